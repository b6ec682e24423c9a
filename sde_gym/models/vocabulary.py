"""The compact vocabulary: the tokens that a model uses most in its own output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sde_gym.errors import InputError
from sde_gym.files import read_json, write_json
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel


def count_output_tokens(
    model: LayeredModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """How often each token occurs in greedy continuations of `prompts`: int64 (vocab_size,)."""
    counts = np.zeros(model.vocab_size, np.int64)
    for start in range(0, len(prompts), batch_size):
        for text in generate_greedy(model, prompts[start : start + batch_size], max_new_tokens):
            np.add.at(counts, text, 1)
        if progress is not None:
            progress(min(len(prompts), start + batch_size))
    return counts


def compact_vocabulary(counts: np.ndarray, size: int, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """The `size` most frequent tokens, ends of text always among them.

    Args:
        counts: (vocab_size,), occurrences in the model's own output.
        size: number of ids, at least one more than there are ends of text, at most vocab_size;
            ties go to the smaller id, which byte-pair merging made earlier.

    Returns:
        {"ids": sorted ids, "coverage": share of the counted tokens that are among them,
        "counted_tokens": ..., "vocab_size": ...}, as stored beside the model.
    """
    ends = set(eos_token_ids)
    if not len(ends) + 1 <= size <= len(counts):
        raise InputError(f"size {size} must lie in {len(ends) + 1}..{len(counts)}")
    order = np.lexsort((np.arange(len(counts)), -counts))
    rest = [int(i) for i in order if int(i) not in ends]
    ids = sorted([*rest[: size - len(ends)], *ends])
    return {
        "ids": ids,
        "coverage": float(counts[ids].sum() / max(1, counts.sum())),
        "counted_tokens": int(counts.sum()),
        "vocab_size": len(counts),
    }


def save_compact_vocabulary(path: Path, vocabulary: dict[str, Any]) -> None:
    """Write it as JSON, atomically."""
    write_json(path, vocabulary)


def load_compact_vocabulary(path: Path, vocab_size: int) -> list[int]:
    """Read the ids.

    Raises:
        InputError: the file is missing, malformed, or made for another vocabulary size.
    """
    stored = read_json(path)
    ids = stored.get("ids") if isinstance(stored, dict) else None
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise InputError(f"{path}: expected an object with a list `ids` of token ids")
    if stored.get("vocab_size", vocab_size) != vocab_size:
        raise InputError(f"{path}: made for a vocabulary of {stored['vocab_size']} tokens, not {vocab_size}")
    return ids
