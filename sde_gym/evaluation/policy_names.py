"""Deterministic policies by name, for the command line, and the exact values that go with a log."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import ExactQ
from sde_gym.offline.behaviours import describe_controller
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import Controller
from sde_gym.policies.files import load_policy, policy_paths
from sde_gym.policies.qnetwork import QController
from sde_gym.policies.rules import StaticController, ThresholdController

#: What a name may look like, and what it means.
FORMS: dict[str, str] = {
    "static:4,4": "exits at depth 4, drafts 4 tokens",
    "threshold:0.2": "exits where the top-1 probability reaches 0.2",
    "PATH": "a policy file",
}

#: Entry of the settings of a data set that holds exact values: whose they are, and at which discount.
Q_TRUE_ENTRY = "q_true"


def named_policy(name: str) -> Controller:
    """The policy of a name; see `FORMS`.

    Raises:
        InputError: a name that is neither a rule nor a policy file, or numbers that the rule refuses.
    """
    kind, colon, rest = name.partition(":")
    numbers = rest.split(",")
    try:
        if colon and kind == "static" and len(numbers) == 2:
            return StaticController(int(numbers[0]), int(numbers[1]))
        if colon and kind == "threshold" and len(numbers) == 1:
            return ThresholdController(float(rest))
    except InputError:
        raise
    except ValueError:
        raise _unknown(name) from None
    if not policy_paths(name)[0].is_file():
        raise _unknown(name)
    return load_policy(name)


def _unknown(name: str) -> InputError:
    return InputError(f"policy: {name!r} is no policy file and none of the forms {', '.join(FORMS)}")


def describe_policy(policy: Controller, name: str | None = None) -> dict[str, Any]:
    """A policy as plain JSON values.

    Args:
        policy: a rule as its numbers, a network as the hash of its weights, any other as its class.
        name: what `named_policy` made it of; of a network its path is kept.
    """
    if not isinstance(policy, QController):
        return describe_controller(policy)
    return {
        "kind": "network",
        "name": policy.name,
        "path": None if name is None else str(Path(name).absolute()),
        "weights_sha256": policy.meta.get("weights_sha256"),
    }


def with_q_true(transitions: Transitions, truth: ExactQ, description: dict[str, Any]) -> Transitions:
    """The transitions, whose settings now say whose exact values are stored beside them.

    Args:
        transitions: what `truth` was computed for.
        truth: exact values.
        description: of the policy, see `describe_policy`.
    """
    entry = {"policy": description, "gamma": truth.gamma}
    return dataclasses.replace(transitions, settings={**transitions.settings, Q_TRUE_ENTRY: entry})
