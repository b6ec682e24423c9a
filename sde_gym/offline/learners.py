"""What trains: a d3rlpy algorithm together with its mini-batches and the policy that it stands for now."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.offline.buffer import NStepBatches
from sde_gym.offline.selection import environment_of
from sde_gym.offline.sequences import SequenceController, TrajectoryBatches
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import BaseController, Controller, View
from sde_gym.policies.extraction import NotPerceptronError
from sde_gym.policies.importing import d3rlpy_network, decides_by_values
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.traces import TraceSet

FloatArray = NDArray[np.float32]

#: Weights beyond this overflow in a network of a few layers.
LARGEST_WEIGHT = 1e9


class Learner(Protocol):
    """A policy in training, over the rows of a data set."""

    def update(self, rows: NDArray[np.int64]) -> Mapping[str, float]:
        """One gradient step on the mini-batch of these rows; its losses by name."""

    def finite(self) -> bool:
        """Whether all weights still are numbers."""

    def metrics(self) -> dict[str, float]:
        """What can be said of the present policy without playing it."""

    def policy(self) -> Controller:
        """The present policy; training on does not change it."""


class StepLearner:
    """Any algorithm of d3rlpy that learns from single (n-step) transitions."""

    def __init__(
        self,
        algorithm: Any,
        transitions: Transitions,
        settings: DQNSettings,
        states: FloatArray,
        name: str,
    ) -> None:
        """Prepare its mini-batches.

        Args:
            algorithm: with its networks built.
            transitions: the data.
            settings: of learning.
            states: float32 (c, f), logged observations on which policies are compared and described.
            name: of its policies.
        """
        self._algorithm, self._transitions, self._states, self._name = algorithm, transitions, states, name
        self._mean, self._std, observation = standardised(transitions)
        self._batches = NStepBatches(transitions, settings.n_steps, settings.gamma, observation)

    def update(self, rows: NDArray[np.int64]) -> Mapping[str, float]:
        """See `Learner`."""
        losses: Mapping[str, float] = self._algorithm.update(self._batches.batch(rows))
        return losses

    def finite(self) -> bool:
        """See `Learner`."""
        return _finite(self._algorithm)

    def network(self) -> QNetwork:
        """The present greedy policy as a network; raises `NotPerceptronError` where it is none."""
        return d3rlpy_network(self._algorithm, self._mean, self._std, self._states)

    def metrics(self) -> dict[str, float]:
        """See `Learner`: the mean larger value, if it has values, and the share of states with EXIT."""
        try:
            scores = self.network()(self._states)
        except NotPerceptronError:
            inputs = ((self._states - self._mean) / self._std).astype(np.float32)
            return {"exits": float(np.mean(self._algorithm.predict(inputs)))}
        found = {"exits": float((scores[:, 1] > scores[:, 0]).mean())}
        if decides_by_values(self._algorithm):
            found = {"value": float(scores.max(axis=1).mean()), **found}
        return found

    def policy(self) -> Controller:
        """See `Learner`: a `QController` if a policy file can hold it, else one that asks d3rlpy."""
        environment = environment_of(self._transitions)
        names = self._transitions.names
        try:
            return QController(
                self.network(), names, environment["depths"], self._transitions.settings["num_layers"],
                environment["max_draft"], k=environment["k"], window=environment["window"], name=self._name,
            )  # fmt: skip
        except NotPerceptronError:
            environment["num_layers"] = self._transitions.settings["num_layers"]
            return PredictController(
                copy.deepcopy(self._algorithm), names, self._mean, self._std, environment, self._name
            )


class SequenceLearner:
    """d3rlpy's Decision Transformer."""

    def __init__(
        self,
        algorithm: Any,
        transitions: Transitions,
        traces: TraceSet | None,
        name: str,
    ) -> None:
        """Prepare its mini-batches.

        Args:
            algorithm: with its networks built.
            transitions: the data.
            traces: on which its policies are run.
            name: of its policies.

        Raises:
            InputError: no traces, or episodes that are no whole texts.
        """
        if traces is None:
            raise InputError(
                f"{name} needs the rewards of the run that it steers, so it is run in replay only; give "
                "traces=, the set it is to be run on"
            )
        episode = transitions.settings.get("episode", "generation")
        if episode != "generation":
            raise InputError(
                f"{name} is told the return of a whole text, but these episodes are a {episode} each; "
                "collect with episode='generation'"
            )
        self._algorithm, self._transitions, self._traces, self._name = algorithm, transitions, traces, name
        self._mean, self._std, observation = standardised(transitions)
        config = algorithm.config
        self._batches = TrajectoryBatches(transitions, observation, config.context_size, config.max_timestep)

    def update(self, rows: NDArray[np.int64]) -> Mapping[str, float]:
        """See `Learner`: slices that end in the first of these rows, `batch_size` of the algorithm's own."""
        slices = rows[: self._algorithm.config.batch_size]
        losses: Mapping[str, float] = self._algorithm.update(self._batches.batch(slices))
        return losses

    def finite(self) -> bool:
        """See `Learner`."""
        return _finite(self._algorithm)

    def metrics(self) -> dict[str, float]:
        """See `Learner`: nothing, since it decides by history."""
        return {}

    def policy(self) -> Controller:
        """See `Learner`."""
        return SequenceController(
            copy.deepcopy(self._algorithm.impl.modules.transformer),
            self._traces,
            self._transitions.names,
            self._mean,
            self._std,
            self._batches.scale,
            self._batches.target,
            self._algorithm.config.context_size,
            self._algorithm.config.max_timestep,
            environment_of(self._transitions),
            self._name,
        )


class PredictController(BaseController):
    """Whatever a d3rlpy algorithm's `predict` says: for policies that no policy file can hold."""

    def __init__(
        self,
        algorithm: Any,
        observation: tuple[str, ...],
        mean: FloatArray,
        std: FloatArray,
        environment: Mapping[str, Any],
        name: str,
    ) -> None:
        """Join an algorithm to the setting it was trained in.

        Args:
            algorithm: trained; not changed while in use.
            observation: names of its inputs, in order.
            mean: float32 (f,), subtracted from every observation.
            std: float32 (f,), divides it afterwards.
            environment: see `environment_of`; and `num_layers`.
            name: how reports call it.
        """
        self._algorithm, self._mean, self._std = algorithm, mean, std
        self._trained = {name: environment[name] for name in ("depths", "num_layers", "max_draft")}
        self.observation, self.name = observation, name
        self.k, self.window = environment["k"], environment["window"]

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError for another setting than the one trained in."""
        super().bind(depths, num_layers, max_draft)
        for label, trained in self._trained.items():
            if getattr(self, label) != trained:
                raise InputError(
                    f"policy {self.name!r} was trained with {label} {trained} and cannot be used with "
                    f"{getattr(self, label)}; choose {label} {trained} here, or train another policy"
                )

    def act(self, view: View) -> NDArray[np.int64]:
        """The algorithm's greedy action for every lane, int64 (n,)."""
        inputs = ((view.observation - self._mean) / self._std).astype(np.float32)
        return np.asarray(self._algorithm.predict(inputs)).reshape(-1).astype(np.int64)


def _finite(algorithm: Any) -> bool:
    """Whether all weights are numbers, and small enough for float32 to compute with them."""
    import torch

    modules = [part for part in vars(algorithm.impl.modules).values() if isinstance(part, torch.nn.Module)]
    weights = [weight for part in modules for weight in part.parameters()]
    return all(bool((weight.abs() < LARGEST_WEIGHT).all()) for weight in weights)


def standardised(transitions: Transitions) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean and deviation of every feature, and the observations standardised by them, all float32."""
    mean, std = standardisation(transitions.observation)
    return mean, std, ((transitions.observation - mean) / std).astype(np.float32)


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
