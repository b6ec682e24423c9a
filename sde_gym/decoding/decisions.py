"""What a decoder asks of a controller, checked: that it is one, and that what it answers are actions."""

from __future__ import annotations

from typing import Any

import numpy as np

from sde_gym.checks import shown
from sde_gym.errors import InputError
from sde_gym.policies.controller import Controller, View

_METHODS = ("bind", "reset", "act", "feedback", "reads")


def check_controller(controller: Any) -> None:
    """Raise InputError unless it is a `Controller`: an object, not its class or its name."""
    if isinstance(controller, type):
        raise InputError(
            f"controller: {controller.__name__} is a class; give an instance, {controller.__name__}(...)"
        )
    missing = [name for name in _METHODS if not callable(getattr(controller, name, None))]
    if not hasattr(controller, "observation"):
        missing.append("observation")
    if missing:
        raise InputError(
            f"controller: {shown(controller)} is no controller, it lacks {', '.join(missing)}; give "
            "one such as StaticController(4, 4), or what load_policy returns"
        )


def ask(controller: Controller, view: View) -> list[int]:
    """The controller's actions for a view of n lanes, n numbers out of 0 and 1.

    Raises:
        InputError: it answers anything else; the message names it.
    """
    answer: Any = controller.act(view)
    n = len(view.lanes)
    try:
        actions: list[int] = (answer if isinstance(answer, np.ndarray) else np.asarray(answer)).tolist()
        # What compares equal to 0 or 1 is one of them; NaN and rows of a table do not.
        if len(actions) == n and actions.count(0) + actions.count(1) == n:
            return actions
    except (AttributeError, TypeError, ValueError):
        pass  # a single number, None, lists of different lengths
    raise InputError(
        f"controller: act of {getattr(controller, 'name', '') or type(controller).__name__!r} returned "
        f"{shown(answer)} for {n} {'lane' if n == 1 else 'lanes'}; it must return an array of that many "
        "actions, each 0 (CONTINUE) or 1 (EXIT)"
    )
