"""Batched generation equals one text at a time; counting and the compact vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sde_gym.decoding import autoregressive
from sde_gym.errors import InputError
from sde_gym.files import write_json
from sde_gym.models.generation import generate_greedy
from sde_gym.models.vocabulary import (
    compact_vocabulary,
    count_output_tokens,
    load_compact_vocabulary,
    save_compact_vocabulary,
)
from tests.decoding.conftest import agreeing_model

PROMPTS = [[1], [2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12]]


def test_a_ragged_batch_equals_single_texts() -> None:
    free = agreeing_model()
    ending = agreeing_model(eos_token_id=autoregressive(free, PROMPTS[1], 12).tokens[5])
    small = agreeing_model(context=12)
    for model in (free, ending, small):
        expected = [autoregressive(model, p, 20).tokens for p in PROMPTS]
        assert generate_greedy(model, PROMPTS, 20) == expected
    assert len({len(t) for t in generate_greedy(ending, PROMPTS, 20)}) > 1  # some ended early


def test_empty_prompts_and_budgets_are_refused() -> None:
    with pytest.raises(InputError, match="no tokens"):
        generate_greedy(agreeing_model(), [[1], []], 4)
    with pytest.raises(InputError, match="max_new_tokens"):
        generate_greedy(agreeing_model(), PROMPTS, 0)


def test_counts_are_those_of_the_texts() -> None:
    model = agreeing_model()
    counts = count_output_tokens(model, PROMPTS, 10, batch_size=2)
    texts = [autoregressive(model, p, 10).tokens for p in PROMPTS]
    np.testing.assert_array_equal(counts, np.bincount(np.concatenate(texts), minlength=40))


def test_the_most_frequent_tokens_are_kept_with_the_end_of_text() -> None:
    counts = np.array([0, 5, 0, 9, 5, 1, 0, 0])
    found = compact_vocabulary(counts, 3, (7,))
    assert found["ids"] == [1, 3, 7]  # 1 and 4 tie: the smaller id
    assert found["coverage"] == pytest.approx(14 / 20)
    for size in (1, 9):
        with pytest.raises(InputError, match=r"2\.\.8"):
            compact_vocabulary(counts, size, (7,))


def test_vocabularies_are_stored_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "compact.json"
    save_compact_vocabulary(path, compact_vocabulary(np.arange(8), 3, (7,)))
    assert load_compact_vocabulary(path, 8) == [5, 6, 7]
    with pytest.raises(InputError, match="made for a vocabulary of 8 tokens, not 9"):
        load_compact_vocabulary(path, 9)
    write_json(path, {"ids": "no"})
    with pytest.raises(InputError, match="list `ids`"):
        load_compact_vocabulary(path, 8)
    with pytest.raises(InputError, match="no such file"):
        load_compact_vocabulary(tmp_path / "none.json", 8)
