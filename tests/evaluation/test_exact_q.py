"""Exact action values: against one environment restarted by hand, Bellman's equation, and known answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.hindsight import best_return
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import ExactQ, exact_q
from sde_gym.evaluation.truth import true_value
from sde_gym.offline.behaviours import EpsilonGreedy, UniformRandom
from sde_gym.offline.collect import collect, trace_set_id
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View
from sde_gym.policies.observation import EXTENDED, PAPER
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.builders import random_traces, written_traces


def tiny(overrun: int, seed: int = 1) -> TraceSet:
    return random_traces(seed, 6, num_layers=6, depths=(1, 4), max_new_tokens=7, p_eos=0.2, overrun=overrun)


def network(names: tuple[str, ...], traces: TraceSet, seed: int = 0, **settings: Any) -> QController:
    """A small random network, which likes both actions somewhere."""
    rng = np.random.default_rng(seed)
    layers = [
        (rng.normal(size=(len(names), 8)), rng.normal(size=8)),
        (rng.normal(size=(8, 2)), np.zeros(2)),
    ]
    return QController(QNetwork(layers), names, traces.depths, traces.num_layers, 3, **settings)


class Adaptive(BaseController):
    """Drafts one token more than the last round of its lane accepted: its state cannot be read off a view."""

    name = "adaptive"

    def __init__(self) -> None:
        self.length = np.ones(0, dtype=np.int64)

    def _grow(self, lanes: np.ndarray) -> None:
        more = max(0, int(lanes.max(initial=-1)) + 1 - len(self.length))
        self.length = np.append(self.length, np.ones(more, dtype=np.int64))

    def reset(self, lanes: np.ndarray) -> None:
        self._grow(lanes)
        self.length[lanes] = 1

    def act(self, view: View) -> np.ndarray:
        return (view.draft_length < self.length[view.lanes]).astype(np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        self.length[outcome.lanes] = 1 + outcome.accepted

    def copy_lanes(self, source: np.ndarray, target: np.ndarray) -> None:
        self._grow(target)
        self.length[target] = self.length[source]


def brute_force(
    policy: Controller, data: Transitions, traces: TraceSet, gamma: float, **settings: Any
) -> np.ndarray:
    """Q of both actions, float64 (n, 2): each by a text of its own, from its start, in one lane."""
    engine = ReplayEngine(traces, observation=policy.observation, **settings)
    policy.bind(engine.depths, engine.num_layers, engine.max_draft)
    lane = np.zeros(1, dtype=np.int64)
    q = np.zeros((len(data), 2))
    for row in range(len(data)):
        first = row - int(data.step[row])
        text = int(data.text[row])
        rounds_before = first
        if engine.episode != "generation":  # all rounds of this pass over the text
            while rounds_before > 0 and data.text[rounds_before - 1] == text:
                rounds_before -= 1
        for action in (0, 1):
            row_observed = engine.reset_lanes(lane, np.array([text]))
            policy.reset(lane)

            def play(taken: int, observed: np.ndarray) -> tuple[np.ndarray, float, bool]:
                observed, reward, over, outcome = engine.step(np.array([taken]))
                if outcome.ended[0]:
                    index = np.where(outcome.drafted > 0, outcome.depth_index, len(engine.depths))
                    policy.feedback(RoundOutcome(lane, index, outcome.drafted, outcome.round_accepted))
                return observed, float(reward[0]), bool(over[0])

            for logged in range(rounds_before, row):
                row_observed, _, over = play(int(data.action[logged]), row_observed)
                if over and engine.resumable(lane)[0]:
                    row_observed = engine.resume_lanes(lane)
                elif over:
                    row_observed = engine.reset_lanes(lane, np.array([text]))
                    policy.reset(lane)
            row_observed, total, over = play(action, row_observed)
            weight = gamma
            while not over:
                chosen = int(policy.act(engine.view(lane, row_observed))[0])
                row_observed, reward, over = play(chosen, row_observed)
                total += weight * reward
                weight *= gamma
            q[row, action] = total
    return q


def policies(traces: TraceSet) -> Sequence[Controller]:
    return (
        StaticController(4, 2),
        ThresholdController(0.6, 0.4),
        network(EXTENDED, traces),
        network(PAPER, traces, seed=3, k=2, window=3),
        Adaptive(),
    )


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("credit", ["immediate", "round"])
@pytest.mark.parametrize("overrun", [0, 3])
def test_equals_brute_force(overrun: int, credit: str, gamma: float) -> None:
    traces = tiny(overrun)
    settings: dict[str, Any] = {"credit": credit, "max_draft": 3}
    data = collect(traces, UniformRandom(), 8, seed=2, **settings)
    both = np.zeros(2, dtype=bool)
    for policy in policies(traces):
        found = exact_q(policy, data, traces, gamma=gamma)
        own = {name: getattr(policy, name) for name in ("k", "window") if getattr(policy, name) is not None}
        np.testing.assert_allclose(
            found.q, brute_force(policy, data, traces, gamma, **settings, **own), atol=1e-9
        )
        assert found.policy == policy.name
        both[np.unique(found.action)] = True
        assert (found.advantage != 0).any()
    assert both.all()


def test_other_rewards_depths_and_budgets() -> None:
    traces = tiny(3)
    settings: dict[str, Any] = {
        "depths": (4,), "reward": "speed", "max_draft": 2, "max_new_tokens": 5, "credit": "round",
    }  # fmt: skip
    data = collect(traces, UniformRandom(), 6, seed=2, **settings)
    found = exact_q(ThresholdController(0.6), data, traces, gamma=0.9)
    expected = brute_force(ThresholdController(0.6), data, traces, 0.9, **settings)
    np.testing.assert_allclose(found.q, expected, atol=1e-9)


@pytest.mark.parametrize("rollouts", [1, 3, 40, 8192])
def test_the_number_of_lanes_changes_nothing(rollouts: int) -> None:
    traces = tiny(3)
    data = collect(traces, UniformRandom(), 12, seed=2, max_draft=3)
    for policy in (ThresholdController(0.6), Adaptive()):
        one, other = (exact_q(policy, data, traces, rollouts=n) for n in (rollouts, 17))
        np.testing.assert_allclose(one.q, other.q, atol=1e-12)
        np.testing.assert_array_equal(one.action, other.action)


def test_bellman() -> None:
    """Along the logged episodes, and V is the better-known of the two: Q of the policy's own action."""
    traces = random_traces(4, 9, max_new_tokens=30, overrun=11)
    data = collect(traces, UniformRandom(), 30, seed=1)
    found = exact_q(ThresholdController(0.6), data, traces, gamma=0.95)
    rows = np.arange(len(data))
    inner = np.flatnonzero(~data.terminal)
    np.testing.assert_allclose(
        found.q[inner, data.action[inner]],
        data.reward[inner] + 0.95 * found.q[inner + 1, found.action[inner + 1]],
        atol=1e-5,  # logged rewards are float32
    )
    last = np.flatnonzero(data.terminal)
    np.testing.assert_allclose(found.q[last, data.action[last]], data.reward[last], atol=1e-6)
    np.testing.assert_array_equal(found.value, found.q[rows, found.action])
    np.testing.assert_allclose(found.advantage, found.q[rows, data.action] - found.value)
    obeyed = data.action == found.action
    assert (found.advantage[obeyed] == 0).all()
    assert obeyed.any()
    assert not obeyed.all()


def test_first_states_are_worth_the_policys_return(toy_traces: TraceSet) -> None:
    for policy in (ThresholdController(0.6), StaticController(3, 2), Adaptive()):
        data = collect(toy_traces, UniformRandom(), len(toy_traces), seed=0)
        found = exact_q(policy, data, toy_traces)
        first = data.start[:-1]
        result = run_controller(toy_traces, policy, texts=data.text[first])
        np.testing.assert_allclose(found.value[first], result.returns)


def test_no_action_is_worth_more_than_the_hindsight_optimum(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, UniformRandom(), len(toy_traces), seed=0)
    found = exact_q(ThresholdController(0.6), data, toy_traces)
    first = data.start[:-1]
    best = best_return(toy_traces, data.text[first]).values
    assert (found.q[first] <= best[:, None] + 1e-9).all()


def test_a_case_on_paper() -> None:
    """Depth 2 of 8, right twice and then wrong; the policy always drafts one token."""
    traces = written_traces(
        range(1, 5), [[1], [2], [3], [99]], end="budget", depths=(2,), num_layers=8, overrun=11,
        branches={},
    )  # fmt: skip
    data = collect(traces, EpsilonGreedy(StaticController(2, 1), 0.0), 1, seed=0)
    # exit (right, 1.75), stop (-0.01 and the bonus, 1): two tokens. Then the last, drafted in vain.
    assert data.action.tolist() == [1, 0, 1]
    found = exact_q(StaticController(2, 1), data, traces)
    last_token = -2 + 0.75 + 1
    # At first: plain (0.99), then a right draft and the bonus; in DRAFT: a second right one and the bonus.
    expected = [
        [0.99 + 1.75 - 0.01 + 1, 1.75 + 0.99 + last_token],
        [0.99 + last_token, 1.75 + 0.99],
        [0.99, last_token],
    ]
    np.testing.assert_allclose(found.q, expected)
    assert found.action.tolist() == [1, 0, 1]
    np.testing.assert_allclose(found.value, [expected[0][1], expected[1][0], expected[2][1]])


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_rounds_as_episodes(gamma: float) -> None:
    """Values end with the round; history and the controller's state go on in the text."""
    traces = tiny(3)
    settings: dict[str, Any] = {"max_draft": 3}
    data = collect(traces, UniformRandom(), 40, seed=2, episode="round", **settings)
    assert len(np.unique(data.text)) == 6
    for policy in policies(traces)[1:]:
        found = exact_q(policy, data, traces, gamma=gamma)
        own = {name: getattr(policy, name) for name in ("k", "window") if getattr(policy, name) is not None}
        expected = brute_force(policy, data, traces, gamma, episode="round", **settings, **own)
        np.testing.assert_allclose(found.q, expected, atol=1e-9)


def test_heads_that_a_controller_does_not_read_are_hidden(toy_traces: TraceSet) -> None:
    """What it is shown is what `run_controller` shows it."""

    class Blinkered(ThresholdController):
        def reads(self, phase: int, depth_index: int) -> bool:
            return depth_index == 2

    policy = Blinkered(0.4)
    data = collect(toy_traces, UniformRandom(), len(toy_traces), seed=0)
    found = exact_q(policy, data, toy_traces)
    first = data.start[:-1]
    result = run_controller(toy_traces, policy, texts=data.text[first])
    np.testing.assert_allclose(found.value[first], result.returns)
    assert (found.q != exact_q(ThresholdController(0.4), data, toy_traces).q).any()


def test_progress_counts_states(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, UniformRandom(), 6, seed=0)
    calls: list[tuple[int, int]] = []
    result = exact_q(StaticController(3, 2), data, toy_traces, progress=lambda *call: calls.append(call))
    assert isinstance(result, ExactQ)
    assert calls[-1] == (len(data), len(data))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


class Remembering(BaseController):
    name = "remembering"

    def act(self, view: View) -> np.ndarray:
        return np.ones(len(view.lanes), dtype=np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        pass


def test_what_has_no_exact_values_is_refused_by_name(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, UniformRandom(), 2, seed=0)
    for policy, message in (
        (RandomController(), r"'random\(0.5, 0.5\)' draws its actions.*`policy_value` with repeats"),
        (EpsilonGreedy(StaticController(3, 2), 0.1), "draws its actions"),
        (best_return(toy_traces).controller(), "'hindsight' plays a plan"),
        (Remembering(), "'remembering' keeps state.*define `copy_lanes"),
    ):
        with pytest.raises(InputError, match=message):
            exact_q(policy, data, toy_traces)  # type: ignore[arg-type]
    harmless = Remembering()
    harmless.stateful = False  # type: ignore[attr-defined]
    same = exact_q(harmless, data, toy_traces)
    np.testing.assert_array_equal(same.q, exact_q(RandomController(1.0), data, toy_traces).q)


def test_data_that_do_not_fit_are_refused(toy_traces: TraceSet) -> None:
    policy = StaticController(3, 2)
    data = collect(toy_traces, UniformRandom(), 3, seed=0)
    other = random_traces(9)
    for changes, traces, message in (
        ({}, other, f"{trace_set_id(other)} is not the trace set of these transitions"),
        ({"settings": {}}, toy_traces, "settings lack depths, reward"),
        ({"settings": {**data.settings, "final_token_reward": 0.0}}, toy_traces, r"row \d+ has reward"),
        ({"settings": {**data.settings, "max_draft": 2}}, toy_traces, r"row \d+ has reward"),
    ):
        with pytest.raises(InputError, match=message):
            exact_q(policy, dataclasses.replace(data, **changes), traces)
    for gamma in (0.0, 1.1):
        with pytest.raises(InputError, match="gamma is"):
            exact_q(policy, data, toy_traces, gamma=gamma)
    with pytest.raises(InputError, match="rollouts: 0"):
        exact_q(policy, data, toy_traces, rollouts=0)
    with pytest.raises(InputError, match="exit_depth: 5"):
        exact_q(StaticController(5, 2), data, toy_traces)


@pytest.mark.parametrize(
    "names", [("depth", "phase", "draft_length"), ("depth", "phase", "draft_length", "top1")]
)
def test_the_heads_of_the_logged_features_are_charged_whatever_the_behaviour_reads(
    names: tuple[str, ...],
) -> None:
    plain = tiny(11)
    traces = dataclasses.replace(plain, manifest={**plain.manifest, "exit_head": 0.8, "final_head": 1.5})
    behaviour = EpsilonGreedy(ThresholdController(0.5), 0.3)  # reads top1
    data = collect(traces, behaviour, 20, seed=0, observation=names, reward="speed", max_draft=3)
    policy = StaticController(4, 2)
    first = exact_q(policy, data, traces).value[data.start[:-1]].mean()
    assert first == pytest.approx(true_value(policy, data, traces, (1.0,)).value[0])
