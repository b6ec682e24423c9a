"""Wall-clock comparison: every method on the same prompts, in one process, interleaved.

The methods take turns prompt by prompt, in an order drawn afresh for each prompt, so that a
slow minute of the machine, or a cache that another method warmed, hits all of them alike;
the first prompt is run once by every method before the clock counts. Prefill is timed apart:
a rate is tokens after the first emission over the time after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sde_gym.decoding import autoregressive, speculative
from sde_gym.decoding.result import DecodeResult, Round, check_request
from sde_gym.errors import InputError
from sde_gym.models.checkpoint import quiet_transformers
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Controller

#: Decodes one prompt (token ids, number of the prompt) to a result whose times are filled in.
Method = Callable[[list[int], int], DecodeResult]


@dataclass(frozen=True)
class Measurement:
    """One method on one prompt in one repeat."""

    method: str
    prompt: str  # prompt id
    task: str
    repeat: int
    timed_tokens: int  # tokens emitted while the decode clock ran
    decode_seconds: float
    prefill_seconds: float
    tokens: int
    drafted: int
    accepted: int
    rounds: int
    drafting_rounds: int
    exit_depth_sum: int  # over drafting rounds
    controller_seconds: float
    identical: bool  # same tokens as the baseline


def ar_method(model: LayeredModel, max_new_tokens: int) -> Method:
    """Our own autoregressive decoder."""
    return lambda prompt, number: autoregressive(model, prompt, max_new_tokens)


def controller_method(
    model: LayeredModel, controller: Controller, depths: Sequence[int], max_new_tokens: int, **options: int
) -> Method:
    """Our speculative decoder under a controller; `options` as for `speculative`."""
    return lambda prompt, number: speculative(
        model, prompt, controller, depths, max_new_tokens, text=number, **options
    )


def generate_method(model: LayeredModel, max_new_tokens: int) -> Method:
    """transformers' `generate`, greedy."""
    return lambda prompt, number: _generate(model, prompt, max_new_tokens)[0]


def assistant_early_exit_method(
    model: LayeredModel, max_new_tokens: int, exit_depth: int, draft_length: int
) -> Method:
    """transformers' own self-speculation, `generate(assistant_early_exit=exit_depth)`.

    The draft length and a constant schedule are put into the generation config, since `generate`
    ignores them as arguments. An exception while it drafts would leave the model cut off at
    `exit_depth`; its number of layers is restored here.
    """
    if not 1 <= exit_depth < model.num_layers:
        raise InputError(f"exit_depth {exit_depth} must lie in 1..{model.num_layers - 1}")

    def decode(prompt: list[int], number: int) -> DecodeResult:
        layers = model.hf.config.num_hidden_layers
        try:
            result, emissions = _generate(
                model, prompt, max_new_tokens, exit_depth=exit_depth, draft_length=draft_length
            )
        finally:
            model.hf.config.num_hidden_layers = layers
        emitted = 0
        for count in emissions:  # one emission a round: the accepted drafts and one token more
            drafted = min(draft_length, max_new_tokens - emitted - 1)
            if drafted > 0:
                result.rounds.append(Round(exit_depth, drafted, min(count - 1, drafted)))
            emitted += count
        return result

    return decode


class _Emissions:
    """A streamer that notes when the first tokens came out, and how many came each time."""

    def __init__(self) -> None:
        self.prompt_seen = False
        self.first_at = 0.0
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with new tokens."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        if not self.counts:
            self.first_at = time.perf_counter()
        self.counts.append(int(value.numel()))

    def end(self) -> None:
        """Nothing to flush."""


@torch.inference_mode()
def _generate(
    model: LayeredModel,
    prompt: list[int],
    max_new_tokens: int,
    exit_depth: int | None = None,
    draft_length: int = 0,
) -> tuple[DecodeResult, list[int]]:
    """A result, and how many tokens came out at a time.

    The checkpoint's own generation config is set aside for the call: a repetition penalty or the
    like would make another text than greedy decoding's.
    """
    from transformers import GenerationConfig

    result = DecodeResult(model.num_layers)
    budget = check_request(model, prompt, max_new_tokens)
    if budget == 0:
        return result, []
    ends = list(model.eos_token_ids)
    plain = GenerationConfig(
        do_sample=False, max_new_tokens=budget, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
    )
    options: dict[str, int] = {}
    if exit_depth is not None:
        options["assistant_early_exit"] = exit_depth
        plain.num_assistant_tokens = draft_length
        plain.num_assistant_tokens_schedule = "constant"
        plain.assistant_confidence_threshold = 0.0
    ids = torch.tensor([prompt], device=model.device)
    streamer = _Emissions()
    before = model.hf.generation_config
    model.hf.generation_config = plain
    try:
        with quiet_transformers():
            started = time.perf_counter()
            output = model.hf.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options)
            finished = time.perf_counter()
    finally:
        model.hf.generation_config = before
    for token in output[0, len(prompt) :].tolist():
        result.emit(token, model.num_layers, "final")
    if streamer.counts:
        result.prefill_seconds = streamer.first_at - started
        result.decode_seconds = finished - streamer.first_at
        result.untimed_tokens = streamer.counts[0]
    return result, streamer.counts


def measure(
    methods: Mapping[str, Method],
    prompts: Sequence[tuple[str, str, list[int]]],
    *,
    baseline: str = "ar",
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    sink: Callable[[Measurement], None] | None = None,
) -> tuple[list[Measurement], dict[str, dict[str, DecodeResult]]]:
    """Run all methods over all prompts, `repeats` times.

    Args:
        methods: by name; `baseline` must be among them.
        prompts: (id, task, token ids).
        baseline: the method that outputs are compared with.
        repeats: whole passes over the prompts.
        seed: of the order in which the methods take turns.
        progress: called with prompts done and prompts in all (over all repeats).
        sink: given every row as soon as it is measured.

    Returns:
        One row per (method, prompt, repeat), and the last result of each method and prompt.
    """
    if baseline not in methods:
        raise InputError(f"baseline {baseline!r} is not one of the methods {', '.join(methods)}")
    if not prompts or repeats < 1:
        raise InputError(f"at least one prompt and one repeat are needed, got {len(prompts)} and {repeats}")
    rows: list[Measurement] = []
    outputs: dict[str, dict[str, DecodeResult]] = {name: {} for name in methods}
    for method in methods.values():  # warm-up, not counted
        method(prompts[0][2], 0)
    names = list(methods)
    for repeat in range(repeats):
        for number, (prompt_id, task, ids) in enumerate(prompts):
            turns = np.random.default_rng((seed, repeat, number)).permutation(len(names))
            results = {names[turn]: methods[names[turn]](ids, number) for turn in turns}
            reference = results[baseline].tokens
            for name in names:
                outputs[name][prompt_id] = results[name]
                rows.append(_row(name, prompt_id, task, repeat, results[name], reference))
                if sink is not None:
                    sink(rows[-1])
            if progress is not None:
                progress(repeat * len(prompts) + number + 1, repeats * len(prompts))
    return rows, outputs


def _row(
    name: str, prompt: str, task: str, repeat: int, result: DecodeResult, reference: list[int]
) -> Measurement:
    drafting = [r for r in result.rounds if r.drafted]
    return Measurement(
        method=name,
        prompt=prompt,
        task=task,
        repeat=repeat,
        timed_tokens=max(0, len(result.tokens) - result.untimed_tokens),
        decode_seconds=result.decode_seconds,
        prefill_seconds=result.prefill_seconds,
        tokens=len(result.tokens),
        drafted=result.drafted,
        accepted=result.accepted,
        rounds=len(result.rounds),
        drafting_rounds=len(drafting),
        exit_depth_sum=sum(r.exit_depth for r in drafting),
        controller_seconds=result.controller_seconds,
        identical=result.tokens == reference,
    )


def summarise_rows(rows: Sequence[Measurement], baseline: str = "ar") -> list[dict[str, Any]]:
    """One table row per method, in order of first appearance.

    Rates are total tokens over total seconds; the speed-up is the ratio to the baseline's
    rate of the same repeat, averaged over repeats, with the lowest and highest beside it.
    What was not measured is None: rates where no token was timed; acceptance, exit depth
    and draft length of methods that do not draft.
    """
    repeats = sorted({row.repeat for row in rows})

    def rate(method: str, repeat: int | None = None) -> float | None:
        chosen = [r for r in rows if r.method == method and (repeat is None or r.repeat == repeat)]
        seconds, tokens = sum(r.decode_seconds for r in chosen), sum(r.timed_tokens for r in chosen)
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    table: list[dict[str, Any]] = []
    for method in dict.fromkeys(row.method for row in rows):
        chosen = [row for row in rows if row.method == method]
        pairs = [(rate(method, r), rate(baseline, r)) for r in repeats]
        ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        drafted = sum(r.drafted for r in chosen)
        rounds = sum(r.drafting_rounds for r in chosen)
        decode = sum(r.decode_seconds for r in chosen)
        table.append(
            {
                "method": method,
                "tokens_per_second": rate(method),
                "speedup": float(np.mean(ratios)) if ratios else None,
                "speedup_range": [min(ratios), max(ratios)] if ratios else None,
                "acceptance_rate": sum(r.accepted for r in chosen) / drafted if drafted else None,
                "mean_exit_depth": sum(r.exit_depth_sum for r in chosen) / rounds if rounds else None,
                "mean_draft_length": drafted / rounds if rounds else None,
                "controller_share": sum(r.controller_seconds for r in chosen) / decode if decode else 0.0,
                "identical_to_ar": all(r.identical for r in chosen),
                "identical_prompts": len({r.prompt for r in chosen if r.identical}),
                "prompts": len({r.prompt for r in chosen}),
            }
        )
    return table


def rows_as_dicts(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The raw rows as JSON-ready objects."""
    return [asdict(row) for row in rows]
