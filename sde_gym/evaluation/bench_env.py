"""How many decisions a second the replayed environment takes, beside gymnasium's own CartPole.

All run in turns, `repeats` times over, so that whatever else the machine does hits all alike. Every
environment gets random actions drawn beforehand; starting new episodes is part of the time. Memory is
what numpy and Python allocate, as `tracemalloc` counts it, not what the operating system has reserved.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs.vector import LEDEVectorEnv
from sde_gym.files import write_json
from sde_gym.traces import TraceSet, load_traces

SECONDS = 1.0
"""Least time of one measurement."""

SYNC_ENVS = 64
"""Environments in gymnasium's `SyncVectorEnv`, whose speed hardly depends on how many there are."""

_P_EXIT = 0.6  # rounds of a few tokens, at all depths
_ROUNDS = 32  # steps between two looks at the clock

Take = Callable[[], int]
"""Takes some decisions, returns how many."""


@dataclass(frozen=True)
class Row:
    """What was measured of one environment.

    Attributes:
        name: which.
        envs: how many of it step together.
        rates: decisions a second, of each repeat.
    """

    name: str
    envs: int
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the repeats."""
        return statistics.fmean(self.rates)

    @property
    def spread(self) -> float:
        """Standard deviation over the repeats, 0 for one."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


@dataclass(frozen=True)
class EnvBenchmark:
    """Rows, memory and where it was measured.

    Attributes:
        rows: of all environments.
        bytes_a_lane: that each lane more keeps.
        peak_bytes_a_lane: by which most memory in use at once grows for each lane more: with what drawing
            the texts' order takes for a while, and with what reset and step return.
        bytes_shared: that one lane keeps: the tables, there once however many lanes there are.
        settings: arguments of the run.
        machine: processor, cores, versions.
    """

    rows: tuple[Row, ...]
    bytes_a_lane: float
    peak_bytes_a_lane: float
    bytes_shared: int
    settings: dict[str, Any]
    machine: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        rows = [{**asdict(row), "mean": row.mean, "spread": row.spread} for row in self.rows]
        write_json(path, {**asdict(self), "rows": rows})


def bench_env(
    traces: str | Path | TraceSet = "stdlib-20m",
    *,
    lanes: int = 4096,
    threads: int = 2,
    repeats: int = 3,
    seconds: float = SECONDS,
    progress: Callable[[int, int, str], None] | None = None,
) -> EnvBenchmark:
    """Measure vector, single and synchronous environments, ours and CartPole.

    Args:
        traces: that ours replay.
        lanes: of the vector environments.
        threads: of ours, where numba is installed.
        repeats: times that everything is measured.
        seconds: least time of each measurement.
        progress: called with measurements done, measurements in all, and what comes next.

    Raises:
        InputError: an argument out of range.
    """
    recorded = traces if isinstance(traces, TraceSet) else load_traces(traces)
    subjects = _subjects(recorded, lanes, threads)
    for _, _, take in subjects:  # compiles, fills caches
        take()
    rates: list[list[float]] = [[] for _ in subjects]
    for repeat in range(repeats):
        for number, (name, _, take) in enumerate(subjects):
            if progress is not None:
                progress(repeat * len(subjects) + number, repeats * len(subjects), name)
            rates[number].append(_rate(take, seconds))
    way = "numpy" if lanes == 1 else LEDEVectorEnv(lanes, recorded).engine.accelerator
    (kept, peak), (kept_by_all, peak_of_all) = (_memory(recorded, count, way) for count in (1, 1 + lanes))
    return EnvBenchmark(
        rows=tuple(
            Row(name, envs, tuple(found)) for (name, envs, _), found in zip(subjects, rates, strict=True)
        ),
        bytes_a_lane=(kept_by_all - kept) / lanes,
        peak_bytes_a_lane=(peak_of_all - peak) / lanes,
        bytes_shared=kept,
        settings={
            "traces": traces if isinstance(traces, str) else "given",
            "lanes": lanes,
            "threads": threads,
            "repeats": repeats,
            "seconds": seconds,
        },
        machine=_machine(),
    )


def _subjects(traces: TraceSet, lanes: int, threads: int) -> list[tuple[str, int, Take]]:
    """What is measured: name, environments that step together, and a function that steps them."""
    lede, cart = "sde_gym/LEDE-v0", "CartPole-v1"
    many: dict[str, gymnasium.vector.VectorEnv[Any, Any, Any]] = {
        f"{lede}, vector": LEDEVectorEnv(lanes, traces, threads=threads),
        f"{lede}, vector, numpy": LEDEVectorEnv(lanes, traces, accelerator="numpy"),
        f"{cart}, vector": gymnasium.make_vec(cart, num_envs=lanes, vectorization_mode="vector_entry_point"),
        f"{lede}, SyncVectorEnv": gymnasium.make_vec(
            lede, num_envs=SYNC_ENVS, vectorization_mode="sync", traces=traces
        ),
        f"{cart}, SyncVectorEnv": gymnasium.make_vec(cart, num_envs=SYNC_ENVS, vectorization_mode="sync"),
    }
    alone: dict[str, gymnasium.Env[Any, Any]] = {
        lede: gymnasium.make(lede, traces=traces),
        cart: gymnasium.make(cart),
    }
    found: list[tuple[str, int, Take]] = []
    for name, vector in many.items():
        found.append((name, vector.num_envs, partial(_take_many, vector, _actions(vector.num_envs))))
        vector.reset(seed=0)
    for name, env in alone.items():
        found.append((name, 1, partial(_take_alone, env, _actions(_ROUNDS).ravel().tolist())))
        env.reset(seed=0)
    return found


def _actions(envs: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Random actions, int64 (_ROUNDS, envs)."""
    draws: np.ndarray[Any, np.dtype[np.int64]] = (
        np.random.default_rng(0).random((_ROUNDS, envs)) < _P_EXIT
    ).astype(np.int64)
    return draws


def _take_many(env: gymnasium.vector.VectorEnv[Any, Any, Any], actions: Any) -> int:
    for row in actions:
        env.step(row)
    return int(actions.size)


def _take_alone(env: gymnasium.Env[Any, Any], actions: Sequence[int]) -> int:
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return len(actions)


def _rate(take: Take, seconds: float) -> float:
    """Decisions a second."""
    taken, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or not taken:
        taken += take()
    return taken / passed


def _memory(traces: TraceSet, lanes: int, accelerator: str) -> tuple[int, int]:
    """Bytes that an environment of so many lanes keeps, and most that it has in use while it plays."""
    gc.collect()
    tracemalloc.start()
    try:
        env = LEDEVectorEnv(lanes, traces, accelerator=accelerator)
        tracemalloc.reset_peak()
        env.reset(seed=0)
        _take_many(env, np.ones((4, lanes), dtype=np.int64))
        peak = tracemalloc.get_traced_memory()[1]
        gc.collect()
        return tracemalloc.get_traced_memory()[0], peak
    finally:
        tracemalloc.stop()


def _machine() -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for package in ("numpy", "gymnasium", "numba"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions,
    }
