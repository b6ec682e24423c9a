"""Whether a reward asks for speed: how it ranks the static settings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.run import run_controller
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet


def reward_ranking(traces: TraceSet, **settings: Any) -> float:
    """Whether more return means more speed: Spearman's rank correlation of the two over static settings.

    The settings are all candidate depths with all draft lengths 1..max_draft, each run over all
    texts; return and simulated speed-up are those of all texts together. A reward that does not
    rank settings by speed (a value well below 1) does not ask for speed: look before anything is
    trained on it.

    Args:
        traces: recorded texts, with overrun: without, long drafts look better than they are.
        **settings: as in `run_controller`.

    Returns:
        -1..1; NaN where it is undefined: a single setting, or all equally good or equally fast.

    Raises:
        InputError: traces without overrun, or as `run_controller`.
    """
    traces.check_overrun("ranking static settings")
    engine = ReplayEngine(traces, observation=(), **settings)
    results = [
        run_controller(traces, StaticController(depth, length), **settings)
        for depth in engine.depths
        for length in range(1, engine.max_draft + 1)
    ]
    # Sums of floats in another order must not break a tie.
    returns = np.round([result.returns.sum() for result in results], 6)
    return rank_correlation(returns, np.round([result.speedup for result in results], 9))


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's rank correlation of two samples (n,), ties sharing their average rank.

    NaN where it is undefined: fewer than two values, a constant sample, or a NaN among them.
    """
    samples = [np.asarray(sample, dtype=np.float64) for sample in (first, second)]
    if samples[0].size < 2 or any(np.isnan(sample).any() for sample in samples):
        return float("nan")
    deviations = []
    for sample in samples:
        _, inverse, counts = np.unique(sample, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
        deviations.append(ranks - ranks.mean())
    norm = float(np.sqrt((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    return float(deviations[0] @ deviations[1]) / norm if norm else float("nan")
