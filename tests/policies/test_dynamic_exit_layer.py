"""DEL worked out by hand: acceptance, tokens per layer, thresholds, and that its choice is obeyed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.policies.controller import RoundOutcome
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.observation import Phase
from sde_gym.traces import TraceSet
from tests.policies.views import shadow_of, told, view

DEPTHS, LAYERS, MAX_DRAFT = (2, 4), 8, 2


def bound(**settings: Any) -> DELController:
    controller = DELController(**settings)
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    controller.reset(np.arange(3))
    return controller


def test_two_rounds_on_paper() -> None:
    controller = bound()
    # Nothing is known: plain steps.
    for index in range(2):
        assert controller.act(view([0], [index], [0], [1.0]))[0] == 0
    controller.feedback(told([0], [0], [0], [shadow_of([[0, 1]], [[0.3, 0.6]])], depth_index=2))
    # alpha = 0 and 1. Depth 2: 1/8, 1/10, 1/12; depth 4: 1/8, 2/12, 3/16, which is the most.
    np.testing.assert_allclose(
        controller.tokens_per_layer(np.array([[0.0, 1.0]])),
        [[[1 / 8, 1 / 10, 1 / 12], [1 / 8, 2 / 12, 3 / 16]]],
    )
    assert (controller.state["index"][0], controller.state["length"][0]) == (1, 2)
    # Depth 2 was never right: (1 + 0.3) / 2. Depth 4 was never wrong: (0.6 + 0) / 2.
    assert controller.state["threshold"][0] == pytest.approx([0.65, 0.3])

    controller.feedback(
        told([0], [2], [2], [shadow_of([[1, 1], [1, 1], [0, 0]], [[0.5, 0.9], [0.7, 0.8], [0.4, 0.2]])])
    )
    # Matches 2 and 0.95 + 2, mismatches 0.95 + 1 and 1.
    np.testing.assert_allclose(controller.state["recent"][0], [[2.0, 2.95], [1.95, 1.0]])
    a, b = 2 / 3.95, 2.95 / 3.95
    rates = [[1 / 8, (1 + a) / 10, (1 + a + a * a) / 12], [1 / 8, (1 + b) / 12, (1 + b + b * b) / 16]]
    np.testing.assert_allclose(controller.tokens_per_layer(np.array([[a, b]]))[0], rates)
    assert max(max(rates)) == rates[0][1]  # 0.1506, before 0.1469, 0.1456 and 0.1440
    assert (controller.state["index"][0], controller.state["length"][0]) == (0, 1)
    # c+ = (0.5 + 0.7) / 2 and (0.6 + 0.9 + 0.8) / 3; c- = (0.3 + 0.4) / 2 and 0.2.
    assert controller.state["threshold"][0] == pytest.approx([(0.6 + 0.35) / 2, (2.3 / 3 + 0.2) / 2])
    assert controller.state["length"][1] == 0  # the other lanes know nothing yet


def test_its_choice_is_obeyed_for_the_whole_round() -> None:
    controller = bound()
    controller.feedback(told([0], [0], [0], [shadow_of([[0, 1]], [[0.3, 0.6]])]))  # depth 4, two tokens, 0.3
    shown = view([0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 2], [1.0, 0.0, 0.31, 0.29, 1.0], [0] * 5)
    for _ in range(2):  # asking changes nothing
        assert controller.act(shown).tolist() == [0, 1, 1, 0, 0]
    assert [controller.reads(phase, 1) for phase in Phase] == [False, True]


def test_where_no_depth_is_ever_right_nothing_is_drafted() -> None:
    controller = bound()
    for _ in range(3):
        controller.feedback(told([0], [0], [0], [shadow_of([[0, 0]], [[0.9, 0.9]])], depth_index=2))
    assert controller.state["length"][0] == 0
    assert controller.state["threshold"][0] == pytest.approx([0.95, 0.95])


def test_the_length_is_capped() -> None:
    right = [shadow_of([[1, 1]], [[0.5, 0.5]])]
    for settings, length in (({}, 2), ({"longest": 1}, 1)):
        controller = bound(**settings)
        controller.feedback(told([0], [0], [0], right))
        assert controller.state["length"][0] == length
    assert bound(longest=30, omega=0.5).name == "del(omega=0.5, longest=30)"
    assert bound().name == "del"
    assert bound(carry_over=True).name == "del(carry_over)"


class Watched(DELController):
    """Keeps the choice that was in force when each round ended."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[tuple[int, ...]] = []

    def feedback(self, outcome: RoundOutcome) -> None:
        lanes = outcome.lanes
        chosen = (self.state["index"][lanes], self.state["length"][lanes])
        columns = (*chosen, outcome.depth_index, outcome.drafted, outcome.accepted)
        self.rounds += zip(*(column.tolist() for column in columns), strict=True)
        super().feedback(outcome)
        assert np.isfinite(self.state["threshold"][lanes]).all()


def test_rounds_in_replay_are_those_it_chose(toy_traces: TraceSet) -> None:
    controller = Watched()
    result = run_controller(toy_traces, controller)
    assert len(controller.rounds) == result.rounds.sum()
    lengths = set()
    for index, length, depth_index, drafted, _ in controller.rounds:
        assert depth_index == (index if length else len(toy_traces.depths))
        assert drafted <= length
        lengths.add(length)
    assert len(lengths) > 2
    plain = sum(length == 0 for _, length, *_ in controller.rounds)
    assert plain >= len(toy_traces)  # each text's first


def test_a_driver_without_shadows_is_named() -> None:
    with pytest.raises(InputError, match=r"'del' learns from what all depths say.*attribute `shadows`"):
        bound().feedback(told([0], [0], [0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"omega": 1.5}, r"omega: 1.5 is not a number in 0\.\.1"),
        ({"longest": True}, "longest: True is not a whole number"),
        ({"carry_over": 1}, "carry_over: 1 is neither True nor False"),
        ({"longest": 0}, "longest: 0 is not a whole number of at least 1"),
        ({"longest": 2.0}, "longest: 2.0"),
    ],
)
def test_what_is_out_of_range_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DELController(**settings)
