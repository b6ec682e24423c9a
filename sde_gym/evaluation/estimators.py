"""Off-policy estimators: what a policy is worth, from decisions that another one made.

Notation: episode e took action a_t in state s_t with propensity mu_t and was paid r_t; the target
takes it with probability pi_t. w_t is the product of pi/mu up to and including t, and stays what it
was behind the end of an episode, where all rewards and values are 0. The discount counts decisions.

    is      mean of w_T sum gamma^t r_t                  importance sampling, whole trajectories
    pdis    mean of sum gamma^t w_t r_t                  per decision (Precup, Sutton and Singh 2000)
    wis     as `is`, weights divided by their sum        self-normalised: biased, less variance
    wpdis   as `pdis`, weights of each t divided by their sum over all episodes (Thomas 2015)
    dm      mean of V(s_0)                               direct method: what a Q model says
    dr      mean of V(s_0) + sum gamma^t w_t d_t         doubly robust (Jiang and Li 2016)
    wdr     as `dr`, weights as in `wpdis`               (Thomas and Brunskill 2016)

with d_t = r_t + gamma V(s_{t+1}) - Q(s_t, a_t) and V(s) = sum_a pi(a|s) Q(s, a).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.errors import InputError
from sde_gym.evaluation.logged import EvaluationProblem

FloatArray = NDArray[np.float64]
#: Values of CONTINUE and EXIT in every logged state, float64 (n, 2), under the problem's target and gamma.
QModel = Callable[[EvaluationProblem], FloatArray]

#: All kinds of estimator.
KINDS = ("is", "pdis", "wis", "wpdis", "dm", "dr", "wdr")
#: Those that need a Q model.
MODEL_KINDS = ("dm", "dr", "wdr")
#: Resampled counts held at a time, in numbers.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Estimator:
    """How to estimate.

    Attributes:
        name: for tables.
        kind: one of `KINDS`.
        gamma: discount per decision.
        q_model: for `MODEL_KINDS`.
    """

    name: str
    kind: str
    gamma: float
    q_model: QModel | None = None

    def __post_init__(self) -> None:
        """Raises InputError for a kind that there is not, or one that lacks its Q model."""
        if self.kind not in KINDS:
            raise InputError(f"estimator {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.kind in MODEL_KINDS and self.q_model is None:
            raise InputError(f"estimator {self.name!r}: kind {self.kind!r} needs a q_model")


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of a policy.

    Attributes:
        estimator: its name.
        policy: the policy's.
        value: mean discounted return of an episode; NaN if there is no saying.
        low: lower end of the bootstrap interval, NaN if there is none.
        high: upper end.
        level: share of intervals that should hold the truth.
        gamma: discount per decision, of the value.
        effective_sample_size: (sum w)^2 / sum w^2 over episodes, w being their whole weights (Kong
            1992); all episodes for `dm`, which has no weights; 0 if no episode has any.
        episodes: number of logged episodes.
        reason: why something is NaN, or what was left out; empty if all is well.
    """

    estimator: str
    policy: str
    value: float
    low: float
    high: float
    level: float
    gamma: float
    effective_sample_size: float
    episodes: int
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """As plain JSON; None for NaN."""
        return {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, eq=False)
class Parts:
    """An estimate taken apart by its E episodes, so that they can be drawn anew.

    The estimate is mean(terms) + sum over columns of the weighted mean of `values` under `weights`.

    Attributes:
        terms: float64 (E,).
        weights: float64 (E, k), each column up to a factor; k may be 0.
        values: float64 (E, k).
    """

    terms: FloatArray
    weights: FloatArray
    values: FloatArray

    def estimate(self, counts: FloatArray) -> FloatArray:
        """Estimates, float64 (b,), from float64 (b, E), how often each episode counts.

        NaN where a column's weights are all 0, not finite where a sum is beyond a float64.
        """
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean: FloatArray = counts @ self.terms / counts.sum(axis=1)
            if self.weights.shape[1]:
                mean += (counts @ (self.weights * self.values) / (counts @ self.weights)).sum(axis=1)
        return mean


def estimate(
    estimator: Estimator, problem: EvaluationProblem, level: float = 0.95, samples: int = 1000, seed: int = 0
) -> Estimate:
    """`estimate_all` of one."""
    return estimate_all([(estimator, problem)], level=level, samples=samples, seed=seed)[0]


def estimate_all(
    asked: Sequence[tuple[Estimator, EvaluationProblem]],
    *,
    level: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> list[Estimate]:
    """Estimates with percentile bootstrap intervals, from the same resamples of episodes.

    A Q model is asked once for each problem, however many estimators share it.

    Args:
        asked: estimators with a problem each, at their gamma; all problems are of the same log.
        level: of the intervals, in (0, 1). They hold the scatter between episodes; the error of a Q
            model is not in it.
        samples: bootstrap samples, at least 1.
        seed: of the bootstrap.

    Raises:
        InputError: a level or number out of range, another gamma or log, or Q values that are not finite.
    """
    if not 0 < level < 1:
        raise InputError(f"level is {level}; it must be inside (0, 1)")
    if samples < 1:
        raise InputError(f"samples is {samples}; it must be at least 1")
    whole_number("seed", seed, 0)
    reasons: list[str] = []
    parts: list[Parts | None] = []
    estimates: list[float] = []
    values: dict[tuple[int, int], FloatArray] = {}
    for estimator, problem in asked:
        if estimator.gamma != problem.gamma or problem.transitions is not asked[0][1].transitions:
            raise InputError(
                f"estimator {estimator.name!r} has gamma {estimator.gamma}, its problem {problem.gamma}; "
                "give both the same, and problems of one log"
            )
        key, model = (id(estimator.q_model), id(problem)), estimator.q_model
        if model is not None and key not in values:
            values[key] = model(problem)
        reason, part, value = _undefined(estimator.kind, problem.log_weights), None, float("nan")
        if not reason:
            part = taken_apart(estimator.kind, problem, values.get(key))
            value = float(part.estimate(np.ones((1, len(part.terms))))[0])
        if part is not None and not np.isfinite(value):
            reason, part, value = "weights times rewards are beyond a float64", None, float("nan")
        reasons.append(reason)
        parts.append(part)
        estimates.append(value)
    drawn = iter(_bootstrap([part for part in parts if part is not None], samples, seed))
    answers = []
    for (estimator, problem), value, reason, part in zip(asked, estimates, reasons, parts, strict=True):
        low = high = float("nan")
        if part is not None:
            low, high, reason = _interval(next(drawn), level, episodes=len(part.terms))
        episodes = problem.transitions.num_episodes
        size = effective_sample_size(problem.log_weights[:, -1])
        if estimator.kind == "dm":
            size = float(episodes)
        name, gamma = estimator.name, problem.gamma
        answers.append(Estimate(name, problem.policy, value, low, high, level, gamma, size, episodes, reason))
    return answers


def taken_apart(kind: str, problem: EvaluationProblem, q_values: FloatArray | None = None) -> Parts:
    """The numbers that an estimate is a mean of; see the module for the formulas.

    Args:
        kind: one of `KINDS`.
        problem: the policy and the log.
        q_values: float64 (n, 2), for `MODEL_KINDS`.

    Raises:
        InputError: Q values that are missing, of another shape or not finite.
    """
    reward = problem.padded(problem.transitions.reward.astype(np.float64))
    discount = problem.gamma ** np.arange(reward.shape[1])
    start, paid = np.zeros(len(reward)), reward
    if kind in MODEL_KINDS:
        q = _checked(problem, q_values)
        value = problem.padded((problem.probabilities * q).sum(axis=1))
        following = np.concatenate([value[:, 1:], np.zeros((len(value), 1))], axis=1)
        taken = problem.padded(q[np.arange(len(q)), problem.transitions.action])
        start, paid = value[:, 0], reward + problem.gamma * following - taken
    nothing = np.zeros((len(reward), 0))
    if kind == "dm":
        return Parts(start, nothing, nothing)
    logs, values = problem.log_weights, paid * discount
    if kind in ("is", "wis"):
        logs, values = logs[:, -1:], values.sum(axis=1, keepdims=True)
    if kind in ("is", "pdis", "dr"):
        with np.errstate(over="ignore"):
            return Parts(start + (np.exp(logs) * values).sum(axis=1), nothing, nothing)
    return Parts(start, _scaled(logs), values)


def effective_sample_size(log_weights: FloatArray) -> float:
    """(sum w)^2 / sum w^2 of weights w given by their logarithms, float64 (E,); 0 if all are 0."""
    weights = _scaled(log_weights[:, None])[:, 0]
    square = float((weights**2).sum())
    return float(weights.sum()) ** 2 / square if square else 0.0


def _scaled(logs: FloatArray) -> FloatArray:
    """exp(logs), each column divided by its largest: no overflow, however long the episodes."""
    largest = logs.max(axis=0)
    weights: FloatArray = np.exp(logs - np.where(np.isfinite(largest), largest, 0.0))
    return weights


def _undefined(kind: str, logs: FloatArray) -> str:
    """Why these weights allow no estimate; empty if they do."""
    if kind == "dm":
        return ""
    if kind != "dr" and not np.isfinite(logs[:, -1]).any():
        return "no logged episode does what the policy would have done, to its end"
    longest = float((logs[:, -1:] if kind == "is" else logs).max())
    if kind in ("is", "pdis", "dr") and longest > np.log(np.finfo(np.float64).max):
        return f"an importance weight of e^{longest:.0f} is beyond a float64: episodes are too long for it"
    return ""


def _checked(problem: EvaluationProblem, q_values: FloatArray | None) -> FloatArray:
    shape = (len(problem.transitions), 2)
    if q_values is None or q_values.shape != shape:
        found = "none" if q_values is None else str(q_values.shape)
        raise InputError(f"q_values: expected {shape}, one row a logged decision, but found {found}")
    if not np.isfinite(q_values).all():
        raise InputError(f"q_values hold NaN or infinity for policy {problem.policy!r}; fit the model again")
    return np.asarray(q_values, dtype=np.float64)


def _bootstrap(parts: Sequence[Parts], samples: int, seed: int) -> list[FloatArray]:
    """Estimates from episodes drawn anew with replacement, float64 (samples,) for each of the parts."""
    if not parts:
        return []
    rng = np.random.default_rng(seed)
    episodes = len(parts[0].terms)
    block = max(1, _BLOCK // episodes)
    drawn: list[list[FloatArray]] = [[] for _ in parts]
    for done in range(0, samples, block):
        size = min(block, samples - done)
        chosen = rng.integers(episodes, size=(size, episodes)) + np.arange(size)[:, None] * episodes
        counts = np.bincount(chosen.ravel(), minlength=size * episodes).reshape(size, episodes)
        for part, found in zip(parts, drawn, strict=True):
            found.append(part.estimate(counts.astype(np.float64)))
    return [np.concatenate(found) for found in drawn]


def _interval(drawn: FloatArray, level: float, episodes: int) -> tuple[float, float, str]:
    """Percentiles of bootstrap estimates, and what there is to say about them."""
    nan = float("nan")
    if episodes == 1:
        return nan, nan, "one episode: nothing to resample, so no interval"
    defined = drawn[np.isfinite(drawn)]
    lost, samples = len(drawn) - len(defined), len(drawn)
    if 2 * lost > samples:
        return nan, nan, f"no interval: {lost} of {samples} bootstrap samples hold no episode with any weight"
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    note = f"{lost} of {samples} bootstrap samples were left out: no episode with any weight" if lost else ""
    return float(low), float(high), note
