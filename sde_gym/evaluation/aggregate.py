"""Results of several seeds on several tasks in one number, with an interval (Agarwal et al. 2021).

Definitions are those of "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
Scores are float (seeds, tasks), or (..., seeds, tasks) where a statistic is vectorised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import whole_number
from sde_gym.errors import InputError

FloatArray = NDArray[np.float64]
#: (..., seeds, tasks) -> (...,).
Statistic = Callable[[FloatArray], FloatArray]

#: Numbers resampled at a time.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Interval:
    """A statistic and its percentile bootstrap interval.

    Attributes:
        value: of the scores as they are.
        low: lower end.
        high: upper end.
        level: share of intervals that should hold the true value.
    """

    value: float
    low: float
    high: float
    level: float


def interquartile_mean(scores: FloatArray) -> FloatArray:
    """Mean of the middle half of all scores, seeds and tasks together: (..., seeds, tasks) -> (...,).

    A quarter of their number, rounded down, is left out at either end.
    """
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    mean: FloatArray = flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)
    return mean


def mean_score(scores: FloatArray) -> FloatArray:
    """Mean of all scores: (..., seeds, tasks) -> (...,)."""
    mean: FloatArray = scores.mean(axis=(-2, -1))
    return mean


def stratified_interval(
    scores: ArrayLike,
    statistic: Statistic = interquartile_mean,
    *,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """A statistic with its interval: seeds are drawn anew with replacement, within each task by itself.

    Args:
        scores: float (seeds, tasks); a single task may be given as (seeds,).
        statistic: vectorised, see `Statistic`.
        level: of the interval, in (0, 1).
        samples: bootstrap samples.
        seed: of the bootstrap.

    Raises:
        InputError: scores that are no such table or not finite, or a level or number out of range.
    """
    table = _table("scores", scores)
    _check(level, samples, seed)
    rng = np.random.default_rng(seed)
    drawn = [statistic(part) for part in _resampled(table, samples, rng)]
    return _interval(float(statistic(table)), np.concatenate(drawn), level)


def probability_of_improvement(first: FloatArray, second: FloatArray) -> FloatArray:
    """P(a run of `first` scores above one of `second`), ties half, mean over tasks.

    Per task it is Mann and Whitney's U over the number of pairs.

    Args:
        first: float (..., seeds, tasks).
        second: float (..., other seeds, tasks).

    Returns:
        float64 (...,).
    """
    difference = first[..., :, None, :] - second[..., None, :, :]
    wins: FloatArray = ((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-3, -2, -1))
    return wins


def improvement_interval(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, samples: int = 2000, seed: int = 0
) -> Interval:
    """`probability_of_improvement` with its interval; seeds of either are drawn anew, by task.

    Args:
        first: float (seeds, tasks); a single task may be given as (seeds,).
        second: float (other seeds, tasks).
        level: of the interval, in (0, 1).
        samples: bootstrap samples.
        seed: of the bootstrap.

    Raises:
        InputError: as `stratified_interval`, or tables of different numbers of tasks.
    """
    one, other = _table("first", first), _table("second", second)
    if one.shape[1] != other.shape[1]:
        raise InputError(f"first has {one.shape[1]} tasks and second {other.shape[1]}; give the same tasks")
    _check(level, samples, seed)
    rng = np.random.default_rng(seed)
    drawn = [probability_of_improvement(_draw(one, 1, rng), _draw(other, 1, rng)) for _ in range(samples)]
    return _interval(float(probability_of_improvement(one, other)), np.concatenate(drawn), level)


def _draw(table: FloatArray, samples: int, rng: np.random.Generator) -> FloatArray:
    """Tables of the same size, (samples, seeds, tasks), each task's seeds drawn anew with replacement."""
    rows = rng.integers(table.shape[0], size=(samples, *table.shape))
    return table[rows, np.arange(table.shape[1])]


def _resampled(table: FloatArray, samples: int, rng: np.random.Generator) -> list[FloatArray]:
    block = max(1, _BLOCK // table.size)
    return [_draw(table, min(block, samples - done), rng) for done in range(0, samples, block)]


def _interval(value: float, drawn: FloatArray, level: float) -> Interval:
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), level)


def _table(name: str, scores: ArrayLike) -> FloatArray:
    table = np.asarray(scores, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise InputError(
            f"{name}: {table.shape} numbers; give finite ones, (seeds, tasks), at least one of each"
        )
    return table


def _check(level: float, samples: int, seed: int) -> None:
    whole_number("seed", seed, 0)
    if not 0 < level < 1:
        raise InputError(f"level is {level}; it must be inside (0, 1)")
    if samples < 1:
        raise InputError(f"samples is {samples}; it must be at least 1")
