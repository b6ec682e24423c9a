"""A set of policies, good and bad, on which estimators are judged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.errors import InputError
from sde_gym.evaluation.player import Policy
from sde_gym.evaluation.targets import setting_of
from sde_gym.offline.behaviours import EpsilonGreedy, UniformRandom
from sde_gym.offline.learners import standardisation
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import Controller
from sde_gym.policies.qnetwork import NUM_ACTIONS, QController, QNetwork
from sde_gym.policies.rules import StaticController, ThresholdController

#: Draft lengths of the static settings, as far as the cap allows.
LENGTHS = (1, 2, 4, 8)
#: Most depths of the static settings; more candidates are thinned out evenly.
MOST_DEPTHS = 4
#: Thresholds on the top-1 probability.
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
#: Probabilities of EXIT of the random policies.
COINS = (0.3, 0.5, 0.7)
#: Shares of coin flips of the policies that follow a rule else.
EPSILONS = (0.1, 0.3)
#: Hidden width of the networks made from seeds.
_WIDTH = 16


def policy_suite(
    transitions: Transitions,
    networks: Sequence[Controller] = (),
    *,
    least: int = 20,
    seed: int = 0,
) -> list[Policy]:
    """Policies that fit the setting and the features of a log.

    Static settings over depths and lengths, thresholds, coins, rules followed with a share of coin
    flips, and Q-networks: those given, and untrained ones with random weights, at least two and as
    many as it takes to reach `least`.

    Args:
        transitions: whose settings and features they fit; thresholds need `top1` among these.
        networks: trained controllers that join, under their own names.
        least: number of policies, at least.
        seed: of the random weights.

    Returns:
        At least `least` policies of different names, in a fixed order.

    Raises:
        InputError: settings that do not say the depths, given controllers that share a name, or a negative
            seed.
    """
    whole_number("seed", seed, 0)
    depths, _, max_draft = setting_of(transitions.settings)
    chosen = np.unique(np.rint(np.linspace(0, len(depths) - 1, MOST_DEPTHS)).astype(np.int64))
    lengths = [length for length in LENGTHS if length <= max_draft]
    rules: list[Controller] = [
        StaticController(depths[index], length) for index in chosen for length in lengths
    ]
    around: list[Controller] = [StaticController(depths[len(depths) // 2], lengths[-1])]
    if "top1" in transitions.names:
        rules += [ThresholdController(threshold) for threshold in THRESHOLDS]
        around.append(ThresholdController(THRESHOLDS[len(THRESHOLDS) // 2]))
    suite: list[Policy] = [*rules, *(UniformRandom(coin) for coin in COINS)]
    suite += [EpsilonGreedy(controller, epsilon) for controller in around for epsilon in EPSILONS]
    suite += networks
    made = max(2, least - len(suite))
    suite += [random_network(transitions, seed + number) for number in range(made)]
    check_names(suite)
    return suite


def random_network(transitions: Transitions, seed: int) -> QController:
    """An untrained Q-network on the standardised features of a log: a rule that makes no sense.

    Weights are normal with variance 2 / inputs; biases are such that the actions split the logged
    states half and half, so that it is no constant.
    """
    depths, num_layers, max_draft = setting_of(transitions.settings)
    rng = np.random.default_rng(seed)
    mean, std = standardisation(transitions.observation)
    sizes = (len(transitions.names), _WIDTH, NUM_ACTIONS)
    layers: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = [
        (
            rng.normal(scale=np.sqrt(2.0 / inputs), size=(inputs, outputs)).astype(np.float32),
            np.zeros(outputs, dtype=np.float32),
        )
        for inputs, outputs in pairwise(sizes)
    ]
    values = QNetwork(layers, mean, std)(transitions.observation)
    layers[-1][1][0] = np.median(values[:, 1] - values[:, 0])
    options: dict[str, Any] = {
        name: int(transitions.settings[name]) for name in ("k", "window") if name in transitions.settings
    }
    return QController(
        QNetwork(layers, mean, std), transitions.names, depths, num_layers, max_draft,
        name=f"network-seed{seed}", **options,
    )  # fmt: skip


def check_names(policies: Sequence[Policy]) -> None:
    """Raises InputError where two policies share a name: rows could not be told apart."""
    names = [policy.name for policy in policies]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"policies: {names.count(name)} are named {name!r}; give each a name of its own")
