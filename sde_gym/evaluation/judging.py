"""Estimators judged against the exact truth: how far off, in which order, and at what regret.

For each estimator, over the policies for which it has an estimate at all:

    mean_absolute_error    of estimate against true value, at the estimator's own gamma
    rank_correlation       Spearman's, of estimates and true values
    regret@k               best true value of all policies less the best among the k estimated highest
    coverage               share of the bootstrap intervals that hold the true value
    median_effective_sample_size   over all policies, those without an estimate included

Regret counts all policies: one without an estimate is never chosen, but may be the best that was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.ranking import rank_correlation
from sde_gym.errors import InputError
from sde_gym.evaluation.estimators import KINDS, MODEL_KINDS, Estimate, Estimator, QModel, estimate_all
from sde_gym.evaluation.fitted_q import FittedQ, FQESettings, LeastSquaresQ
from sde_gym.evaluation.logged import evaluation_problem, logged_view
from sde_gym.evaluation.player import Policy
from sde_gym.evaluation.policy_suite import check_names
from sde_gym.evaluation.truth import TrueValue, true_value
from sde_gym.offline.transitions import Transitions
from sde_gym.traces import TraceSet

FloatArray = NDArray[np.float64]
Row = dict[str, Any]
#: Called with (policies judged, policies in all).
Progress = Callable[[int, int], None]

#: k of regret@k.
REGRET_AT = (1, 3, 5)


@dataclass(frozen=True)
class Judgement:
    """What came out, as plain JSON; None stands for a number that there is not.

    Attributes:
        estimates: a row for each estimator and policy: `Estimate.row()`, `truth`,
            `truth_standard_error`, and `error`, the estimate less the truth.
        summary: a row for each estimator, see the module.
    """

    estimates: list[Row]
    summary: list[Row]

    def markdown(self) -> str:
        """The summary as a Markdown table."""
        header = list(self.summary[0])
        lines = [[_cell(row[name]) for name in header] for row in self.summary]
        rule = ["---" if name == "estimator" else "---:" for name in header]
        table = [[name.replace("_", " ") for name in header], rule, *lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in table)


def default_estimators(
    gamma: float, fitted: FQESettings | None = None, *, fqe: bool = True
) -> list[Estimator]:
    """All kinds: those with a Q model once with LSTD-Q and once with fitted Q evaluation.

    Args:
        gamma: discount per decision.
        fitted: settings of the latter.
        fqe: False leaves it out; nothing then needs d3rlpy.
    """
    models: list[tuple[str, QModel]] = [("lstd", LeastSquaresQ())]
    if fqe:
        models.append(("fqe", FittedQ(fitted)))
    weighted = [Estimator(kind, kind, gamma) for kind in KINDS if kind not in MODEL_KINDS]
    modelled = [
        Estimator(label if kind == "dm" else f"{kind}-{label}", kind, gamma, model)
        for label, model in models
        for kind in MODEL_KINDS
    ]
    return weighted + modelled


def judge(
    estimators: Sequence[Estimator],
    policies: Sequence[Policy],
    transitions: Transitions,
    traces: TraceSet,
    *,
    level: float = 0.95,
    samples: int = 1000,
    repeats: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> Judgement:
    """Estimate every policy with every estimator, and compare with the truth.

    Args:
        estimators: see `default_estimators`.
        policies: see `policy_suite`; at least 2, and 20 or more for ranks that mean something.
        transitions: the log: whole texts, or rounds.
        traces: the trace set that it was collected from.
        level: of the intervals.
        samples: bootstrap samples.
        repeats: replays of a policy that draws its actions, see `true_value`.
        seed: of bootstrap and replays.
        progress: see `Progress`.

    Raises:
        InputError: too few policies or estimators, names given twice, or what estimators, policies and
            trace set have against it.
    """
    if len(policies) < 2 or not estimators:
        raise InputError(
            f"{len(policies)} policies and {len(estimators)} estimators; give at least 2 policies to rank, "
            "and an estimator"
        )
    check_names(policies)
    labels = [estimator.name for estimator in estimators]
    if len(set(labels)) < len(labels):
        raise InputError(f"estimators: a name is given twice in {', '.join(labels)}")
    gammas = list(dict.fromkeys(estimator.gamma for estimator in estimators))
    view = logged_view(transitions, traces)
    estimates: list[Estimate] = []
    truths: list[TrueValue] = []
    for number, policy in enumerate(policies, start=1):
        truths.append(true_value(policy, transitions, traces, gammas, repeats=repeats, seed=seed))
        problems = {gamma: evaluation_problem(policy, transitions, gamma, view) for gamma in gammas}
        asked = [(estimator, problems[estimator.gamma]) for estimator in estimators]
        estimates += estimate_all(asked, level=level, samples=samples, seed=seed)
        if progress is not None:
            progress(number, len(policies))
    return _judged(estimates, truths, labels)


def _judged(estimates: Sequence[Estimate], truths: Sequence[TrueValue], labels: Sequence[str]) -> Judgement:
    """Rows of estimates given policy by policy."""
    rows, summary = [], []
    for at, label in enumerate(labels):
        own = list(estimates[at :: len(labels)])
        index = truths[0].gammas.index(own[0].gamma)
        truth = np.array([true.value[index] for true in truths])
        for said, true in zip(own, truths, strict=True):
            value, error = float(true.value[index]), float(true.standard_error[index])
            off = said.value - value if np.isfinite(said.value) else None
            rows.append({**said.row(), "truth": value, "truth_standard_error": error, "error": off})
        summary.append({"estimator": label, **summarise(own, truth)})
    return Judgement(rows, summary)


def summarise(estimates: Sequence[Estimate], truth: FloatArray) -> Row:
    """How one estimator did over p policies; see the module.

    Args:
        estimates: one a policy.
        truth: float64 (p,), their true values.
    """
    value = np.array([said.value for said in estimates])
    low, high = np.array([said.low for said in estimates]), np.array([said.high for said in estimates])
    some = np.isfinite(value)
    bounded = np.isfinite(low) & np.isfinite(high)
    held = (low <= truth) & (truth <= high)
    row: Row = {
        "gamma": estimates[0].gamma,
        "policies": len(estimates),
        "estimated": int(some.sum()),
        "mean_absolute_error": _number(np.abs(value - truth)[some].mean()) if some.any() else None,
        "rank_correlation": _number(rank_correlation(value[some], truth[some])),
    }
    for k in REGRET_AT:
        row[f"regret@{k}"] = regret(value, truth, k)
    row["coverage"] = _number(held[bounded].mean()) if bounded.any() else None
    sizes = [said.effective_sample_size for said in estimates]
    row["median_effective_sample_size"] = float(np.median(sizes))
    return row


def regret(value: FloatArray, truth: FloatArray, k: int) -> float | None:
    """Best true value less the best among the k policies of the highest estimates; None without estimates.

    Args:
        value: float64 (p,), estimates, NaN where there is none; of equal ones the first counts as higher.
        truth: float64 (p,).
        k: at least 1; if fewer have an estimate, those.
    """
    some = np.flatnonzero(np.isfinite(value))
    if not some.size:
        return None
    best = some[np.argsort(-value[some], kind="stable")[:k]]
    return float(truth.max() - truth[best].max())


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
