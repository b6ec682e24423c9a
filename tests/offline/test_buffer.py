"""Both ways to mini-batches: every (s, a, r, s') of every episode is where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.offline.buffer import NStepBatches, to_replay_buffer
from sde_gym.offline.transitions import Transitions

Make = Callable[..., Transitions]


def expected_rows(data: Transitions, n_steps: int, gamma: float) -> list[tuple]:
    """(observation, action, return, next observation or zeros, terminal, interval), the slow way."""
    rows = []
    for first, end in pairwise(data.start):
        for row in range(first, end):
            following = min(row + n_steps, end)
            total = sum(gamma ** (j - row) * float(data.reward[j]) for j in range(row, following))
            terminal = following == end
            next_observation = [0.0, 0.0] if terminal else data.observation[following].tolist()
            rows.append(
                (data.observation[row].tolist(), int(data.action[row]), total, next_observation,
                 terminal, following - row)
            )  # fmt: skip
    return rows


@pytest.mark.parametrize(("n_steps", "gamma"), [(1, 0.9), (3, 0.9), (3, 1.0), (50, 0.5)])
def test_replay_buffer_keeps_every_episode_aligned(
    make_transitions: Make, n_steps: int, gamma: float
) -> None:
    data = make_transitions()
    buffer = to_replay_buffer(data, n_steps, gamma)
    assert buffer.transition_count == len(data)
    assert buffer.dataset_info.action_size == 2
    assert buffer.dataset_info.action_space.name == "DISCRETE"
    picked = [
        buffer.transition_picker(episode, index)
        for episode in buffer.episodes
        for index in range(episode.transition_count)
    ]
    expected = expected_rows(data, n_steps, gamma)
    assert len(picked) == len(expected)
    for got, (observation, action, total, following, terminal, interval) in zip(
        picked, expected, strict=True
    ):
        assert got.observation.tolist() == observation
        assert got.action.tolist() == [action]
        assert got.reward == pytest.approx([total], rel=1e-6, abs=1e-7)
        assert got.next_observation.tolist() == following
        assert (bool(got.terminal), got.interval) == (terminal, interval)


@pytest.mark.parametrize(("n_steps", "gamma"), [(1, 0.9), (2, 0.99), (3, 1.0), (50, 0.5)])
def test_fast_batches_equal_d3rlpys_own(make_transitions: Make, n_steps: int, gamma: float) -> None:
    from d3rlpy.dataset import TransitionMiniBatch

    data = make_transitions()
    buffer = to_replay_buffer(data, n_steps, gamma)
    slow = TransitionMiniBatch.from_transitions(
        [
            buffer.transition_picker(episode, index)
            for episode in buffer.episodes
            for index in range(episode.transition_count)
        ]
    )
    order = np.random.default_rng(0).permutation(len(data))
    fast = NStepBatches(data, n_steps, gamma).batch(order)
    for name in ("observations", "actions", "next_observations", "next_actions", "terminals", "intervals"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name)[order], err_msg=name)
    np.testing.assert_allclose(fast.rewards, slow.rewards[order], rtol=1e-6, atol=1e-7)
    assert len(fast) == len(data)


def test_given_observations_replace_the_logged_ones(make_transitions: Make) -> None:
    data = make_transitions((3,))
    batch = NStepBatches(data, 1, 0.9, data.observation * 2).batch(np.array([0, 2]))
    np.testing.assert_array_equal(batch.observations, data.observation[[0, 2]] * 2)
    np.testing.assert_array_equal(batch.next_observations, [data.observation[1] * 2, [0, 0]])
    with pytest.raises(InputError, match="expected float32 with 3 rows"):
        NStepBatches(data, 1, 0.9, data.observation[:2])


@pytest.mark.parametrize(
    ("n_steps", "gamma", "message"),
    [
        (0, 0.9, "n_steps is 0"),
        (1, 0.0, "gamma is 0.0"),
        (1, 1.01, "gamma is 1.01"),
        (1, float("nan"), "gamma"),
    ],
)
def test_impossible_returns_are_refused(
    make_transitions: Make, n_steps: int, gamma: float, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        to_replay_buffer(make_transitions(), n_steps, gamma)
    with pytest.raises(InputError, match=message):
        NStepBatches(make_transitions(), n_steps, gamma)
