"""Run a behaviour policy over recorded texts and log every decision with its propensity.

Every draw is a pure function of (seed, episode, decision number), and every episode's text and
mixture component depend on (seed, episode) only. So the data do not depend on how many lanes run
side by side, and the first hundred episodes of a thousand are the hundred of a shorter run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.rewards import StepOutcome
from sde_gym.errors import InputError
from sde_gym.offline.behaviours import Behaviour, EpisodeMixture, select
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import RoundOutcome, View, feature_settings
from sde_gym.policies.observation import Action, resolve_observation
from sde_gym.policies.rules import counter_uniform
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.traces import TraceSet
from sde_gym.traces.trace_set import OVERRUN_ARRAYS, ROW_ARRAYS

#: Called with (episodes finished, episodes in all).
Progress = Callable[[int, int], None]

#: Separates the collector's draws from those of random controllers with the same seed.
_STREAM = 1


def collect(
    traces: TraceSet,
    behaviour: Behaviour | EpisodeMixture,
    episodes: int,
    seed: int,
    *,
    observation: str | Iterable[str] = "extended",
    depths: Sequence[int] | None = None,
    reward: str = "lede",
    final_token_reward: float = 1.0,
    credit: str = "immediate",
    k: int | None = None,
    window: int | None = None,
    max_draft: int = DEFAULT_MAX_DRAFT,
    max_new_tokens: int | None = None,
    lanes: int = 256,
    progress: Progress | None = None,
) -> Transitions:
    """Collect whole episodes, one text each.

    Texts are played in shuffled passes: none a second time before all were played once.

    Args:
        traces: recorded texts; those of fewer than two tokens are left out.
        behaviour: says with which probability to exit; its own features need not be logged ones.
        episodes: number of episodes.
        seed: of texts, components and actions.
        observation: features that are logged, in order.
        depths: candidate depths; all recorded ones if None.
        reward: its name or "module:function" (not a callable: the file must say what it was).
        final_token_reward: see `ReplayEngine`, as for the arguments up to `max_new_tokens`.
        credit: see `ReplayEngine`.
        k: see `ReplayEngine`; what the behaviour declares if not given, else 5.
        window: see `ReplayEngine`; likewise, else 8.
        max_draft: see `ReplayEngine`.
        max_new_tokens: see `ReplayEngine`.
        lanes: texts played side by side; changes speed only.
        progress: see `Progress`.

    Returns:
        The transitions, ordered by episode and step.

    Raises:
        InputError: no episode, no playable text, or what `ReplayEngine` and the behaviour refuse.
    """
    if episodes < 1:
        raise InputError(f"episodes is {episodes}; it must be at least 1")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be at least 0")
    k, window = feature_settings(behaviour, k, window)
    names = resolve_observation(observation)
    seen = tuple(dict.fromkeys((*names, *behaviour.observation)))
    engine = ReplayEngine(
        traces, depths=depths, observation=seen, reward=reward, credit=credit, k=k, window=window,
        max_draft=max_draft, max_new_tokens=max_new_tokens, final_token_reward=final_token_reward,
        lanes=min(lanes, episodes),
    )  # fmt: skip
    behaviour.bind(engine.depths, engine.num_layers, engine.max_draft)
    text_of = _texts(np.flatnonzero(engine.tables.playable), episodes, seed)
    cast = _Cast(behaviour, episodes, seed, seen)
    logged = [seen.index(name) for name in names]

    log: dict[str, list[NDArray[Any]]] = {}
    running = np.arange(engine.lanes)  # lanes with an episode in progress
    episode_of = np.arange(engine.lanes)  # by lane
    started, finished = engine.lanes, 0
    rows = engine.reset_lanes(running, text_of[episode_of])
    cast.reset(running, episode_of)
    while len(running):
        episode = episode_of[running]
        view = engine.view(running, rows)
        probability = cast.exit_probability(view, episode)
        exits = counter_uniform(seed, episode, view.decision, _STREAM) < probability
        action = np.where(exits, int(Action.EXIT), int(Action.CONTINUE))
        following, reward_paid, terminated, outcome = engine.step(action, running)
        record: dict[str, NDArray[Any]] = {
            "observation": rows[:, logged],
            "action": action,
            "reward": reward_paid,
            "terminal": terminated,
            "episode": episode,
            "step": view.decision,
            "propensity": np.where(exits, probability, 1.0 - probability),
            "text": view.text,
        }
        for name, value in record.items():
            log.setdefault(name, []).append(value)
        cast.feedback(running, episode, outcome, len(engine.depths))
        rows = following
        done = np.flatnonzero(terminated)
        if len(done):
            fresh = done[: episodes - started]
            episode_of[running[fresh]] = np.arange(started, started + len(fresh))
            started += len(fresh)
            finished += len(done)
            if len(fresh):
                lane = running[fresh]
                rows[fresh] = engine.reset_lanes(lane, text_of[episode_of[lane]])
                cast.reset(lane, episode_of[lane])
            kept = np.setdiff1d(np.arange(len(running)), done[len(fresh) :])
            running, rows = running[kept], rows[kept]
            if progress is not None:
                progress(finished, episodes)

    arrays = {name: np.concatenate(parts) for name, parts in log.items()}
    order = np.lexsort((arrays["step"], arrays["episode"]))
    arrays = {name: array[order] for name, array in arrays.items()}
    return Transitions(
        observation=arrays["observation"].astype(np.float32),
        action=arrays["action"].astype(np.int64),
        reward=arrays["reward"].astype(np.float32),
        terminal=arrays["terminal"].astype(np.bool_),
        episode=arrays["episode"].astype(np.int64),
        step=arrays["step"].astype(np.int64),
        propensity=arrays["propensity"].astype(np.float64),
        text=arrays["text"].astype(np.int64),
        component=cast.component[arrays["episode"]],
        names=names,
        settings={
            "behaviour": behaviour.describe(),
            "episodes": episodes,
            "seed": seed,
            "depths": list(engine.depths),
            "num_layers": engine.num_layers,
            "reward": reward,
            "final_token_reward": final_token_reward,
            "credit": credit,
            "k": k,
            "window": window,
            "max_draft": max_draft,
            "max_new_tokens": engine.max_new_tokens,
            "traces": trace_set_id(traces),
        },
    )


class _Cast:
    """Which behaviour acts in which episode; every one sees its own rows and columns only."""

    def __init__(
        self, behaviour: Behaviour | EpisodeMixture, episodes: int, seed: int, seen: tuple[str, ...]
    ) -> None:
        self.component: NDArray[np.int64] = np.zeros(episodes, dtype=np.int64)
        self.members: tuple[Behaviour, ...]
        if isinstance(behaviour, EpisodeMixture):
            self.members = behaviour.components
            self.component = behaviour.component_of(np.arange(episodes), seed)
        else:
            self.members = (behaviour,)
        self._columns = [[seen.index(name) for name in member.observation] for member in self.members]

    def _split(self, episode: NDArray[np.int64]) -> Iterable[tuple[int, NDArray[np.int64]]]:
        """Members with the positions at which they act."""
        component = self.component[episode]
        for member in np.unique(component):
            yield int(member), np.flatnonzero(component == member)

    def reset(self, lanes: NDArray[np.int64], episode: NDArray[np.int64]) -> None:
        for member, at in self._split(episode):
            self.members[member].reset(lanes[at])

    def exit_probability(self, view: View, episode: NDArray[np.int64]) -> NDArray[np.float64]:
        probability = np.empty(len(episode))
        for member, at in self._split(episode):
            shown = select(view, rows=at, columns=self._columns[member])
            probability[at] = self.members[member].exit_probability(shown)
        return probability

    def feedback(
        self, lanes: NDArray[np.int64], episode: NDArray[np.int64], outcome: StepOutcome, num_depths: int
    ) -> None:
        ended = np.flatnonzero(outcome.ended)
        depth_index = np.where(outcome.drafted > 0, outcome.depth_index, num_depths)
        for member, at in self._split(episode[ended]):
            rows = ended[at]
            self.members[member].feedback(
                RoundOutcome(
                    lanes=lanes[rows],
                    depth_index=depth_index[rows],
                    drafted=outcome.drafted[rows],
                    accepted=outcome.round_accepted[rows],
                )
            )


def _texts(playable: NDArray[np.int64], episodes: int, seed: int) -> NDArray[np.int64]:
    """Text of each episode: shuffled passes over the playable texts."""
    if not len(playable):
        raise InputError("no text of the trace set has two or more tokens, so there is no episode to play")
    rng = np.random.default_rng(seed)
    passes = -(-episodes // len(playable))
    order: NDArray[np.int64] = np.concatenate([rng.permutation(playable) for _ in range(passes)])
    return order[:episodes]


def trace_set_id(traces: TraceSet) -> str:
    """Sixteen hex digits that identify what a trace set says, wherever it is stored.

    Two sets with the same texts, depths and numbers have the same id; a subset has another.
    """
    digest = hashlib.sha256(repr((traces.depths, traces.num_layers, traces.text_ids, traces.ends)).encode())
    arrays = (*ROW_ARRAYS, *OVERRUN_ARRAYS, "start", "branch_start")
    for name in arrays:
        digest.update(np.ascontiguousarray(getattr(traces, name)).tobytes())
    return digest.hexdigest()[:16]
