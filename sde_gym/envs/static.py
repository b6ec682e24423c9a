"""Static settings with their full cost, from traces alone.

A static controller drafts its fixed number of tokens whether the first of them was right or not, so
what it drafts behind a wrong proposal costs the same whatever it is: nothing off the true text need
be recorded. `run_controller` ends such rounds early, which flatters long drafts; use this to
compare static settings and to choose the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.rewards import (
    ACCEPTED_REWARD,
    CONTINUE_REWARD,
    REJECTED_REWARD,
    LEDEReward,
    SpeedReward,
)
from sde_gym.envs.run import RunResult, chosen_texts
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet


def run_static(
    traces: TraceSet,
    exit_depth: int,
    draft_length: int,
    texts: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    final_token_reward: float = 1.0,
    **settings: Any,
) -> RunResult:
    """What `StaticController(exit_depth, draft_length)` does in live decoding, over-drafting charged.

    One thing is not in the traces: an end-of-text proposal behind a wrong one would end the draft
    early. It is taken not to happen.

    Args:
        traces: recorded texts.
        exit_depth: a candidate depth.
        draft_length: 1..max_draft.
        texts: indices, none twice; all that are episodes if not given.
        final_token_reward: of the "lede" reward.
        **settings: of `ReplayEngine`, as in `run_controller`. `returns` are NaN for any reward but
            "lede" and "speed": what another one pays behind a wrong proposal is not known.

    Raises:
        InputError: as `run_controller`.
    """
    engine = ReplayEngine(traces, observation=(), final_token_reward=final_token_reward, **settings)
    controller = StaticController(exit_depth, draft_length)
    controller.bind(engine.depths, engine.num_layers, engine.max_draft)
    chosen = chosen_texts(engine, texts)
    tables, m, layers = engine.tables, len(engine.depths), engine.num_layers
    level = engine.depths.index(exit_depth)
    n = chosen.size
    position = np.ones(n, dtype=np.int64)
    names = ("tokens", "rounds", "drafted", "accepted", "decisions", "layer_passes", "sequential_layers")
    sums = {name: np.zeros(n, dtype=np.int64) for name in (*names, "head_calls")}
    returns = np.zeros(n)
    offsets = np.arange(draft_length)
    saved = (layers - exit_depth) / layers
    active = np.arange(n)
    while active.size:
        text, opening = chosen[active], position[active]
        remaining = tables.budget[text] - opening
        # Proposals as far as the text is known, (active, draft_length).
        known = opening[:, None] + offsets < tables.limit[text][:, None]
        row = tables.start[text][:, None] + np.where(known, opening[:, None] + offsets, 0)
        entry = row * m + level
        right = np.cumprod(tables.match[entry] & known, axis=1).astype(bool)
        accepted = right.sum(axis=1)
        # An end-of-text proposal that is right, or the first wrong one, ends the draft.
        ends_text = tables.ends_text[entry] & known & (offsets <= accepted[:, None])
        ended = ends_text.any(axis=1)
        first = np.where(ended, ends_text.argmax(axis=1) + 1, draft_length)
        drafted = np.minimum(first, remaining)
        accepted = np.minimum(accepted, drafted)
        unfed = (ended & (drafted == first)) | (drafted == remaining)
        final = ~(unfed & (accepted == drafted))
        fed = drafted - unfed
        stopped = (drafted == draft_length) & ~unfed & (draft_length < engine.max_draft)
        continued = level + stopped
        amounts: dict[str, Any] = {
            "tokens": accepted + final,
            "rounds": 1,
            "drafted": drafted,
            "accepted": accepted,
            "decisions": drafted + continued,
            "layer_passes": layers * (1 + fed),
            "sequential_layers": exit_depth * (1 + fed) + layers - exit_depth,
            "head_calls": drafted + 1,
        }
        for name, amount in amounts.items():
            sums[name][active] += amount
        if isinstance(engine.reward, LEDEReward):
            returns[active] += (
                ACCEPTED_REWARD * accepted
                + REJECTED_REWARD * (drafted - accepted)
                + saved * drafted
                + CONTINUE_REWARD * continued
                + engine.reward.final_token_reward * final
            )
        elif isinstance(engine.reward, SpeedReward):
            returns[active] += accepted + final - engine.reward.rho * amounts["sequential_layers"]
        else:
            returns[active] = np.nan
        position[active] += accepted + final
        active = active[position[active] < tables.limit[chosen[active]]]
    exits = np.zeros((n, m + 1), dtype=np.int64)
    exits[:, level] = sums["rounds"]
    return RunResult(
        controller=controller.name,
        depths=engine.depths,
        num_layers=layers,
        texts=chosen,
        returns=returns,
        exits=exits,
        **sums,
    )


def reward_ranking(traces: TraceSet, **settings: Any) -> float:
    """Whether more return means more speed: Spearman's rank correlation of the two over static settings.

    The settings are all candidate depths with all draft lengths 1..max_draft, each run by
    `run_static` over all texts; return and simulated speed-up are those of all texts together. A
    reward that does not rank settings by speed (a value well below 1) does not ask for speed: look
    before anything is trained on it.

    Args:
        traces: recorded texts.
        **settings: as in `run_static`.

    Returns:
        -1..1; NaN where it is undefined: a single setting, all equally good or equally fast, or a
        reward whose returns `run_static` does not know.

    Raises:
        InputError: as `run_static`.
    """
    engine_settings = {name: value for name, value in settings.items() if name != "texts"}
    engine = ReplayEngine(traces, observation=(), **engine_settings)
    results = [
        run_static(traces, depth, length, **settings)
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
