"""Errors of action values: known answers, and the n-step bias against its sum of advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import ExactQ, exact_q
from sde_gym.evaluation.fitted_q import LeastSquaresQ
from sde_gym.evaluation.logged import EvaluationProblem, evaluation_problem, logged_view
from sde_gym.evaluation.q_error import (
    DECISIONS_LEFT,
    QErrors,
    error_table,
    model_errors,
    n_step_bias,
    policy_errors,
    policy_values,
    rows_table,
    state_groups,
)
from sde_gym.offline.behaviours import EpsilonGreedy, UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.observation import EXTENDED
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import ThresholdController
from sde_gym.traces import TraceSet
from tests.pages import first_column, marked, read_page

GAMMA = 0.9
POLICY = ThresholdController(0.5)


@pytest.fixture(scope="module")
def data(toy_traces: TraceSet) -> Transitions:
    return collect(toy_traces, UniformRandom(), 12, seed=1)


@pytest.fixture(scope="module")
def truth(data: Transitions, toy_traces: TraceSet) -> ExactQ:
    return exact_q(POLICY, data, toy_traces, gamma=GAMMA)


def network(traces: TraceSet, names: tuple[str, ...] = ("top1", "depth"), **meta: Any) -> QController:
    """A small random network of a few features."""
    rng = np.random.default_rng(3)
    first, second = (rng.normal(size=shape).astype(np.float32) for shape in ((len(names), 8), (8, 2)))
    layers = [(first, first[0]), (second, np.zeros(2, dtype=np.float32))]
    return QController(QNetwork(layers), names, traces.depths, traces.num_layers, 12, meta=meta)


def errors_of(
    predicted: NDArray[np.float64], truth: ExactQ, data: Transitions, traces: TraceSet
) -> list[dict[str, Any]]:
    def said(problem: EvaluationProblem) -> NDArray[np.float64]:
        return predicted

    (found,) = model_errors({"model": said}, POLICY, data, traces, gamma=GAMMA, truth=truth)
    return found.rows()


def test_the_truth_has_no_error_and_a_shift_is_all_bias(
    data: Transitions, truth: ExactQ, toy_traces: TraceSet
) -> None:
    for shift in (0.0, -1.5):
        for row in errors_of(truth.q + shift, truth, data, toy_traces):
            for name in ("bias", "overestimation"):
                assert row[name] == pytest.approx(shift)
            for name in ("mean_absolute_error", "root_mean_square_error"):
                assert row[name] == pytest.approx(abs(shift))
            assert (row["agreement"], row["greedy_regret"]) == (1.0, 0.0)
            assert row["advantage_correlation"] == pytest.approx(1.0)


def test_values_of_the_wrong_order_lose_the_whole_advantage(
    data: Transitions, truth: ExactQ, toy_traces: TraceSet
) -> None:
    row = errors_of(truth.q[:, ::-1].copy(), truth, data, toy_traces)[0]
    advantage = np.abs(truth.q[:, 1] - truth.q[:, 0])
    assert row["greedy_regret"] == pytest.approx(advantage.mean())
    assert row["agreement"] == pytest.approx((advantage < 1e-9).mean())
    assert row["advantage_correlation"] == pytest.approx(-1.0)
    assert row["bias"] == pytest.approx(0.0)
    assert row["root_mean_square_error"] == pytest.approx(np.sqrt((advantage**2).mean()))


def test_only_the_policys_own_action_counts_as_overestimation(
    data: Transitions, truth: ExactQ, toy_traces: TraceSet
) -> None:
    predicted = truth.q.copy()
    predicted[np.arange(len(data)), truth.action] += 2.0
    row = errors_of(predicted, truth, data, toy_traces)[0]
    assert (row["overestimation"], row["bias"]) == (pytest.approx(2.0), pytest.approx(1.0))


def test_a_policy_is_held_against_its_own_greedy_values(data: Transitions, toy_traces: TraceSet) -> None:
    policy = network(toy_traces, training={"gamma": GAMMA})
    (found,) = policy_errors({"net": policy}, data, toy_traces)
    columns = [data.names.index(name) for name in policy.observation]
    values = policy.network(data.observation[:, columns])
    np.testing.assert_array_equal(found.predicted, values)
    np.testing.assert_array_equal(found.truth.action, values[:, 1] > values[:, 0])
    assert found.truth.gamma == GAMMA
    np.testing.assert_array_equal(found.truth.q, exact_q(policy, data, toy_traces, gamma=GAMMA).q)
    for row, group in zip(found.rows(), found.groups, strict=True):
        error = (values - found.truth.q)[group.rows]
        assert (row["by"], row["states"], row["count"]) == (group.by, group.states, len(error))
        assert row["bias"] == pytest.approx(error.mean())
        assert row["mean_absolute_error"] == pytest.approx(np.abs(error).mean())


def test_estimators_models_are_compared(data: Transitions, truth: ExactQ, toy_traces: TraceSet) -> None:
    (found,) = model_errors({"lstd": LeastSquaresQ()}, POLICY, data, toy_traces, gamma=GAMMA)
    np.testing.assert_array_equal(found.truth.q, truth.q)
    np.testing.assert_array_equal(
        found.predicted, LeastSquaresQ()(evaluation_problem(POLICY, data, GAMMA, logged_view(data)))
    )
    row = found.rows()[0]
    assert row["bias"] == pytest.approx((found.predicted - truth.q).mean())
    flat = errors_of(np.full_like(truth.q, truth.q.mean()), truth, data, toy_traces)[0]
    assert flat["root_mean_square_error"] == pytest.approx(flat["true_deviation"])
    assert row["label"] == "lstd"


@pytest.mark.parametrize("episode", ["generation", "round"])
def test_groups_part_the_states(toy_traces: TraceSet, episode: str) -> None:
    logged = collect(
        toy_traces, UniformRandom(), 12, seed=1, observation=("top1",), episode=episode
    )  # phases are not among the features: they follow from a replay, or from the actions
    full = collect(toy_traces, UniformRandom(), 12, seed=1, observation=EXTENDED, episode=episode)
    groups = state_groups(logged, toy_traces)
    for by in ("phase", "decisions left"):
        assert (np.sum([group.rows for group in groups if group.by == by], axis=0) == 1).all()
    (drafting,) = (group.rows for group in groups if group.states == "DRAFT")
    np.testing.assert_array_equal(drafting, full.observation[:, EXTENDED.index("phase")] == 1)
    (last,) = (group.rows for group in state_groups(logged, toy_traces, (1, 2)) if group.states == "1")
    np.testing.assert_array_equal(last, logged.terminal)
    assert {group.states for group in groups} <= {"all", "SELECT", "DRAFT", "1-9", "10-29", "30-99", "100+"}


def by_hand(data: Transitions, truth: ExactQ, n: int) -> NDArray[np.float64]:
    """Error of each n-step target as a sum of discounted advantages."""
    error = np.zeros(len(data))
    for row in range(len(data)):
        last = False
        for j in range(n):
            if j:
                error[row] += truth.gamma**j * truth.advantage[row + j]
            last = bool(data.terminal[row + j])
            if last:
                break
    return error


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000])
def test_the_bias_is_the_sum_of_advantages(data: Transitions, truth: ExactQ, n: int) -> None:
    (row,) = n_step_bias(data, truth, (n,))
    error = by_hand(data, truth, n)
    assert row["bias"] == pytest.approx(error.mean(), abs=1e-5)
    assert row["root_mean_square_error"] == pytest.approx(np.sqrt((error**2).mean()), abs=1e-5)
    assert row["mean_absolute_error"] == pytest.approx(np.abs(error).mean(), abs=1e-5)
    if n > 1:
        assert row["bias"] != pytest.approx(0.0, abs=1e-3)
        assert 0 < row["own_actions"] < 1
    else:
        assert row["own_actions"] == 1.0


def test_targets_of_the_policys_own_log_are_unbiased(toy_traces: TraceSet) -> None:
    own = collect(toy_traces, EpsilonGreedy(POLICY, 0.0), 6, seed=0)
    truth = exact_q(POLICY, own, toy_traces, gamma=GAMMA)
    np.testing.assert_array_equal(own.action, truth.action)
    for row in n_step_bias(own, truth):
        assert row["bias"] == pytest.approx(0.0, abs=1e-5)
        assert row["own_actions"] == 1.0


def test_targets_are_told_apart_and_errors_are_those_of_episodes(
    data: Transitions, truth: ExactQ, toy_traces: TraceSet
) -> None:
    groups = state_groups(data, toy_traces)
    rows = {(row["n"], row["states"]): row for row in n_step_bias(data, truth, (3, 5), groups)}
    for n in (3, 5):
        parts = [rows[n, phase] for phase in ("SELECT", "DRAFT")]
        mean = sum(part["bias"] * part["count"] for part in parts) / len(data)
        assert rows[n, "all"]["bias"] == pytest.approx(mean)
    # The standard error of a ratio, over episodes: sums of deviations, not of single rows.
    error = by_hand(data, truth, 3)
    sums = np.add.reduceat(error - error.mean(), data.start[:-1])
    expected = np.sqrt((sums**2).sum() * len(sums) / (len(sums) - 1)) / len(error)
    assert rows[3, "all"]["standard_error"] == pytest.approx(expected, rel=1e-3)


def test_one_episode_has_no_standard_error(toy_traces: TraceSet) -> None:
    single = collect(toy_traces, UniformRandom(), 1, seed=0)
    (row,) = n_step_bias(single, exact_q(POLICY, single, toy_traces), (2,))
    assert row["standard_error"] is None


def test_tables_hold_the_rows(data: Transitions, truth: ExactQ, toy_traces: TraceSet) -> None:
    groups = state_groups(data, toy_traces)
    errors = [
        QErrors("exact", truth.q, truth, groups),
        QErrors("flat", np.zeros_like(truth.q), truth, groups),
    ]
    lines = error_table(errors).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| exact", "| flat"]
    assert lines[3].split(" | ")[-3] == "-"  # a constant has no rank correlation
    assert len(error_table(errors, "phase").splitlines()) == 2 + 2 * 2
    assert rows_table([{"a": "x", "b": 0.5, "c": 3}]).splitlines()[1:] == [
        "| --- | ---: | ---: |",
        "| x | 0.500 | 3 |",
    ]
    with pytest.raises(InputError, match="by: no states are grouped by 'depth'"):
        error_table(errors, "depth")


def test_the_page_explains_every_column(data: Transitions, truth: ExactQ, toy_traces: TraceSet) -> None:
    row = errors_of(truth.q, truth, data, toy_traces)[0]
    assert first_column(marked(read_page("exact"), "q-errors")) == list(row)
    described = QErrors.rows.__doc__ or ""
    assert all(name in described for name in row)


def test_what_cannot_be_compared_is_refused(data: Transitions, truth: ExactQ, toy_traces: TraceSet) -> None:
    cloned = network(toy_traces, provenance={"algorithm": "bc"})
    with pytest.raises(InputError, match="trained by bc, whose scores"):
        policy_values(cloned, data)
    cloned = network(toy_traces, training={"algorithm": "sb3_ppo", "gamma": 0.9})
    with pytest.raises(InputError, match="trained by sb3_ppo, whose scores"):
        policy_values(cloned, data)
    with pytest.raises(InputError, match="does not say with which gamma"):
        policy_errors({"net": network(toy_traces)}, data, toy_traces)
    few = collect(toy_traces, UniformRandom(), 2, seed=0, observation=("top1",))
    with pytest.raises(InputError, match="reads depth, not among the logged features"):
        policy_values(network(toy_traces), few)
    with pytest.raises(InputError, match="call exact_q on these transitions"):
        n_step_bias(few, truth)
    with pytest.raises(InputError, match="call exact_q on these transitions"):
        model_errors({}, POLICY, few, toy_traces, gamma=GAMMA, truth=truth)
    with pytest.raises(InputError, match=r"of 'threshold\(0.5, 0.5\)' at gamma 0.9, but those of .* at 0.8"):
        model_errors({}, POLICY, data, toy_traces, gamma=0.8, truth=truth)
    with pytest.raises(InputError, match=r"but those of 'threshold\(0.6, 0.6\)' at 0.9 are needed"):
        model_errors({}, ThresholdController(0.6), data, toy_traces, gamma=GAMMA, truth=truth)
    with pytest.raises(InputError, match="steps: 0 is out of range"):
        n_step_bias(data, truth, (0,))
    for edges in ((), (2, 5), (1, 1)):
        with pytest.raises(InputError, match="must begin with 1 and rise"):
            state_groups(data, toy_traces, edges)
    assert DECISIONS_LEFT[0] == 1
