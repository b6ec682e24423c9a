"""Every way in which a very short text can be decoded, as one log: expectations without sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.offline.collect import trace_set_id
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.observation import EXTENDED
from sde_gym.traces import TraceSet
from tests.builders import EOS, written_traces

History = tuple[int, ...]


def short_traces() -> TraceSet:
    """Four tokens and two depths, of whose proposals some are wrong and one ends the text."""
    proposals = [[9, 9], [5, 6], [7, 6], [EOS, 8]]
    return written_traces([4, 5, 6, 8], proposals, end="budget", depths=(2, 4), num_layers=6)


@dataclass(frozen=True)
class Histories:
    """All episodes there are, each once; `before` holds the actions before each decision."""

    transitions: Transitions
    before: list[History]

    def probability(self, exit_probability: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each episode under a policy with these probabilities of EXIT, float64 (episodes,)."""
        taken = np.where(self.transitions.action == 1, exit_probability, 1.0 - exit_probability)
        return np.multiply.reduceat(taken, self.transitions.start[:-1])

    def returns(self, gamma: float) -> NDArray[np.float64]:
        """Discounted, float64 (episodes,)."""
        paid = self.transitions.reward.astype(np.float64) * gamma**self.transitions.step
        return np.add.reduceat(paid, self.transitions.start[:-1])

    def value(self, exit_probability: NDArray[np.float64], gamma: float) -> float:
        """Exact value of a policy."""
        return float(self.probability(exit_probability) @ self.returns(gamma))

    def exact_q(self, exit_probability: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
        """Q^pi of both actions before each decision, float64 (n, 2), longest histories first."""
        log, q = self.transitions, np.zeros((len(self.before), 2))
        value: dict[History, float] = {}
        share = np.stack([1.0 - exit_probability, exit_probability], axis=1)
        first_row = {history: row for row, history in reversed(list(enumerate(self.before)))}
        paid = {
            (*history, int(action)): (float(reward), bool(over))
            for history, action, reward, over in zip(
                self.before, log.action, log.reward, log.terminal, strict=True
            )
        }
        for history in sorted(first_row, key=len, reverse=True):
            for action in (0, 1):
                reward, over = paid[(*history, action)]
                following = 0.0 if over else gamma * value[(*history, action)]
                q[first_row[history], action] = reward + following
            value[history] = float(share[first_row[history]] @ q[first_row[history]])
        return q[[first_row[history] for history in self.before]]


def every_history(traces: TraceSet, seed: int = 0, **settings: Any) -> Histories:
    """All episodes of the only text, logged with propensities that depend on the whole history."""
    engine = ReplayEngine(traces, observation=EXTENDED, **settings)
    lane = np.array([0])
    episodes: list[list[tuple[Any, int, float, bool]]] = []
    open_histories: list[History] = [()]
    while open_histories:
        history = open_histories.pop()
        observation, rows, over = engine.reset_lanes(lane, lane), [], False
        for chosen in history:
            before = observation[0].copy()
            observation, reward, terminated, _ = engine.step(np.array([chosen]))
            over = bool(terminated[0])
            rows.append((before, chosen, float(reward[0]), over))
        if over:
            episodes.append(rows)
        else:
            open_histories += [(*history, 0), (*history, 1)]
    flat = [row for rows in episodes for row in rows]
    histories = [tuple(row[1] for row in rows[:step]) for rows in episodes for step in range(len(rows))]
    action = np.array([row[1] for row in flat])
    exits = by_history(histories, seed)
    lengths = [len(rows) for rows in episodes]
    transitions = Transitions(
        observation=np.stack([row[0] for row in flat]).astype(np.float32),
        action=action,
        reward=np.array([row[2] for row in flat], dtype=np.float32),
        terminal=np.array([row[3] for row in flat]),
        episode=np.repeat(np.arange(len(episodes)), lengths),
        step=np.concatenate([np.arange(length) for length in lengths]),
        propensity=np.where(action == 1, exits, 1.0 - exits),
        text=np.zeros(len(flat), dtype=np.int64),
        component=np.zeros(len(flat), dtype=np.int64),
        names=EXTENDED,
        settings={
            "depths": list(engine.depths),
            "num_layers": engine.num_layers,
            "max_draft": engine.max_draft,
            "max_new_tokens": engine.max_new_tokens,
            "k": engine.k,
            "window": engine.window,
            "traces": trace_set_id(traces),
        },
    )
    return Histories(transitions, histories)


def by_history(before: list[History], seed: int) -> NDArray[np.float64]:
    """A probability of EXIT in 0.2..0.8 for each history, the same wherever it occurs."""
    return np.array(
        [
            np.random.default_rng([seed, len(history), int("1" + "".join(map(str, history)), 2)]).uniform(
                0.2, 0.8
            )
            for history in before
        ]
    )
