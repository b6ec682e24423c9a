"""Checks of arguments, shared by the engine and the environments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import whole_number
from sde_gym.errors import InputError
from sde_gym.traces import TraceSet
from sde_gym.traces.schema import check_depths


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value`; InputError naming the argument and what is allowed unless it is one of that."""
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
    return value


def candidate_depths(depths: Sequence[int] | None, traces: TraceSet) -> tuple[int, ...]:
    """Candidate depths, checked against the recorded ones."""
    if depths is None:
        return traces.depths
    if isinstance(depths, (str, bytes)) or not isinstance(depths, Iterable):
        raise InputError(f"depths: {depths!r} is not a list of depths out of {list(traces.depths)}")
    chosen = tuple(whole_number("depths", depth, 1, traces.num_layers - 1) for depth in depths)
    try:
        check_depths(chosen, traces.num_layers)
    except InputError as error:
        raise InputError(f"{error}; this trace set has {list(traces.depths)}") from None
    for depth in chosen:
        if depth not in traces.depths:
            raise InputError(f"depths: {depth} was not recorded; this trace set has {list(traces.depths)}")
    return chosen


def token_budget(max_new_tokens: int | None, traces: TraceSet) -> int:
    """The token budget, checked against what was recorded."""
    recorded = int(traces.manifest["max_new_tokens"])
    if max_new_tokens is None:
        return recorded
    # Such a text would have gone on, and so would a draft behind a wrong proposal.
    cut = "budget" in traces.ends or traces.overrun > 0
    return whole_number("max_new_tokens", max_new_tokens, 2, recorded if cut else None)


def indices(name: str, values: ArrayLike, count: int) -> NDArray[np.int64]:
    """int64 (n,) within 0..count - 1, else InputError."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InputError(f"{name}: {values!r} is not a list of whole numbers")
    if array.size and (array.min() < 0 or array.max() >= count):
        raise InputError(f"{name}: {values!r} goes outside 0..{count - 1}")
    return array.astype(np.int64)
