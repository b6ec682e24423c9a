"""Run a behaviour policy over recorded texts and log every decision with its propensity.

Every draw is a pure function of (seed, play, decision number), a play being one text from its
beginning to its end, and every play's text and mixture component depend on (seed, play) only. So the
data do not depend on how many lanes run side by side, and the first hundred episodes of a thousand are
the hundred of a shorter run. An episode is a play or, with episode "round", a round of one; the
decisions are the same either way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.arguments import choice
from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.shadow import check_replayable, ended_rounds, some_rounds, wants_shadows
from sde_gym.errors import InputError
from sde_gym.offline.behaviours import Behaviour, EpisodeMixture, select
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import RoundOutcome, View, feature_settings
from sde_gym.policies.observation import HEAD_FEATURES, Action, resolve_observation
from sde_gym.policies.rules import counter_uniform
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.traces import TraceSet
from sde_gym.traces.trace_set import OVERRUN_ARRAYS, ROW_ARRAYS

#: What an episode is: a whole text, or a round, after which the text goes on.
EPISODES = ("generation", "round")

#: Called with (episodes finished, episodes in all); those finished out of order do not count yet.
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
    episode: str = "generation",
    k: int | None = None,
    window: int | None = None,
    max_draft: int = DEFAULT_MAX_DRAFT,
    max_new_tokens: int | None = None,
    lanes: int = 256,
    progress: Progress | None = None,
) -> Transitions:
    """Collect whole episodes.

    Texts are played in shuffled passes: none a second time before all were played once, nor twice in a
    row where there are two. Where a reward charges heads, those are charged that the logged features need,
    whatever the behaviour reads besides or learns from shadow tokens.

    Args:
        traces: recorded texts; those of fewer than two tokens are left out.
        behaviour: says with which probability to exit; its own features need not be logged ones.
        episodes: number of episodes; with rounds, text after text until there are so many.
        seed: of texts, components and actions.
        observation: features that are logged, in order.
        depths: candidate depths; all recorded ones if None.
        reward: its name or "module:function" (not a callable: the file must say what it was).
        final_token_reward: see `ReplayEngine`, as for the arguments up to `max_new_tokens`.
        credit: see `ReplayEngine`.
        episode: see `EPISODES`. A behaviour is reset, and a mixture over episodes draws, where a text
            begins.
        k: see `ReplayEngine`; what the behaviour declares if not given, else 5.
        window: see `ReplayEngine`; likewise, else 8.
        max_draft: see `ReplayEngine`.
        max_new_tokens: see `ReplayEngine`.
        lanes: texts played side by side; changes speed only.
        progress: see `Progress`.

    Returns:
        The transitions, ordered by episode and step.

    Raises:
        InputError: no episode, no playable text, a reward without a name, a behaviour that cannot be
            replayed, or what `ReplayEngine` and the behaviour refuse.
    """
    check_replayable(behaviour)
    if episodes < 1:
        raise InputError(f"episodes is {episodes}; it must be at least 1")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be at least 0")
    choice("episode", episode, EPISODES)
    if not isinstance(reward, str):
        raise InputError(
            f"reward: {reward!r} is no name; give one, or 'module:function': the data must say what paid"
        )
    k, window = feature_settings(behaviour, k, window)
    names = resolve_observation(observation)
    seen = tuple(dict.fromkeys((*names, *behaviour.observation)))
    engine = ReplayEngine(
        traces, depths=depths, observation=seen, reward=reward, credit=credit, episode=episode, k=k,
        window=window, max_draft=max_draft, max_new_tokens=max_new_tokens,
        final_token_reward=final_token_reward, lanes=min(lanes, episodes),
        reads=not HEAD_FEATURES.isdisjoint(names),
    )  # fmt: skip
    behaviour.bind(engine.depths, engine.num_layers, engine.max_draft)
    cast = _Cast(behaviour, episodes, seed, seen)
    tally = _Tally(episodes)
    arrays = _play(engine, cast, tally, [seen.index(name) for name in names], seed, progress)
    number = tally.first[arrays["play"]] + arrays["part"]
    order = np.lexsort((arrays["decision"], arrays["play"]))
    order = order[number[order] < episodes]  # rounds beyond those asked for were played by the way
    columns = {name: array[order] for name, array in arrays.items()}
    number = number[order]
    begins = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    return Transitions(
        observation=columns["observation"].astype(np.float32, copy=False),
        action=columns["action"].astype(np.int64, copy=False),
        reward=columns["reward"].astype(np.float32),
        terminal=columns["terminal"].astype(np.bool_, copy=False),
        episode=number,
        step=np.arange(len(number)) - np.repeat(begins, np.diff(np.append(begins, len(number)))),
        propensity=columns["propensity"].astype(np.float64, copy=False),
        text=columns["text"].astype(np.int64, copy=False),
        component=cast.component[columns["play"]],
        names=names,
        settings={
            "behaviour": behaviour.describe(),
            "episodes": int(episodes),
            "seed": int(seed),
            "depths": list(engine.depths),
            "num_layers": engine.num_layers,
            "reward": reward,
            "final_token_reward": float(final_token_reward),
            "credit": credit,
            "episode": episode,
            "k": engine.k,
            "window": engine.window,
            "max_draft": engine.max_draft,
            "max_new_tokens": engine.max_new_tokens,
            "traces": trace_set_id(traces),
            "model": {"name": traces.manifest["model"], "weights_hash": traces.manifest["model_hash"]},
        },
    )


def _play(
    engine: ReplayEngine,
    cast: _Cast,
    tally: _Tally,
    logged: list[int],
    seed: int,
    progress: Progress | None,
) -> dict[str, NDArray[Any]]:
    """Play texts until the episodes asked for are over; every decision taken, in the order of time.

    Returns:
        by name, arrays over decisions: `observation` (the logged columns), `action`, `reward`,
        `terminal`, `propensity`, `text`, `decision` (its number in the text), `play`, and `part`, the
        number of its episode within the play.
    """
    text_of = _texts(np.flatnonzero(engine.tables.playable), tally.episodes, seed)
    log: dict[str, list[NDArray[Any]]] = {}
    running = np.arange(engine.lanes)  # lanes with a text in progress,
    play = np.arange(engine.lanes)  # and the play of each of them
    started = engine.lanes
    rows = engine.reset_lanes(running, text_of[play])
    cast.reset(running, play)
    while tally.settled < tally.episodes:
        view = engine.view(running, rows)
        probability = cast.exit_probability(view, play)
        exits = counter_uniform(seed, play, view.decision, _STREAM) < probability
        action = np.where(exits, int(Action.EXIT), int(Action.CONTINUE))
        following, reward, terminated, outcome = engine.step(action, running)
        record: dict[str, NDArray[Any]] = {
            "observation": rows[:, logged],
            "action": action,
            "reward": reward,
            "terminal": terminated,
            "propensity": np.where(exits, probability, 1.0 - probability),
            "text": view.text,
            "decision": view.decision,
            "play": play,
            "part": tally.ended[play],
        }
        for name, value in record.items():
            log.setdefault(name, []).append(value)
        told = ended_rounds(engine, running, outcome, cast.shadows)
        if told is not None:
            cast.feedback(told, play[outcome.ended])
        rows = following
        done = np.flatnonzero(terminated)
        if not len(done):
            continue
        before = tally.settled
        goes_on = engine.resumable(running[done])
        tally.count(play[done], play[done[~goes_on]])
        resumed, over = done[goes_on], done[~goes_on]
        if len(resumed):
            rows[resumed] = engine.resume_lanes(running[resumed])
        fresh = over[: tally.episodes - started]
        if len(fresh):
            play = play.copy()  # the log holds the old one
            play[fresh] = np.arange(started, started + len(fresh))
            started += len(fresh)
            rows[fresh] = engine.reset_lanes(running[fresh], text_of[play[fresh]])
            cast.reset(running[fresh], play[fresh])
        kept = np.ones(len(running), dtype=bool)
        kept[over[len(fresh) :]] = False
        running, play, rows = running[kept], play[kept], rows[kept]
        if progress is not None and tally.settled > before:
            progress(min(tally.settled, tally.episodes), tally.episodes)
    return {name: np.concatenate(parts) for name, parts in log.items()}


class _Tally:
    """How many episodes each play has ended, and how many are certain to be among those asked for.

    Episodes are numbered play by play. Those of a play can be numbered once all plays before it are
    over, so `settled` counts the episodes of the finished plays up to the first that is not, and of it.

    Args:
        episodes: asked for; as many plays are enough.
    """

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes
        self.ended: NDArray[np.int64] = np.zeros(episodes, dtype=np.int64)
        self._over = np.zeros(episodes, dtype=bool)
        self._open = 0  # the first play that is not over
        self._before = 0  # episodes of the plays before it

    @property
    def settled(self) -> int:
        """Episodes that are over and whose number is known."""
        return self._before + (int(self.ended[self._open]) if self._open < self.episodes else 0)

    @property
    def first(self) -> NDArray[np.int64]:
        """Number of the first episode of each play, int64 (episodes,)."""
        return np.asarray(np.cumsum(self.ended) - self.ended, dtype=np.int64)

    def count(self, play: NDArray[np.int64], over: NDArray[np.int64]) -> None:
        """One more episode of each of these plays has ended, and these plays are over."""
        self.ended[play] += 1
        self._over[over] = True
        while self._open < self.episodes and self._over[self._open]:
            self._before += int(self.ended[self._open])
            self._open += 1


class _Cast:
    """Which behaviour acts in which play; every one sees its own rows and columns only."""

    def __init__(
        self, behaviour: Behaviour | EpisodeMixture, plays: int, seed: int, seen: tuple[str, ...]
    ) -> None:
        self.component: NDArray[np.int64] = np.zeros(plays, dtype=np.int64)
        self.members: tuple[Behaviour, ...]
        if isinstance(behaviour, EpisodeMixture):
            self.members = behaviour.components
            self.component = behaviour.component_of(np.arange(plays), seed)
        else:
            self.members = (behaviour,)
        self._columns = [[seen.index(name) for name in member.observation] for member in self.members]
        self.shadows = any(wants_shadows(member) for member in self.members)

    def _split(self, play: NDArray[np.int64]) -> Iterable[tuple[int, NDArray[np.int64]]]:
        """Members with the positions at which they act."""
        component = self.component[play]
        for member in np.unique(component):
            yield int(member), np.flatnonzero(component == member)

    def reset(self, lanes: NDArray[np.int64], play: NDArray[np.int64]) -> None:
        for member, at in self._split(play):
            self.members[member].reset(lanes[at])

    def exit_probability(self, view: View, play: NDArray[np.int64]) -> NDArray[np.float64]:
        probability = np.empty(len(play))
        for member, at in self._split(play):
            shown = select(view, rows=at, columns=self._columns[member])
            probability[at] = self.members[member].exit_probability(shown)
        return probability

    def feedback(self, told: RoundOutcome, play: NDArray[np.int64]) -> None:
        for member, at in self._split(play):
            self.members[member].feedback(some_rounds(told, at))


def _texts(playable: NDArray[np.int64], plays: int, seed: int) -> NDArray[np.int64]:
    """Text of each play: shuffled passes over the playable texts.

    None begins with the text that ended the one before, so that plays of one text are never neighbours
    (unless there is but one) and rows of the same text that follow each other are of one play.
    """
    if not len(playable):
        raise InputError("no text of the trace set has two or more tokens, so there is no episode to play")
    rng = np.random.default_rng(seed)
    passes = -(-plays // len(playable))
    order: NDArray[np.int64] = np.stack([rng.permutation(playable) for _ in range(passes)])
    if len(playable) > 1:
        for before, following in pairwise(order):
            if following[0] == before[-1]:
                following[:2] = following[1::-1]
    return order.ravel()[:plays]


def trace_set_id(traces: TraceSet) -> str:
    """Sixteen hex digits that identify what a trace set says, wherever it is stored.

    Two sets with the same texts, depths and numbers have the same id; a subset has another.
    """
    digest = hashlib.sha256(repr((traces.depths, traces.num_layers, traces.text_ids, traces.ends)).encode())
    arrays = (*ROW_ARRAYS, *OVERRUN_ARRAYS, "start", "branch_start")
    for name in arrays:
        digest.update(np.ascontiguousarray(getattr(traces, name)).tobytes())
    return digest.hexdigest()[:16]
