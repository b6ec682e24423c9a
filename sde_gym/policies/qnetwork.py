"""A Q-network small enough to be asked at every token, and the controller that obeys it.

Plain numpy on purpose: the decoder asks for one row at a time, and at that size calling into
torch costs more than the arithmetic. Training happens elsewhere; this file only evaluates.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.policies.controller import NotADecodingMethod, RoundOutcome, View
from sde_gym.policies.observation import HEAD_FEATURES, Action, resolve_observation

FloatArray = NDArray[np.float32]

NUM_ACTIONS = len(Action)

_CONTINUE, _EXIT = int(Action.CONTINUE), int(Action.EXIT)  # plain numbers: asked at every token


class QNetwork:
    """A multilayer perceptron with ReLU between its layers: observations in, action values out.

    Computes `relu(... relu(((x - mean) / std) @ W_0 + b_0) ...) @ W_last + b_last`.

    Attributes:
        layers: pairs of weight (inputs, outputs) and bias (outputs,), float32, first layer first;
            the last has one output per action, in the order of `Action`.
        mean: float32 (f,), subtracted from every observation.
        std: float32 (f,), > 0, divides it afterwards.
    """

    def __init__(
        self,
        layers: Sequence[tuple[FloatArray, FloatArray]],
        mean: FloatArray | None = None,
        std: FloatArray | None = None,
    ) -> None:
        """Copy the arrays and check that they make a network.

        Args:
            layers: see the class; anything that converts to float32 arrays.
            mean: see the class; zeros if None.
            std: see the class; ones if None.

        Raises:
            InputError: no layer, shapes that do not chain, an output that is not one value per
                action, NaN or infinite numbers, or a std that is not positive.
        """
        if not layers:
            raise InputError("a Q-network needs at least one layer; it got none")
        self.layers = tuple((_frozen(weight), _frozen(bias)) for weight, bias in layers)
        for number, (weight, bias) in enumerate(self.layers):
            if weight.ndim != 2 or bias.shape != weight.shape[1:]:
                raise InputError(
                    f"layer {number}: weight {weight.shape} and bias {bias.shape} do not fit; "
                    "expected (inputs, outputs) and (outputs,)"
                )
            if number and weight.shape[0] != self.layers[number - 1][0].shape[1]:
                raise InputError(
                    f"layer {number} takes {weight.shape[0]} inputs but layer {number - 1} "
                    f"gives {self.layers[number - 1][0].shape[1]}"
                )
        if self.sizes[-1] != NUM_ACTIONS:
            raise InputError(
                f"the last layer gives {self.sizes[-1]} values; expected {NUM_ACTIONS}, one per action"
            )
        features = self.sizes[0]
        self.mean = _frozen(np.zeros(features) if mean is None else mean)
        self.std = _frozen(np.ones(features) if std is None else std)
        for label, array in (("mean", self.mean), ("std", self.std)):
            if array.shape != (features,):
                raise InputError(
                    f"normalisation {label} has shape {array.shape}; expected ({features},), "
                    "one number per input"
                )
        for array in (self.mean, self.std, *(array for pair in self.layers for array in pair)):
            if not np.isfinite(array).all():
                raise InputError("the Q-network holds NaN or infinite numbers; train it again")
        if not (self.std > 0).all():
            raise InputError(f"normalisation std must be positive; the smallest is {self.std.min()}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width of the input, of every hidden layer, and of the output."""
        return (self.layers[0][0].shape[0], *(weight.shape[1] for weight, _ in self.layers))

    def __call__(self, observation: FloatArray) -> FloatArray:
        """Action values.

        Args:
            observation: float32 (n, f).

        Returns:
            float32 (n, 2): the value of CONTINUE and of EXIT.
        """
        hidden = observation - self.mean
        hidden /= self.std
        last = len(self.layers) - 1
        for number, (weight, bias) in enumerate(self.layers):
            hidden = hidden @ weight
            hidden += bias
            if number < last:
                np.maximum(hidden, 0.0, out=hidden)
        return hidden


class QController(NotADecodingMethod):
    """Greedy control by a `QNetwork`: exit where exiting is worth more; a tie continues.

    A network knows only the setting it was trained in, so the controller carries that setting and
    refuses another one instead of deciding nonsense.
    """

    def __init__(
        self,
        network: QNetwork,
        observation: str | Sequence[str],
        depths: Sequence[int],
        num_layers: int,
        max_draft: int,
        *,
        k: int = 5,
        window: int = 8,
        name: str = "lede",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Join a network to the setting it was trained in.

        Args:
            network: gives the action values.
            observation: names of its inputs, in order.
            depths: candidate depths, ascending, each in [1, num_layers).
            num_layers: L of the model.
            max_draft: cap on proposals a round.
            k: number of tokens behind the feature `confidence`.
            window: number of tokens behind the feature `trace`.
            name: how reports call this policy.
            meta: whatever else its file says (provenance); kept, not interpreted.

        Raises:
            InputError: names or numbers that are impossible or do not fit the network.
        """
        self.observation = resolve_observation(observation)
        if len(self.observation) != network.sizes[0]:
            raise InputError(
                f"policy {name!r}: the network takes {network.sizes[0]} inputs but the observation "
                f"has {len(self.observation)} ({', '.join(self.observation)})"
            )
        self.depths = tuple(operator.index(depth) for depth in depths)
        ordered = all(low < high for low, high in pairwise(self.depths))
        if not self.depths or not ordered or self.depths[0] < 1 or self.depths[-1] >= num_layers:
            raise InputError(
                f"policy {name!r}: depths {self.depths} must be ascending and within [1, {num_layers - 1}] "
                f"for a model of {num_layers} layers"
            )
        for label, value in (("max_draft", max_draft), ("k", k), ("window", window)):
            if value < 1:
                raise InputError(f"policy {name!r}: {label} is {value}; it must be at least 1")
        self.network = network
        self._inputs = network.sizes[0]
        self.num_layers = num_layers
        self.max_draft = max_draft
        self.k: int | None = k
        self.window: int | None = window
        self.name = name
        self.meta: Mapping[str, Any] = meta or {}

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Refuse any setting but the one trained in.

        Raises:
            InputError: the message says what differs and what to do.
        """
        found = {"depths": tuple(depths), "num_layers": num_layers, "max_draft": max_draft}
        for label, value in found.items():
            trained = getattr(self, label)
            if value != trained:
                raise InputError(
                    f"policy {self.name!r} was trained with {label} {trained} and cannot be used with "
                    f"{value}; choose {label} {trained} here, or train a policy for {value}"
                )

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Nothing to forget: the network has no memory."""

    def act(self, view: View) -> NDArray[np.int64]:
        """The action of higher value for every lane, int64 (n,).

        Raises:
            InputError: the observation has another number of features than the network.
        """
        if view.observation.shape[-1] != self._inputs:
            raise InputError(
                f"policy {self.name!r} reads {', '.join(self.observation)}: {self.network.sizes[0]} "
                f"features, but it was given {view.observation.shape[-1]}; build the environment with "
                f"observation={self.observation}"
            )
        values = self.network(view.observation)
        exits: NDArray[np.int64] = (values[:, _EXIT] > values[:, _CONTINUE]).astype(np.int64)
        return exits

    def feedback(self, outcome: RoundOutcome) -> None:
        """Nothing to learn while decoding."""

    def reads(self, phase: int, depth_index: int) -> bool:
        """True everywhere, if any of its features needs a head: a network looks at all of them."""
        return not HEAD_FEATURES.isdisjoint(self.observation)


def _frozen(array: Any) -> FloatArray:
    """A read-only float32 copy, so that a loaded policy cannot drift from its file."""
    copy: FloatArray = np.array(array, dtype=np.float32, order="C")
    copy.setflags(write=False)
    return copy
