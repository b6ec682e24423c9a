"""When the passes and heads inside a real decoder happen, told from outside.

`watched` gives a copy of a model, weights shared, that behaves the same in every decoder and notes
when each pass through some layers and each head began and ended.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sde_gym.models.heads import ExitHeads
from sde_gym.models.layered import LayeredModel, LayerStack
from sde_gym.models.slots import Rows, SlotCache


@dataclass(frozen=True, slots=True)
class Event:
    """One pass through layers first..stop-1, or one head at depth `first` (`stop` is 0 then).

    Attributes:
        start: seconds, of `time.perf_counter`.
        end: the same.
        rows: tokens.
        first: depth at which the tokens are.
        stop: depth to which they are run, or 0.
    """

    start: float
    end: float
    rows: int
    first: int
    stop: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass
class Stopwatch:
    """Notes of one run; `clear` before the next.

    Attributes:
        device: where the model runs.
        events: in order.
        decisions: when a controller was asked, seconds; whoever asks writes it down.
    """

    device: torch.device
    events: list[Event] = field(default_factory=list)
    decisions: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything."""
        self.events.clear()
        self.decisions.clear()

    def now(self) -> float:
        """The time at which all work so far is done."""
        if self.device.type == "cuda":  # work is queued there; the decoder waits for it soon after
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _WatchedStack:
    """The layers of a model, their passes timed."""

    def __init__(self, stack: LayerStack, stopwatch: Stopwatch) -> None:
        self.stack, self.stopwatch = stack, stopwatch
        self.window_kinds = stack.window_kinds

    def new_cache(self, capacity: int) -> SlotCache:
        return self.stack.new_cache(capacity)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.stack.embed(tokens)

    def run(self, hidden: Tensor, first: int, stop: int, rows: Rows, cache: SlotCache) -> Tensor:
        start = self.stopwatch.now()
        states = self.stack.run(hidden, first, stop, rows, cache)
        self.stopwatch.events.append(Event(start, self.stopwatch.now(), len(hidden), first, stop))
        return states


class _WatchedHeads(ExitHeads):
    """The heads of a model, timed."""

    def __init__(self, heads: ExitHeads, stopwatch: Stopwatch) -> None:
        self.__dict__.update(vars(heads))
        self.stopwatch = stopwatch
        self._began: float | None = None

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        self._began = self.stopwatch.now()
        return super().states(hidden, depth)

    def project(self, hidden: Tensor, depth: int, compact: bool = True) -> Tensor:
        start = self.stopwatch.now() if self._began is None else self._began
        self._began = None
        found = super().project(hidden, depth, compact)
        self.stopwatch.events.append(Event(start, self.stopwatch.now(), len(hidden), depth, 0))
        return found


def watched(model: LayeredModel, stopwatch: Stopwatch) -> LayeredModel:
    """The same model, weights shared, that tells the stopwatch of every pass and head."""
    copied = copy.copy(model)
    copied.stack = _WatchedStack(model.stack, stopwatch)
    copied.heads = _WatchedHeads(model.heads, stopwatch)
    return copied
