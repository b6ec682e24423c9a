"""Decode text or token ids with any model and controller, under any options that `generate` knows.

Options are those of transformers' `GenerationConfig` and mean what they mean there: it is transformers
that makes logits processors and stopping criteria of them.
"""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, overload

import torch

from sde_gym.checks import shown
from sde_gym.decoding.autoregressive import autoregressive
from sde_gym.decoding.batch import speculative_batch
from sde_gym.decoding.options import callables, check_options, check_streamer, generator_from
from sde_gym.decoding.request import Request, Row, stop_string_criteria
from sde_gym.decoding.result import DecodeResult, check_model, check_request
from sde_gym.decoding.speculative import speculative
from sde_gym.errors import InputError
from sde_gym.models.checkpoint import one_line, quiet_transformers
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import BaseController, Controller
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS

#: By policy, the hashes of the models that it was already said not to be trained for.
_TOLD: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Decoding:
    """A controller and the settings that it decodes with.

    Attributes:
        controller: decides depth and draft length; None = plain decoding, every token through all layers.
        depths: candidate exit depths; None = those that the policy was trained for, or the controller's
            `exit_depth` or `made_for`, else those of `DEFAULT_DEPTHS` below the model's last.
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
            given: Any = self.depths
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise InputError(f"depths: {given!r} is no list of depths; give one, such as (2, 4)")
            return tuple(given)
        controller = self._decider()
        exit_depth = getattr(controller, "exit_depth", None)
        if exit_depth is not None:
            return (exit_depth,)
        # What a `BaseController` remembers is what it was bound to last, not what it was made for.
        remembers = isinstance(controller, BaseController)
        own = getattr(controller, "made_for" if remembers else "depths", ())
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

    def warn_of_other_weights(self, model: LayeredModel) -> None:
        """Warn, once for each policy and model, of a policy that was trained on other weights."""
        controller = self._decider()
        trained_on = (getattr(controller, "meta", None) or {}).get("model") or {}
        trained = trained_on.get("weights_hash")
        if trained is None or trained == model.weights_hash():
            return
        told = _TOLD.setdefault(controller, set())
        if model.weights_hash() not in told:
            told.add(model.weights_hash())
            warnings.warn(
                f"the policy {controller.name!r} was trained on {trained_on.get('name', 'an unnamed model')} "
                f"with the weights {trained}, but those of {model.name!r} are {model.weights_hash()}; the "
                "text stays that of plain decoding, the speed may suffer",
                stacklevel=3,
            )

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
        seed: of the draws, 0..2**64 - 1, only with do_sample=True; None = torch's global generator.
        streamer: of transformers; given the prompt, then every token, then the end. For a single prompt.
        stopping_criteria: of transformers, or a list of them, besides those of the options.
        logits_processor: of transformers, or a list of them, besides those of the options. Must answer by
            their arguments alone.
        generation_options: of `GenerationConfig`, those in `GENERATION_OPTIONS`.

    Returns:
        What was generated, or a list of that for a list of prompts.

    Raises:
        InputError: an unknown option or one that cannot be honoured or has no effect, a value that
            transformers refuses, an empty prompt or one that fills the context, or settings that the
            controller does not fit.

    Warns:
        UserWarning: the context ended a text before its budget did, or the policy was trained on other
            weights (once for each policy and model).
    """
    check_model(model)
    generator = generator_from(seed)
    check_options(generation_options, model.vocab_size, seed)
    check_streamer(streamer)
    budget = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    prompts, many = _prompts(model, prompt)
    for ids in prompts:
        check_request(model, ids, budget)
    if streamer is not None and len(prompts) != 1:
        raise InputError(f"streamer: it follows one text, not {len(prompts)}; give one prompt at a time")
    criteria = callables("stopping_criteria", stopping_criteria)
    processors = callables("logits_processor", logits_processor)
    stop_strings = generation_options.pop("stop_strings", None)
    if stop_strings is not None:  # transformers would lose the tokenizer on the way to a custom method
        criteria.append(stop_string_criteria(stop_strings, model.tokenizer))
    if generation_options or criteria or processors:
        # Also where nothing is to be generated: a wrong option is wrong then too.
        rows = [
            _prepared(model, ids, max(1, budget), criteria, processors, generation_options, generator)
            for ids in prompts
        ]
    else:
        rows = [Row(ids, None) for ids in prompts]
    decoding = Decoding(controller, depths, max_draft, k, window)
    decoding.warn_of_other_weights(model)
    if streamer is not None:
        streamer.put(torch.tensor([rows[0].prompt]))
    if budget == 0:
        results = [DecodeResult(model.num_layers) for _ in prompts]
    else:
        results = decoding.run(model, rows, budget, None if streamer is None else token_by_token(streamer))
    if streamer is not None:
        streamer.end()
    warn_of_the_context(model, rows, results, budget)
    return results if many else results[0]


def token_by_token(streamer: Any) -> Callable[[list[int]], None]:
    """What hands tokens on to a streamer as `generate` does: one at a time, int64 (1,)."""

    def put(tokens: list[int]) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))

    return put


def warn_of_the_context(
    model: LayeredModel, rows: Sequence[Row], results: Sequence[DecodeResult], max_new_tokens: int
) -> None:
    """Warn of a text that was cut where transformers would go on, behind the positions the model knows."""
    for row, result in zip(rows, results, strict=True):
        if len(result.tokens) >= max_new_tokens:
            continue
        eos = model.eos_token_ids if row.rules is None else row.rules.eos_token_ids
        if result.tokens[-1] in eos or (row.rules is not None and row.rules.stopped):
            continue
        warnings.warn(
            f"the model's context of {model.context_limit} tokens ended a text before max_new_tokens "
            f"({max_new_tokens}) did",
            stacklevel=3,
        )
        return


def _prompts(model: LayeredModel, prompt: Any) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether several were given."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise InputError(f"prompt: {shown(prompt)} is neither text nor a list of token ids, nor several")
    many = not isinstance(prompt, str) and len(prompt) > 0 and not _is_number(prompt[0])
    found = []
    for one in prompt if many else [prompt]:
        if isinstance(one, str):
            found.append(model.encode(one))
            continue
        ids = one.tolist() if hasattr(one, "tolist") else one
        if isinstance(ids, bytes) or not isinstance(ids, Sequence) or any(isinstance(i, bool) for i in ids):
            raise InputError(f"prompt: {shown(one)} is neither text nor a list of token ids")
        try:
            found.append([operator.index(token) for token in ids])
        except TypeError:
            raise InputError(f"prompt: {shown(one)} is neither text nor a list of token ids") from None
    return found, many


def _is_number(value: Any) -> bool:
    return isinstance(value, Integral) or getattr(value, "shape", None) == ()


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
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise InputError(f"transformers refuses these options: {one_line(error)}") from error
    (request,) = requests
    request.check("leave it out")
    (row,) = request.rows(model.vocab_size, model.eos_token_ids, generator)
    return row
