"""Train a DQN on logged transitions with d3rlpy, and take the network out of it.

Reads transitions, returns a `QNetwork`. Metrics of a checkpoint, all in the log:

    step              gradient steps made so far
    loss              mean TD loss (Huber) since the checkpoint before
    value             mean over logged states of the larger action value
    exits             share of logged states where the greedy action is EXIT
    seconds           since training started
    return, ...       whatever `evaluate` measured on the greedy policy
    best              1 if this checkpoint is the best so far, else 0

Departures from the paper, numbered: (1) double DQN by default; (2) the learning rate falls along a
cosine; (3) with `evaluate`, the returned network is the checkpoint of highest return on the texts
that `evaluate` plays, which must be training texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.offline.backend import training_session
from sde_gym.offline.buffer import NStepBatches
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.qnetwork import NUM_ACTIONS, QNetwork

#: Called with (gradient steps done, gradient steps in all, newest checkpoint's metrics).
Progress = Callable[[int, int, Mapping[str, float]], None]
#: Plays the greedy policy of a network; "return" is what checkpoints are compared by.
Evaluate = Callable[[QNetwork], Mapping[str, float]]
#: Called with every checkpoint that is the best so far, and its metrics.
OnBest = Callable[[QNetwork, Mapping[str, float]], None]
#: Called with the metrics of every checkpoint.
OnCheckpoint = Callable[[Mapping[str, float]], None]
Log = list[dict[str, float]]

#: Gradients are clipped to this norm: early targets of a rough network can be far off.
CLIP_GRADIENT_NORM = 10.0
#: Gradient steps between calls of `progress`.
PROGRESS_EVERY = 50
#: Logged states on which an exported network is compared with d3rlpy's own predictions.
CHECKED_STATES = 512


def train_dqn(
    transitions: Transitions,
    settings: DQNSettings,
    progress: Progress | None = None,
    evaluate: Evaluate | None = None,
    on_best: OnBest | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    on_start: Callable[[], None] | None = None,
) -> tuple[QNetwork, Log]:
    """Train offline.

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
    mean, std = standardisation(transitions.observation)
    observation = ((transitions.observation - mean) / std).astype(np.float32)
    batches = NStepBatches(transitions, settings.n_steps, settings.gamma, observation)
    rng = np.random.default_rng(settings.seed)
    states = transitions.observation[rng.integers(len(transitions), size=CHECKED_STATES)]
    best: QNetwork | None = None
    best_return = -math.inf
    log: Log = []
    metrics: dict[str, float] = {}
    losses: list[float] = []
    started = time.perf_counter()
    with training_session(settings.seed, settings.threads) as d3rlpy:
        algorithm = create_dqn(d3rlpy, settings, transitions.observation.shape[1])
        if on_start is not None:
            on_start()
        for step in range(1, settings.gradient_steps + 1):
            rows = rng.integers(len(batches), size=settings.batch_size)
            losses.append(float(algorithm.update(batches.batch(rows))["loss"]))
            if step % settings.evaluate_every == 0 or step == settings.gradient_steps:
                loss = float(np.mean(losses))
                losses.clear()
                if not math.isfinite(loss):
                    raise InputError(
                        f"training diverged before step {step}: the loss is {loss}; lower learning_rate "
                        f"(now {settings.learning_rate}) or gamma (now {settings.gamma})"
                    )
                network = export_network(algorithm, mean, std, states)
                values = network(states)
                metrics = {
                    "step": step,
                    "loss": loss,
                    "value": float(values.max(axis=1).mean()),
                    "exits": float((values[:, 1] > values[:, 0]).mean()),
                    "seconds": time.perf_counter() - started,
                }
                if evaluate is not None:
                    metrics.update(evaluate(network))
                reached = metrics["return"] if evaluate is not None else math.inf
                metrics["best"] = float(best is None or evaluate is None or reached > best_return)
                log.append(metrics)
                if metrics["best"]:
                    best, best_return = network, reached
                    if on_best is not None:
                        on_best(network, metrics)
                if on_checkpoint is not None:
                    on_checkpoint(metrics)
            if progress is not None and (step % PROGRESS_EVERY == 0 or step == settings.gradient_steps):
                progress(step, settings.gradient_steps, metrics)
    assert best is not None  # at least one gradient step ends in a checkpoint
    return best, log


def standardisation(
    observation: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and standard deviation of every feature, float32 (f,) each.

    A feature that never varies gets 1 for its deviation: it stays finite and tells nothing.
    """
    mean = observation.mean(axis=0, dtype=np.float64)
    std = observation.std(axis=0, dtype=np.float64)
    # What is left of a constant after rounding is not variation.
    constant = std <= 1e-6 * np.maximum(np.abs(mean), 1.0)
    return mean.astype(np.float32), np.where(constant, 1.0, std).astype(np.float32)


def create_dqn(d3rlpy: ModuleType, settings: DQNSettings, features: int) -> Any:
    """A d3rlpy DQN or double DQN with its network built, ready for `update`.

    Its observations are to be standardised by us: d3rlpy's scalers give NaN on constant features.

    Args:
        d3rlpy: the module, from `training_session`.
        settings: the learning settings.
        features: number of observation features f.
    """
    from d3rlpy.models.encoders import VectorEncoderFactory
    from d3rlpy.optimizers import AdamFactory
    from d3rlpy.optimizers.lr_schedulers import CosineAnnealingLRFactory

    config = d3rlpy.algos.DoubleDQNConfig if settings.double else d3rlpy.algos.DQNConfig
    algorithm = config(
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        optim_factory=AdamFactory(
            clip_grad_norm=CLIP_GRADIENT_NORM,
            lr_scheduler_factory=CosineAnnealingLRFactory(T_max=settings.gradient_steps),
        ),
        encoder_factory=VectorEncoderFactory(hidden_units=list(settings.hidden)),
        gamma=settings.gamma,
        target_update_interval=settings.target_update_interval,
    ).create(device=False)
    algorithm.create_impl((features,), NUM_ACTIONS)
    return algorithm


def export_network(
    algorithm: Any,
    mean: NDArray[np.float32],
    std: NDArray[np.float32],
    states: NDArray[np.float32],
) -> QNetwork:
    """Copy the Q-function out of a d3rlpy algorithm and prove that the copy agrees with it.

    Args:
        algorithm: DQN or DoubleDQN with one critic and plain linear layers.
        mean: float32 (f,), the standardisation that its inputs went through.
        std: float32 (f,).
        states: float32 (n, f), raw observations on which the two are compared.

    Raises:
        RuntimeError: the values differ by more than 1e-5 (relative, above 1), or the greedy actions
            differ where the two values are not that close: a fault of this export, not of the input.
    """
    from torch import nn

    (q_function,) = algorithm.impl.q_function
    network = QNetwork(
        [
            (layer.weight.detach().cpu().numpy().T, layer.bias.detach().cpu().numpy())
            for layer in q_function.modules()
            if isinstance(layer, nn.Linear)
        ],
        mean,
        std,
    )
    ours = network(states)
    standardised = ((states - mean) / std).astype(np.float32)
    theirs = np.stack(
        [
            algorithm.predict_value(standardised, np.full((len(states), 1), action))
            for action in range(NUM_ACTIONS)
        ],
        axis=1,
    ).reshape(ours.shape)
    tolerance = 1e-5 * np.maximum(1.0, np.abs(theirs).max())
    clear = np.abs(ours[:, 1] - ours[:, 0]) > 2 * tolerance
    same = (ours.argmax(axis=1) == algorithm.predict(standardised).reshape(-1)) | ~clear
    if np.abs(ours - theirs).max() > tolerance or not same.all():
        raise RuntimeError(
            f"the exported Q-network differs from d3rlpy's: values by {np.abs(ours - theirs).max():.2e} "
            f"(allowed {tolerance:.2e}), greedy actions in {int((~same).sum())} of {len(states)} states"
        )
    return network
