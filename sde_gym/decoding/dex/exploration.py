"""Exploration sets: the depths at which explorers hand tokens on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from sde_gym.checks import is_whole
from sde_gym.errors import InputError

#: Most explorers of a real lattice, which may come to hold 2^N - 1 tokens, and a mask over all pairs of them.
MOST_EXPLORERS = 12


def exploration_set(given: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The exploration set X = (d_0 < ... < d_{N-1} = L), checked.

    Args:
        given: the depths, or the number N of explorers, which then split the layers evenly.
        num_layers: L.

    Raises:
        InputError: depths that do not rise, lie outside 1..L or do not end at L, more explorers than
            layers, or more than `MOST_EXPLORERS`.
    """
    depths = _exploration_set(given, num_layers)
    if len(depths) > MOST_EXPLORERS:
        raise InputError(
            f"exploration set: the lattice of {len(depths)} explorers may hold 2^{len(depths)} - 1 = "
            f"{2 ** len(depths) - 1} tokens; give at most {MOST_EXPLORERS} explorers"
        )
    return depths


def _exploration_set(given: Any, num_layers: int) -> tuple[int, ...]:
    if is_whole(given):
        return even_exploration_set(int(given), num_layers)
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InputError(
            f"exploration set: {given!r} is neither a list of depths nor a number of explorers; give depths "
            f"that rise and end at {num_layers}"
        )
    found = given.tolist() if hasattr(given, "tolist") else list(given)
    wrong = [depth for depth in found if not is_whole(depth)]
    if wrong:
        raise InputError(f"exploration set: {wrong[0]!r} is not a whole number; depths are 1..{num_layers}")
    depths = tuple(int(depth) for depth in found)
    if not depths:
        raise InputError(f"exploration set: it is empty; the shortest one is ({num_layers},)")
    if len(depths) > num_layers:
        raise InputError(
            f"exploration set: {len(depths)} explorers for {num_layers} layers; each needs one at least, so "
            f"give at most {num_layers} depths"
        )
    for low, high in pairwise(depths):
        if high <= low:
            raise InputError(
                f"exploration set: {depths} does not rise ({high} follows {low}); sort its depths and give "
                "each once"
            )
    if depths[0] < 1:
        raise InputError(
            f"exploration set: depth {depths[0]} has no layer in front of it; begin at 1 or deeper"
        )
    if depths[-1] != num_layers:
        raise InputError(
            f"exploration set: {depths} must end at the last layer, {num_layers}, whose token is the one "
            "emitted; " + ("append it" if depths[-1] < num_layers else "leave out what is deeper")
        )
    return depths


def even_exploration_set(explorers: int, num_layers: int) -> tuple[int, ...]:
    """X of N explorers whose shares of the L layers differ by one at most, and not at all if N divides L.

    Raises:
        InputError: N outside 1..L.
    """
    if not 1 <= explorers <= num_layers:
        raise InputError(
            f"explorers: {explorers} cannot share {num_layers} layers; give a number in 1..{num_layers}"
        )
    return tuple((stage + 1) * num_layers // explorers for stage in range(explorers))
