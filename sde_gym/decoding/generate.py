"""Decode text or token ids with any model and controller, under any options that `generate` knows.

Options are those of transformers' `GenerationConfig` and mean what they mean there: it is transformers
that makes logits processors and stopping criteria of them.
"""

from __future__ import annotations

import copy
import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, overload

import torch

from sde_gym.decoding.autoregressive import autoregressive
from sde_gym.decoding.batch import speculative_batch
from sde_gym.decoding.request import Request, Row, stop_string_criteria
from sde_gym.decoding.result import DecodeResult, check_request
from sde_gym.decoding.speculative import speculative
from sde_gym.errors import InputError
from sde_gym.models.checkpoint import one_line, quiet_transformers
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import BaseController, Controller
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS

#: Options that mean something only where tokens are sampled.
SAMPLING_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip

#: Every option of `GenerationConfig` that `generate` takes.
GENERATION_OPTIONS = (
    "min_length", "min_new_tokens", "max_time", "stop_strings", "eos_token_id", "do_sample",
    *SAMPLING_OPTIONS, "repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "watermarking_config",
)  # fmt: skip


@dataclass(frozen=True)
class Decoding:
    """A controller and the settings that it decodes with.

    Attributes:
        controller: decides depth and draft length; None = plain decoding, every token through all layers.
        depths: candidate exit depths; None = those that the policy was trained for, or the controller's
            `exit_depth`, else those of `DEFAULT_DEPTHS` below the model's last.
        max_draft: most proposals in a round; None = what the policy was trained for, else 12.
        k, window: of features; None = the controller's own.
    """

    controller: Controller | None
    depths: Sequence[int] | None = None
    max_draft: int | None = None
    k: int | None = None
    window: int | None = None

    def candidates(self, num_layers: int) -> tuple[int, ...]:
        """The candidate exit depths for a model of so many layers."""
        if self.depths is not None:
            return tuple(self.depths)
        controller = self._decider()
        exit_depth = getattr(controller, "exit_depth", None)
        if exit_depth is not None:
            return (exit_depth,)
        # What a `BaseController` remembers is what it was bound to last, not what it was made for.
        own = () if isinstance(controller, BaseController) else getattr(controller, "depths", ())
        return tuple(own) or tuple(depth for depth in DEFAULT_DEPTHS if depth < num_layers)

    def longest_draft(self) -> int:
        """The cap on proposals."""
        if self.max_draft is not None:
            return self.max_draft
        controller = self._decider()
        if not isinstance(controller, BaseController):
            return getattr(controller, "max_draft", 0) or DEFAULT_MAX_DRAFT
        return max(DEFAULT_MAX_DRAFT, getattr(controller, "draft_length", 0) or 0)

    def run(
        self,
        model: LayeredModel,
        rows: Sequence[Row],
        max_new_tokens: int,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> list[DecodeResult]:
        """Decode texts, several at once if there are several; `on_tokens` hears of a single one."""
        if self.controller is None:
            return [
                autoregressive(model, row.prompt, max_new_tokens, rules=row.rules, on_tokens=on_tokens)
                for row in rows
            ]
        depths, max_draft = self.candidates(model.num_layers), self.longest_draft()
        if len(rows) == 1:
            (row,) = rows
            return [
                speculative(
                    model, row.prompt, self.controller, depths, max_new_tokens, max_draft=max_draft, k=self.k,
                    window=self.window, rules=row.rules, on_tokens=on_tokens,
                )
            ]  # fmt: skip
        rules = [row.rules for row in rows if row.rules is not None]
        return speculative_batch(
            model, [row.prompt for row in rows], self.controller, depths, max_new_tokens, max_draft=max_draft,
            k=self.k, window=self.window, rules=rules or None,
        )  # fmt: skip

    def _decider(self) -> Any:
        """The controller, taken out of what is wrapped around it (`sde_gym.policies.ablation`)."""
        found: Any = self.controller
        while getattr(found, "controller", None) is not None:
            found = found.controller
        return found


@overload
def generate(
    model: LayeredModel, prompt: str | Sequence[int], controller: Controller | None = None, **options: Any
) -> DecodeResult: ...


@overload
def generate(
    model: LayeredModel,
    prompt: Sequence[str] | Sequence[Sequence[int]],
    controller: Controller | None = None,
    **options: Any,
) -> list[DecodeResult]: ...


def generate(
    model: LayeredModel,
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    controller: Controller | None = None,
    *,
    depths: Sequence[int] | None = None,
    max_new_tokens: int | None = None,
    max_draft: int | None = None,
    k: int | None = None,
    window: int | None = None,
    seed: int | None = None,
    streamer: Any = None,
    stopping_criteria: Any = None,
    logits_processor: Any = None,
    **generation_options: Any,
) -> DecodeResult | list[DecodeResult]:
    """Decode one prompt or several.

    The checkpoint's own `generation_config` is read for its special token ids and for nothing else:
    decoding is greedy from raw logits unless options say otherwise.

    Args:
        model: any `LayeredModel`.
        prompt: text (encoded by `model.encode`) or token ids, or a list of either.
        controller: decides depth and draft length; None = plain decoding.
        depths: candidate exit depths; None = the policy's own, see `Decoding`.
        max_new_tokens: budget, at least 0; None = 96.
        max_draft: most proposals in a round; None = the policy's own, else 12.
        k, window: of features; None = the policy's own.
        seed: of the draws, if sampling; None = torch's global generator.
        streamer: of transformers; given the prompt, then every token. For a single prompt.
        stopping_criteria: of transformers, or a list of them, besides those of the options.
        logits_processor: of transformers, or a list of them, besides those of the options. Must answer by
            their arguments alone.
        generation_options: of `GenerationConfig`, those in `GENERATION_OPTIONS`.

    Returns:
        What was generated, or a list of that for a list of prompts.

    Raises:
        InputError: an unknown option or one that cannot be honoured, a value that transformers refuses, an
            empty prompt or one that fills the context, or settings that the controller does not fit.
    """
    _check_options(generation_options)
    budget = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    prompts, many = _prompts(model, prompt)
    for ids in prompts:
        check_request(model, ids, budget)
    if streamer is not None and len(prompts) != 1:
        raise InputError(f"streamer: it follows one text, not {len(prompts)}; give one prompt at a time")
    if budget == 0:
        results = [DecodeResult(model.num_layers) for _ in prompts]
        return results if many else results[0]
    criteria, processors = _listed(stopping_criteria), _listed(logits_processor)
    stop_strings = generation_options.pop("stop_strings", None)
    if stop_strings is not None:  # transformers would lose the tokenizer on the way to a custom method
        criteria.append(stop_string_criteria(stop_strings, model.tokenizer))
    if generation_options or criteria or processors:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        rows = [
            _prepared(model, ids, budget, criteria, processors, generation_options, generator)
            for ids in prompts
        ]
    else:
        rows = [Row(ids, None) for ids in prompts]
    if streamer is not None:
        streamer.put(torch.tensor([rows[0].prompt]))
    results = Decoding(controller, depths, max_draft, k, window).run(
        model, rows, budget, None if streamer is None else token_by_token(streamer)
    )
    if streamer is not None:
        streamer.end()
    return results if many else results[0]


def token_by_token(streamer: Any) -> Callable[[list[int]], None]:
    """What hands tokens on to a streamer as `generate` does: one at a time, int64 (1,)."""

    def put(tokens: list[int]) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))

    return put


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are unknown, not supported, or without effect."""
    for name in options:
        if name in GENERATION_OPTIONS:
            continue
        if name == "max_length":
            raise InputError("max_length: give max_new_tokens, which does not count the prompt")
        if name == "num_return_sequences":
            raise InputError("num_return_sequences: give the prompt several times instead, [prompt] * n")
        close = difflib.get_close_matches(name, GENERATION_OPTIONS, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"{name}: no option of this decoder; {meant}Supported are {', '.join(GENERATION_OPTIONS)}"
        )
    if not options.get("do_sample"):
        for name in SAMPLING_OPTIONS:
            if name in options:
                raise InputError(
                    f"{name}={options[name]!r}: without do_sample=True it has no effect; add that, or leave "
                    f"{name} out"
                )


def _prompts(model: LayeredModel, prompt: Any) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether several were given."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    many = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], Integral)
    found = []
    for one in prompt if many else [prompt]:
        if isinstance(one, str):
            found.append(model.encode(one))
            continue
        try:
            found.append([operator.index(token) for token in one])
        except TypeError:
            raise InputError(f"prompt: {one!r} is neither text nor a list of token ids") from None
    return found, many


def _listed(given: Any) -> list[Any]:
    """One thing, several, or None, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _prepared(
    model: LayeredModel,
    prompt: list[int],
    max_new_tokens: int,
    criteria: list[Any],
    processors: list[Any],
    options: Mapping[str, Any],
    generator: torch.Generator | None,
) -> Row:
    """A prompt and the rules that transformers' own preparation makes of the options."""
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    requests: list[Request] = []

    def capture(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **inputs: Any,
    ) -> Any:  # fmt: skip
        requests.append(Request(input_ids, logits_processor, stopping_criteria, generation_config, inputs))
        return input_ids

    hf = copy.copy(model.hf)  # shares everything but its defaults, which are not wanted here
    known = model.hf.generation_config
    hf.generation_config = GenerationConfig(
        bos_token_id=known.bos_token_id,
        eos_token_id=list(model.eos_token_ids) or None,
        pad_token_id=known.pad_token_id,
    )
    ids = torch.tensor([prompt], device=model.device)
    try:
        with quiet_transformers():
            hf.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                logits_processor=LogitsProcessorList(processors),
                stopping_criteria=StoppingCriteriaList(criteria),
                custom_generate=capture,
                **options,
            )
    except (ValueError, TypeError) as error:
        raise InputError(f"transformers refuses these options: {one_line(error)}") from error
    (request,) = requests
    request.check()
    (row,) = request.rows(model.vocab_size, model.eos_token_ids, generator)
    return row
