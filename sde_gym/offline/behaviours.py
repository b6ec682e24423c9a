"""Behaviour policies for collecting data: each says with which probability it exits.

A behaviour never draws; the collector does, and logs the probability of what it drew. That keeps
every propensity exact, and one protocol serves coin flips, epsilon-greedy controllers, mixtures and
anything else with known probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.run import heads_read, hidden_columns
from sde_gym.envs.shadow import check_replayable, wants_shadows
from sde_gym.errors import InputError
from sde_gym.policies.ablation import draws
from sde_gym.policies.controller import Controller, RoundOutcome, View
from sde_gym.policies.observation import Phase
from sde_gym.policies.rules import StaticController, ThresholdController

#: Thresholds on the top-1 probability that the exploratory schedule explores around.
SCHEDULE_THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
#: Draft lengths that it explores around, as far as the cap allows; the cap itself is always added.
SCHEDULE_LENGTHS = (1, 2, 4, 8)
#: Shares of its episodes: coin flips, around static settings, around thresholds.
SCHEDULE_SHARES = (0.2, 0.4, 0.4)


class Behaviour(Protocol):
    """A policy known by its probabilities; stateful ones keep their state by lane.

    Attributes:
        name: for logs.
        observation: the features that it reads, in order; may be empty.
        k: tokens that its feature `confidence` averages; None = no opinion.
        window: tokens that its feature `trace` averages; None = no opinion.

    One that has an attribute `shadows`, and it is True, is told what every depth said, see `RoundOutcome`.
    """

    name: str
    observation: tuple[str, ...]
    k: int | None
    window: int | None

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Learn the setting; raises InputError if it does not fit."""

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """These lanes start a new text."""

    def exit_probability(self, view: View) -> NDArray[np.float64]:
        """Probability of EXIT in each lane of the view, float64 (n,) in [0, 1]."""

    def feedback(self, outcome: RoundOutcome) -> None:
        """Learn how rounds ended."""

    def describe(self) -> dict[str, Any]:
        """Everything that defines it, as plain JSON values; see `behaviour_names.rebuild_behaviour`."""


class UniformRandom:
    """Exits with a fixed probability, whatever it sees."""

    observation: tuple[str, ...] = ()
    k: int | None = None
    window: int | None = None

    def __init__(self, exit_probability: float = 0.5) -> None:
        """Args:
            exit_probability: in (0, 1), so that both actions are logged; 0.5 is uniform.

        Raises:
            InputError: a probability outside (0, 1).
        """
        if not 0 < exit_probability < 1:
            raise InputError(f"exit_probability is {exit_probability}; it must be inside (0, 1)")
        self.probability = exit_probability
        self.name = "uniform" if exit_probability == 0.5 else f"random-{exit_probability:g}"

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Fits everything."""

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Nothing to forget."""

    def exit_probability(self, view: View) -> NDArray[np.float64]:
        """The same number for every lane."""
        return np.full(len(view.lanes), self.probability)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def describe(self) -> dict[str, Any]:
        """Kind and probability."""
        return {"kind": "random", "exit_probability": self.probability}


class EpsilonGreedy:
    """Follows a deterministic controller, but with probability epsilon flips a fair coin instead.

    The controller's action has propensity 1 - epsilon / 2, the other one epsilon / 2. It is shown what
    the decoder would show it: features of a head are 0 where it does not read that head.
    """

    def __init__(
        self, controller: Controller, epsilon: float, *, asked: Sequence[Phase] = tuple(Phase)
    ) -> None:
        """Args:
            controller: deterministic; its state, if any, is kept by lane as usual.
            epsilon: share of coin flips, in [0, 1]. At 0 the data hold one action per state.
            asked: phases in which it will be asked: there the controller must not draw its actions.

        Raises:
            InputError: epsilon outside [0, 1], or a controller that draws or cannot be replayed.
        """
        check_replayable(controller)
        if any(draws(controller, phase) for phase in asked):
            raise InputError(
                f"controller: {controller.name!r} draws its actions, so their propensities are unknown; give "
                "a deterministic one, or a behaviour such as UniformRandom in its place"
            )
        if not 0 <= epsilon <= 1:
            raise InputError(f"epsilon is {epsilon}; it must be in [0, 1]")
        self.controller = controller
        self.epsilon = epsilon
        self.name = f"{controller.name}+{epsilon:g}"
        self.observation = controller.observation
        self.k: int | None = getattr(controller, "k", None)
        self.window: int | None = getattr(controller, "window", None)
        self.shadows = wants_shadows(controller)
        self._hidden: NDArray[np.bool_] | None = None  # (2, m, f), None where nothing is hidden

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """The controller's own check."""
        self.controller.bind(depths, num_layers, max_draft)
        hidden = hidden_columns(self.observation, heads_read(self.controller, len(depths)))
        self._hidden = hidden if hidden.any() else None

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Passed on."""
        self.controller.reset(lanes)

    def exit_probability(self, view: View) -> NDArray[np.float64]:
        """Epsilon / 2, plus 1 - epsilon where the controller exits."""
        if self._hidden is not None:
            unread = self._hidden[view.phase, view.depth_index]
            view = dataclasses.replace(view, observation=np.where(unread, np.float32(0), view.observation))
        actions = np.asarray(self.controller.act(view)).astype(np.float64)
        return np.asarray(self.epsilon / 2 + (1 - self.epsilon) * actions, dtype=np.float64)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Passed on."""
        self.controller.feedback(outcome)

    def describe(self) -> dict[str, Any]:
        """The controller and epsilon."""
        controller = describe_controller(self.controller)
        return {"kind": "epsilon_greedy", "controller": controller, "epsilon": self.epsilon}


def describe_controller(controller: Controller) -> dict[str, Any]:
    """A rule as plain JSON values; of any other controller class and name, which do not rebuild it."""
    if type(controller) is StaticController:
        return {
            "kind": "static",
            "exit_depth": controller.exit_depth,
            "draft_length": controller.draft_length,
        }
    if type(controller) is ThresholdController:
        return {
            "kind": "threshold",
            "threshold": controller.threshold.tolist(),
            "draft_threshold": controller.draft_threshold.tolist(),
        }
    kind = type(controller)
    return {"kind": "other", "class": f"{kind.__module__}:{kind.__qualname__}", "name": controller.name}


class _Mixture:
    """What both mixtures share: components with normalised weights, all bound and told alike."""

    kind = ""

    def __init__(self, components: Sequence[Behaviour], weights: Sequence[float] | None = None) -> None:
        """Args:
            components: the behaviours mixed.
            weights: positive, one for each; equal if None. They are normalised.

        Raises:
            InputError: no component, weights that do not fit, or components that were made for
                different `k` or `window`.
        """
        shares = np.asarray([1.0] * len(components) if weights is None else weights, dtype=np.float64)
        if not components or shares.shape != (len(components),) or not (shares > 0).all():
            raise InputError(
                f"a mixture of {len(components)} behaviours with weights {shares.tolist()}; it needs at "
                "least one behaviour and a positive weight for each"
            )
        self.components = tuple(components)
        self.weights: NDArray[np.float64] = shares / shares.sum()
        names = [component.name for component in components]
        self.name = f"{self.kind}({names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
        features = (name for component in components for name in component.observation)
        self.observation: tuple[str, ...] = tuple(dict.fromkeys(features))
        self.k, self.window = self._agreed("k"), self._agreed("window")
        self.shadows = any(wants_shadows(component) for component in components)
        for component in components:
            check_replayable(component)

    def _agreed(self, setting: str) -> int | None:
        """What all components that have an opinion on `k` or `window` say."""
        opinions = [(component.name, getattr(component, setting, None)) for component in self.components]
        said = [(name, value) for name, value in opinions if value is not None]
        if len({value for _, value in said}) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in said)
            raise InputError(
                f"a mixture whose members were made for different values of {setting} ({listed}); the data "
                "have one; mix members that agree"
            )
        return said[0][1] if said else None

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Every component's own check."""
        for component in self.components:
            component.bind(depths, num_layers, max_draft)

    def describe(self) -> dict[str, Any]:
        """Kind, components and weights."""
        return {
            "kind": self.kind,
            "components": [component.describe() for component in self.components],
            "weights": self.weights.tolist(),
        }


class StepMixture(_Mixture):
    """At every decision one component is drawn afresh; the propensity is that of the whole mixture."""

    kind = "step_mixture"

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Passed on to every component."""
        for component in self.components:
            component.reset(lanes)

    def exit_probability(self, view: View) -> NDArray[np.float64]:
        """Weighted mean of the components' probabilities."""
        total = np.zeros(len(view.lanes))
        for weight, component in zip(self.weights, self.components, strict=True):
            columns = [self.observation.index(name) for name in component.observation]
            total += weight * component.exit_probability(select(view, columns=columns))
        return np.clip(total, 0.0, 1.0)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Passed on to every component."""
        for component in self.components:
            component.feedback(outcome)


class EpisodeMixture(_Mixture):
    """One component acts for a whole episode; the propensity is that component's own.

    Not a `Behaviour` by itself: the collector gives each episode to a component and logs which.
    Given the component, importance weights are exact; the mixture's marginal propensity of a whole
    episode would be a sum over components.
    """

    kind = "episode_mixture"

    def component_of(self, episode: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Component of each episode, int64 (n,).

        Points of the golden-ratio sequence, from a start drawn by the seed, are cut by the cumulated
        weights: any run of episodes holds every component close to its share, where independent
        draws would leave some of forty components out of two hundred episodes.
        """
        offset = np.random.default_rng(seed).random()
        points = (offset + episode * ((np.sqrt(5.0) - 1.0) / 2.0)) % 1.0
        chosen = np.searchsorted(np.cumsum(self.weights), points, side="right")
        return np.minimum(chosen, len(self.components) - 1).astype(np.int64)


def exploratory_schedule(depths: Sequence[int], max_draft: int, epsilon: float = 0.15) -> EpisodeMixture:
    """The exploration that fills the buffer: a mixture over episodes in the spirit of LEDE's.

    A fifth of the episodes flips coins. Coin flips rarely draft long, so two fifths explore around
    static settings that span every depth and lengths up to the cap, and two fifths around confidence
    thresholds, which draft as long as the model is sure.

    Args:
        depths: candidate depths.
        max_draft: cap on proposals.
        epsilon: share of coin flips around the settings and thresholds.

    Returns:
        The mixture, with its components in a fixed order.
    """
    lengths = sorted({*(length for length in SCHEDULE_LENGTHS if length < max_draft), max_draft})
    around_static = [
        EpsilonGreedy(StaticController(int(depth), length), epsilon) for depth in depths for length in lengths
    ]
    around_thresholds = [
        EpsilonGreedy(ThresholdController(threshold), epsilon) for threshold in SCHEDULE_THRESHOLDS
    ]
    groups: tuple[Sequence[Behaviour], ...] = ([UniformRandom()], around_static, around_thresholds)
    components = [component for group in groups for component in group]
    weights = [
        share / len(group)
        for share, group in zip(SCHEDULE_SHARES, groups, strict=True)
        for _ in group
    ]  # fmt: skip
    return EpisodeMixture(components, weights)


def select(view: View, rows: NDArray[np.int64] | None = None, columns: Sequence[int] | None = None) -> View:
    """Some rows (lanes) and some columns (features) of a view; None keeps all."""
    kept: Any = slice(None) if rows is None else rows
    observation = view.observation[kept]
    return View(
        phase=view.phase[kept],
        depth_index=view.depth_index[kept],
        draft_length=view.draft_length[kept],
        observation=observation if columns is None else observation[:, list(columns)],
        lanes=view.lanes[kept],
        text=view.text[kept],
        decision=view.decision[kept],
    )
