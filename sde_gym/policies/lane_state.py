"""Controllers that remember something: numbers kept by lane, and what becomes of them at a new text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.policies.controller import BaseController


class LaneState:
    """Arrays with one row a lane; there is room for every lane that was named.

    Args:
        fresh: by name, what a lane starts with: a number or an array, whose dtype the rows have.
    """

    def __init__(self, fresh: Mapping[str, ArrayLike]) -> None:
        self._fresh: dict[str, NDArray[Any]] = {name: np.asarray(value) for name, value in fresh.items()}
        self._rows: dict[str, NDArray[Any]] = {name: value[None][:0] for name, value in self._fresh.items()}
        self._started: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The rows of all lanes, (capacity, ...), to read and to write; look them up anew after `start`."""
        return self._rows[name]

    def start(self, lanes: NDArray[np.int64], keep: bool = False) -> None:
        """Make these lanes fresh, or with `keep` only those that never were."""
        self._make_room(lanes)
        starting = lanes[~self._started[lanes]] if keep else lanes
        for name, value in self._fresh.items():
            self._rows[name][starting] = value
        self._started[lanes] = True

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Make the target lanes what the source lanes are; no lane may be named twice among the targets."""
        self._make_room(target)
        for rows in (*self._rows.values(), self._started):
            rows[target] = rows[source]

    def _make_room(self, lanes: NDArray[np.int64]) -> None:
        capacity = len(self._started)
        missing = int(lanes.max(initial=-1)) + 1 - capacity
        if missing <= 0:
            return
        more = max(missing, capacity)  # doubled, so that lanes that come one by one cost little
        self._started = np.append(self._started, np.zeros(more, dtype=bool))
        for name, value in self._fresh.items():
            new = np.broadcast_to(value, (more, *value.shape))
            self._rows[name] = np.concatenate([self._rows[name], new])


class RememberingController(BaseController):
    """A controller whose decisions depend on earlier rounds of the lane.

    Subclasses define `_fresh` besides what `BaseController` asks for; `state` holds the rows. State is
    written in `feedback` only, so that `act` may be asked without consequences.

    Args:
        carry_over: whether a lane keeps what it knows from one text to the next, as the public code of
            Draft & Verify and DEL does within a process. It then outlives `bind` to the same setting,
            and with it a call of the decoder; `forget` ends it. In replay a lane is one text of many
            played side by side, so that each lane goes on from its own.
    """

    stateful = True

    def __init__(self, carry_over: bool = False) -> None:
        self.carry_over = bool(carry_over)
        self.state = LaneState({})

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Start afresh, unless state is carried over and the setting is the same as before."""
        before = (self.depths, self.num_layers, self.max_draft)
        super().bind(depths, num_layers, max_draft)
        if not self.carry_over or before != (self.depths, self.num_layers, self.max_draft):
            self.forget()

    def forget(self) -> None:
        """Forget every lane."""
        self.state = LaneState(self._fresh())

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """These lanes start a new text."""
        self.state.start(lanes, keep=self.carry_over)

    def copy_lanes(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Make what is known of the target lanes, int64 (n,), a copy of what is of the source lanes."""
        self.state.copy(source, target)

    def _fresh(self) -> Mapping[str, ArrayLike]:
        """By name, what a lane starts with; called once bound."""
        raise NotImplementedError
