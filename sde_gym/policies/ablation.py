"""Controllers that decide one of the two things and leave the other to a fixed rule: LEDE's ablations.

`DepthChoiceOnly` is the paper's "without adaptive length", `LengthChoiceOnly` its "without dynamic
exit". They do to a controller what `sde_gym.envs.wrappers` (`DepthOnly`, `LengthOnly`) do to an
environment: same actions and, but for heads, same returns and counters. The wrapped controller is not
asked where the rule decides, and the heads there are not read; the environment, which cannot know that,
counts them in `head_calls` and charges them where its reward and features do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View
from sde_gym.policies.observation import Phase
from sde_gym.policies.qnetwork import QController
from sde_gym.policies.rules import RandomController


class _OnePhase(BaseController):
    """A controller where it decides, a rule in the other phase.

    Subclasses set `decides` and define `_rule`.

    Attributes:
        controller: decides in the phase `decides`.
        stateful: whether it keeps state between decisions; the rules keep none.
        stochastic: whether it draws its actions.
    """

    decides: Phase

    def __init__(self, controller: Controller, name: str) -> None:
        if not isinstance(controller, Controller):
            raise InputError(
                f"controller: {getattr(controller, 'name', controller)!r} is no controller: it lacks what "
                "the protocol `Controller` names; for a behaviour policy use sde_gym.offline.restricted"
            )
        self.controller = controller
        self.name = name
        self.observation = controller.observation
        self.k = getattr(controller, "k", None)
        self.window = getattr(controller, "window", None)
        self.shadows = getattr(controller, "shadows", False)
        self.walks_every_token = getattr(controller, "walks_every_token", False)
        self.stateful = keeps_state(controller)
        self.stochastic = draws(controller, self.decides)

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """The controller's own check."""
        super().bind(depths, num_layers, max_draft)
        self.controller.bind(depths, num_layers, max_draft)

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Passed on."""
        self.controller.reset(lanes)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Passed on."""
        self.controller.feedback(outcome)

    def act(self, view: View) -> NDArray[np.int64]:
        """The controller's actions in its phase, the rule's in the other, int64 (n,)."""
        asked = view.phase == self.decides
        if asked.all():
            return np.asarray(self.controller.act(view), dtype=np.int64)
        actions = self._rule(view).astype(np.int64)
        if asked.any():
            rows = View(**{name: array[asked] for name, array in vars(view).items()})
            actions[asked] = self.controller.act(rows)
        return actions

    def reads(self, phase: int, depth_index: int) -> bool:
        """As the controller does in its phase; never in the other."""
        return phase == self.decides and self.controller.reads(phase, depth_index)

    def _rule(self, view: View) -> NDArray[np.bool_]:
        """Where the rule exits, bool (n,); looked at in the other phase only."""
        raise NotImplementedError

    @property
    def seed(self) -> int:
        """Of the controller's draws; AttributeError where it has none."""
        inner: Any = self.controller
        seed: int = inner.seed
        return seed

    @seed.setter
    def seed(self, seed: int) -> None:
        # Copied, since copies of this object that keep the old seed share the controller.
        inner: Any = copy.copy(self.controller)
        inner.seed = seed
        self.controller = inner

    @property
    def copy_lanes(self) -> Callable[[NDArray[np.int64], NDArray[np.int64]], None]:
        """The controller's own `copy_lanes(source, target)`; AttributeError where it has none."""
        inner: Any = self.controller
        method: Callable[[NDArray[np.int64], NDArray[np.int64]], None] = inner.copy_lanes
        return method


class DepthChoiceOnly(_OnePhase):
    """The controller chooses the depth; once it exits, a fixed number of tokens is drafted.

    Drafts are shorter only where verification is forced: at an end-of-text proposal, with the token
    budget, or at a wrong proposal of a trace set without overrun.

    Args:
        controller: decides in SELECT.
        draft_length: proposals of a round, 1..max_draft; `bind` refuses more.

    Raises:
        InputError: draft_length is no whole number of at least 1, or `controller` is no controller.
    """

    decides = Phase.SELECT

    def __init__(self, controller: Controller, draft_length: int) -> None:
        self.draft_length = _whole_number("draft_length", draft_length)
        name = getattr(controller, "name", "")
        super().__init__(controller, f"depth only({name}, {self.draft_length})")

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError for a draft beyond max_draft, or as the controller does."""
        if self.draft_length > max_draft:
            raise InputError(f"draft_length: {self.draft_length} is out of range (1..{max_draft})")
        super().bind(depths, num_layers, max_draft)

    def _rule(self, view: View) -> NDArray[np.bool_]:
        exits: NDArray[np.bool_] = view.draft_length < self.draft_length
        return exits


class LengthChoiceOnly(_OnePhase):
    """The depth is fixed; the controller chooses how long to draft.

    The rule makes a round's first proposal; the controller is asked from the second on.

    Args:
        controller: decides in DRAFT.
        exit_depth: layers; `bind` refuses a depth that is not a candidate.

    Raises:
        InputError: exit_depth is no whole number of at least 1, or `controller` is no controller.
    """

    decides = Phase.DRAFT

    def __init__(self, controller: Controller, exit_depth: int) -> None:
        self.exit_depth = _whole_number("exit_depth", exit_depth)
        self._exit_index = -1
        name = getattr(controller, "name", "")
        super().__init__(controller, f"length only({name}, {self.exit_depth})")

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError for a depth that is no candidate or max_draft 1, or as the controller does."""
        if self.exit_depth not in depths:
            raise InputError(f"exit_depth: {self.exit_depth} is not one of the depths {list(depths)}")
        if max_draft < 2:
            raise InputError("max_draft: 1 leaves nothing to decide once the depth is fixed; give at least 2")
        super().bind(depths, num_layers, max_draft)
        self._exit_index = self.depths.index(self.exit_depth)

    def _rule(self, view: View) -> NDArray[np.bool_]:
        exits: NDArray[np.bool_] = view.depth_index >= self._exit_index
        return exits


def draws(controller: Controller, phase: Phase) -> bool:
    """Whether a controller draws its actions in this phase.

    Its own attribute `stochastic` decides where it has one; else random controllers do, unless their
    probability is 0 or 1, and all others are taken to be deterministic.
    """
    declared = getattr(controller, "stochastic", None)
    if declared is not None:
        return bool(declared)
    if isinstance(controller, RandomController):
        return (controller.p_exit if phase == Phase.SELECT else controller.p_draft) not in (0.0, 1.0)
    return False


def keeps_state(controller: Controller) -> bool:
    """Whether a controller remembers anything from one decision to the next.

    Its own attribute `stateful` decides where it has one; else it does if it has a `reset` or a
    `feedback` other than the empty ones of `BaseController` and `QController`.
    """
    declared = getattr(controller, "stateful", None)
    if declared is not None:
        return bool(declared)
    return any(
        getattr(getattr(controller, name), "__func__", None)
        not in (getattr(BaseController, name), getattr(QController, name))
        for name in ("reset", "feedback")
    )


def _whole_number(name: str, value: Any) -> int:
    """`value` as an int; InputError unless it is a whole number of at least 1."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InputError(f"{name}: {value!r} is not a whole number (at least 1)")
    if value < 1:
        raise InputError(f"{name}: {value} is out of range (at least 1)")
    return int(value)
