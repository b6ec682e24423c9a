"""Train any algorithm of d3rlpy for discrete actions on logged transitions, and take its policy out.

Reads transitions, returns a policy. Metrics of a checkpoint, all in the log:

    step              gradient steps made so far
    loss              mean loss since the checkpoint before: Huber TD loss of a DQN; whatever the algorithm
                      minimises; of two losses the critic's
    ..._loss, temp    parts of it, and other losses, where the algorithm names several
    value             mean over logged states of the larger action value, where it has values
    exits             share of logged states where the greedy action is EXIT; none for Decision Transformer
    seconds           since training started
    return, ...       whatever `evaluate` measured on the greedy policy
    best              1 if this checkpoint is the best so far, else 0

Mini-batches are cut by array indexing and go straight into d3rlpy's `update` (see `buffer`), on
standardised observations.

Departures from LEDE's paper, numbered: (1) double DQN by default; (2) the learning rate falls along a
cosine; (3) with `evaluate`, the returned policy is the checkpoint of highest return on the texts
that `evaluate` plays, which must be training texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.offline.algorithms import algorithm_factory, create_algorithm
from sde_gym.offline.backend import training_session
from sde_gym.offline.learners import Learner, SequenceLearner, StepLearner
from sde_gym.offline.selection import environment_of, replay_metrics
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import Controller
from sde_gym.policies.qnetwork import QNetwork
from sde_gym.traces import TraceSet

#: Called with (gradient steps done, gradient steps in all, newest checkpoint's metrics).
Progress = Callable[[int, int, Mapping[str, float]], None]
#: Plays the greedy policy of a network; "return" is what checkpoints are compared by.
Evaluate = Callable[[QNetwork], Mapping[str, float]]
#: The same of a policy.
EvaluatePolicy = Callable[[Controller], Mapping[str, float]]
#: Called with every checkpoint that is the best so far, and its metrics.
OnBest = Callable[[QNetwork, Mapping[str, float]], None]
#: The same with a policy.
OnBestPolicy = Callable[[Controller, Mapping[str, float]], None]
#: Called with the metrics of every checkpoint.
OnCheckpoint = Callable[[Mapping[str, float]], None]
Log = list[dict[str, float]]

#: Gradient steps between calls of `progress`.
PROGRESS_EVERY = 50
#: Logged states on which an exported network is compared with d3rlpy's own predictions.
CHECKED_STATES = 512

Policy = TypeVar("Policy")
AnyLearner = TypeVar("AnyLearner", bound=Learner)


def train(
    transitions: Transitions,
    algorithm: str,
    settings: DQNSettings | None = None,
    *,
    traces: TraceSet | None = None,
    evaluate: EvaluatePolicy | None = None,
    progress: Progress | None = None,
    on_best: OnBestPolicy | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    on_start: Callable[[Controller], None] | None = None,
    name: str | None = None,
) -> Controller:
    """Train any algorithm offline.

    The same transitions, settings and torch give the same policy on the same machine.

    Args:
        transitions: the data; the policy reads their features, under the settings they were collected with.
        algorithm: a name out of `algorithm_names()`.
        settings: only the learning settings are used here; `DQNSettings()` if not given.
        traces: the training texts: every checkpoint is played on them, exactly, and the best one is
            returned. Needed for Decision Transformer.
        evaluate: plays a checkpoint in place of that; without both the last checkpoint is returned.
        progress: see `Progress`.
        on_best: see `OnBestPolicy`.
        on_checkpoint: see `OnCheckpoint`; called after `on_best`.
        on_start: called once with the untrained policy, right before the first gradient step.
        name: of the policy; the algorithm's if not given.

    Returns:
        A `QController`, which a policy file can hold and the decoder can run, where the policy is one
        network: all algorithms that come with the package but decision_transformer. Else a
        `SequenceController` or `PredictController`, for comparisons in replay.

    Raises:
        InputError: an algorithm that is not registered, transitions that do not say how they were collected
            or that are restricted to one phase while `traces` are to be played,
            Decision Transformer without traces, d3rlpy missing, or a loss that is no longer finite.
    """
    factory = algorithm_factory(algorithm)
    environment = environment_of(transitions)
    chosen = settings or DQNSettings()
    play = evaluate
    phase = transitions.settings.get("restricted")
    if phase is not None and play is None and traces is not None:
        raise InputError(
            f"these transitions are restricted to the phase {phase!r}, so a policy has to be played together "
            "with the rule of the other; give evaluate= (sde_gym.policies.ablation joins them)"
        )
    if play is None and traces is not None:
        texts = traces

        def play(policy: Controller) -> Mapping[str, float]:
            return replay_metrics(texts, policy, **environment)

    def make(d3rlpy: ModuleType, states: NDArray[np.float32]) -> Learner:
        made = create_algorithm(d3rlpy, factory, chosen, transitions.observation.shape[1])
        label = name or algorithm
        if hasattr(made.config, "context_size"):
            return SequenceLearner(made, transitions, traces, label)
        return StepLearner(made, transitions, chosen, states, label)

    best, _ = _optimise(
        transitions, chosen, make, lambda learner: learner.policy(), play, progress, on_best, on_checkpoint,
        on_start,
    )  # fmt: skip
    return best


def train_dqn(
    transitions: Transitions,
    settings: DQNSettings,
    progress: Progress | None = None,
    evaluate: Evaluate | None = None,
    on_best: OnBest | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    on_start: Callable[[], None] | None = None,
) -> tuple[QNetwork, Log]:
    """Train a DQN offline, or a double DQN if the settings say so, and return its network.

    The same transitions, settings and torch give the same network on the same machine.

    Args:
        transitions: the data; its features become the network's inputs, in order.
        settings: only the learning settings are used here.
        progress: see `Progress`.
        evaluate: see `Evaluate`; None returns the last checkpoint instead of the best.
        on_best: see `OnBest`.
        on_checkpoint: see `OnCheckpoint`; called after `on_best`.
        on_start: called once, when everything is ready, right before the first gradient step.

    Returns:
        The network (standardisation inside) and one row of metrics per checkpoint.

    Raises:
        InputError: d3rlpy missing, or a loss that is no longer finite.
    """
    name = dqn_name(settings)

    def make(d3rlpy: ModuleType, states: NDArray[np.float32]) -> StepLearner:
        factory = algorithm_factory(name)
        algorithm = create_algorithm(d3rlpy, factory, settings, transitions.observation.shape[1])
        return StepLearner(algorithm, transitions, settings, states, name)

    return _optimise(
        transitions, settings, make, lambda learner: learner.network(), evaluate, progress, on_best,
        on_checkpoint, None if on_start is None else lambda _: on_start(),
    )  # fmt: skip


def dqn_name(settings: DQNSettings) -> str:
    """The algorithm that the setting `double` stands for."""
    return "double_dqn" if settings.double else "dqn"


def _optimise(
    transitions: Transitions,
    settings: DQNSettings,
    make: Callable[[ModuleType, NDArray[np.float32]], AnyLearner],
    policy_of: Callable[[AnyLearner], Policy],
    evaluate: Callable[[Policy], Mapping[str, float]] | None,
    progress: Progress | None,
    on_best: Callable[[Policy, Mapping[str, float]], None] | None,
    on_checkpoint: OnCheckpoint | None,
    on_start: Callable[[Policy], None] | None,
) -> tuple[Policy, Log]:
    """The loop: gradient steps, checkpoints, the best of them."""
    rng = np.random.default_rng(settings.seed)
    states = transitions.observation[rng.integers(len(transitions), size=CHECKED_STATES)]
    best: Policy | None = None
    best_return = -math.inf
    log: Log = []
    metrics: dict[str, float] = {}
    losses: list[Mapping[str, float]] = []
    started = time.perf_counter()
    with training_session(settings.seed, settings.threads) as d3rlpy:
        learner = make(d3rlpy, states)
        if on_start is not None:
            on_start(policy_of(learner))
        for step in range(1, settings.gradient_steps + 1):
            rows = rng.integers(len(transitions), size=settings.batch_size)
            try:
                losses.append(learner.update(rows))
            except ValueError:  # torch's distributions refuse NaN before any loss shows it
                if learner.finite():
                    raise
                raise _diverged(step, "loss", math.nan, settings) from None
            if step % settings.evaluate_every == 0 or step == settings.gradient_steps:
                metrics = {"step": step, **_mean_losses(losses, step, settings)}
                losses.clear()
                if not learner.finite():
                    raise _diverged(step, "network", math.nan, settings)
                policy = policy_of(learner)
                metrics |= {**learner.metrics(), "seconds": time.perf_counter() - started}
                if evaluate is not None:
                    metrics.update(evaluate(policy))
                reached = metrics["return"] if evaluate is not None else math.inf
                metrics["best"] = float(best is None or evaluate is None or reached > best_return)
                log.append(metrics)
                if metrics["best"]:
                    best, best_return = policy, reached
                    if on_best is not None:
                        on_best(policy, metrics)
                if on_checkpoint is not None:
                    on_checkpoint(metrics)
            if progress is not None and (step % PROGRESS_EVERY == 0 or step == settings.gradient_steps):
                progress(step, settings.gradient_steps, metrics)
    assert best is not None  # at least one gradient step ends in a checkpoint
    return best, log


def _mean_losses(losses: list[Mapping[str, float]], step: int, settings: DQNSettings) -> dict[str, float]:
    """Means by name, "loss" first.

    Raises:
        InputError: one is not finite.
    """
    means = {name: float(np.mean([row[name] for row in losses])) for name in losses[0]}
    means.pop("learning_rate", None)  # Decision Transformer's schedule
    found = {"loss": means.get("loss", means.get("critic_loss", math.nan)), **means}
    for name, value in found.items():
        if not math.isfinite(value):
            raise _diverged(step, name.replace("_", " "), value, settings)
    return found


def _diverged(step: int, what: str, value: float, settings: DQNSettings) -> InputError:
    return InputError(
        f"training diverged before step {step}: the {what} is {value}; lower learning_rate "
        f"(now {settings.learning_rate}) or gamma (now {settings.gamma})"
    )
