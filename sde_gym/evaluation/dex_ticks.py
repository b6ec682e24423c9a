"""How many ticks DEX takes, counted from traces alone.

N explorers explore at the depths X = {d_0 < ... < d_{N-1} = L} (`exploration_sets`). In one *tick* each
runs its stage once, on every lattice token that has reached it, all explorers in parallel. A token that
comes out of stage i yields a candidate for the next position, which enters stage 0 with the next tick.
When a token of the text comes out of the last stage, the final token is known. If the shallowest
candidate equal to it was proposed at stage i*, its branch is already N - 1 - i* stages deep, and the next
final token comes i* + 1 ticks later; N ticks later if no shallower candidate is right (i* = N - 1, the
final layer's own). So T tokens take

    ticks = N + sum over t < T of (i*_t + 1),

the first costing N, which is prefill, and the last one's i* not being needed (arXiv 2606.29223, known
here by its summary). Only candidates of tokens of the text matter, and those are recorded; what the rest of
the lattice did cannot change it. `sde_gym.decoding.dex` builds that lattice and takes as many ticks.

DECS: a deeper explorer leaves out the tokens that shallower ones have proposed for the same position, so
its candidate is its most probable token not proposed yet. The last layer never leaves anything out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sde_gym.decoding.dex.exploration import exploration_set as checked_set
from sde_gym.errors import InputError
from sde_gym.evaluation.exploration_sets import (
    head_costs,
    recorded_columns,
    resolution,
    slowest_stage,
)
from sde_gym.traces import TraceSet


@dataclass(frozen=True, eq=False)
class TickCount:
    """What DEX takes for n texts of P tokens in all, with one exploration set.

    Attributes:
        exploration_set: d_0 .. d_{N-1} = L.
        exit_head: what an exit head costs, layers.
        final_head: the same of the last layer's head.
        tokens: int64 (n,), tokens committed, T of each text, prefill's included.
        ticks: int64 (n,), ticks for them, N for prefill's.
        stage: int64 (P,), i* of each token, text by text.
    """

    exploration_set: tuple[int, ...]
    exit_head: float
    final_head: float
    tokens: NDArray[np.int64]
    ticks: NDArray[np.int64]
    stage: NDArray[np.int64]

    @property
    def explorers(self) -> int:
        """N."""
        return len(self.exploration_set)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.exploration_set[-1]

    @property
    def resolution(self) -> int:
        """Layers of the longest stage."""
        return resolution(self.exploration_set)

    @property
    def depth(self) -> NDArray[np.int64]:
        """d_i* of each token, int64 (P,)."""
        return np.array(self.exploration_set, dtype=np.int64)[self.stage]

    @property
    def ticks_per_token(self) -> float:
        """All ticks over all tokens."""
        return float(self.ticks.sum() / self.tokens.sum())

    @property
    def slowest_stage(self) -> float:
        """What a tick takes, in layers: the slowest stage with its head."""
        return slowest_stage(self.exploration_set, self.exit_head, self.final_head)

    @property
    def tick_speedup(self) -> float:
        """(L + final head) / (slowest stage with its head x ticks a token): N devices against one.

        What passes between devices, and many tokens in one stage, are taken to cost nothing.
        """
        return (self.num_layers + self.final_head) / (self.slowest_stage * self.ticks_per_token)

    @property
    def layer_speedup(self) -> float:
        """The same where heads cost nothing: L / (longest stage x ticks a token)."""
        return self.num_layers / (self.resolution * self.ticks_per_token)

    @property
    def depth_speedup(self) -> float:
        """L / mean d_i*: the paper's measure of a selection, whatever it takes to get there."""
        return float(self.num_layers / self.depth.mean())

    @property
    def lattice_bound(self) -> int:
        """Most evaluations of a token by a stage between two commits: 2^N - 1."""
        return int(2**self.explorers - 1)


def dex_ticks(
    traces: TraceSet,
    exploration_set: Sequence[int],
    *,
    decs: bool = True,
    single_exit: bool = False,
    heads: tuple[float, float] | None = None,
) -> TickCount:
    """Count the ticks of every text of a trace set.

    Args:
        traces: recorded texts.
        exploration_set: d_0 .. d_{N-1} = L, those below L recorded.
        decs: deeper explorers leave out what shallower ones have proposed.
        single_exit: an ablation in which only the first explorer's candidate opens a branch.
        heads: what an exit head and the full head cost, in layers; the manifest's sizes if not given.

    Raises:
        InputError: no exploration set of this model, a depth that was not recorded, more explorers than
            the recorded candidates can serve with DECS, or a head's cost below 0.
    """
    exit_head, final_head = head_costs(traces) if heads is None else (float(cost) for cost in heads)
    if not (0 <= exit_head < np.inf and 0 <= final_head < np.inf):
        raise InputError(f"heads: {heads!r} are no costs of at least 0")
    stage = match_stages(traces, exploration_set, decs=decs)
    if single_exit:
        stage = np.where(stage == 0, 0, len(exploration_set) - 1)
    needed = stage + 1
    needed[traces.start[1:] - 1] = 0  # nothing follows
    return TickCount(
        exploration_set=checked_set(exploration_set, traces.num_layers),
        exit_head=exit_head,
        final_head=final_head,
        tokens=traces.lengths,
        ticks=len(exploration_set) + np.add.reduceat(needed, traces.start[:-1]),
        stage=stage,
    )


def match_stages(traces: TraceSet, exploration_set: Sequence[int], *, decs: bool = True) -> NDArray[np.int64]:
    """i* at every position: the shallowest stage whose candidate is the final token, else N - 1.

    Returns:
        int64 (P,).

    Raises:
        InputError: as `dex_ticks`.
    """
    found = candidates(traces, exploration_set, decs=decs) == traces.token[:, None]
    last = np.ones((len(found), 1), dtype=bool)
    return np.concatenate([found, last], axis=1).argmax(axis=1).astype(np.int64)


def candidates(traces: TraceSet, exploration_set: Sequence[int], *, decs: bool = True) -> NDArray[np.int32]:
    """What each stage but the last proposes at every position, int32 (P, N - 1).

    Raises:
        InputError: as `dex_ticks`.
    """
    columns = recorded_columns(traces, exploration_set)
    if not decs:
        return traces.top_ids[:, columns, 0]
    if len(columns) > traces.k:
        raise InputError(
            f"exploration_set: with DECS, {len(columns) + 1} explorers may need the {len(columns)} best "
            f"tokens of a depth, but {traces.k} were recorded; take at most {traces.k + 1}, or no DECS"
        )
    proposed = np.empty((len(traces.token), len(columns)), dtype=np.int32)
    rows = np.arange(len(proposed))
    for stage, column in enumerate(columns):
        best = traces.top_ids[:, column, : stage + 1]
        taken = (best[:, :, None] == proposed[:, None, :stage]).any(axis=2)
        proposed[:, stage] = best[rows, taken.argmin(axis=1)]  # of stage + 1 tokens one is free
    return proposed
