"""The DQN against a problem whose action values are known, and its export."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.offline.algorithms import create_algorithm, dqn
from sde_gym.offline.backend import training_session
from sde_gym.offline.learners import standardisation
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.training import train_dqn
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.importing import d3rlpy_network
from sde_gym.policies.qnetwork import QNetwork

FAST = DQNSettings(
    hidden=(32,), gamma=0.5, n_steps=1, learning_rate=3e-3, batch_size=64, gradient_steps=1500,
    target_update_interval=50, evaluate_every=500,
)  # fmt: skip


def two_step_problem(episodes: int = 1500, seed: int = 0) -> Transitions:
    """Two decisions an episode: exiting pays 1 where the signal is 1 and -1 where it is 0.

    At gamma 0.5 the second decision is worth max(signal's pay, 0), 0.5 on average, so
    Q(step 1, exit) = pay, Q(step 1, continue) = 0, and the values at step 0 are 0.25 higher.
    """
    rng = np.random.default_rng(seed)
    signal = rng.integers(2, size=2 * episodes)
    action = rng.integers(2, size=2 * episodes)
    step = np.tile([0, 1], episodes)
    constant = np.full(2 * episodes, 0.7)
    return Transitions(
        observation=np.stack([signal, step, constant], axis=1).astype(np.float32),
        action=action,
        reward=np.where(action == 1, 2 * signal - 1, 0).astype(np.float32),
        terminal=step == 1,
        episode=np.repeat(np.arange(episodes), 2),
        step=step,
        propensity=np.full(2 * episodes, 0.5),
        text=np.zeros(2 * episodes, dtype=np.int64),
        component=np.zeros(2 * episodes, dtype=np.int64),
        names=("top1", "phase", "depth"),
    )


STATES = np.array([[s, t, 0.7] for t in (0, 1) for s in (0, 1)], dtype=np.float32)
TRUTH = np.array([[0.25, -0.75], [0.25, 1.25], [0.0, -1.0], [0.0, 1.0]])  # continue, exit


@pytest.mark.parametrize("double", [True, False])
def test_it_finds_the_true_action_values(double: bool) -> None:
    network, log = train_dqn(two_step_problem(), dataclasses.replace(FAST, double=double))
    np.testing.assert_allclose(network(STATES), TRUTH, atol=0.1)
    assert [row["step"] for row in log] == [500, 1000, 1500]
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[-1]["exits"] == pytest.approx(0.5, abs=0.1)


def test_n_step_returns_discount_by_their_own_length() -> None:
    # Two-step returns of random behaviour: Q(step 0, a) = pay(a) + 0.5 * 0 (exit and continue average out).
    network, _ = train_dqn(two_step_problem(), dataclasses.replace(FAST, n_steps=2))
    expected = TRUTH - np.array([[0.25], [0.25], [0.0], [0.0]])
    np.testing.assert_allclose(network(STATES), expected, atol=0.15)


def test_same_seed_same_network_other_seed_other_network() -> None:
    data = two_step_problem(50)
    short = dataclasses.replace(FAST, gradient_steps=30)
    values = [train_dqn(data, dataclasses.replace(short, seed=seed))[0](STATES) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(values[0], values[1])
    assert not np.array_equal(values[0], values[2])


def test_the_best_checkpoint_is_kept_and_announced() -> None:
    returns = iter([1.0, 7.0, 3.0])
    seen: list[QNetwork] = []
    announced = []

    def evaluate(network: QNetwork) -> dict[str, float]:
        seen.append(network)
        return {"return": next(returns), "acceptance": 0.5}

    network, log = train_dqn(
        two_step_problem(50),
        dataclasses.replace(FAST, gradient_steps=25, evaluate_every=10),
        evaluate=evaluate,
        on_best=lambda network, metrics: announced.append((network, metrics["return"])),
    )
    assert [row["step"] for row in log] == [10, 20, 25]  # the remainder is trained and logged too
    assert [row["best"] for row in log] == [1, 1, 0]
    assert [row["acceptance"] for row in log] == [0.5] * 3
    assert network is seen[1]
    assert [(n is s, r) for (n, r), s in zip(announced, seen, strict=False)] == [(True, 1.0), (True, 7.0)]


def test_progress_reaches_the_end() -> None:
    calls = []
    settings = dataclasses.replace(FAST, gradient_steps=120, evaluate_every=100)
    train_dqn(two_step_problem(50), settings, progress=lambda *call: calls.append(call))
    assert [(done, total) for done, total, _ in calls] == [(50, 120), (100, 120), (120, 120)]
    assert calls[0][2] == {}
    assert calls[-1][2]["step"] == 120


def test_a_constant_feature_is_harmless() -> None:
    rows = np.array([[0.1, 5.0], [0.1, 7.0]] * 500, dtype=np.float32)
    mean, std = standardisation(rows)
    np.testing.assert_allclose(mean, [0.1, 6.0], rtol=1e-6)
    np.testing.assert_allclose(std, [1.0, 1.0], rtol=1e-6)
    assert mean.dtype == std.dtype == np.float32


def test_a_diverging_loss_is_reported() -> None:
    data = two_step_problem(50)
    data = dataclasses.replace(data, reward=np.full(len(data), 3e38, dtype=np.float32))
    with pytest.raises(InputError, match=r"training diverged before step 10.*lower learning_rate"):
        train_dqn(data, dataclasses.replace(FAST, gradient_steps=10, gamma=1.0, learning_rate=1e30))


def test_zero_gradient_steps_are_refused() -> None:
    with pytest.raises(InputError, match="gradient_steps is 0"):
        train_dqn(two_step_problem(5), dataclasses.replace(FAST, gradient_steps=0))


def test_export_agrees_with_d3rlpy_and_notices_when_it_does_not() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(200, 3)).astype(np.float32)
    mean, std = standardisation(states)
    with training_session(seed=0, threads=1) as d3rlpy:
        algorithm = create_algorithm(d3rlpy, dqn, dataclasses.replace(FAST, hidden=(16, 8)), 3)
        network = d3rlpy_network(algorithm, mean, std, states)
        assert network.sizes == (3, 16, 8, 2)
        standardised = ((states - mean) / std).astype(np.float32)
        for action in (0, 1):
            theirs = algorithm.predict_value(standardised, np.full((200, 1), action))
            np.testing.assert_allclose(network(states)[:, action], theirs.reshape(-1), atol=1e-5)
        np.testing.assert_array_equal(network(states).argmax(axis=1), algorithm.predict(standardised))
        shifted = SimpleNamespace(
            impl=algorithm.impl,
            config=algorithm.config,
            predict=algorithm.predict,
            predict_value=lambda rows, actions: algorithm.predict_value(rows, actions) + 1e-3,
        )
        swapped = SimpleNamespace(
            impl=algorithm.impl,
            config=algorithm.config,
            predict=lambda rows: 1 - algorithm.predict(rows),
            predict_value=algorithm.predict_value,
        )
        for wrong in (shifted, swapped):
            with pytest.raises(RuntimeError, match="differs from d3rlpy's"):
                d3rlpy_network(wrong, mean, std, states)
