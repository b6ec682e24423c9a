"""Target policies: asked for the probabilities of their actions at logged states.

Off-policy estimators see logged transitions only. A target is a `Controller`, deterministic, or a
`Behaviour` of `sde_gym.offline.behaviours`, known by its probabilities; either way it is asked at
every logged state, so it must decide from what was logged: its features must be among the logged
ones, and it may not remember what happened before.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.run import heads_read, hidden_columns
from sde_gym.envs.shadow import check_replayable
from sde_gym.errors import InputError
from sde_gym.evaluation.player import Policy, is_stochastic
from sde_gym.offline.behaviours import EpsilonGreedy, StepMixture, select
from sde_gym.policies.controller import Controller, View, feature_settings
from sde_gym.policies.observation import Action, Phase
from sde_gym.policies.rules import RandomController

#: All that a method which does nothing compiles to.
_IDLE = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}


class Target:
    """A policy asked for its probability of EXIT, given the columns that were logged.

    Attributes:
        name: the policy's.
    """

    def __init__(self, policy: Policy, names: tuple[str, ...], settings: Mapping[str, Any]) -> None:
        """Bind a policy to the setting of a log.

        Args:
            policy: a controller, or a behaviour.
            names: the logged features, in order.
            settings: of the log, as `collect` wrote them.

        Raises:
            InputError: a policy that remembers, that reads a feature which was not logged or was made
                with another `k` or `window`, or that does not fit depths, layers or draft cap; a controller
                that draws its actions, but for a `RandomController`, whose probabilities are known.
        """
        check_replayable(policy)
        check_memoryless(policy)
        known = not isinstance(policy, Controller) or isinstance(policy, RandomController)
        if not known and is_stochastic(policy):
            raise InputError(
                f"policy {policy.name!r} draws its actions and does not say with which probabilities; give a "
                "behaviour"
            )
        missing = [name for name in policy.observation if name not in names]
        if missing:
            raise InputError(
                f"policy {policy.name!r} reads {', '.join(missing)}, not among the logged features "
                f"({', '.join(names)}); collect with these features, too"
            )
        depths, num_layers, max_draft = setting_of(settings)
        feature_settings(policy, settings.get("k"), settings.get("window"))
        policy.bind(depths, num_layers, max_draft)
        self.name = policy.name
        self._policy = policy
        self._columns = [names.index(name) for name in policy.observation]
        self._hidden: NDArray[np.bool_] | None = None
        if isinstance(policy, Controller):
            self._hidden = hidden_columns(policy.observation, heads_read(policy, len(depths)))

    def exit_probability(self, view: View) -> NDArray[np.float64]:
        """Probability of EXIT for each decision of a view with the logged columns, float64 (n,)."""
        shown = select(view, columns=self._columns)
        if self._hidden is None:
            behaviour: Any = self._policy
            probability = behaviour.exit_probability(shown)
        elif isinstance(self._policy, RandomController):  # its probabilities, not one draw of them
            select_phase = view.phase == Phase.SELECT
            probability = np.where(select_phase, self._policy.p_exit, self._policy.p_draft)
        else:
            shown.observation[self._hidden[shown.phase, shown.depth_index]] = 0.0
            controller: Any = self._policy
            probability = controller.act(shown)
        return np.asarray(probability, dtype=np.float64)


def setting_of(settings: Mapping[str, Any]) -> tuple[tuple[int, ...], int, int]:
    """Depths, number of layers and draft cap of a log.

    Raises:
        InputError: one of them is missing.
    """
    for name in ("depths", "num_layers", "max_draft"):
        if name not in settings:
            raise InputError(f"transitions: their settings do not say {name}; collect them with `collect`")
    depths = tuple(int(depth) for depth in settings["depths"])
    return depths, int(settings["num_layers"]), int(settings["max_draft"])


def check_memoryless(policy: Policy) -> None:
    """Refuse a policy whose choice depends on more than the state it is shown.

    A policy's own attribute `stateful` decides where it has one. Else memory comes in by `reset` and
    `feedback`; both must be compiled to nothing, as they are where `BaseController`'s are inherited.

    Raises:
        InputError: the message names the policy.
    """
    if isinstance(policy, EpsilonGreedy):
        check_memoryless(policy.controller)
        return
    if isinstance(policy, StepMixture):
        for component in policy.components:
            check_memoryless(component)
        return
    stateful = getattr(policy, "stateful", None)
    if stateful is None:
        stateful = not all(_does_nothing(getattr(policy, name, None)) for name in ("reset", "feedback"))
    if stateful:
        raise InputError(
            f"policy {policy.name!r} keeps state (a `reset` or `feedback` of its own): a logged state does "
            "not say what it would do; estimate policies without memory, or set `stateful = False` on it if "
            "it keeps none"
        )


def _does_nothing(method: Any) -> bool:
    function = getattr(method, "__func__", method)
    return inspect.isfunction(function) and all(
        instruction.opname in _IDLE for instruction in dis.get_instructions(function)
    )


def chosen_actions(exit_probability: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """EXIT where a uniform number in [0, 1) falls below its probability, int64 (n,)."""
    return np.where(uniform < exit_probability, int(Action.EXIT), int(Action.CONTINUE)).astype(np.int64)
