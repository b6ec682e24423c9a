"""The rows of `sde-gym dex`: the columns that all methods share, and how those of DEX are filled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sde_gym.envs.hindsight import headroom
from sde_gym.evaluation.dex_live import LiveTexts
from sde_gym.evaluation.dex_ticks import TickCount
from sde_gym.traces import TraceSet
from sde_gym.traces.ead import earliest_depths

COLUMNS = (
    "method", "setting", "devices", "explorers", "exploration_set", "resolution", "decs", "texts", "tokens",
    "ticks_per_token", "tick_speedup", "simulated_speedup", "layer_speedup", "depth_speedup", "oracle_share",
    "late_exit", "fallback", "early_match", "decoded_texts", "identical_texts", "identical_to_ar",
    "lattice_tokens", "lattice_tokens_max", "lattice_bound", "useful_share", "ticks_checked", "near_ties",
)  # fmt: skip
"""Of every row, in this order."""

NOT_DECODED: dict[str, Any] = {"decoded_texts": 0, "identical_texts": None, "identical_to_ar": None}
"""Columns of a row of which nothing was decoded."""


def dex_row(
    method: str,
    count: TickCount,
    traces: TraceSet,
    decs: bool = True,
    single_exit: bool = False,
    live: LiveTexts | None = None,
) -> dict[str, Any]:
    """The row of an exploration set.

    Args:
        method: its name.
        count: of these traces.
        traces: judged on.
        decs, single_exit: with which it was counted.
        live: texts whose lattice is built by the real decoder, and its ticks compared with the count.

    Raises:
        TickMismatchError: they differ.
    """
    lattice: dict[str, Any] = NOT_DECODED | dict.fromkeys(
        ("lattice_tokens", "lattice_tokens_max", "useful_share", "ticks_checked", "near_ties")
    )
    if live is not None:
        lattice = live.lattice(count, decs, single_exit)
    ead = earliest_depths(traces)
    return {
        "method": method,
        "setting": f"N = {count.explorers}",
        "devices": count.explorers,
        "explorers": count.explorers,
        "exploration_set": list(count.exploration_set),
        "resolution": count.resolution,
        "decs": decs,
        "texts": len(traces),
        "tokens": int(count.tokens.sum()),
        "ticks_per_token": count.ticks_per_token,
        "tick_speedup": count.tick_speedup,
        "simulated_speedup": count.tick_speedup,
        "layer_speedup": count.layer_speedup,
        "depth_speedup": count.depth_speedup,
        "oracle_share": finite(headroom(count.depth_speedup, 1.0, traces.num_layers / float(ead.mean()))),
        "late_exit": float(np.maximum(count.depth - ead, 0).mean()),
        "fallback": 0.0,
        "early_match": float(np.maximum(ead - count.depth, 0).mean()),
        "lattice_bound": count.lattice_bound,
        **lattice,
    }


def finite(value: float) -> float | None:
    """A share of nothing is no number; JSON has none for it either."""
    return value if math.isfinite(value) else None
