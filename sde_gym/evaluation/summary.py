"""What a policy did on some texts, in a few numbers: how `sde_gym.evaluation.value` sums up its runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.run import RunResult

ALL = "all"
"""Stands for all tasks together."""


@dataclass(frozen=True)
class Estimate:
    """A mean return per text.

    Attributes:
        gamma: discount per decision.
        mean: over texts, and over seeds if there are several.
        standard_error: over texts; None for a single text.
        seed_error: standard error of the mean over seeds; None unless there are several.
    """

    gamma: float
    mean: float
    standard_error: float | None
    seed_error: float | None


@dataclass(frozen=True)
class Summary:
    """A policy on the texts of one task, or on all.

    Attributes:
        task: its name, or `ALL`.
        texts: number of texts.
        undiscounted: the mean return.
        values: the same at each gamma asked for.
        acceptance_rate: accepted over proposed, 1.0 if nothing was proposed.
        mean_exit_depth: mean of l* over rounds, L where nothing was proposed.
        mean_draft_length: proposals a round.
        layer_speedup: simulated by counting layers; heads and controllers are free.
        speedup: simulated under the cost model.
        best_return: undiscounted mean return of the hindsight optimum.
        best_layer_speedup: highest `layer_speedup` in hindsight.
        best_speedup: highest `speedup` in hindsight, with no head read that is not proposed from.
        return_fraction: `undiscounted.mean` over `best_return`; None unless that is positive.
        layer_speedup_fraction: `layer_speedup` over `best_layer_speedup`.
        speedup_fraction: `speedup` over `best_speedup`.
    """

    task: str
    texts: int
    undiscounted: Estimate
    values: tuple[Estimate, ...]
    acceptance_rate: float
    mean_exit_depth: float
    mean_draft_length: float
    layer_speedup: float
    speedup: float
    best_return: float
    best_layer_speedup: float
    best_speedup: float
    return_fraction: float | None
    layer_speedup_fraction: float
    speedup_fraction: float


def part_of(run: RunResult, chosen: NDArray[np.bool_]) -> RunResult:
    """The same run on some of its texts."""
    arrays: dict[str, Any] = {
        field.name: getattr(run, field.name)[chosen]
        for field in dataclasses.fields(run)
        if isinstance(getattr(run, field.name), np.ndarray)
    }
    return dataclasses.replace(run, **arrays)


def _pooled(runs: Sequence[RunResult]) -> RunResult:
    """Runs one behind the other, as if all were texts of one run."""
    arrays: dict[str, Any] = {
        field.name: np.concatenate([getattr(run, field.name) for run in runs])
        for field in dataclasses.fields(RunResult)
        if isinstance(getattr(runs[0], field.name), np.ndarray)
    }
    return dataclasses.replace(runs[0], **arrays)


def _estimate(gamma: float, returns: NDArray[np.float64]) -> Estimate:
    """Of returns (r, n)."""
    by_text, by_seed = returns.mean(axis=0), returns.mean(axis=1)
    return Estimate(float(gamma), float(by_text.mean()), _standard_error(by_text), _standard_error(by_seed))


def _standard_error(sample: NDArray[np.float64]) -> float | None:
    return float(sample.std(ddof=1) / np.sqrt(len(sample))) if len(sample) > 1 else None


def summarise(
    task: str,
    runs: Sequence[RunResult],
    gammas: Sequence[float],
    returns: NDArray[np.float64],
    optimum: tuple[float, float, float],
) -> Summary:
    """Of r runs of n texts, with their returns (g, r, n) and the optimum of these texts."""
    run = _pooled(runs)
    undiscounted = _estimate(1.0, np.stack([single.returns for single in runs]))
    best, best_layers, best_speedup = optimum
    return Summary(
        task=task,
        texts=len(runs[0].texts),
        undiscounted=undiscounted,
        values=tuple(_estimate(gamma, part) for gamma, part in zip(gammas, returns, strict=True)),
        acceptance_rate=run.acceptance_rate,
        mean_exit_depth=run.mean_exit_depth,
        mean_draft_length=run.mean_draft_length,
        layer_speedup=run.layer_speedup,
        speedup=run.speedup,
        best_return=best,
        best_layer_speedup=best_layers,
        best_speedup=best_speedup,
        return_fraction=undiscounted.mean / best if best > 0 else None,
        layer_speedup_fraction=run.layer_speedup / best_layers,
        speedup_fraction=run.speedup / best_speedup,
    )


def plain(summary: Summary) -> dict[str, Any]:
    """A summary as plain JSON values."""
    return {**dataclasses.asdict(summary), "values": [dataclasses.asdict(value) for value in summary.values]}


def flat_row(summary: Summary) -> dict[str, Any]:
    """A summary as one flat row of plain JSON values; see `PolicyValue.rows`."""
    own = summary.undiscounted
    row: dict[str, Any] = {
        "task": summary.task,
        "texts": summary.texts,
        "return": own.mean,
        "return_error": own.standard_error if own.seed_error is None else own.seed_error,
    }
    row |= {f"value@{value.gamma:g}": value.mean for value in summary.values if value.gamma != 1.0}
    numbers = [field.name for field in dataclasses.fields(Summary)][4:]
    return {**row, **{name: getattr(summary, name) for name in numbers}}
