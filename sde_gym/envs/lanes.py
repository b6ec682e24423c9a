"""Lanes that play one episode after another: what all faces of the replayed decision problem share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.order import TextOrder, chosen_text, text_option
from sde_gym.envs.state import COUNTERS
from sde_gym.errors import InputError
from sde_gym.policies.observation import Action, bounds
from sde_gym.traces import TraceSet, load_traces

NO_TEXT = -1
"""Stands for a text that nobody asked for: the lane goes on as it would by itself."""


class Lanes:
    """A replay engine whose n lanes know which texts they play, and when an episode is too long.

    Args:
        traces: name of a shipped trace set, path of a folder, or a `TraceSet`.
        lanes: n.
        tasks: only texts of these tasks; all if not given.
        order: "shuffled" or "sequential".
        max_episode_steps: steps after which an episode is truncated; never if not given.
        **settings: of `ReplayEngine`, but `lanes`.

    Attributes:
        engine: the engine; with it the tables are there once however many lanes there are.
        texts: int64 (count,), indices of the texts that are played.
        observation_space: of one lane.
        action_space: of one lane.

    Raises:
        InputError: an argument out of range; the message names it.
        TypeError: an argument that there is not.
    """

    def __init__(
        self,
        traces: str | Path | TraceSet,
        lanes: int = 1,
        *,
        tasks: Sequence[str] | None = None,
        order: str = "shuffled",
        max_episode_steps: int | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(traces, (str, Path, TraceSet)):
            raise InputError(f"traces: {traces!r} is neither a name nor a path")
        known = {*signature(ReplayEngine).parameters} - {"traces", "lanes"}
        if unknown := sorted(set(settings) - known):
            known |= {"tasks", "order", "max_episode_steps"}
            raise TypeError(
                f"unknown argument {unknown[0]!r}; an environment takes {', '.join(sorted(known))}"
            )
        trace_set = traces if isinstance(traces, TraceSet) else load_traces(traces)
        self.engine = ReplayEngine(trace_set, lanes=lanes, **settings)
        if not self.engine.names:
            raise InputError("observation: an environment needs at least one feature")
        texts = trace_set.texts_of(tasks)
        self.texts = texts[self.engine.tables.playable[texts]]
        if not len(self.texts):
            raise InputError(f"tasks: no text of {tasks!r} has at least two tokens")
        self._order = TextOrder(self.texts, order, lanes)
        self._seeded = False
        self._limit = (
            None if max_episode_steps is None else whole_number("max_episode_steps", max_episode_steps, 1)
        )
        self._elapsed = np.zeros(lanes, dtype=np.int64)
        self._ids = np.array(trace_set.text_ids, dtype=object)
        self._playing = np.repeat(self._ids[:1], lanes)  # id of each lane's text
        self.all = np.arange(lanes, dtype=np.int64)
        self.observation_space = gymnasium.spaces.Box(*bounds(self.engine.names), dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(Action))

    def chosen(self, options: Mapping[str, Any] | None) -> NDArray[np.int64]:
        """The texts that reset's options ask for, int64 (n,), `NO_TEXT` where they ask for none.

        Args:
            options: {"text": index or id} for all lanes, or with a list that has one of these, or
                None, for each.

        Raises:
            InputError: an unknown option, or a text that there is not.
        """
        wanted = text_option(options)
        if isinstance(wanted, np.ndarray):
            wanted = wanted.tolist()
        if not isinstance(wanted, (list, tuple)):
            wanted = [wanted] * len(self.all)
        elif len(wanted) != len(self.all):
            raise InputError(f"options: {len(wanted)} texts for {len(self.all)} lanes")
        ids = self.engine.traces.text_ids
        return np.array(
            [NO_TEXT if text is None else chosen_text(text, self.texts, ids) for text in wanted],
            dtype=np.int64,
        )

    def seed(self, seeds: Sequence[int | None], entropy: np.random.Generator) -> None:
        """Start the order of texts over in lanes that are given a seed; their texts are given up.

        Args:
            seeds: one for each lane, or None.
            entropy: where seeds of lanes come from that never had any.
        """
        given = np.array([seed is not None for seed in seeds], dtype=bool)
        if not self._seeded and not given.all():
            first = int(entropy.integers(2**62))
            seeds = [first + lane if seed is None else seed for lane, seed in enumerate(seeds)]
            given[:] = True
        self._seeded = True
        lane = self.all[given]
        self._order.seed(lane, [seed for seed in seeds if seed is not None])
        self.engine.abandon(lane)

    def begin(self, lane: NDArray[np.int64], texts: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Start the next episode of these lanes; its observations, float32 (n, f).

        Where the last episode ended but not its text, that is the text's next round or walk; else
        the next text in order.

        Args:
            lane: int64 (n,), distinct lanes.
            texts: int64 (n,), the text to start in each instead, or `NO_TEXT`.
        """
        self._elapsed[lane] = 0
        if texts is None and self.engine.episode == "generation":
            # Each time texts end, and nothing but this happens: the vector environments live from it.
            texts = self._order.next(lane)
            self._playing[lane] = self._ids[texts]
            return self.engine.begin(lane, texts)
        texts = np.full(len(lane), NO_TEXT) if texts is None else texts.copy()
        drawn = (texts == NO_TEXT) & ~self.engine.resumable(lane)
        texts[drawn] = self._order.next(lane[drawn])
        observation = self.engine.begin(lane, texts)
        fresh = texts != NO_TEXT
        self._playing[lane[fresh]] = self._ids[texts[fresh]]
        return observation

    def step(
        self, actions: NDArray[Any], skip: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Take one action in each lane but those to skip: observation, reward, terminated and truncated.

        Args:
            actions: int (n,), `Action`.
            skip: bool (n,), lanes that stay as they are, and of which zeros come back; none if not given.

        Raises:
            InputError: not one `Action` for each lane.
            RuntimeError: a lane without an episode in progress.
        """
        observation, reward, terminated = self.engine.advance(actions, skip)
        if self._limit is None:
            return observation, reward, terminated, np.zeros_like(terminated)
        self._elapsed += 1 if skip is None else ~skip
        truncated = self._elapsed >= self._limit
        return observation, reward, terminated, truncated if skip is None else truncated & ~skip

    def info(self, lane: NDArray[np.int64] | None = None) -> dict[str, NDArray[Any]]:
        """Counters and state of these lanes, all if not given.

        Arrays (n,) of int64, float64, bool or str objects.
        """
        engine = self.engine
        columns = engine.columns(lane)
        return {
            **{name: columns[name] for name in COUNTERS},
            **{name: columns[name] for name in ("cost", "speedup", "phase", "depth")},
            "draft_length": columns["proposals"],
            "text": columns["text"],
            "text_id": self._playing.copy() if lane is None else self._playing[lane],
            "overrun": np.full(len(columns["text"]), engine.traces.overrun > 0),
        }

    def info_alone(self) -> dict[str, Any]:
        """The same of the only lane, as plain Python values."""
        if self.engine.accelerator == "python":
            return self.engine.one.info()
        return {name: values.tolist()[0] for name, values in self.info().items()}


def lane_seeds(seed: int | Sequence[int | None] | None, lanes: int) -> list[int | None]:
    """The seed of each lane: seed + i for lane i, or as listed, or None.

    Raises:
        InputError: not a whole number of at least 0, or not one for each lane.
    """
    if seed is None:
        return [None] * lanes
    if isinstance(seed, (list, tuple, np.ndarray)):
        if len(seed) != lanes:
            raise InputError(f"seed: {len(seed)} seeds for {lanes} lanes")
        return [None if each is None else whole_number("seed", each, 0) for each in seed]
    first = whole_number("seed", seed, 0)
    return [first + lane for lane in range(lanes)]
