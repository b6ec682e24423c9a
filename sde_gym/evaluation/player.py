"""A policy at the lanes of a replay engine: what exact answers are played with.

`Player` shows a controller what it may see, steps any of the lanes, and tells it what became of its
rounds, as `sde_gym.envs.run_controller` does; but lanes may be forced to other actions, and one lane
may be made what another is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.run import heads_read, hidden_columns
from sde_gym.envs.shadow import check_replayable, ended_rounds, wants_shadows
from sde_gym.errors import InputError
from sde_gym.offline.behaviours import Behaviour
from sde_gym.policies.ablation import keeps_state
from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View, feature_settings
from sde_gym.policies.observation import Action
from sde_gym.policies.rules import RandomController, counter_uniform
from sde_gym.traces import TraceSet

Policy = Controller | Behaviour
"""What can be evaluated: a controller, or a behaviour policy, whose actions are drawn."""

_STREAM = 2
"""Separates the draws of `SampledBehaviour` from those of collectors and random controllers."""


class SampledBehaviour(BaseController):
    """A behaviour policy as a controller: its actions are drawn with its own probabilities.

    Draws depend on (seed, text, decision number) only.

    Args:
        behaviour: the behaviour policy.
        seed: of the draws.
    """

    stochastic = True

    def __init__(self, behaviour: Behaviour, seed: int = 0) -> None:
        self.behaviour = behaviour
        self.seed = int(seed)
        self.name = behaviour.name
        self.observation = behaviour.observation
        self.k = getattr(behaviour, "k", None)
        self.window = getattr(behaviour, "window", None)
        self.shadows = wants_shadows(behaviour)

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """The behaviour's own check."""
        super().bind(depths, num_layers, max_draft)
        self.behaviour.bind(depths, num_layers, max_draft)

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Passed on."""
        self.behaviour.reset(lanes)

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT with the behaviour's probability."""
        exits = counter_uniform(self.seed, view.text, view.decision, _STREAM)
        return np.where(exits < self.behaviour.exit_probability(view), int(Action.EXIT), int(Action.CONTINUE))

    def feedback(self, outcome: RoundOutcome) -> None:
        """Passed on."""
        self.behaviour.feedback(outcome)


def is_stochastic(policy: Policy) -> bool:
    """Whether a policy draws its actions.

    A policy's own attribute `stochastic` decides where it has one; behaviour policies and random
    controllers draw, all other controllers are taken to be deterministic.
    """
    declared = getattr(policy, "stochastic", None)
    if declared is not None:
        return bool(declared)
    if isinstance(policy, RandomController):
        return not {policy.p_exit, policy.p_draft} <= {0.0, 1.0}
    return not isinstance(policy, Controller)


def reseeded(policy: Policy, seed: int) -> Controller:
    """A stochastic policy as a controller that draws from this seed; `policy` itself is not changed.

    Raises:
        InputError: it is neither a behaviour policy nor a controller with an attribute `seed`.
    """
    if isinstance(policy, Controller) and hasattr(policy, "seed"):
        seeded = copy.copy(policy)
        seeded.seed = seed
        return seeded
    if not isinstance(policy, Controller) and hasattr(policy, "exit_probability"):
        return SampledBehaviour(policy, seed)
    name = getattr(policy, "name", policy)
    raise InputError(
        f"policy {name!r}: its actions are drawn, but it is neither a behaviour policy (a mixture over "
        "episodes is none: take one of its components) nor a controller with an attribute `seed`"
    )


class Player:
    """A controller bound to n lanes.

    Args:
        traces: recorded texts.
        controller: bound here.
        lanes: n.
        settings: of `ReplayEngine`, but `observation` and `lanes`; `reads` follows from the controller
            if not given, and `k` and `window` may be its own.

    Attributes:
        engine: the engine.
        controller: as given.
        observation: float32 (n, f), the newest of each lane.

    Raises:
        InputError: a setting out of range, or a controller that does not fit or cannot be replayed.
    """

    def __init__(
        self, traces: TraceSet, controller: Controller, lanes: int, settings: Mapping[str, Any]
    ) -> None:
        check_replayable(controller)
        k, window = feature_settings(controller, settings.get("k"), settings.get("window"))
        settings = {**settings, "k": k, "window": window}
        probe = ReplayEngine(traces, **{**settings, "observation": (), "reads": False})
        controller.bind(probe.depths, probe.num_layers, probe.max_draft)
        reads = heads_read(controller, len(probe.depths))
        settings.setdefault("reads", reads)
        self.controller = controller
        self.engine = ReplayEngine(traces, observation=controller.observation, lanes=lanes, **settings)
        self.observation = np.zeros((lanes, len(controller.observation)), dtype=np.float32)
        self._hidden = hidden_columns(controller.observation, reads)
        self._any_hidden = bool(self._hidden.any())
        self._stateful = keeps_state(controller)
        self._shadows = wants_shadows(controller)

    def begin(self, lanes: NDArray[np.int64], texts: NDArray[np.int64]) -> None:
        """Start these texts, int64 (n,), in distinct lanes; where one is negative, go on in the lane's text.

        Raises:
            InputError: a text that is out of range or too short.
            RuntimeError: a lane that has no text to go on with.
        """
        self.observation[lanes] = self.engine.begin(lanes, texts)
        self.controller.reset(lanes[texts >= 0])

    def act(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the controller would do in these lanes, int64 (n,)."""
        view = self.engine.view(lanes, self.observation[lanes])
        if self._any_hidden:
            view.observation[self._hidden[view.phase, view.depth_index]] = 0.0
        return np.asarray(self.controller.act(view)).astype(np.int64)

    def step(
        self, lanes: NDArray[np.int64], actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Take one action in each of these distinct lanes.

        Returns:
            reward float64 (n,) and terminated bool (n,), in the order of `lanes`.
        """
        engine = self.engine
        if self._stateful:
            observation, reward, terminated, outcome = engine.step(actions, lanes)
            self.observation[lanes] = observation
            told = ended_rounds(engine, lanes, outcome, self._shadows)
            if told is not None:
                self.controller.feedback(told)
            return reward, terminated
        # Nobody has to be told what happened, so the fast way of stepping will do.
        every, skip = np.zeros(engine.lanes, dtype=np.int64), np.ones(engine.lanes, dtype=bool)
        every[lanes], skip[lanes] = actions, False
        observation, reward, terminated = engine.advance(every, skip)
        self.observation[lanes] = observation[lanes]
        return reward[lanes], terminated[lanes]

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Make the target lanes what the source lanes are; what a stateful controller knows of them, too."""
        self.engine.copy_lanes(source, target)
        self.observation[target] = self.observation[source]
        if self._stateful:
            self.controller.copy_lanes(source, target)  # type: ignore[attr-defined]
