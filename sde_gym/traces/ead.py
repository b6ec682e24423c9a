"""Earliest available depth (EAD): how deep each token has to go before the answer is there to stay.

A token's EAD is the shallowest recorded depth whose proposal equals the emitted token, and so does that
of every deeper recorded depth; L where there is none (DEX, arXiv 2606.29223). A selector that knew it
would be an oracle, and L / mean EAD its speed-up.

A set that holds all of the depths 1..L-1 gives the EAD itself. One that holds some of them gives it on
that grid only: it cannot see whether a depth in between was right already, nor whether one in between
was wrong again. `ead_bounds` says between which depths the EAD lies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sde_gym.traces.trace_set import TraceSet


@dataclass(frozen=True)
class EADSummary:
    """The EAD over all positions of some texts.

    Attributes:
        task: of these texts, None for all.
        num_layers: L.
        positions: how many.
        counts: by depth, of the recorded ones and L, on how many of them it is the EAD.
        mean: of the EAD on the recorded grid, layers.
        bounds: between which the mean of the EAD over all layers lies, layers.
    """

    task: str | None
    num_layers: int
    positions: int
    counts: dict[int, int]
    mean: float
    bounds: tuple[float, float]

    @property
    def shares(self) -> dict[int, float]:
        """By depth, the share of positions whose EAD it is."""
        return {depth: count / self.positions for depth, count in self.counts.items()}

    @property
    def oracle_speedup(self) -> float:
        """L / mean EAD on the recorded grid."""
        return self.num_layers / self.mean

    @property
    def oracle_bounds(self) -> tuple[float, float]:
        """Between which the oracle's speed-up over all layers lies."""
        return self.num_layers / self.bounds[1], self.num_layers / self.bounds[0]


def earliest_depths(traces: TraceSet) -> NDArray[np.int64]:
    """The EAD of every position on the recorded grid, int64 (P,), out of the recorded depths and L."""
    return np.array([*traces.depths, traces.num_layers])[_places(traces)]


def ead_bounds(traces: TraceSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Between which depths the EAD over all layers lies at every position.

    Below the recorded depth under the EAD on the grid it cannot lie, since that depth is wrong. It lies
    above the one on the grid only if some depth up there was not recorded.

    Returns:
        least and greatest, int64 (P,) each; both the EAD itself where all depths were recorded.
    """
    places = _places(traces)
    least = np.array([1, *(depth + 1 for depth in traces.depths)])[places]
    unknown = set(range(1, traces.num_layers)) - set(traces.depths)
    ead = earliest_depths(traces)
    return least, np.maximum(ead, max(unknown, default=0) + 1)


def ead_summaries(traces: TraceSet) -> list[EADSummary]:
    """The EAD over all texts, then over those of each task."""
    tasks: list[str | None] = [None, *sorted(set(traces.tasks))]
    return [_summary(traces if task is None else traces.subset(traces.texts_of([task])), task)
            for task in tasks]  # fmt: skip


def _summary(traces: TraceSet, task: str | None) -> EADSummary:
    ead = earliest_depths(traces)
    least, greatest = (bound.mean() for bound in ead_bounds(traces))
    found = Counter(ead.tolist())
    return EADSummary(
        task=task,
        num_layers=traces.num_layers,
        positions=len(ead),
        counts={depth: found[depth] for depth in (*traces.depths, traces.num_layers)},
        mean=float(ead.mean()),
        bounds=(float(least), float(greatest)),
    )


def _places(traces: TraceSet) -> NDArray[np.int64]:
    """Index of the EAD among the m recorded depths, m for L; int64 (P,)."""
    stable = np.logical_and.accumulate(traces.match[:, ::-1], axis=1)
    return np.asarray(len(traces.depths) - stable.sum(axis=1), dtype=np.int64)
