"""From transitions to what d3rlpy trains on: its replay buffer, and a faster way to mini-batches.

Two ways to the same numbers. `to_replay_buffer` makes an ordinary d3rlpy buffer, for any algorithm
and for `fit`. `NStepBatches` computes n-step returns for all rows at once and cuts mini-batches by
array indexing: d3rlpy's own sampler walks Python objects one transition at a time, which costs as
much as the gradient step of a small network.

d3rlpy's own converters are not used: its episodes hold as many observations as actions, and a
converter that keeps the final observation shifts every later episode by one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.offline.backend import import_d3rlpy
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.qnetwork import NUM_ACTIONS

if TYPE_CHECKING:
    from d3rlpy.dataset import ReplayBuffer, TransitionMiniBatch


def to_replay_buffer(
    transitions: Transitions,
    n_steps: int,
    gamma: float,
    observation: NDArray[np.float32] | None = None,
) -> ReplayBuffer:
    """A d3rlpy replay buffer with n-step targets and the action space said explicitly.

    The algorithm that trains on it must be given the same gamma; d3rlpy does not check.

    Args:
        transitions: the data; every episode is `terminated`, none is cut.
        n_steps: number of rewards summed in a target.
        gamma: discount of that sum.
        observation: float32 (n, f), used instead of the logged one (a standardised copy).

    Returns:
        The buffer: observations float32 (f,), actions int64 (1,), rewards float32 (1,).

    Raises:
        InputError: n_steps < 1, gamma outside (0, 1], or observations of another length.
    """
    check_returns(n_steps, gamma)
    rows = _observations(transitions, observation)
    d3rlpy = import_d3rlpy()
    from d3rlpy.dataset import Episode, InfiniteBuffer, MultiStepTransitionPicker, ReplayBuffer

    episodes = [
        Episode(
            observations=rows[first:end],
            actions=transitions.action[first:end, None],
            rewards=transitions.reward[first:end, None],
            terminated=True,
        )
        for first, end in pairwise(transitions.start)
    ]
    return ReplayBuffer(
        InfiniteBuffer(),
        transition_picker=MultiStepTransitionPicker(n_steps, gamma),
        episodes=episodes,
        action_space=d3rlpy.ActionSpace.DISCRETE,
        action_size=NUM_ACTIONS,
    )


class NStepBatches:
    """All n-step transitions of a data set, ready to be cut into mini-batches by row numbers.

    For row i of an episode that ends before row e, with m = min(n, e - i): the target sums
    gamma^j r[i + j] for j < m, bootstraps from row i + m with gamma^m, and is terminal if i + m = e.
    Equal to d3rlpy's `MultiStepTransitionPicker`, computed for all rows at once.

    Attributes:
        reward: float32 (n, 1), the discounted sums.
        interval: float32 (n, 1), m.
        terminal: float32 (n, 1), 1 where nothing follows.
        next_row: int64 (n,), i + m, or i itself where terminal (its observation is then masked).
    """

    def __init__(
        self,
        transitions: Transitions,
        n_steps: int,
        gamma: float,
        observation: NDArray[np.float32] | None = None,
    ) -> None:
        """Compute the targets.

        Args:
            transitions: the data.
            n_steps: number of rewards summed, at least 1.
            gamma: discount, in (0, 1].
            observation: float32 (n, f), used instead of the logged one (a standardised copy).

        Raises:
            InputError: n_steps < 1, gamma outside (0, 1], or observations of another length.
        """
        check_returns(n_steps, gamma)
        self._observation = _observations(transitions, observation)
        self._action = transitions.action.astype(np.float32)[:, None]
        rows = np.arange(len(transitions), dtype=np.int64)
        end = np.repeat(transitions.start[1:], np.diff(transitions.start))
        following = np.minimum(rows + n_steps, end)
        total = np.zeros(len(transitions))
        for step in range(n_steps):
            inside = rows + step < end
            total[inside] += gamma**step * transitions.reward[(rows + step)[inside]]
        terminal = following == end
        self.reward = total.astype(np.float32)[:, None]
        self.interval = (following - rows).astype(np.float32)[:, None]
        self.terminal = terminal.astype(np.float32)[:, None]
        self.next_row = np.where(terminal, rows, following)

    def __len__(self) -> int:
        return len(self.next_row)

    def batch(self, rows: NDArray[np.int64]) -> TransitionMiniBatch:
        """The mini-batch of these rows, for `algo.update`.

        Args:
            rows: int64 (b,), row numbers; repeats are allowed.

        Returns:
            Arrays of b rows. `transitions` is empty, so an algorithm that wants returns-to-go
            (none of the Q-learners here) cannot use it.
        """
        from d3rlpy.dataset import TransitionMiniBatch

        terminal = self.terminal[rows]
        next_rows = self.next_row[rows]
        empty: tuple[Any, ...] = ()
        return TransitionMiniBatch(
            observations=self._observation[rows],
            actions=self._action[rows],
            rewards=self.reward[rows],
            next_observations=self._observation[next_rows] * (1.0 - terminal),
            next_actions=self._action[next_rows] * (1.0 - terminal),
            terminals=terminal,
            intervals=self.interval[rows],
            transitions=empty,
        )


def _observations(transitions: Transitions, observation: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """The observations given, else the logged ones; InputError unless there is one for each transition."""
    if observation is None:
        return transitions.observation
    if observation.shape[0] != len(transitions) or observation.dtype != np.float32:
        raise InputError(
            f"observations are {observation.dtype} {observation.shape}; expected "
            f"float32 with {len(transitions)} rows, one per transition"
        )
    return observation


def check_returns(n_steps: int, gamma: float) -> None:
    """Refuse impossible n-step settings.

    Raises:
        InputError: n_steps < 1 or gamma outside (0, 1].
    """
    if n_steps < 1:
        raise InputError(f"n_steps is {n_steps}; it must be at least 1")
    if not 0 < gamma <= 1:
        raise InputError(f"gamma is {gamma}; it must be in (0, 1]")
