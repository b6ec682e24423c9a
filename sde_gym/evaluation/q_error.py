"""How far action values are from the truth, state by state, and how far n-step targets are.

`exact_q` says what an action is really worth under a policy, at every logged state. Held against it are

- the values of a Q-learner, against Q^pi of its own greedy policy: `policy_errors`;
- the values of an estimator's Q model, against Q^pi of its target policy: `model_errors`;
- n-step targets cut from the log, against Q^pi of the action that they are for: `n_step_bias`.

An uncorrected n-step target holds what the behaviour policy did behind its first action. With the true
value bootstrapped, the error of the target at row i, whose next m rows are used, is

    G_n(i) - Q^pi(s_i, a_i) = sum over 0 < j < m of gamma^j (Q^pi(s_{i+j}, a_{i+j}) - V^pi(s_{i+j})),

the discounted advantages of those actions: 0 for n = 1, negative wherever the log is worse than pi.

Values are compared as they are: no algorithm that learns values here rescales rewards, and `FittedQ`
undoes its own scale. Those of bc, sac, bcq and sb3_ppo are scores, not values, and are refused where
their policy file says what made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.ranking import rank_correlation
from sde_gym.errors import InputError
from sde_gym.evaluation.estimators import QModel
from sde_gym.evaluation.exact_q import ExactQ, exact_q
from sde_gym.evaluation.logged import evaluation_problem, logged_view
from sde_gym.evaluation.player import Policy
from sde_gym.evaluation.targets import Target
from sde_gym.offline.buffer import NStepBatches
from sde_gym.offline.collect import Progress
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.observation import Action, Phase
from sde_gym.policies.qnetwork import QController
from sde_gym.traces import TraceSet

FloatArray = NDArray[np.float64]
Row = dict[str, Any]

#: Bins of the number of decisions left in a logged episode, the present one included: their first numbers.
DECISIONS_LEFT = (1, 10, 30, 100)

#: True values are sums in different orders; they are equal if they are to so many decimals.
_DECIMALS = 9

#: Algorithms whose network gives scores to choose by, not action values.
_WITHOUT_VALUES = ("bc", "bcq", "sac", "sb3_ppo")


@dataclass(frozen=True, eq=False)
class StateGroup:
    """Some of the logged states.

    Attributes:
        by: what they are grouped by: "all", "phase" or "decisions left".
        states: which of these they are, such as "SELECT" or "10-29".
        rows: bool (n,).
    """

    by: str
    states: str
    rows: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class QErrors:
    """Action values beside the true ones at the n states of a log.

    Attributes:
        label: of whatever said them.
        predicted: float64 (n, 2), by `Action`.
        truth: the exact values of the policy that they are meant for.
        groups: states that are told apart; those without a single state are left out.
    """

    label: str
    predicted: FloatArray
    truth: ExactQ
    groups: tuple[StateGroup, ...]

    @property
    def advantages(self) -> tuple[FloatArray, FloatArray]:
        """Q(EXIT) - Q(CONTINUE), predicted and true, float64 (n,) each."""
        predicted, true = (q[:, Action.EXIT] - q[:, Action.CONTINUE] for q in (self.predicted, self.truth.q))
        return predicted, true

    def rows(self) -> list[Row]:
        """A flat row for each group, plain JSON values; None for what is undefined.

        label, policy, gamma, by, states
        count                   states in the group
        mean_true               mean of Q^pi over states and both actions
        true_deviation          its standard deviation over the same: the root mean square error of values
                                that are `mean_true` throughout
        bias                    mean of predicted less true value, over both actions
        overestimation          the same at the policy's own action only: how much V^pi is overrated
        mean_absolute_error     over both actions
        root_mean_square_error  over both actions
        advantage_correlation   Spearman's, of predicted and true advantage of EXIT
        agreement               share of states whose action of higher predicted value is no worse in truth,
                                up to rounding
        greedy_regret           mean true value lost by that action against the better one
        """
        truth, count = self.truth, np.arange(len(self.predicted))
        error = self.predicted - truth.q
        at_policy = error[count, truth.action]
        predicted, true = (np.round(advantage, _DECIMALS) for advantage in self.advantages)
        greedy = np.where(predicted > 0, int(Action.EXIT), int(Action.CONTINUE))  # a tie continues
        lost = truth.q.max(axis=1) - truth.q[count, greedy]
        found = []
        for group in self.groups:
            rows = group.rows
            correlation = rank_correlation(predicted[rows], true[rows])
            found.append(
                {
                    "label": self.label,
                    "policy": truth.policy,
                    "gamma": truth.gamma,
                    "by": group.by,
                    "states": group.states,
                    "count": int(rows.sum()),
                    "mean_true": float(truth.q[rows].mean()),
                    "true_deviation": float(truth.q[rows].std()),
                    "bias": float(error[rows].mean()),
                    "overestimation": float(at_policy[rows].mean()),
                    "mean_absolute_error": float(np.abs(error[rows]).mean()),
                    "root_mean_square_error": float(np.sqrt((error[rows] ** 2).mean())),
                    "advantage_correlation": correlation if np.isfinite(correlation) else None,
                    "agreement": float((lost[rows] < 0.1**_DECIMALS).mean()),
                    "greedy_regret": float(lost[rows].mean()),
                }
            )
        return found


def policy_values(policy: QController, transitions: Transitions) -> FloatArray:
    """What a policy's network says of both actions at every logged state, float64 (n, 2).

    Raises:
        InputError: a policy whose scores are no values, or one that reads what was not logged.
    """
    # The pipeline names it under provenance, agents among the settings of training.
    said = [policy.meta.get(key) or {} for key in ("provenance", "training")]
    algorithm = said[0].get("algorithm") or said[1].get("algorithm")
    if algorithm in _WITHOUT_VALUES:
        raise InputError(
            f"policy {policy.name!r} was trained by {algorithm}, whose scores say which action "
            "to choose, not what it is worth; give a policy of a Q-learner, such as double_dqn"
        )
    Target(policy, transitions.names, transitions.settings)  # refuses what does not fit
    columns = [transitions.names.index(name) for name in policy.observation]
    return policy.network(transitions.observation[:, columns]).astype(np.float64)


def policy_errors(
    policies: Mapping[str, QController],
    transitions: Transitions,
    traces: TraceSet,
    *,
    gamma: float | None = None,
    progress: Progress | None = None,
) -> list[QErrors]:
    """The values of Q-learners, each against the exact Q^pi of its own greedy policy.

    Args:
        policies: by label.
        transitions: logged decisions; they need not be those trained on.
        traces: what these were collected on.
        gamma: discount per decision that the policies were trained with; what their files say if None.
        progress: as `exact_q` calls it, for each policy.

    Raises:
        InputError: as `policy_values`, `exact_q` and `logged_view`; a file that does not say gamma.
    """
    groups = state_groups(transitions, traces)
    found = []
    for label, policy in policies.items():
        predicted = policy_values(policy, transitions)
        discount = _trained_gamma(policy) if gamma is None else gamma
        truth = exact_q(policy, transitions, traces, gamma=discount, progress=progress)
        found.append(QErrors(label, predicted, truth, groups))
    return found


def model_errors(
    models: Mapping[str, QModel],
    policy: Policy,
    transitions: Transitions,
    traces: TraceSet,
    *,
    gamma: float,
    truth: ExactQ | None = None,
) -> list[QErrors]:
    """The Q models of estimators, such as `FittedQ`, against the exact Q^pi of their target policy.

    Args:
        models: by label.
        policy: the target; deterministic.
        transitions: what the models are fitted to, and compared on.
        traces: what these were collected on.
        gamma: discount per decision.
        truth: what `exact_q` gave for just this, if it is there already.

    Raises:
        InputError: as `exact_q`, `evaluation_problem` and the models; a truth of another policy or gamma,
            or of a log of another length.
    """
    if truth is None:
        truth = exact_q(policy, transitions, traces, gamma=gamma)
    if (truth.gamma, truth.policy) != (gamma, policy.name):
        raise InputError(
            f"truth: exact values of {truth.policy!r} at gamma {truth.gamma}, but those of {policy.name!r} "
            f"at {gamma} are needed; call exact_q with these"
        )
    _check_truth(truth, transitions)
    problem = evaluation_problem(policy, transitions, gamma, logged_view(transitions, traces))
    groups = state_groups(transitions, traces)
    return [QErrors(label, model(problem), truth, groups) for label, model in models.items()]


def n_step_bias(
    transitions: Transitions,
    truth: ExactQ,
    steps: Sequence[int] = (1, 2, 3, 5, 10, 20),
    groups: Sequence[StateGroup] | None = None,
) -> list[Row]:
    """What uncorrected n-step targets are off by, exactly, at every logged state and action.

    The targets are those that training cuts from the log, with V^pi bootstrapped in place of a
    network: what is left is the error that the behaviour policy's actions bring in.

    Args:
        transitions: the log.
        truth: exact values of pi at its states; its gamma is used.
        steps: values of n, each at least 1.
        groups: states that are told apart, as `state_groups` makes them; all together if None.

    Returns:
        A row for each n and group, plain JSON values: policy, gamma, n, by, states, count; `bias`, the mean
        of target less Q^pi(s, a); `standard_error` of it over episodes, None for a single one;
        mean_absolute_error; root_mean_square_error; and `own_actions`, the share of targets in which every
        action behind the first is the policy's, so that nothing is to be corrected.

    Raises:
        InputError: an n below 1, or exact values of a log of another length.
    """
    _check_truth(truth, transitions)
    n, rows = len(transitions), np.arange(len(transitions))
    told_apart = [StateGroup("all", "all", np.ones(n, dtype=bool))] if groups is None else list(groups)
    taken = truth.q[rows, transitions.action]
    others = np.append(0, np.cumsum(transitions.action != truth.action))  # in the rows before each
    found: list[Row] = []
    for count in steps:
        batches = NStepBatches(transitions, whole_number("steps", count, 1), truth.gamma)
        used = batches.interval[:, 0].astype(np.int64)
        following = (1.0 - batches.terminal[:, 0]) * truth.value[batches.next_row]
        error = batches.reward[:, 0].astype(np.float64) + truth.gamma**used * following - taken
        own = others[rows + used] == others[rows + 1]
        for group in told_apart:
            off = error[group.rows]
            found.append(
                {
                    "policy": truth.policy,
                    "gamma": truth.gamma,
                    "n": int(count),
                    "by": group.by,
                    "states": group.states,
                    "count": len(off),
                    "bias": float(off.mean()),
                    "standard_error": _standard_error(off, transitions.episode[group.rows]),
                    "mean_absolute_error": float(np.abs(off).mean()),
                    "root_mean_square_error": float(np.sqrt((off**2).mean())),
                    "own_actions": float(own[group.rows].mean()),
                }
            )
    return found


def state_groups(
    transitions: Transitions, traces: TraceSet | None = None, edges: Sequence[int] = DECISIONS_LEFT
) -> tuple[StateGroup, ...]:
    """All states; those of each phase; and those with so many decisions left in their logged episode.

    Args:
        transitions: the log.
        traces: what it was collected on; see `logged_view` for when it is needed.
        edges: first numbers of the bins of decisions left, rising from 1; the last bin is open.

    Raises:
        InputError: edges that do not rise from 1, or as `logged_view`.
    """
    if not edges or edges[0] != 1 or any(low >= high for low, high in pairwise(edges)):
        raise InputError(f"edges: {list(edges)} must begin with 1 and rise")
    phase = logged_view(transitions, traces).phase
    left = np.repeat(transitions.start[1:], np.diff(transitions.start)) - np.arange(len(transitions))
    found = [StateGroup("all", "all", np.ones(len(transitions), dtype=bool))]
    found += [StateGroup("phase", each.name, phase == each) for each in Phase]
    for low, high in pairwise(edges):
        label = str(low) if high == low + 1 else f"{low}-{high - 1}"
        found.append(StateGroup("decisions left", label, (left >= low) & (left < high)))
    found.append(StateGroup("decisions left", f"{edges[-1]}+", left >= edges[-1]))
    return tuple(group for group in found if group.rows.any())


def error_table(errors: Sequence[QErrors], by: str = "all") -> str:
    """A Markdown table of `QErrors.rows`, grouped one way.

    Args:
        errors: a line for each and each of its groups.
        by: "all", "phase" or "decisions left".

    Raises:
        InputError: there is no such group.
    """
    rows = [row for each in errors for row in each.rows() if row["by"] == by]
    if not rows:
        raise InputError(f"by: no states are grouped by {by!r}; use 'all', 'phase' or 'decisions left'")
    left_out = {"by", "policy"} | ({"states"} if by == "all" else set())
    return rows_table([{name: row[name] for name in row if name not in left_out} for row in rows])


def rows_table(rows: Sequence[Row]) -> str:
    """Flat rows with the same entries as a Markdown table."""
    header = [name.replace("_", " ") for name in rows[0]]
    numbers = ["---" if isinstance(value, str) else "---:" for value in rows[0].values()]
    lines = [header, numbers, *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _trained_gamma(policy: QController) -> float:
    gamma = policy.meta.get("training", {}).get("gamma")
    if gamma is None:
        raise InputError(
            f"policy {policy.name!r} does not say with which gamma it was trained, which its values depend "
            "on; give gamma"
        )
    return float(gamma)


def _check_truth(truth: ExactQ, transitions: Transitions) -> None:
    if len(truth.action) != len(transitions):
        raise InputError(
            f"truth: exact values of {len(truth.action)} states, but {len(transitions)} were logged; call "
            "exact_q on these transitions"
        )


def _standard_error(values: FloatArray, episode: NDArray[np.int64]) -> float | None:
    """Of the mean of values that come in episodes, which vary as wholes; None for a single episode."""
    _, number = np.unique(episode, return_inverse=True)
    episodes = int(number.max()) + 1
    if episodes < 2:
        return None
    sums = np.bincount(number, weights=values - values.mean())
    return float(np.sqrt(episodes / (episodes - 1) * (sums**2).sum()) / len(values))
