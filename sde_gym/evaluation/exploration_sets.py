"""Exploration sets of DEX: the depths d_0 < ... < d_{N-1} = L at which N explorers propose tokens.

Explorer i runs the layers from d_{i-1} to d_i and the head at d_i; this is its *stage*. All stages run
side by side, so the slowest one sets the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sde_gym.checks import whole_number
from sde_gym.decoding.dex.exploration import even_exploration_set
from sde_gym.decoding.dex.exploration import exploration_set as checked_set
from sde_gym.errors import InputError
from sde_gym.traces import TraceSet


def nested_split(num_layers: int, explorers: int) -> tuple[int, ...]:
    """N stages of equally many layers where N divides L, else the next best set that nests.

    Where N does not divide L, the even set of the largest divisor below N is refined: the longest stage,
    the shallowest of several, is halved (its deeper half is the shorter one) until there are N. A refined
    set holds every depth of the one it refines, so it proposes no token at a greater depth. (The decoder's
    `even_exploration_set` makes the shares differ by one at most; such sets do not nest.)

    Raises:
        InputError: N is no whole number within 1..L.
    """
    given = whole_number("explorers", explorers, 1, num_layers)
    parts = next(n for n in range(given, 0, -1) if num_layers % n == 0)
    depths = list(even_exploration_set(parts, num_layers))
    while len(depths) < given:
        low, high = max(pairwise((0, *depths)), key=lambda stage: (stage[1] - stage[0], -stage[0]))
        depths = sorted([*depths, low + (high - low + 1) // 2])
    return tuple(depths)


def resolution(exploration_set: Sequence[int]) -> int:
    """Layers of the longest stage."""
    return max(high - low for low, high in pairwise((0, *exploration_set)))


def slowest_stage(exploration_set: Sequence[int], exit_head: float = 0.0, final_head: float = 0.0) -> float:
    """What the slowest explorer takes for one tick, in layers, its head included.

    Args:
        exploration_set: d_0 .. d_{N-1} = L.
        exit_head: what an exit head takes, in layers.
        final_head: the same of the last layer's head.
    """
    layers = [high - low for low, high in pairwise((0, *exploration_set))]
    return max([*(count + exit_head for count in layers[:-1]), layers[-1] + final_head])


def recorded_columns(traces: TraceSet, exploration_set: Sequence[int]) -> list[int]:
    """Columns of the depths below L in a trace set.

    Raises:
        InputError: one of them was not recorded, or it is no exploration set of this model.
    """
    chosen = checked_set(exploration_set, traces.num_layers)
    missing = [depth for depth in chosen[:-1] if depth not in traces.depths]
    if missing:
        raise InputError(
            f"exploration set: {chosen} has the depths {missing}, which were not recorded; this trace "
            f"set has {list(traces.depths)}: take depths out of these, or record again with --depths"
        )
    return [traces.depths.index(depth) for depth in chosen[:-1]]


def head_costs(traces: TraceSet) -> tuple[float, float]:
    """What an exit head and the full head cost in layers, by their size; 0 where that is not known."""
    manifest = traces.manifest
    return float(manifest.get("exit_head", 0.0)), float(manifest.get("final_head", 0.0))
