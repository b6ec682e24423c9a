"""A stochastic policy made of a Q-network: the softmax over its action values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.policies.controller import RoundOutcome, View
from sde_gym.policies.files import load_policy
from sde_gym.policies.observation import Action
from sde_gym.policies.qnetwork import QController, QNetwork


class Softmax:
    """Draws by the values of a Q-network: P(exit) = 1 / (1 + exp((Q(continue) - Q(exit)) / temperature)).

    The values are computed so that those of a row do not depend on the rows beside it, which a
    matrix product does not promise: propensities are the same bits however many texts run together.
    They differ from the controller's own by rounding.
    """

    def __init__(self, controller: QController, temperature: float, path: str | Path | None = None) -> None:
        """Args:
            controller: the network and the setting that it was trained in.
            temperature: above 0, in units of action values: low is greedy, high is uniform.
            path: the file that the controller was loaded from; without one the description does not
                suffice to rebuild it.

        Raises:
            InputError: a temperature that is not positive and finite.
        """
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InputError(f"temperature is {temperature}; it must be positive and finite")
        self.controller = controller
        self.temperature = float(temperature)
        self.path = None if path is None else str(Path(path).absolute())
        self.name = f"softmax({controller.name}, {temperature:g})"
        self.observation = controller.observation
        self.k, self.window = controller.k, controller.window

    @classmethod
    def load(cls, path: str | Path, temperature: float) -> Softmax:
        """The softmax over a saved policy; InputError as `load_policy`."""
        return cls(load_policy(path), temperature, path)

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Refuses any setting but the one that the network was trained in."""
        self.controller.bind(depths, num_layers, max_draft)

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Nothing to forget."""

    def exit_probability(self, view: View) -> NDArray[np.float64]:
        """The logistic function of the advantage of EXIT."""
        values = _values(self.controller.network, view.observation)
        advantage = values[Action.EXIT].astype(np.float64) - values[Action.CONTINUE]
        small = np.exp(-np.abs(advantage) / self.temperature)  # no overflow on either side
        return np.where(advantage >= 0, 1.0, small) / (1.0 + small)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def describe(self) -> dict[str, Any]:
        """Temperature, file and the hash of its weights."""
        return {
            "kind": "softmax",
            "path": self.path,
            "weights_sha256": self.controller.meta.get("weights_sha256"),
            "temperature": self.temperature,
        }


def _values(network: QNetwork, observation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Action values, float32 (2, n), summed over inputs in one fixed order."""
    hidden = np.ascontiguousarray(((observation - network.mean) / network.std).T)
    last = len(network.layers) - 1
    for number, (weight, bias) in enumerate(network.layers):
        total = np.repeat(bias[:, None], hidden.shape[1], axis=1)
        term = np.empty_like(total)
        for row, outgoing in zip(hidden, weight, strict=True):
            total += np.multiply(outgoing[:, None], row, out=term)
        hidden = total if number == last else np.maximum(total, 0.0, out=total)
    return hidden
