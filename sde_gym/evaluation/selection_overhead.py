"""What a controller loses against a selector that knows every token's earliest available depth.

Every emitted token came out of some depth's head: an accepted proposal out of l*, any other out of the
last layer. Beside its EAD (`sde_gym.traces.ead`) that depth says how well it was selected:

- **late exit**: deeper than the EAD though nothing was wrong. An accepted proposal of a depth that is deeper
  than necessary, or a token of the last layer where nothing had been proposed: the walk went past the
  EAD, or the draft was stopped before this token. The waste is depth less EAD.
- **early exit, fallback**: the proposal at this position was rejected, so the depth was shallower than the
  EAD and the last layer had to make the token anew. The waste is L less EAD.
- **early match**: an accepted proposal of a depth shallower than the EAD, right there and wrong again
  deeper. Nothing is wasted: what is gained is EAD less depth.

Per token, mean depth - mean EAD = late exits + fallbacks - early matches, exactly; L / mean depth is the
`depth_speedup`, the figure of DEX's paper for the quality of a selection. It is no speed-up of decoding:
accepted tokens are verified by the last layer, too, many at once, and proposals behind a rejected one are
thrown away. `discarded` counts the latter, `result.speedup` has it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.hindsight import headroom
from sde_gym.envs.run import RunResult, run_controller
from sde_gym.policies.controller import Controller, RoundOutcome
from sde_gym.traces import TraceSet
from sde_gym.traces.ead import earliest_depths


class Origin(IntEnum):
    """Where an emitted token came from."""

    PROPOSAL = 0
    """An accepted proposal."""
    CORRECTION = 1
    """The last layer, in place of a rejected proposal."""
    FINAL = 2
    """The last layer, nothing having been proposed."""


@dataclass(frozen=True, eq=False)
class SelectionOverhead:
    """The tokens that a controller emitted, n of them, text by text, prefill's left out.

    Attributes:
        result: of the replay.
        rows: int64 (n,), their rows in the trace set.
        origin: int64 (n,), `Origin`.
        depth: int64 (n,), the depth whose head made them.
        ead: int64 (n,), on the recorded grid.
        discarded: proposals that were rejected, or made behind one that was.
    """

    result: RunResult
    rows: NDArray[np.int64]
    origin: NDArray[np.int64]
    depth: NDArray[np.int64]
    ead: NDArray[np.int64]
    discarded: int

    @property
    def mean_depth(self) -> float:
        """Layers a token."""
        return float(self.depth.mean())

    @property
    def mean_ead(self) -> float:
        """Layers a token."""
        return float(self.ead.mean())

    @property
    def late_exit(self) -> float:
        """Waste of late exits, layers a token."""
        return self._mean(np.maximum(self.depth - self.ead, 0), self.origin != Origin.CORRECTION)

    @property
    def fallback(self) -> float:
        """Waste of early exits that the last layer had to make good, layers a token."""
        return self._mean(self.depth - self.ead, self.origin == Origin.CORRECTION)

    @property
    def early_match(self) -> float:
        """Gain of right proposals shallower than the EAD, layers a token."""
        return self._mean(np.maximum(self.ead - self.depth, 0), self.origin == Origin.PROPOSAL)

    @property
    def late_share(self) -> float:
        """Share of tokens that exited too late."""
        return float(((self.depth > self.ead) & (self.origin != Origin.CORRECTION)).mean())

    @property
    def fallback_share(self) -> float:
        """Share of tokens that exited too early."""
        return float((self.origin == Origin.CORRECTION).mean())

    @property
    def depth_speedup(self) -> float:
        """L / mean depth."""
        return self.result.num_layers / self.mean_depth

    @property
    def oracle_share(self) -> float:
        """Share of the oracle's headroom, (depth_speedup - 1) / (L / mean EAD - 1)."""
        return headroom(self.depth_speedup, 1.0, self.result.num_layers / self.mean_ead)

    def totals(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = (
            "mean_depth", "mean_ead", "late_exit", "fallback", "early_match", "late_share", "fallback_share",
            "depth_speedup", "oracle_share",
        )  # fmt: skip
        return {
            "controller": self.result.controller,
            "tokens": len(self.rows),
            **{name: getattr(self, name) for name in names},
            "discarded_a_token": self.discarded / len(self.rows),
        }

    def _mean(self, layers: NDArray[np.int64], where: NDArray[np.bool_]) -> float:
        return float(np.where(where, layers, 0).mean())


def selection_overhead(
    traces: TraceSet,
    controller: Controller,
    texts: Sequence[int] | NDArray[np.int64] | None = None,
    **settings: Any,
) -> SelectionOverhead:
    """Replay a controller and take its choices of depth apart: `run_controller`'s arguments.

    The EAD is that of all recorded depths, whichever of them the controller is offered. Without recorded
    overrun, a round ends at its first wrong proposal, and what is drafted on behind it is not counted.

    Raises:
        InputError: as `run_controller`, so for AdaDecode, whose rounds no trace holds.
    """
    watched = _Watched(controller)
    result = run_controller(traces, cast("Controller", watched), texts, **settings)
    lanes, depth_index, drafted, accepted = (
        np.concatenate([getattr(told, name) for told in watched.rounds])
        for name in ("lanes", "depth_index", "drafted", "accepted")
    )
    order = np.argsort(lanes, kind="stable")  # text by text; rounds of a text stay in order
    lanes, depth_index, drafted, accepted = (
        array[order] for array in (lanes, depth_index, drafted, accepted)
    )
    # Each round emits its accepted proposals and one token of the last layer, but for a text's last round,
    # which may have none. Counted on through all rounds, these extra ones are cut off below.
    emitted = accepted + 1
    which = np.repeat(np.arange(len(lanes)), emitted)  # round of each token
    number = np.arange(len(which)) - np.repeat(np.cumsum(emitted) - emitted, emitted)  # within its round
    of_lane = np.bincount(lanes, weights=emitted, minlength=len(result.texts)).astype(np.int64)
    position = np.arange(len(which)) - np.repeat(np.cumsum(of_lane) - of_lane, of_lane) + 1
    kept = position <= result.tokens[lanes[which]]
    which, number, position = which[kept], number[kept], position[kept]

    proposal = number < accepted[which]
    rejected = ~proposal & (accepted < drafted)[which]
    origin = np.select([proposal, rejected], [Origin.PROPOSAL, Origin.CORRECTION], Origin.FINAL)
    exits = np.array([*result.depths, result.num_layers])
    rows = traces.start[result.texts[lanes[which]]] + position
    return SelectionOverhead(
        result=result,
        rows=rows,
        origin=origin.astype(np.int64),
        depth=np.where(proposal, exits[depth_index[which]], result.num_layers),
        ead=earliest_depths(traces)[rows],
        discarded=int((drafted - accepted).sum()),
    )


class _Watched:
    """A controller that keeps what it is told of its rounds; for all else it is the one it wraps."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.rounds: list[RoundOutcome] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Keep it and pass it on."""
        self.rounds.append(outcome)
        self._controller.feedback(outcome)
