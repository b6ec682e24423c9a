"""What transformers' `generate` was asked for: refused by name, or made into prompts and rules for tokens.

`generate` hands a custom decoding method its inputs, processors, stopping criteria and configuration ready
made, so nothing of it is rebuilt here. What this decoder cannot honour is an error that says so: an option
that is silently ignored would be a wrong text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sde_gym.decoding.rules import GenerationRules
from sde_gym.errors import InputError

_LEAVE_OUT = "leave it out, or call generate without custom_generate"

#: By option of `GenerationConfig`: whether a value asks for what this decoder has not, and what that is.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda v: v not in (None, 1), "beam search"),
    "num_beam_groups": (lambda v: v not in (None, 1), "group beam search"),
    "constraints": (lambda v: v is not None, "constrained beam search"),
    "force_words_ids": (lambda v: v is not None, "constrained beam search"),
    "penalty_alpha": (lambda v: bool(v), "contrastive search"),
    "dola_layers": (lambda v: v is not None, "DoLa"),
    "prompt_lookup_num_tokens": (lambda v: v is not None, "drafts from elsewhere: here they are early exits"),
    "assistant_early_exit": (lambda v: v is not None, "a second self-speculation: the depths are given here"),
    "assistant_ensemble_weight": (lambda v: v is not None, "lossy verification"),
    "use_mtp": (lambda v: bool(v), "drafts from elsewhere: here they are early exits"),
    "speculation_type": (lambda v: v is not None, "drafts from elsewhere: here they are early exits"),
    "is_assistant": (lambda v: bool(v), "being an assistant"),
    "output_scores": (lambda v: bool(v), "returning scores"),
    "output_logits": (lambda v: bool(v), "returning logits"),
    "output_attentions": (lambda v: bool(v), "returning attentions"),
    "output_hidden_states": (lambda v: bool(v), "returning hidden states"),
    "guidance_scale": (lambda v: v not in (None, 1), "classifier-free guidance: it runs the model itself"),
    "cache_implementation": (lambda v: v not in (None, "dynamic"), "another cache: it keeps its own"),
    "use_cache": (lambda v: v is False, "decoding without a cache"),
    "prefill_chunk_size": (lambda v: v is not None, "prefill in chunks"),
    "token_healing": (lambda v: bool(v), "token healing"),
}

#: Inputs of the model that are honoured, or that transformers adds by itself.
_KNOWN_INPUTS = ("attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep")

#: Processors of transformers whose answer depends on their arguments only. Its others are refused.
_STATELESS = (
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "PrefixConstrainedLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One text to decode."""

    prompt: list[int]  # without padding
    rules: GenerationRules | None  # None = plain greedy, to the model's own end-of-text ids


@dataclass(frozen=True, repr=False)  # a configuration that is in use cannot be printed
class Request:
    """What `generate` hands to a custom decoding method.

    Attributes:
        input_ids: int64 (rows, t), padded on the left.
        processors: a `LogitsProcessorList`.
        criteria: a `StoppingCriteriaList`.
        config: the `GenerationConfig`, complete.
        inputs: further inputs of the model.
    """

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    inputs: Mapping[str, Any]

    def check(self, remedy: str = _LEAVE_OUT) -> None:
        """Raise InputError for the first thing asked for that cannot be honoured, by its name.

        Args:
            remedy: what to do instead, the end of the message.
        """
        for name, (asked, what) in _REFUSED.items():
            value = getattr(self.config, name, None)
            if asked(value):
                raise InputError(f"{name}={value!r}: this decoder does not do {what}; {remedy}")
        if getattr(self.inputs.get("cache"), "_is_user_defined", False):
            raise InputError(
                f"past_key_values: this decoder keeps a cache of its own and reads no other; {remedy}"
            )
        for name, value in self.inputs.items():
            if name not in _KNOWN_INPUTS and value is not None:
                raise InputError(f"{name}: this decoder takes token ids only; {remedy}")
        rows = len(self.input_ids)
        for processor in self.processors:
            name = type(processor).__name__
            if type(processor).__module__.partition(".")[0] == "transformers" and name not in _STATELESS:
                raise InputError(
                    f"{name}: a processor that keeps state or runs the model cannot follow drafts that are "
                    f"taken back; {remedy}"
                )
            if name.startswith("Encoder") and rows > 1:
                raise InputError(f"{name}: only for one prompt at a time, not for {rows}")
        for criterion in self.criteria:
            if type(criterion).__name__ == "ConfidenceCriteria":
                raise InputError(f"ConfidenceCriteria: it reads scores, which are not kept; {remedy}")

    @property
    def max_new_tokens(self) -> int:
        """Tokens that a row may have: what its `MaxLengthCriteria` leaves."""
        limits = [c.max_length for c in self.criteria if type(c).__name__ == "MaxLengthCriteria"]
        return max(1, min(limits or [self.config.max_length]) - self.input_ids.shape[1])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, without repeats."""
        found: list[int] = []
        for criterion in self.criteria:
            if type(criterion).__name__ == "EosTokenCriteria":
                found += criterion.eos_token_id.reshape(-1).tolist()
        return tuple(dict.fromkeys(found))

    def rows(self, vocab_size: int, model_eos: Sequence[int], generator: torch.Generator | None) -> list[Row]:
        """The texts, each with its rules.

        Args:
            vocab_size: V of the model.
            model_eos: its own end-of-text ids.
            generator: of the draws, if sampling; None = torch's global one, as for `generate` itself.

        Raises:
            InputError: padding anywhere but on the left, a row of nothing but padding, or positions other
                than those that follow from it.
        """
        eos = self.eos_token_ids
        others = [
            c for c in self.criteria if type(c).__name__ not in ("MaxLengthCriteria", "EosTokenCriteria")
        ]
        criteria = type(self.criteria)(others) if others else None
        source = (generator or torch.default_generator) if self.config.do_sample else None
        plain = not self.processors and criteria is None and source is None and set(eos) == set(model_eos)
        rows = []
        for number, (ids, padded) in enumerate(zip(self.input_ids.tolist(), self._padding(), strict=True)):
            rules = None
            if not plain:
                rules = GenerationRules(
                    vocab_size, eos, self._row_processors(number), criteria, source,
                    padding=ids[:padded], device=self.input_ids.device,
                )  # fmt: skip
            rows.append(Row(ids[padded:], rules))
        return rows

    def _padding(self) -> list[int]:
        """Length of every row's padding on the left."""
        rows, length = self.input_ids.shape
        mask = self.inputs.get("attention_mask")
        if mask is None:
            visible = torch.ones(rows, length, dtype=torch.int64)
        elif mask.shape != self.input_ids.shape:
            raise InputError(
                f"attention_mask: its shape {tuple(mask.shape)} is not that of input_ids, ({rows}, {length})"
            )
        elif not ((mask == 0) | (mask == 1)).all():
            raise InputError("attention_mask: only 0 (padding) and 1 can stand in it")
        else:
            visible = (mask != 0).long().cpu()
        if length and not visible[:, -1].all():
            raise InputError(
                "attention_mask: a prompt is padded on the right, or all padding; pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        if (visible.diff(dim=1) < 0).any():
            raise InputError(
                "attention_mask: a prompt has gaps, but only padding on the left can be masked; if none was "
                "given, transformers took the pad token's places for it: give one"
            )
        positions = self.inputs.get("position_ids")
        if positions is not None:
            expected = (visible.cumsum(1) - 1).clamp_min(0)
            fits = positions.ndim == 2 and positions.shape[-1] == length
            if not fits or ((positions.cpu() - expected) * visible).any():
                raise InputError(
                    "position_ids: only 0, 1, 2, ... behind the padding can be honoured; leave them out, and "
                    "give an attention_mask of the shape of input_ids"
                )
        return [int(count) for count in length - visible.sum(1)]

    def _row_processors(self, row: int) -> Any:
        """Processors, reduced to one row of the batch where they know of several; None."""
        if not self.processors:
            return None
        copies_each = self.config.num_return_sequences or 1
        return type(self.processors)(_of_row(p, row, row // copies_each) for p in self.processors)


def _of_row(processor: Any, row: int, prompt: int) -> Any:
    """A processor that is called with one row alone as it would be with the whole batch."""
    name = type(processor).__name__
    ignored = getattr(processor, "prompt_ignore_length", None)
    if name == "RepetitionPenaltyLogitsProcessor" and isinstance(ignored, Tensor) and len(ignored) > 1:
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    elif name == "PrefixConstrainedLogitsProcessor":
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _, ids: allowed(prompt, ids), 1)
    return processor


def stop_string_criteria(stop_strings: str | Sequence[str], tokenizer: Any) -> Any:
    """transformers' criterion that ends a text where one of these strings is complete.

    Raises:
        InputError: no tokenizer, or no string.
    """
    from transformers import StopStringCriteria

    strings: list[Any] = [stop_strings]
    if isinstance(stop_strings, (list, tuple, set, frozenset)):
        strings = list(stop_strings)
    if not strings or not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop_strings: {stop_strings!r} is neither a string nor a list of them")
    if tokenizer is None:
        raise InputError("stop_strings: a tokenizer is needed to find them; give tokenizer=... as well")
    return StopStringCriteria(tokenizer, strings)
