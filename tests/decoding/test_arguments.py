"""Arguments of the wrong kind or size are refused by name, and at once, by every decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sde_gym.decoding import autoregressive, speculative, speculative_batch
from sde_gym.decoding.dex import dex
from sde_gym.decoding.dex.exploration import MOST_EXPLORERS, exploration_set
from sde_gym.decoding.skipping import skipping
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.models.skipping import SkipSet
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.settings import LONGEST_DRAFT

DEPTHS = (1, 2, 4)
PROMPT = [1, 2, 3]


def by_speculative(model: Any, prompt: Any, budget: Any, controller: Any = None, **options: Any) -> Any:
    controller = StaticController(4, 3) if controller is None else controller
    return speculative(model, prompt, controller, options.pop("depths", DEPTHS), budget, **options)


def by_batch(model: Any, prompt: Any, budget: Any, controller: Any = None, **options: Any) -> Any:
    controller = StaticController(4, 3) if controller is None else controller
    depths = options.pop("depths", DEPTHS)
    return speculative_batch(model, [[5, 6], prompt], controller, depths, budget, **options)[1]


def by_skipping(model: Any, prompt: Any, budget: Any, controller: Any = None, **options: Any) -> Any:
    skip = SkipSet(attention=(2, 3), mlp=(2, 3))
    controller = StaticController(skip.depth(6), 3) if controller is None else controller
    return skipping(model, prompt, skip, controller, budget, **options)


def by_dex(model: Any, prompt: Any, budget: Any) -> Any:
    return dex(model, prompt, 3, budget)


Decode = Callable[..., Any]
EVERY = pytest.mark.parametrize("decode", [autoregressive, by_speculative, by_batch, by_skipping, by_dex])
CONTROLLED = pytest.mark.parametrize("decode", [by_speculative, by_batch, by_skipping])


@EVERY
@pytest.mark.parametrize("budget", [2.0, 2.5, "5", float("nan"), float("inf"), None, True, [3]])
def test_a_budget_is_a_whole_number(model: LayeredModel, decode: Decode, budget: Any) -> None:
    with pytest.raises(InputError, match=r"max_new_tokens: .* is not a whole number"):
        decode(model, PROMPT, budget)


@EVERY
@pytest.mark.parametrize(
    "prompt", [None, 5, "abc", b"ab", {1: 2}, [1.5], [True], [[1, 2]], torch.tensor([[1, 2]])]
)
def test_a_prompt_is_a_list_of_ids(model: LayeredModel, decode: Decode, prompt: Any) -> None:
    with pytest.raises(InputError, match=r"prompt: .* is no (list of )?token id"):
        decode(model, prompt, 5)


@EVERY
def test_arrays_of_ids_and_numbers_of_numpy_will_do(model: LayeredModel, decode: Decode) -> None:
    expected = autoregressive(model, PROMPT, 9).tokens
    for prompt in (tuple(PROMPT), np.array(PROMPT), torch.tensor(PROMPT), list(torch.tensor(PROMPT))):
        assert decode(model, prompt, np.int64(9)).tokens == expected


@EVERY
def test_a_transformers_model_is_no_layered_model(model: LayeredModel, decode: Decode) -> None:
    for wrong in (model.hf, "stdlib-20m", None, LayeredModel):
        with pytest.raises(InputError, match=r"model: .* is no LayeredModel; give"):
            decode(wrong, PROMPT, 5)


@CONTROLLED
@pytest.mark.parametrize("name", ["max_draft", "k", "window"])
@pytest.mark.parametrize("value", ["3", 1.5, 5.0, float("nan"), float("inf"), True, 0, -1, [1]])
def test_settings_are_whole_numbers(model: LayeredModel, decode: Decode, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name}: .* is (not a whole number|out of range)"):
        decode(model, PROMPT, 5, **{name: value})


@CONTROLLED
@pytest.mark.parametrize("controller", ["static:4,3", StaticController, object(), 5, DEPTHS])
def test_what_is_no_controller_is_refused(model: LayeredModel, decode: Decode, controller: Any) -> None:
    with pytest.raises(InputError, match=r"controller: .* is (a class|no controller)"):
        decode(model, PROMPT, 5, controller)


def test_no_controller_at_all_is_refused(model: LayeredModel) -> None:
    with pytest.raises(InputError, match="controller: None is no controller, it lacks bind"):
        speculative(model, PROMPT, None, DEPTHS, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("depths", [4, "4", None, b"12", {1: 2}])
def test_depths_are_a_list(model: LayeredModel, depths: Any) -> None:
    with pytest.raises(InputError, match=r"depths: .* is no list of depths"):
        speculative(model, PROMPT, StaticController(4, 3), depths, 5)


@pytest.mark.parametrize("depth", [float("nan"), None, 4.7, 4.0, "4", True])
def test_each_depth_is_a_whole_number(model: LayeredModel, depth: Any) -> None:
    with pytest.raises(InputError, match=r"depths: .* is not a whole number"):
        model.check_depths((depth,))


def test_depths_of_numpy_will_do(model: LayeredModel) -> None:
    for depths in (
        np.array(DEPTHS),
        torch.tensor(DEPTHS),
        iter(DEPTHS),
        [np.int32(depth) for depth in DEPTHS],
    ):
        found = model.check_depths(depths)  # type: ignore[arg-type]
        assert found == DEPTHS
        assert all(type(depth) is int for depth in found)


class Answering(BaseController):
    """Says the same at every decision, whatever that is."""

    name = "answering"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def act(self, view: View) -> Any:
        return self.answer(len(view.lanes))


@CONTROLLED
@pytest.mark.parametrize(
    "answer",
    [
        lambda n: np.full(n, 7), lambda n: np.full(n, -1), lambda n: np.full(n, 1.5),
        lambda n: np.full(n, np.nan), lambda n: np.zeros(n + 1, int), lambda n: np.zeros(n - 1, int),
        lambda n: None, lambda n: 1, lambda n: np.int64(1), lambda n: np.ones((n, 1), np.int64),
        lambda n: "1" * n, lambda n: [None] * n, lambda n: ["1"] * n, lambda n: [[1], [1, 0]],
    ],
    ids=[
        "7", "-1", "1.5", "nan", "too many", "too few", "None", "int", "scalar", "table", "text", "Nones",
        "texts", "ragged",
    ],
)  # fmt: skip
def test_what_is_no_action_is_refused(
    model: LayeredModel, decode: Decode, answer: Callable[[int], Any]
) -> None:
    with pytest.raises(InputError, match=r"controller: act of 'answering' returned .*; it must return"):
        decode(model, PROMPT, 8, Answering(answer))


@CONTROLLED
@pytest.mark.parametrize(
    "answer",
    [lambda n: [1] * n, lambda n: (True,) * n, lambda n: np.ones(n, np.bool_), lambda n: torch.ones(n)],
)
def test_whatever_equals_an_action_is_one(
    model: LayeredModel, decode: Decode, answer: Callable[[int], Any]
) -> None:
    expected = decode(model, PROMPT, 20, Answering(lambda n: np.ones(n, np.int64)))
    found = decode(model, PROMPT, 20, Answering(answer))
    assert found.drafted > 0
    assert (found.tokens, found.rounds) == (expected.tokens, expected.rounds)


def test_a_long_draft_reserves_no_more_than_the_budget(
    model: LayeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    made = LayeredModel.sequence

    def watched(self: LayeredModel, capacity: int = 256) -> Any:
        asked.append(capacity)
        return made(self, capacity)

    monkeypatch.setattr(LayeredModel, "sequence", watched)
    controller = ThresholdController(0.0)  # drafts for as long as it may
    result = speculative(model, PROMPT, controller, DEPTHS, 8, max_draft=LONGEST_DRAFT)
    assert result.tokens == autoregressive(model, PROMPT, 8).tokens
    assert asked[0] <= len(PROMPT) + 2 * 8


@CONTROLLED
def test_a_draft_without_bounds_is_refused(model: LayeredModel, decode: Decode) -> None:
    with pytest.raises(InputError, match=rf"max_draft: 1000000 is out of range \(1\.\.{LONGEST_DRAFT}\)"):
        decode(model, PROMPT, 8, max_draft=10**6)


def test_a_lattice_that_does_not_fit_is_refused() -> None:
    assert len(exploration_set(MOST_EXPLORERS, 24)) == MOST_EXPLORERS
    for given in (24, 13, tuple(range(1, 25))):
        with pytest.raises(InputError, match=r"may hold 2\^\d+ - 1 = \d+ tokens; give at most 12 explorers"):
            exploration_set(given, 24)


@pytest.mark.parametrize("tokens", ["abc", [1.5], [True], 5, None, [[1]], {1: 2}])
def test_a_sequence_takes_ids_only(model: LayeredModel, tokens: Any) -> None:
    sequence = model.sequence()
    sequence.append([1])
    with pytest.raises(InputError, match=r"tokens: .* is no (list of )?token id"):
        sequence.append(tokens)
    assert sequence.tokens == [1]
