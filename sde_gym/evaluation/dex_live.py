"""Some texts of a trace set decoded for real, to hold what was counted from traces against.

Every lattice token that `dex` runs is counted, and every token's i* is compared with the one that follows
from the traces. They must be the same, but where a choice was made between two logits that are closer than
`NEAR_TIE`: there another order of summation may choose otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sde_gym.decoding import autoregressive, speculative
from sde_gym.decoding.dex import DexResult, dex
from sde_gym.decoding.result import NEAR_TIE, DecodeResult
from sde_gym.errors import InputError
from sde_gym.evaluation.dex_ticks import TickCount
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.policies.controller import Controller
from sde_gym.prompts import resolve_source
from sde_gym.traces import TraceSet


class TickMismatchError(RuntimeError):
    """The lattice took other ticks than its traces say; one of them is wrong."""


def model_of(traces: TraceSet, name: str | None = None) -> LayeredModel:
    """The model that a trace set was recorded from.

    Args:
        traces: recorded in float32; in a coarser dtype, logits tie too often to compare anything.
        name: a name, a folder or a hub id; the one in the manifest if not given.

    Raises:
        InputError: there is no such model here, it has other weights or heads, or another dtype.
    """
    manifest = traces.manifest
    if manifest["dtype"] != "float32":
        raise InputError(
            f"model: the traces were recorded in {manifest['dtype']}, where logits tie too often to compare "
            "ticks; record in float32, or take --lattice-texts 0"
        )
    model = load_model(manifest["model"] if name is None else name)
    for what, here, recorded in (
        ("weights", model.weights_hash(), manifest["model_hash"]),
        ("exit heads", model.head_hash(), manifest["head"]),
    ):
        if here != recorded:
            raise InputError(
                f"model: {model.name} has other {what} ({here}) than the traces were recorded with "
                f"({recorded}); give the model that recorded them, or --lattice-texts 0"
            )
    return model


class LiveTexts:
    """Some texts of a trace set, evenly spread over it, and their model.

    Args:
        model: that recorded them, see `model_of`.
        traces: the set.
        count: of texts, at least 1; all if there are fewer.

    Attributes:
        texts: indices in the set.
        prompts: their token ids.
    """

    def __init__(self, model: LayeredModel, traces: TraceSet, count: int) -> None:
        self.model = model
        self.traces = traces
        self.texts = np.unique(np.linspace(0, len(traces) - 1, min(count, len(traces))).round().astype(int))
        self.prompts = [self._prompt(text) for text in self.texts.tolist()]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def max_new_tokens(self) -> int:
        """Of the recording."""
        return int(self.traces.manifest["max_new_tokens"])

    @cached_property
    def plain(self) -> list[list[int]]:
        """The tokens of plain decoding."""
        return [autoregressive(self.model, ids, self.max_new_tokens).tokens for ids in self.prompts]

    def lattice(self, count: TickCount, decs: bool = True, single_exit: bool = False) -> dict[str, Any]:
        """The columns of a DEX row that only the lattice can fill, see docs/dex.md.

        Args:
            count: of the whole trace set, with the same options.
            decs, single_exit: as for `dex`.

        Raises:
            TickMismatchError: the lattice takes other ticks than the traces say.
        """
        results, checked, near = [], 0, 0
        for text, ids in zip(self.texts.tolist(), self.prompts, strict=True):
            result = dex(
                self.model, ids, count.exploration_set, self.max_new_tokens, decs=decs,
                single_exit=single_exit,
            )  # fmt: skip
            compared, tied = compare_ticks(result, self.traces, text, count, decs)
            checked, near = checked + compared, near + tied
            results.append(result)
        tokens = sum(len(result.tokens) for result in results)
        evaluations = sum(result.lattice_tokens for result in results)
        return {
            "lattice_tokens": evaluations / tokens,
            "lattice_tokens_max": max(max(result.round_tokens) for result in results),
            "useful_share": count.explorers * tokens / evaluations,
            "ticks_checked": checked,
            "near_ties": near,
            **self.identity(results),
        }

    def decoded(self, controller: Controller, depths: Sequence[int], max_draft: int) -> list[DecodeResult]:
        """The texts under a controller."""
        return [
            speculative(
                self.model, ids, controller, depths, self.max_new_tokens, max_draft=max_draft, text=text
            )
            for text, ids in zip(self.texts.tolist(), self.prompts, strict=True)
        ]  # fmt: skip

    def identity(self, results: Sequence[DecodeResult]) -> dict[str, Any]:
        """Columns: how many of the texts are plain decoding's."""
        same = [result.tokens == plain for result, plain in zip(results, self.plain, strict=True)]
        return {"decoded_texts": len(same), "identical_texts": sum(same), "identical_to_ar": all(same)}

    def _prompt(self, text: int) -> list[int]:
        recorded = self.traces.prompt_tokens[text]
        if recorded is not None:
            return [int(token) for token in recorded]
        ids = self.model.encode(resolve_source(self.traces.sources[text]))
        if len(ids) != self.traces.prompt_lengths[text]:
            raise InputError(
                f"text {self.traces.text_ids[text]!r}: its prompt has {len(ids)} tokens here, but "
                f"{self.traces.prompt_lengths[text]} where it was recorded; the tokenizer is another one"
            )
        return ids


def compare_ticks(
    result: DexResult, traces: TraceSet, text: int, count: TickCount, decs: bool = True
) -> tuple[int, int]:
    """Hold a decoded text against the ticks counted from its traces, token by token.

    Args:
        result: of `dex`.
        traces: the set.
        text: index of the text.
        count: of the set, with the same exploration set and options.
        decs: likewise.

    Returns:
        tokens compared, and those of them that differ at a near-tie. Behind an emitted token that differs
        nothing can be compared.

    Raises:
        TickMismatchError: the first token that differs otherwise, or ticks that do not follow from i*.
    """
    where, first = f"text {traces.text_ids[text]!r}", int(traces.start[text])
    recorded, stages = traces.tokens_of(text).tolist(), count.stage[first : first + traces.lengths[text]]
    expected = count.explorers + sum(stage + 1 for stage in result.selected[:-1])
    if result.ticks != expected:
        raise TickMismatchError(
            f"{where}: {result.ticks} ticks, but by the stages that were selected {expected}"
        )
    near = 0
    for place, (token, stage) in enumerate(zip(result.tokens, result.selected, strict=True)):
        if place == len(recorded) or token != recorded[place]:
            if place < len(recorded) and traces.final_gap[first + place] < NEAR_TIE:
                return place + 1, near + 1
            raise TickMismatchError(
                f"{where}, token {place}: the lattice emits {token}, the traces hold "
                f"{recorded[place] if place < len(recorded) else 'no more'}, and there is no near-tie"
            )
        if stage != stages[place]:
            if not _nearly_tied(traces, first + place, count, max(stage, int(stages[place])), decs):
                raise TickMismatchError(
                    f"{where}, token {place}: the lattice selects stage {stage} of {count.exploration_set}, "
                    f"the traces say {stages[place]}, and there is no near-tie"
                )
            near += 1
    if len(result.tokens) < len(recorded):
        raise TickMismatchError(
            f"{where}: the lattice ends after {len(result.tokens)} tokens, the traces hold {len(recorded)}"
        )
    return len(recorded), near


def _nearly_tied(traces: TraceSet, row: int, count: TickCount, deepest: int, decs: bool) -> bool:
    """Whether a stage up to this one chose between tokens whose logits nearly tie.

    With DECS, stage i proposes one of its i + 1 best tokens.
    """
    for stage, depth in enumerate(count.exploration_set[: min(deepest + 1, count.explorers - 1)]):
        best = traces.top_logprobs[row, traces.depths.index(depth), : stage + 2 if decs else 2]
        if (-np.diff(best) < NEAR_TIE).any():
            return True
    return False
