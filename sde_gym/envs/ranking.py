"""Whether a reward asks for speed: how it ranks the static settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.rewards import Reward, StepOutcome, checked_reward
from sde_gym.envs.run import run_controller
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet

SHIPPED_REWARDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lede": MappingProxyType({"reward": "lede"}),
        "lede, final_token_reward=0": MappingProxyType({"reward": "lede", "final_token_reward": 0.0}),
        "speed": MappingProxyType({"reward": "speed"}),
    }
)
"""Settings of the rewards that ship with the package, and of the paper's literal variant, by label."""


@dataclass(frozen=True)
class RewardRank:
    """How one reward ranks the static settings.

    Attributes:
        reward: its label.
        correlation: Spearman's, of return and simulated speed-up; NaN where it is undefined.
        best: the setting with the highest return, as (exit depth, draft length).
        best_speedup: simulated, of that setting.
        fastest: the setting with the highest simulated speed-up.
        fastest_speedup: of that setting.
    """

    reward: str
    correlation: float
    best: tuple[int, int]
    best_speedup: float
    fastest: tuple[int, int]
    fastest_speedup: float


def reward_ranking(traces: TraceSet, **settings: Any) -> float:
    """Whether more return means more speed: Spearman's rank correlation of the two over static settings.

    The settings are all candidate depths with all draft lengths 1..max_draft, each run over all
    texts; return and simulated speed-up are those of all texts together. A reward that does not
    rank settings by speed (a value well below 1) does not ask for speed: look before anything is
    trained on it.

    Args:
        traces: recorded texts, with overrun: without, long drafts look better than they are.
        **settings: as in `run_controller`; the speed-up is that of its cost model.

    Returns:
        -1..1; NaN where it is undefined: a single setting, or all equally good or equally fast.

    Raises:
        InputError: traces without overrun, or as `run_controller`.
    """
    return ranking_table(traces, {"": {}}, **settings)[0].correlation


def ranking_table(
    traces: TraceSet, rewards: Mapping[str, Mapping[str, Any]] = SHIPPED_REWARDS, **settings: Any
) -> list[RewardRank]:
    """`reward_ranking` of several rewards, with the settings that they and the cost model prefer.

    Args:
        traces: as in `reward_ranking`.
        rewards: by label, the settings that make the reward.
        **settings: as in `run_controller`, the same for all rewards.

    Raises:
        InputError: as `reward_ranking`.
    """
    traces.check_overrun("ranking static settings")
    engines = [ReplayEngine(traces, observation=(), **{**settings, **own}) for own in rewards.values()]
    shared = {name: value for name, value in settings.items() if name not in _REWARD_ARGUMENTS}
    grid = [(depth, length) for depth in engines[0].depths for length in range(1, engines[0].max_draft + 1)]
    returns, speedups = np.zeros((len(engines), len(grid))), np.zeros(len(grid))
    for column, (depth, length) in enumerate(grid):
        # Each setting is played once; the rewards are functions of the same steps.
        tally = _Tally([engine.reward for engine in engines])
        result = run_controller(traces, StaticController(depth, length), reward=tally, **shared)
        returns[:, column], speedups[column] = tally.totals, result.speedup
    return [_ranked(label, grid, row, speedups) for label, row in zip(rewards, returns, strict=True)]


def ranking_text(ranks: Sequence[RewardRank]) -> str:
    """`ranking_table` as a Markdown table, to print."""
    lines = [
        "| reward | rank correlation with speed | setting it likes best | fastest setting |",
        "|---|---|---|---|",
    ]
    for rank in ranks:
        correlation = "undefined" if np.isnan(rank.correlation) else f"{rank.correlation:.3f}"
        best, fastest = (
            f"depth {setting[0]}, {setting[1]} drafted: {speedup:.2f}x"
            for setting, speedup in (
                (rank.best, rank.best_speedup),
                (rank.fastest, rank.fastest_speedup),
            )
        )
        lines.append(f"| {rank.reward} | {correlation} | {best} | {fastest} |")
    return "\n".join(lines)


_REWARD_ARGUMENTS = ("reward", "final_token_reward", "rho")


class _Tally:
    """A reward that pays nothing and sums what others would have paid over all texts."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = rewards
        self.totals = np.zeros(len(rewards))

    def __call__(self, outcome: StepOutcome) -> NDArray[np.float64]:
        self.totals += [float(checked_reward(reward, outcome).sum()) for reward in self.rewards]
        return np.zeros(len(outcome.action))


def _ranked(
    label: str,
    grid: Sequence[tuple[int, int]],
    returns: NDArray[np.float64],
    speedups: NDArray[np.float64],
) -> RewardRank:
    # Sums of floats in another order must not break a tie.
    returns, speedups = np.round(returns, 6), np.round(speedups, 9)
    best, fastest = int(returns.argmax()), int(speedups.argmax())
    return RewardRank(
        reward=label,
        correlation=rank_correlation(returns, speedups),
        best=grid[best],
        best_speedup=float(speedups[best]),
        fastest=grid[fastest],
        fastest_speedup=float(speedups[fastest]),
    )


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
