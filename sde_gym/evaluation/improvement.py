"""Policy iteration with exact action values: what a policy on some features can reach at all.

A learner knows rewards and has to guess the values of what it did not do. Here nothing is guessed:
replay tells the value of both actions at every state that was visited (`sde_gym.evaluation.exact_q`). A
network is then trained to take the better one, each state weighing as much as the choice matters there,
visits states of its own, and so on. What it reaches is a reference for learners on the same features, not
a learner: it sees the truth of the training texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import exact_q
from sde_gym.models.threads import torch_threads
from sde_gym.offline.behaviours import Behaviour, EpisodeMixture, EpsilonGreedy, exploratory_schedule
from sde_gym.offline.collect import collect
from sde_gym.offline.learners import standardisation
from sde_gym.policies.controller import Controller
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.traces import TraceSet

EPSILON = 0.1
"""Share of coin flips with which a policy visits states for its own improvement."""

BATCH, LEARNING_RATE, WEIGHT_DECAY = 256, 3e-3, 1e-4
"""Of the classifier: states a step, peak of the one-cycle schedule, of AdamW."""

Progress = Callable[[int, int, float], None]
"""Called with iterations done, in all, and the mean return on the training texts."""


@dataclass(frozen=True)
class Improvement:
    """One policy of the series.

    Attributes:
        policy: that took the better action at most of the states visited so far.
        mean_return: undiscounted, on the training texts.
        states: it was trained on.
    """

    policy: QController
    mean_return: float
    states: int


def improve(
    traces: TraceSet,
    start: Controller,
    *,
    observation: str | Iterable[str] = "extended",
    depths: Sequence[int] | None = None,
    reward: str = "speed",
    max_draft: int = 12,
    iterations: int = 4,
    episodes: int = 160,
    hidden: Sequence[int] = (64, 64),
    epochs: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Improvement]:
    """Improve on a policy several times over.

    The first states are those of `exploratory_schedule`, later ones those of the newest policy, with
    coin flips; the newest two collections are trained on.

    Args:
        traces: the training texts.
        start: a deterministic policy, whose values are the first.
        observation: features that the new policies see.
        depths: candidate depths; all recorded ones if not given.
        reward: its name; its undiscounted return is improved.
        max_draft: see `ReplayEngine`.
        iterations: at least 1.
        episodes: played for each of them, at least 1.
        hidden: widths of the networks' hidden layers.
        epochs: passes over the states, at least 1.
        seed: of everything that is drawn.
        progress: see `Progress`.

    Returns:
        One entry an iteration; the best is that of the highest `mean_return`.

    Raises:
        InputError: an argument out of range, or a policy that does not fit.
    """
    for name, value in (("iterations", iterations), ("episodes", episodes), ("epochs", epochs)):
        whole_number(name, value, 1)
    whole_number("seed", seed, 0)
    if not hidden or min(hidden) < 1:
        raise InputError(f"hidden is {hidden}; it needs at least one width, each at least 1")
    rules: dict[str, Any] = {"depths": depths, "reward": reward, "max_draft": max_draft}
    policy: Controller = start
    behaviour: Behaviour | EpisodeMixture = exploratory_schedule(depths or traces.depths, max_draft, 0.15)
    seen: list[tuple[NDArray[np.float32], NDArray[np.float64]]] = []
    found: list[Improvement] = []
    for number in range(iterations):
        drawn = np.random.SeedSequence([seed, number]).generate_state(1, np.uint32)[0]
        data = collect(traces, behaviour, episodes, int(drawn), observation=observation, **rules)
        values = exact_q(policy, data, traces, gamma=1.0).q
        seen = [*seen[-1:], (data.observation, values[:, 1] - values[:, 0])]
        states, advantage = (np.concatenate(parts) for parts in zip(*seen, strict=True))
        network = better_action(states, advantage, hidden, epochs, seed)
        newest = QController(
            network,
            data.names,
            depths or traces.depths,
            traces.num_layers,
            max_draft,
            name=f"exact-{number + 1}",
        )
        mean = float(run_controller(traces, newest, **rules).returns.mean())
        found.append(Improvement(newest, mean, len(states)))
        policy, behaviour = newest, EpsilonGreedy(newest, EPSILON)
        if progress is not None:
            progress(number + 1, iterations, mean)
    return found


def better_action(
    states: NDArray[np.float32],
    advantage: NDArray[np.float64],
    hidden: Sequence[int],
    epochs: int,
    seed: int,
) -> QNetwork:
    """A network whose larger output is the action that is better where it matters.

    It minimises the logistic loss of the action's sign, weighted by the size of the advantage.

    Args:
        states: float32 (n, f).
        advantage: float64 (n,), of EXIT over CONTINUE.
        hidden: widths of the hidden layers.
        epochs: passes over the states.
        seed: of weights and batches.
    """
    mean, std = standardisation(states)
    inputs = torch.from_numpy(((states - mean) / std).astype(np.float32))
    target = torch.from_numpy(advantage.astype(np.float32))
    sizes = [states.shape[1], *hidden]
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: list[torch.nn.Module] = []
        for narrow, wide in pairwise(sizes):
            parts += [torch.nn.Linear(narrow, wide), torch.nn.ReLU()]
        network = torch.nn.Sequential(*parts, torch.nn.Linear(sizes[-1], 1))
        optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        batches = -(-len(inputs) // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, total_steps=epochs * batches + 1
        )
        for _ in range(epochs):
            for rows in torch.randperm(len(inputs)).split(BATCH):
                margin = network(inputs[rows])[:, 0] * target[rows].sign()
                loss = (torch.nn.functional.softplus(-margin) * target[rows].abs()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        linear = [part for part in network if isinstance(part, torch.nn.Linear)]
        layers = [(part.weight.detach().numpy().T, part.bias.detach().numpy()) for part in linear]
    weight, bias = layers[-1]
    # CONTINUE scores 0, EXIT what the network says.
    layers[-1] = (np.concatenate([np.zeros_like(weight), weight], axis=1), np.concatenate([[0.0], bias]))
    return QNetwork(layers, mean, std)
