"""Plain decoding: budgets, ends and counters (equality with `generate` is tested per architecture)."""

from __future__ import annotations

import pytest

from sde_gym.decoding import autoregressive
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from tests.decoding.conftest import agreeing_model


@pytest.mark.parametrize("budget", [0, 1, 2, 17])
def test_budget_is_met_exactly(model: LayeredModel, budget: int) -> None:
    result = autoregressive(model, [5, 6], budget)
    assert len(result.tokens) == len(result.depths) == len(result.fates) == budget
    steps = max(0, budget - 1)
    assert result.layer_passes == result.sequential_layers == 6 * steps
    assert result.head_calls == steps


def test_the_end_of_text_is_the_last_token(model: LayeredModel) -> None:
    free = autoregressive(model, [5, 6], 40).tokens
    ending = agreeing_model(eos_token_id=free[10])
    expected = free[: free.index(free[10]) + 1]
    assert autoregressive(ending, [5, 6], 40).tokens == expected


def test_the_context_limit_bounds_the_budget() -> None:
    small = agreeing_model(context=16)
    # 10 prompt tokens leave 6 positions to feed, and the last token is never fed.
    assert len(autoregressive(small, list(range(10)), 99).tokens) == 7


@pytest.mark.parametrize(
    ("prompt", "budget", "words"),
    [
        ([], 4, "no tokens"),
        ([1], -1, "max_new_tokens"),
        (list(range(16)), 4, "context holds 16"),
        ([40], 4, "token ids must lie in 0..39"),
        ([-1], 4, "token ids must lie in 0..39"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], budget: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        autoregressive(agreeing_model(context=16), prompt, budget)
