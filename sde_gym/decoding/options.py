"""Options of `generate`: which there are, and what is refused before transformers is asked.

transformers checks less: a token id outside the vocabulary, say, is an index error while decoding there, or
has no effect. An option that does nothing is not what was asked for, so it is an error here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from sde_gym.checks import is_whole, whole_number
from sde_gym.errors import InputError

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

#: Those that hold token ids, in whatever nesting; `sequence_bias` has biases besides.
_TOKEN_OPTIONS = (
    "eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id",
)  # fmt: skip


def check_options(options: Mapping[str, Any], vocab_size: int, seed: int | None) -> None:
    """Refuse options that are unknown, not supported, or without effect.

    Args:
        options: of `GenerationConfig`, by name.
        vocab_size: V of the model.
        seed: of the draws; None = not given.

    Raises:
        InputError: naming the first such option.
    """
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
        sampling = {name: options[name] for name in SAMPLING_OPTIONS if name in options}
        if seed is not None:
            sampling["seed"] = seed
        for name, value in sampling.items():
            raise InputError(
                f"{name}={value!r}: without do_sample=True it has no effect; add that, or leave {name} out"
            )
    for name in _TOKEN_OPTIONS:
        if options.get(name) is not None:
            _check_token_ids(name, options[name], vocab_size)
    biases = options.get("sequence_bias")
    if isinstance(biases, Mapping):
        _check_token_ids("sequence_bias", list(biases), vocab_size)
    elif isinstance(biases, (list, tuple)):  # [[ids, bias], ...]
        _check_token_ids("sequence_bias", [pair[:1] for pair in biases if isinstance(pair, list)], vocab_size)
    limit = options.get("max_time")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Real) or math.isnan(limit)):
        raise InputError(f"max_time={limit!r}: not a number of seconds")


def generator_from(seed: int | None) -> torch.Generator | None:
    """A generator with this seed; None for None.

    Raises:
        InputError: not a whole number of 0..2**64 - 1.
    """
    if seed is None:
        return None
    return torch.Generator().manual_seed(whole_number("seed", seed, 0, 2**64 - 1))


def check_streamer(streamer: Any) -> None:
    """Raise InputError unless it is None or has a streamer's two methods."""
    if streamer is not None and not (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    ):
        raise InputError(
            f"streamer: {streamer!r} lacks put or end; give one of transformers (TextStreamer), or what "
            "has both"
        )


def callables(name: str, given: Any) -> list[Callable[..., Any]]:
    """One function, several, or None, as a list; InputError naming the argument for anything else."""
    if given is None:
        return []
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        if not callable(one):
            raise InputError(f"{name}: {one!r} cannot be called; give one of transformers or a function")
    return found


def _check_token_ids(name: str, value: Any, vocab_size: int) -> None:
    found = list(_leaves(value))
    if name == "eos_token_id" and not found:
        raise InputError(f"{name}={value!r}: no id; give one or more, or leave it out for the model's own")
    for token in found:
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise InputError(
                f"{name}={value!r}: {token!r} is no token id of this model (0..{vocab_size - 1})"
            )


def _leaves(value: Any) -> Iterator[Any]:
    """What stands in nested lists, tuples, arrays or tensors."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
