"""A log, and what a target policy would have done in its place: what estimators start from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.errors import InputError
from sde_gym.evaluation.player import Policy
from sde_gym.evaluation.targets import Target, setting_of
from sde_gym.offline.collect import trace_set_id
from sde_gym.offline.transitions import Transitions, refuse_restricted
from sde_gym.policies.controller import View
from sde_gym.policies.observation import HEAD_FEATURES
from sde_gym.traces import TraceSet

#: Settings of the log that the replay engine takes, too.
ENGINE_SETTINGS = (
    "depths", "reward", "credit", "episode", "k", "window", "max_draft", "max_new_tokens",
    "final_token_reward", "rho", "cost", "reads",
)  # fmt: skip

_RESTRICTED = (
    "so decisions of the other one are missing and rewards are sums over them; give the transitions that "
    "they were made from"
)


@dataclass(frozen=True, eq=False)
class EvaluationProblem:
    """The value of one policy is asked for, and n logged decisions are there to say it.

    Attributes:
        transitions: the log.
        policy: name of the target policy.
        exit_probability: float64 (n,), the target's probability of EXIT in each logged state.
        gamma: discount per decision, in (0, 1].
    """

    transitions: Transitions
    policy: str
    exit_probability: NDArray[np.float64]
    gamma: float

    def __post_init__(self) -> None:
        """Refuse what has no answer.

        Raises:
            InputError: gamma outside (0, 1], or not one probability in [0, 1] for each decision.
        """
        if not 0 < self.gamma <= 1:
            raise InputError(f"gamma is {self.gamma}; it must be in (0, 1]")
        probability = self.exit_probability
        inside = (probability >= 0) & (probability <= 1)
        if probability.shape != (len(self.transitions),) or not inside.all():
            raise InputError(
                f"policy {self.policy!r}: exit probabilities {probability.shape} in "
                f"[{probability.min(initial=np.inf)}, {probability.max(initial=-np.inf)}]; expected "
                f"{len(self.transitions)} in [0, 1], one for each decision"
            )

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """Of CONTINUE and EXIT under the target, float64 (n, 2)."""
        return np.stack([1.0 - self.exit_probability, self.exit_probability], axis=1)

    @cached_property
    def ratio(self) -> NDArray[np.float64]:
        """Probability of the logged action under the target over its propensity, float64 (n,)."""
        taken = self.probabilities[np.arange(len(self.transitions)), self.transitions.action]
        return taken / self.transitions.propensity

    @cached_property
    def log_weights(self) -> NDArray[np.float64]:
        """log w_t, the products of ratios up to each step, float64 (episodes, longest episode).

        -inf where the target would not have come this far; the last one is kept behind an episode's end.
        """
        with np.errstate(divide="ignore"):
            return np.cumsum(self.padded(np.log(self.ratio)), axis=1)

    def padded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """One number a decision as (episodes, longest episode), zeros behind an episode's end."""
        lengths = np.diff(self.transitions.start)
        matrix = np.zeros((len(lengths), int(lengths.max())))
        matrix[np.repeat(np.arange(len(lengths)), lengths), self.transitions.step] = values
        return matrix


def evaluation_problem(
    policy: Policy, transitions: Transitions, gamma: float, view: View | None = None
) -> EvaluationProblem:
    """Ask a policy at every logged state.

    Args:
        policy: the target; a `RandomController` counts as the coin that it flips.
        transitions: the log.
        gamma: discount per decision, in (0, 1].
        view: what `logged_view` made of the log; made here if None, which needs no trace set where
            `phase`, `depth` and `draft_length` were logged.

    Raises:
        InputError: as `Target`, `logged_view` and `EvaluationProblem`, or transitions restricted to one
            phase.
    """
    refuse_restricted(transitions, _RESTRICTED)
    target = Target(policy, transitions.names, transitions.settings)
    seen = logged_view(transitions) if view is None else view
    return EvaluationProblem(transitions, target.name, target.exit_probability(seen), gamma)


def logged_view(transitions: Transitions, traces: TraceSet | None = None) -> View:
    """The log as a controller is shown it: all n decisions at once, each in a lane of its own.

    Phase, depth index and draft length are read off the features of these names. Where one was not
    logged they follow from the actions: by counting within a round or a walk; within a whole text by
    replaying it.

    Args:
        transitions: the log; `decision` is its `step`.
        traces: the trace set that it was collected from; needed for whole texts whose features lack
            one of the three.

    Raises:
        InputError: settings or features that do not determine the three, another trace set, or
            transitions restricted to one phase.
    """
    refuse_restricted(transitions, _RESTRICTED)
    depths, num_layers, max_draft = setting_of(transitions.settings)
    names, action = transitions.names, transitions.action
    if {"phase", "depth", "draft_length"} <= set(names):
        values = transitions.observation.astype(np.float64)
        layers = np.rint(values[:, names.index("depth")] * num_layers).astype(np.int64)
        phase = values[:, names.index("phase")].astype(np.int64)
        index = np.minimum(np.searchsorted(depths, layers), len(depths) - 1)
        drafted = np.rint(values[:, names.index("draft_length")] * max_draft).astype(np.int64)
        if not np.array_equal(np.asarray(depths)[index], layers):
            raise InputError(
                f"transitions: the feature depth does not fit depths {list(depths)} of their settings"
            )
    elif transitions.settings.get("episode", "generation") != "generation":
        exits = np.cumsum(action) - action
        exits -= np.repeat(exits[transitions.start[:-1]], np.diff(transitions.start))
        phase, index, drafted = (exits > 0).astype(np.int64), transitions.step - exits, exits
    else:
        phase, index, drafted = _replayed(transitions, traces)
    return View(
        phase=phase,
        depth_index=index,
        draft_length=drafted,
        observation=transitions.observation,
        lanes=np.arange(len(transitions), dtype=np.int64),
        text=transitions.text,
        decision=transitions.step,
    )


def _replayed(
    transitions: Transitions, traces: TraceSet | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Phase, depth index and draft length of every decision, int64 (n,) each, by replaying whole texts."""
    if traces is None:
        raise InputError(
            "transitions: phase, depth and draft_length were not all logged, only "
            f"{', '.join(transitions.names)}; give the trace set they were collected from, or collect with "
            "observation='extended'"
        )
    settings = engine_settings(transitions, traces)
    engine = ReplayEngine(traces, observation=(), lanes=transitions.num_episodes, **settings)
    lanes = np.arange(engine.lanes, dtype=np.int64)
    engine.reset_lanes(lanes, transitions.text[transitions.start[:-1]])
    phase, index, drafted = (np.empty(len(transitions), dtype=np.int64) for _ in range(3))
    row = transitions.start[:-1].copy()
    while lanes.size:
        state, now = engine.state, row[lanes]
        phase[now], index[now], drafted[now] = state.phase[lanes], state.index[lanes], state.drafted[lanes]
        over = engine.step(transitions.action[now], lanes)[2]
        if not np.array_equal(over, transitions.terminal[now]):
            raise InputError(
                "transitions: episodes do not end where the trace set ends them; collect them again"
            )
        row[lanes] += 1
        lanes = lanes[~over]
    return phase, index, drafted


def engine_settings(transitions: Transitions, traces: TraceSet) -> dict[str, Any]:
    """Settings of a `ReplayEngine` in which the log would come about again.

    Raises:
        InputError: a trace set other than the log's, or transitions restricted to one phase.
    """
    refuse_restricted(transitions, _RESTRICTED)
    setting_of(transitions.settings)
    written = transitions.settings.get("traces")
    if written is not None and written != trace_set_id(traces):
        raise InputError(
            f"transitions were collected from the trace set {written}, but this one is "
            f"{trace_set_id(traces)}; give the one they come from"
        )
    kept = {name: transitions.settings[name] for name in ENGINE_SETTINGS if name in transitions.settings}
    # The log charged the heads that it read, whatever the target reads.
    kept.setdefault("reads", not HEAD_FEATURES.isdisjoint(transitions.names))
    return kept
