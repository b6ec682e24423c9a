"""Trace sets for tests of depth exploration: all depths recorded, or only some of the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sde_gym.traces import TraceSet
from tests.builders import random_traces


def all_depths(seed: int = 0, num_layers: int = 8, **options: Any) -> TraceSet:
    """A random set that holds every depth below L, with few right proposals and a small vocabulary."""
    options = {"p_match": 0.5, "vocabulary": 20, "texts": 8} | options
    return random_traces(seed, num_layers=num_layers, depths=range(1, num_layers), **options)


def with_depths(traces: TraceSet, depths: Sequence[int]) -> TraceSet:
    """The same texts as if only these depths had been recorded, without overrun."""
    columns = [traces.depths.index(depth) for depth in depths]
    names = ("top_ids", "top_logprobs", "entropy", "match")
    return replace(
        traces,
        manifest={**traces.manifest, "depths": list(depths), "overrun": 0},
        depths=tuple(depths),
        branch_start=np.zeros(len(traces.token) * len(depths) + 1, dtype=np.int64),
        **{name: getattr(traces, name)[:, columns] for name in names},
    )


def stable(traces: TraceSet) -> TraceSet:
    """The same texts with a right proposal wherever a shallower depth has one."""
    match = np.logical_or.accumulate(traces.match, axis=1)
    ids = traces.top_ids.copy()
    ids[..., 0] = np.where(match, traces.token[:, None], ids[..., 0])
    return replace(traces, top_ids=ids, match=match)
