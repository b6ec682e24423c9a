"""Estimators give what was worked out on paper, and on average what enumeration gives."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.evaluation.estimators import KINDS, MODEL_KINDS, Estimate, Estimator, estimate, taken_apart
from sde_gym.evaluation.logged import EvaluationProblem, evaluation_problem
from sde_gym.evaluation.player import Policy
from sde_gym.evaluation.truth import true_value
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.rules import StaticController, ThresholdController
from tests.evaluation.histories import Histories, by_history, every_history, short_traces

GAMMA = 0.5


def logged(episodes: Sequence[Sequence[tuple[int, float]]], propensity: float = 0.5) -> Transitions:
    """Episodes of (action, reward); the only feature is the step."""
    lengths = [len(episode) for episode in episodes]
    flat = [row for episode in episodes for row in episode]
    step = np.concatenate([np.arange(length) for length in lengths])
    episode = np.repeat(np.arange(len(episodes)), lengths)
    return Transitions(
        observation=step[:, None].astype(np.float32),
        action=np.array([action for action, _ in flat]),
        reward=np.array([reward for _, reward in flat], dtype=np.float32),
        terminal=np.append(episode[1:] != episode[:-1], True),
        episode=episode,
        step=step,
        propensity=np.full(len(flat), propensity),
        text=episode,
        component=np.zeros(len(flat), dtype=np.int64),
        names=("trace",),
    )


def two_steps(
    episodes: Sequence[Sequence[tuple[int, float]]],
) -> tuple[EvaluationProblem, NDArray[np.float64]]:
    """The target exits with 3/4 in step 0 and 1/4 in step 1; Q is (2, 4) and (1, 3); the log flips coins."""
    log = logged(episodes)
    problem = EvaluationProblem(log, "target", np.array([0.75, 0.25])[log.step], GAMMA)
    return problem, np.array([[2.0, 4.0], [1.0, 3.0]])[log.step]


THREE = [[(1, 2.0), (1, 2.0)], [(1, 1.0), (0, 3.0)], [(0, 0.0), (1, 4.0)]]
# w_0 = 3/2, 3/2, 1/2; w_1 = 3/4, 9/4, 1/4; returns 3, 5/2, 2; V = 7/2 and 3/2;
# d_0 = -5/4, -9/4, -5/4; d_1 = -1, 2, 1.
BY_HAND = {
    "is": (2.25 + 5.625 + 0.5) / 3,
    "pdis": ((3 + 0.75) + (1.5 + 3.375) + 0.5) / 3,
    "wis": (2.25 + 5.625 + 0.5) / 3.25,
    "wpdis": (3 + 1.5) / 3.5 + 0.5 * (1.5 + 6.75 + 1) / 3.25,
    "dm": 3.5,
    "dr": (1.25 + 2.375 + 3.0) / 3,
    "wdr": 3.5 + (-1.875 - 3.375 - 0.625) / 3.5 + 0.5 * (-0.75 + 4.5 + 0.25) / 3.25,
}


def said(
    kind: str, problem: EvaluationProblem, q: NDArray[np.float64] | None = None, **options: int
) -> Estimate:
    model = (lambda _: q) if kind in MODEL_KINDS else None
    return estimate(Estimator(kind, kind, problem.gamma, model), problem, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_by_hand(kind: str) -> None:
    problem, q = two_steps(THREE)
    found = said(kind, problem, q, samples=50)
    assert found.value == pytest.approx(BY_HAND[kind], abs=1e-12)
    assert found.low <= found.value <= found.high or kind == "dm"
    size = 3.0 if kind == "dm" else 3.25**2 / (0.5625 + 5.0625 + 0.0625)
    assert found.effective_sample_size == pytest.approx(size)
    assert (found.gamma, found.episodes, found.reason) == (GAMMA, 3, "")


def test_an_ended_episode_keeps_its_weight_in_the_sums() -> None:
    problem, q = two_steps([*THREE, [(1, 6.0)]])  # w = 3/2 from step 0 on, d_0 = 6 - 4
    value = (3 + 1.5 + 9) / 5 + 0.5 * 9.25 / 4.75
    assert said("wpdis", problem).value == pytest.approx(value, abs=1e-12)
    value = 3.5 + (-5.875 + 3) / 5 + 0.5 * 4 / 4.75
    assert said("wdr", problem, q).value == pytest.approx(value, abs=1e-12)


@pytest.fixture(scope="module")
def histories() -> Histories:
    return every_history(short_traces(), max_draft=2)


def targets(histories: Histories) -> dict[str, NDArray[np.float64]]:
    policies: list[Policy] = [StaticController(2, 2), ThresholdController(0.85)]
    probabilities = {
        policy.name: evaluation_problem(policy, histories.transitions, 1.0).exit_probability
        for policy in policies
    }
    return {**probabilities, "by history": by_history(histories.before, 7)}


@pytest.mark.parametrize("kind", ["is", "pdis", "dr"])
@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_the_expectation_over_all_histories_is_the_value(
    histories: Histories, kind: str, gamma: float
) -> None:
    log = histories.transitions
    probability = histories.probability(by_history(histories.before, 0))
    assert probability.sum() == pytest.approx(1.0, abs=1e-12)
    wrong_q = np.random.default_rng(3).normal(size=(len(log), 2))
    # A model may say what it likes, but of the same state the same.
    wrong_q = wrong_q[[histories.before.index(history) for history in histories.before]]
    for exits in targets(histories).values():
        parts = taken_apart(kind, EvaluationProblem(log, "target", exits, gamma), wrong_q)
        assert probability @ parts.terms == pytest.approx(histories.value(exits, gamma), abs=1e-10)


def test_with_the_exact_q_every_episode_says_the_value(histories: Histories) -> None:
    for exits in targets(histories).values():
        problem = EvaluationProblem(histories.transitions, "target", exits, 0.9)
        q = histories.exact_q(exits, 0.9)
        value = histories.value(exits, 0.9)
        terms = taken_apart("dr", problem, q).terms
        np.testing.assert_allclose(terms, value, atol=1e-10)
        for kind in ("dm", "wdr"):
            found = said(kind, problem, q, samples=20)
            assert found.value == pytest.approx(value, abs=1e-10)
            assert found.high - found.low < 1e-10


def test_replay_and_enumeration_agree(histories: Histories) -> None:
    log, traces = histories.transitions, short_traces()
    policies: list[Policy] = [StaticController(2, 2), ThresholdController(0.85)]
    for policy in policies:
        exits = evaluation_problem(policy, log, 1.0).exit_probability
        true = true_value(policy, log, traces, (1.0, 0.8))
        np.testing.assert_allclose(
            true.value, [histories.value(exits, 1.0), histories.value(exits, 0.8)], atol=1e-6
        )
        assert (true.standard_error == 0).all()
    coin = true_value(UniformRandom(0.4), log, traces, (0.8,), repeats=400)
    exact = histories.value(np.full(len(log), 0.4), 0.8)
    assert coin.standard_error[0] > 0
    assert abs(coin.value[0] - exact) < 4 * coin.standard_error[0]


def test_the_policy_of_the_log_gets_the_mean_return_and_an_honest_interval() -> None:
    rng = np.random.default_rng(0)
    log = logged([[(int(rng.integers(2)), float(rng.normal())) for _ in range(3)] for _ in range(400)])
    problem = EvaluationProblem(log, "coin", np.full(len(log), 0.5), 1.0)
    returns = log.returns()
    for kind in ("is", "pdis", "wis", "wpdis"):
        found = said(kind, problem, samples=2000)
        assert found.value == pytest.approx(returns.mean(), abs=1e-12)
        assert found.effective_sample_size == pytest.approx(400)
        half = 1.96 * returns.std() / 20
        assert (found.high - found.low) / (2 * half) == pytest.approx(1.0, abs=0.12)
        assert found == said(kind, problem, samples=2000)


def test_without_agreement_there_is_no_estimate() -> None:
    log = logged(THREE)
    problem = EvaluationProblem(log, "never", np.where(log.step == 0, 0.0, 1.0 - (log.action == 1)), GAMMA)
    for kind in ("is", "pdis", "wis", "wpdis", "wdr"):
        found = said(kind, problem, np.zeros((6, 2)))
        assert np.isnan([found.value, found.low, found.high]).all()
        assert found.effective_sample_size == 0
        assert "no logged episode does what the policy would have done" in found.reason
        assert found.row()["value"] is None
    assert np.isfinite(said("dr", problem, np.zeros((6, 2))).value)
    assert np.isfinite(said("dm", problem, np.zeros((6, 2))).value)


def test_weights_beyond_a_float_are_named_and_self_normalised_ones_are_not() -> None:
    log = logged([[(1, 1.0)] * 2000, [(1, 0.5)] * 2000])
    problem = EvaluationProblem(log, "long", np.ones(4000), 0.5)
    for kind in ("is", "pdis"):
        found = said(kind, problem)
        assert np.isnan(found.value)
        assert "beyond a float64" in found.reason
    assert said("wis", problem).value == pytest.approx(1.5)
    assert said("wpdis", problem).value == pytest.approx(1.5)


def test_an_estimate_beyond_a_float_is_none() -> None:
    """The weight, 2**1020, is a number, but not its product with the rewards."""
    log = logged([[(1, 1000.0)] * 1020, [(1, 500.0)] * 1020])
    problem = EvaluationProblem(log, "long", np.ones(len(log)), 1.0)
    for kind in ("is", "pdis"):
        found = said(kind, problem, samples=20)
        assert np.isnan([found.value, found.low, found.high]).all()
        assert "weights times rewards are beyond a float64" in found.reason
        json.dumps(found.row(), allow_nan=False)


def test_resamples_without_weight_are_left_out_and_told() -> None:
    log = logged([[(1, 1.0)], [(0, 0.0)], [(0, 0.0)], [(0, 0.0)]])
    found = said("wis", EvaluationProblem(log, "exit", np.ones(4), 1.0), samples=400)
    assert found.value == found.low == found.high == 1.0
    assert found.reason.endswith("bootstrap samples were left out: no episode with any weight")


def test_one_episode_has_no_interval() -> None:
    found = said("is", EvaluationProblem(logged([[(1, 1.0)]]), "exit", np.ones(1), 1.0))
    assert found.value == 2.0
    assert np.isnan(found.low)
    assert "one episode" in found.reason


def test_bad_input_is_refused() -> None:
    problem, q = two_steps(THREE)
    with pytest.raises(InputError, match="gamma is 0"):
        EvaluationProblem(problem.transitions, "p", problem.exit_probability, 0.0)
    with pytest.raises(InputError, match="exit probabilities"):
        EvaluationProblem(problem.transitions, "p", problem.exit_probability * 2, 1.0)
    with pytest.raises(InputError, match="exit probabilities"):
        EvaluationProblem(problem.transitions, "p", problem.exit_probability[:3], 1.0)
    with pytest.raises(InputError, match="'ips' is not one of"):
        Estimator("x", "ips", 1.0)
    with pytest.raises(InputError, match="needs a q_model"):
        Estimator("x", "dr", 1.0)
    with pytest.raises(InputError, match="give both the same"):
        estimate(Estimator("is", "is", 1.0), problem)
    with pytest.raises(InputError, match="NaN or infinity"):
        said("dm", problem, q * np.nan)
    with pytest.raises(InputError, match=r"expected \(6, 2\)"):
        said("dr", problem, q[:2])
    with pytest.raises(InputError, match=r"propensity 0.0 in row 0"):
        logged(THREE, propensity=0.0)
    with pytest.raises(InputError, match="samples is 0"):
        said("is", problem, samples=0)
    with pytest.raises(InputError, match="seed: -1 is out of range"):
        said("is", problem, seed=-1)
    with pytest.raises(InputError, match="level is 1"):
        estimate(Estimator("is", "is", GAMMA), problem, level=1)
