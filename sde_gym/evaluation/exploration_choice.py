"""The exploration set that suits a text: dynamic programming over the EAD, under the honest tick cost.

An even split treats all depths alike, but tokens do not: most are settled early. More explorers where
they are settled save ticks, yet a longer stage elsewhere makes every tick longer. What counts is

    cost(X) = slowest stage of X, its head included  x  ticks of X.

If a right proposal stays right at every deeper layer, stage i* of a token is the number of explorers
below its EAD, so that

    ticks(X) = texts N + tokens + sum over i < N - 1 of late(d_i),

late(d) being the number of tokens whose EAD is deeper than d, each text's last token left out. That sum
is additive over the stages, so for each bound on the slowest stage a dynamic program finds the X of least
ticks; the least cost over all bounds is the optimum. Where right proposals do not stay right, or DECS
proposes other ones, the formula counts a few ticks too many; so the set found is then exchanged depth by
depth as long as the true count falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import whole_number
from sde_gym.errors import InputError
from sde_gym.evaluation.dex_ticks import dex_ticks
from sde_gym.evaluation.exploration_sets import head_costs, slowest_stage
from sde_gym.traces import TraceSet
from sde_gym.traces.ead import earliest_depths


def chosen_exploration_set(
    traces: TraceSet,
    explorers: int,
    *,
    decs: bool = True,
    heads: tuple[float, float] | None = None,
    exchange: bool = True,
) -> tuple[int, ...]:
    """The exploration set of N depths with the highest `tick_speedup` that is found on these texts.

    Args:
        traces: recorded texts, other ones than those to be judged on.
        explorers: N.
        decs: as in `dex_ticks`; matters for the exchange only.
        heads: as in `dex_ticks`.
        exchange: whether the dynamic program's set is improved under the true count.

    Raises:
        InputError: N out of range, or more than the recorded depths allow.
    """
    whole_number("explorers", explorers, 1, traces.num_layers)
    if explorers - 1 > len(traces.depths):
        raise InputError(
            f"explorers: {explorers} need {explorers - 1} depths below {traces.num_layers}, but only "
            f"{len(traces.depths)} were recorded; take fewer explorers, or record more depths"
        )
    exit_head, final_head = head_costs(traces) if heads is None else heads
    ead = earliest_depths(traces)
    counted = np.ones(len(ead), dtype=bool)
    counted[traces.start[1:] - 1] = False  # as `dex_ticks` counts
    late = (ead[counted, None] > np.array(traces.depths)).sum(axis=0)
    fixed = float(explorers * len(traces) + counted.sum())
    found = cheapest_set(
        traces.depths, late, traces.num_layers, explorers, fixed, exit_head=exit_head, final_head=final_head
    )
    if not exchange:
        return found
    return _exchanged(traces, found, decs, (float(exit_head), float(final_head)))


def cheapest_set(
    depths: Sequence[int],
    late: ArrayLike,
    num_layers: int,
    explorers: int,
    fixed: float,
    *,
    exit_head: float = 0.0,
    final_head: float = 0.0,
) -> tuple[int, ...]:
    """The set X of N depths, L the last, with the least (slowest stage) x (fixed + sum of late).

    Args:
        depths: m depths below L to choose from, rising; at least N - 1.
        late: float (m,), at least 0: ticks that an explorer at each depth adds.
        num_layers: L.
        explorers: N.
        fixed: ticks that do not depend on X.
        exit_head: cost of a head below L, layers.
        final_head: cost of the head at L, layers.
    """
    at = np.array([0, *depths], dtype=np.float64)
    added = np.concatenate([[0.0], np.asarray(late, dtype=np.float64)])
    stage = at[None, :] - at[:, None] + exit_head  # [from, to]
    stage[at[None, :] <= at[:, None]] = np.inf
    last = num_layers - at + final_head
    bounds = np.unique(np.concatenate([stage[np.isfinite(stage)], last]))
    best: tuple[int, ...] = ()
    cheapest = np.inf
    for bound in bounds:
        allowed = np.where(stage <= bound, 0.0, np.inf)
        found = _fewest(allowed, np.where(last <= bound, 0.0, np.inf), added, explorers)
        if found is None:
            continue
        chosen = (*(int(at[place]) for place in found), num_layers)
        cost = slowest_stage(chosen, exit_head, final_head) * (fixed + added[found].sum())
        if cost < cheapest:
            best, cheapest = chosen, cost
    return best


def _fewest(
    allowed: NDArray[np.float64], last: NDArray[np.float64], added: NDArray[np.float64], explorers: int
) -> list[int] | None:
    """Places of N - 1 depths with the least sum of `added`, inf standing where a stage may not be."""
    least = np.where(np.arange(len(added)) == 0, 0.0, np.inf)  # no explorer yet, at depth 0
    came_from = []
    for _ in range(explorers - 1):
        totals = least[:, None] + allowed + added[None, :]
        came_from.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    end = int((least + last).argmin())
    if not np.isfinite(least[end] + last[end]):
        return None
    places = []
    for step in reversed(came_from):
        places.append(end)
        end = int(step[end])
    return places[::-1]


def _exchanged(
    traces: TraceSet, chosen: tuple[int, ...], decs: bool, heads: tuple[float, float]
) -> tuple[int, ...]:
    """The set after exchanging one depth at a time, always for the highest tick speed-up, while it rises."""

    def speedup(candidate: tuple[int, ...]) -> float:
        return dex_ticks(traces, candidate, decs=decs, heads=heads).tick_speedup

    best = speedup(chosen)
    while True:
        others = {
            tuple(sorted({*chosen, new} - {old}))
            for old in chosen[:-1] for new in traces.depths if new not in chosen
        }  # fmt: skip
        scored = [(speedup(candidate), candidate) for candidate in sorted(others)]
        top, candidate = max(scored, key=lambda pair: pair[0], default=(best, chosen))
        if top <= best:
            return chosen
        best, chosen = top, candidate
