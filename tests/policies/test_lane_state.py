"""State by lane: room, freshness, copies, and what outlives a text or a binding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sde_gym.envs.run import run_controller
from sde_gym.evaluation.exact_q import exact_q
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.policies.ablation import keeps_state
from sde_gym.policies.controller import Controller, RoundOutcome
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.lane_state import LaneState, RememberingController
from sde_gym.policies.lite import CALMController
from sde_gym.traces import TraceSet
from tests.policies.views import random_rounds, view

DEPTHS, LAYERS, MAX_DRAFT = (2, 3, 6), 8, 6

MAKERS: dict[str, Callable[[], RememberingController]] = {
    "draft_verify": lambda: DraftVerifyController(3, 0.5, step=0.2),
    "calm": lambda: CALMController(0.6, 20),
    "del": DELController,
}


def test_lanes_appear_as_they_are_named() -> None:
    state = LaneState({"count": 0, "pair": np.array([1.0, 2.0])})
    state.start(np.array([3, 1]))
    assert len(state["count"]) >= 4
    state["count"][[1, 3]] = 5, 7
    state["pair"][1] = 0.0
    state.start(np.array([1, 9]), keep=True)  # 1 was started, 9 was not
    assert state["count"][[1, 3, 9]].tolist() == [5, 7, 0]
    assert state["pair"][[1, 9]].tolist() == [[0.0, 0.0], [1.0, 2.0]]
    state.start(np.array([1]))
    assert state["count"][[1, 3]].tolist() == [0, 7]
    state.copy(np.array([3, 3]), np.array([0, 40]))
    assert state["count"][[0, 3, 40]].tolist() == [7, 7, 7]
    state["pair"][40] = 9.0
    assert state["pair"][3].tolist() == [1.0, 2.0]
    assert state["count"].dtype == np.int64
    assert state["pair"].dtype == np.float64


@pytest.mark.parametrize("name", MAKERS)
def test_many_lanes_are_as_many_times_one(name: str) -> None:
    """Every decision after every round, in lanes together and each alone."""
    together, alone = MAKERS[name](), [MAKERS[name]() for _ in range(5)]
    for controller in (together, *alone):
        assert isinstance(controller, Controller)
        assert keeps_state(controller)
        controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    together.reset(np.arange(5))
    for controller in alone:
        controller.reset(np.zeros(1, np.int64))
    rng, acts = np.random.default_rng(1), []
    for told in random_rounds(0, 5, 3, MAX_DRAFT, 40):
        together.feedback(told)
        for number, lane in enumerate(told.lanes):
            mine = slice(number, number + 1)
            shadow = None if told.shadow is None else told.shadow[mine]
            alone[lane].feedback(
                RoundOutcome(np.zeros(1, np.int64), told.depth_index[mine], told.drafted[mine],
                             told.accepted[mine], shadow)
            )  # fmt: skip
        shown = view(
            rng.integers(0, 2, 5).tolist(), rng.integers(0, 3, 5).tolist(),
            rng.integers(0, MAX_DRAFT, 5).tolist(), rng.random(5).tolist(),
        )  # fmt: skip
        actions = together.act(shown)
        assert actions.dtype == np.int64
        for lane in range(5):
            single = view(
                shown.phase[[lane]], shown.depth_index[[lane]], shown.draft_length[[lane]],  # type: ignore[arg-type]
                shown.observation[lane],  # type: ignore[arg-type]
            )  # fmt: skip
            assert alone[lane].act(single)[0] == actions[lane]
        acts += actions.tolist()
    assert 0.1 < np.mean(acts) < 0.9


@pytest.mark.parametrize("name", MAKERS)
def test_texts_side_by_side_are_those_one_by_one(name: str, toy_traces: TraceSet) -> None:
    controller = MAKERS[name]()
    together = run_controller(toy_traces, controller)
    for text in range(len(toy_traces)):
        alone = run_controller(toy_traces, controller, [text])
        for column in ("returns", "rounds", "drafted", "accepted", "cost", "head_calls"):
            assert getattr(alone, column)[0] == getattr(together, column)[text], column


@pytest.mark.parametrize("name", MAKERS)
def test_state_is_copied_to_the_lanes_that_roll_out(name: str, toy_traces: TraceSet) -> None:
    controller = MAKERS[name]()
    data = collect(toy_traces, UniformRandom(), len(toy_traces), seed=0)
    first = data.start[:-1]
    found = exact_q(controller, data, toy_traces)
    result = run_controller(toy_traces, controller, texts=data.text[first])
    np.testing.assert_allclose(found.value[first], result.returns)
    assert result.drafted.sum() > 5


@pytest.mark.parametrize("carry_over", [False, True])
@pytest.mark.parametrize(
    "make", [lambda c: DraftVerifyController(3, carry_over=c), lambda c: DELController(carry_over=c)]
)
def test_what_goes_on_from_text_to_text(
    make: Callable[[bool], RememberingController], carry_over: bool
) -> None:
    controller = make(carry_over)
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    lanes = np.arange(2)
    controller.reset(lanes)
    fresh = controller.state["threshold"][lanes].copy()
    for told in random_rounds(2, 2, 3, MAX_DRAFT, 6):
        controller.feedback(told)
    learnt = controller.state["threshold"][lanes].copy()
    assert (learnt != fresh).all()
    expected = learnt if carry_over else fresh
    controller.reset(lanes)
    np.testing.assert_array_equal(controller.state["threshold"][lanes], expected)
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)  # as every call of the decoder does
    controller.reset(lanes)
    np.testing.assert_array_equal(controller.state["threshold"][lanes], expected)
    controller.reset(np.array([7]))  # a lane that is new starts fresh either way
    np.testing.assert_array_equal(controller.state["threshold"][7], fresh[0])
    controller.forget()
    controller.reset(lanes)
    np.testing.assert_array_equal(controller.state["threshold"][lanes], fresh)
    for told in random_rounds(2, 2, 3, MAX_DRAFT, 6):
        controller.feedback(told)
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT - 1)  # another setting: what was learnt is of no use there
    controller.reset(lanes)
    np.testing.assert_array_equal(controller.state["threshold"][lanes], fresh)
