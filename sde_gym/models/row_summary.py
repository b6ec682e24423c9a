"""`summarise_row`, compiled: one pass over one row of logits instead of eight numpy calls.

Only `sde_gym.models.heads.row_summary` imports this module, where numba is installed. Compiled code is
kept on disk where numba finds a place for it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.compiling import compiled

_LOWEST = np.float32(-1e4)


def summarise_row(logits: NDArray[np.float32], k: int) -> tuple[int, list[float], float]:
    """As `sde_gym.models.heads.summarise_row`."""
    best = np.empty(k)
    column, entropy = _summarise(logits, best)
    return column, best.tolist(), entropy


@compiled(fastmath={"contract", "reassoc", "nsz", "arcp", "afn"})  # but infinities count
def _summarise(logits: Any, best: Any) -> tuple[int, float]:
    """Best column and entropy; fills `best`, float64 (k,)."""
    column = 0
    for index in range(logits.size):
        if logits[index] > logits[column]:
            column = index
    top = logits[column]
    total, expected = 0.0, 0.0
    for index in range(logits.size):
        shifted = max(logits[index] - top, _LOWEST)
        weight = math.exp(shifted)
        total += weight
        expected += weight * shifted
    k, filled = best.size, 0
    for index in range(logits.size):
        value = logits[index]
        if filled == k and not value > best[k - 1]:
            continue
        place = min(filled, k - 1)
        while place > 0 and best[place - 1] < value:
            best[place] = best[place - 1]
            place -= 1
        best[place] = value
        filled = min(filled + 1, k)
    log_total = math.log(total)
    for rank in range(k):
        best[rank] = max(best[rank] - top, _LOWEST) - log_total
    return column, log_total - expected / total
