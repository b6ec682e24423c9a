"""Rule-based controllers on views written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.policies.controller import BaseController, Controller, View
from sde_gym.policies.observation import Phase
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController, counter_uniform
from sde_gym.settings import LONGEST_DRAFT

DEPTHS, LAYERS, MAX_DRAFT = (2, 4, 8), 12, 6


def view(
    phase: list[int],
    depth_index: list[int],
    draft_length: list[int],
    observation: list[list[float]] | None = None,
    text: list[int] | None = None,
    decision: list[int] | None = None,
) -> View:
    n = len(phase)
    return View(
        phase=np.array(phase),
        depth_index=np.array(depth_index),
        draft_length=np.array(draft_length),
        observation=np.array(observation if observation is not None else [[]] * n, dtype=np.float32),
        lanes=np.arange(n),
        text=np.array(text if text is not None else [0] * n),
        decision=np.array(decision if decision is not None else range(n)),
    )


@pytest.mark.parametrize("controller", [StaticController(4, 2), ThresholdController(0.5), RandomController()])
def test_they_are_controllers(controller: Controller) -> None:
    assert isinstance(controller, Controller)
    assert controller.name
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    controller.reset(np.arange(2))
    columns = len(controller.observation)
    actions = controller.act(view([0, 1], [0, 1], [0, 1], [[0.5] * columns] * 2))
    assert actions.dtype == np.int64
    assert set(actions.tolist()) <= {0, 1}


def test_static() -> None:
    controller = StaticController(4, 3)
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    assert controller.act(view([0, 0, 0], [0, 1, 2], [0, 0, 0])).tolist() == [0, 1, 1]
    assert controller.act(view([1, 1, 1], [1, 1, 1], [1, 2, 3])).tolist() == [1, 1, 0]
    assert not any(controller.reads(phase, index) for phase in Phase for index in range(3))
    assert controller.observation == ()
    assert controller.name == "static(4, 3)"


@pytest.mark.parametrize(
    ("depth", "length", "message"),
    [
        (3, 2, r"exit_depth: 3 is not one of the depths \[2, 4, 8\]"),
        (12, 2, "exit_depth: 12 is not one of"),
        (4, 7, r"draft_length: 7 is outside 1\.\.6"),
    ],
)
def test_static_that_does_not_fit(depth: int, length: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        StaticController(depth, length).bind(DEPTHS, LAYERS, MAX_DRAFT)


@pytest.mark.parametrize("length", [0, -1])
def test_static_without_drafts_is_refused(length: int) -> None:
    with pytest.raises(InputError, match=f"draft_length: {length} is out of range"):
        StaticController(4, length)


def test_threshold() -> None:
    controller = ThresholdController(0.8, 0.5)
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    assert controller.observation == ("top1",)
    assert controller.reads(Phase.SELECT, 0)
    seen = [[0.79], [0.81], [0.49], [0.51]]
    assert controller.act(view([0, 0, 1, 1], [0, 2, 1, 1], [0, 0, 1, 1], seen)).tolist() == [0, 1, 0, 1]


def test_threshold_of_each_depth() -> None:
    controller = ThresholdController([0.9, 0.6, 0.3])
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    seen = [[0.5]] * 6
    assert controller.act(view([0, 0, 0, 1, 1, 1], [0, 1, 2] * 2, [0] * 6, seen)).tolist() == [0, 0, 1] * 2
    with pytest.raises(InputError, match="draft_threshold: 2 values for 3 depths"):
        ThresholdController(0.5, [0.1, 0.2]).bind(DEPTHS, LAYERS, MAX_DRAFT)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), []])
def test_what_is_no_probability_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="threshold: "):
        ThresholdController(wrong)
    with pytest.raises(InputError, match="p_exit: "):
        RandomController(wrong)


def test_random_rates() -> None:
    controller = RandomController(0.2, seed=1, p_draft=0.9)
    n = 20_000
    select = controller.act(view([0] * n, [0] * n, [0] * n))
    draft = controller.act(view([1] * n, [0] * n, [1] * n))
    assert select.mean() == pytest.approx(0.2, abs=0.01)
    assert draft.mean() == pytest.approx(0.9, abs=0.01)
    assert RandomController(0.0).act(view([0] * n, [0] * n, [0] * n)).sum() == 0
    assert RandomController(1.0).act(view([0] * n, [0] * n, [0] * n)).sum() == n


def test_random_draws_depend_on_text_and_decision_only() -> None:
    """Not on the lane, on who else decides, or on the order of calls."""
    text, decision = [3, 1, 2, 1], [5, 0, 7, 1]
    controller = RandomController(0.5, seed=9)
    together = controller.act(view([0] * 4, [0] * 4, [0] * 4, text=text, decision=decision))
    for at in (2, 0, 3, 1):
        alone = controller.act(view([0], [2], [0], text=[text[at]], decision=[decision[at]]))
        assert alone[0] == together[at]


def test_counter_uniform() -> None:
    """Uniform, uncorrelated along texts and decisions, different for every key; pinned values."""
    text, decision = np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200)
    draws = counter_uniform(7, text, decision)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert abs(counts - 2000).max() < 200  # 4.6 standard deviations
    square = draws.reshape(200, 200)
    assert abs(np.corrcoef(square[1:].ravel(), square[:-1].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(square[:, 1:].ravel(), square[:, :-1].ravel())[0, 1]) < 0.02
    assert len(np.unique(draws)) == draws.size
    for other in (counter_uniform(8, text, decision), counter_uniform(7, text, decision, stream=1)):
        assert abs(np.corrcoef(draws, other)[0, 1]) < 0.02
    np.testing.assert_allclose(
        counter_uniform(-1, 5, [0, 1, 2]), [0.44109779, 0.06526755, 0.03652065], atol=1e-8
    )


def test_base_controller_reads_what_it_asks_for() -> None:
    controller = BaseController()
    assert not controller.reads(0, 0)
    controller.observation = ("top1",)
    assert controller.reads(0, 0)
    controller.bind((np.int64(2), np.int64(4)), 6, 12)  # type: ignore[arg-type]
    assert controller.depths == (2, 4)
    assert (controller.num_layers, controller.max_draft) == (6, 12)


@pytest.mark.parametrize("wrong", [4.9, "4", True, None, float("nan"), [4], 0])
def test_static_settings_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(InputError, match="exit_depth: "):
        StaticController(wrong, 4)
    with pytest.raises(InputError, match="draft_length: "):
        StaticController(4, wrong)


def test_numbers_of_numpy_will_do() -> None:
    controller = StaticController(np.int64(4), np.int32(2))  # type: ignore[arg-type]
    assert controller.name == "static(4, 2)"
    assert type(controller.exit_depth) is type(controller.draft_length) is int
    assert RandomController(np.float64(0.5), np.int64(3)).seed == 3  # type: ignore[arg-type]
    assert ThresholdController(np.float32(0.5)).threshold.tolist() == [0.5]  # type: ignore[arg-type]


def test_a_draft_without_bounds_is_refused() -> None:
    StaticController(4, LONGEST_DRAFT)
    with pytest.raises(InputError, match=rf"draft_length: {LONGEST_DRAFT + 1} is out of range \(1\.\.1024\)"):
        StaticController(4, LONGEST_DRAFT + 1)


@pytest.mark.parametrize("wrong", ["a", "0.5", None, True, [True], [0.5, None], [[0.5], [0.1, 0.2]], 0.5j])
def test_thresholds_are_numbers(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"threshold: .* is not a probability"):
        ThresholdController(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.1, 0.9],), r"p_exit: \[0.1, 0.9\] is not a number in 0\.\.1"),
        ((0.5, 0, [0.1, 0.9]), "p_draft: "),
        ((0.5, "a"), "seed: 'a' is not a whole number"),
        ((0.5, 1.5), r"seed: 1\.5 is not a whole number"),
        ((0.5, True), "seed: True is not a whole number"),
    ],
)
def test_random_settings_are_numbers(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RandomController(*arguments)
