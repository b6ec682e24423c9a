"""How good predicted probabilities are: do they rank, and do they mean what they say?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.errors import InputError

BINS = 10
"""Bins of equal width in a reliability curve."""

_LEAST = 1e-7  # a probability of 0 or 1 that is wrong would cost infinitely much


def auc(score: ArrayLike, happened: ArrayLike) -> float:
    """Probability that what happened was scored higher than what did not; ties count half.

    Args:
        score: float (n,).
        happened: bool (n,).

    Returns:
        0..1; NaN where all happened, or none.
    """
    scores, events = _checked(score, happened)
    positive = int(events.sum())
    negative = len(events) - positive
    if not positive or not negative:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal scores
    return float((ranks[place][events].sum() - positive * (positive + 1) / 2) / (positive * negative))


def log_loss(probability: ArrayLike, happened: ArrayLike) -> float:
    """Mean of -log of the probability given to what came, nats: float (n,), bool (n,) -> 0 at best."""
    predicted, events = _checked(probability, happened)
    given = np.clip(np.where(events, predicted, 1.0 - predicted), _LEAST, 1.0)
    return float(-np.log(given).mean())


def reliability_curve(
    probability: ArrayLike, happened: ArrayLike, bins: int = BINS
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """What was predicted and what came, by bins of equal width of the prediction.

    Args:
        probability: float (n,), 0..1.
        happened: bool (n,).
        bins: at least 1.

    Returns:
        Rows in each bin, int64 (bins,); mean prediction and share that happened, float64 (bins,), both
        0 in an empty bin.
    """
    predicted, events = _checked(probability, happened)
    place = np.clip((predicted * bins).astype(np.int64), 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    rows = np.maximum(count, 1)
    mean = np.bincount(place, weights=predicted, minlength=bins) / rows
    share = np.bincount(place, weights=events, minlength=bins) / rows
    return count, mean, share


def expected_calibration_error(probability: ArrayLike, happened: ArrayLike, bins: int = BINS) -> float:
    """Mean distance between prediction and share over the bins of `reliability_curve`, by their rows.

    Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.
    """
    count, mean, share = reliability_curve(probability, happened, bins)
    return float((count * np.abs(mean - share)).sum() / count.sum())


def figures(probability: ArrayLike, happened: ArrayLike) -> dict[str, Any]:
    """All of these as plain JSON values; `auc` is None where it does not exist."""
    count, mean, share = reliability_curve(probability, happened)
    ranked = auc(probability, happened)
    return {
        "rows": int(count.sum()),
        "share": float(np.asarray(happened, dtype=bool).mean()),
        "auc": None if np.isnan(ranked) else ranked,
        "log_loss": log_loss(probability, happened),
        "expected_calibration_error": expected_calibration_error(probability, happened),
        "reliability": {"rows": count.tolist(), "predicted": mean.tolist(), "happened": share.tolist()},
    }


def _checked(values: ArrayLike, happened: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    numbers, events = np.asarray(values, dtype=np.float64), np.asarray(happened, dtype=bool)
    if numbers.ndim != 1 or numbers.shape != events.shape or not numbers.size:
        raise InputError(
            f"predictions of shape {numbers.shape} and outcomes of shape {events.shape}: one of each a row "
            "is needed, and at least one row"
        )
    if not np.isfinite(numbers).all():
        raise InputError("predictions: a value is not finite")
    return numbers, events
