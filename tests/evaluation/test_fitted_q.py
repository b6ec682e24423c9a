"""Q models find values that are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.evaluation.fitted_q import FittedQ, FQESettings, LeastSquaresQ
from sde_gym.evaluation.logged import EvaluationProblem
from sde_gym.offline.transitions import Transitions

GAMMA = 0.9
# State 0 leads to state 1 or 2, by the action; there the episode ends.
REWARD = np.array([[0.5, -0.01], [1.0, 2.0], [0.0, -1.0]])
EXIT = np.array([0.5, 1.0, 0.25])


def three_states(episodes: int = 1500, noise: bool = False) -> tuple[EvaluationProblem, NDArray[np.int64]]:
    """A problem whose states are one-hot, with the state of each row. Noise is skewed, of mean 0."""
    rng = np.random.default_rng(0)
    action = rng.integers(2, size=2 * episodes)
    state = np.zeros(2 * episodes, dtype=np.int64)
    state[1::2] = 1 + action[::2]
    reward = REWARD[state, action]
    if noise:
        reward = reward + np.where(rng.random(2 * episodes) < 0.2, -4.0, 1.0)
    transitions = Transitions(
        observation=np.eye(3, dtype=np.float32)[state],
        action=action,
        reward=reward.astype(np.float32),
        terminal=np.tile([False, True], episodes),
        episode=np.repeat(np.arange(episodes), 2),
        step=np.tile([0, 1], episodes),
        propensity=np.full(2 * episodes, 0.5),
        text=np.zeros(2 * episodes, dtype=np.int64),
        component=np.zeros(2 * episodes, dtype=np.int64),
        names=("top1", "margin", "stable"),
    )
    return EvaluationProblem(transitions, "target", EXIT[state], GAMMA), state


def true_q() -> NDArray[np.float64]:
    """Q of every state and action."""
    last = (1 - EXIT) * REWARD[:, 0] + EXIT * REWARD[:, 1]
    q = REWARD.copy()
    q[0] += GAMMA * last[1:]
    return q


def test_least_squares_is_exact_on_a_table() -> None:
    problem, state = three_states()
    np.testing.assert_allclose(LeastSquaresQ(ridge=1e-9)(problem), true_q()[state], atol=1e-5)


def test_fitted_q_comes_near_and_repeats() -> None:
    problem, state = three_states()
    settings = FQESettings(hidden=(32,), gradient_steps=800, batch_size=64, target_update_interval=20)
    seen: list[tuple[int, int]] = []
    q = FittedQ(settings, lambda done, of: seen.append((done, of)))(problem)
    assert np.abs(q - true_q()[state]).max() < 0.1
    assert seen[-1] == (800, 800)
    quick = FQESettings(hidden=(8,), gradient_steps=20, batch_size=8)
    np.testing.assert_array_equal(FittedQ(quick)(problem), FittedQ(quick)(problem))


def test_skewed_rewards_do_not_pull_the_mean_to_the_median() -> None:
    problem, state = three_states(noise=True)
    settings = FQESettings(hidden=(32,), gradient_steps=1200, batch_size=128, target_update_interval=20)
    # Huber's loss on rewards as they are would end near the median, 0.6 above the mean at each step.
    assert np.abs(FittedQ(settings)(problem) - true_q()[state]).max() < 0.35
    assert np.abs(LeastSquaresQ()(problem) - true_q()[state]).max() < 0.35


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (("gradient_steps", 0), ("hidden", ()), ("learning_rate", 0.0), ("seed", -1)):
        with pytest.raises(InputError, match=f"{name} is"):
            FQESettings(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ridge is 0"):
        LeastSquaresQ(0)
