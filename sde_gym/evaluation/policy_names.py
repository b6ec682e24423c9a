"""Deterministic policies by name, for the command line, and the exact values that go with a log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import ExactQ
from sde_gym.offline.behaviours import describe_controller
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.controller import Controller
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.files import load_policy, policy_paths
from sde_gym.policies.lite import CALMController, LITEController
from sde_gym.policies.qnetwork import QController
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.traces import load_traces

#: What a name may look like, and what it means.
FORMS: dict[str, str] = {
    "static:4,4": "exits at depth 4, drafts 4 tokens",
    "threshold:0.2": "exits where the top-1 probability reaches 0.2",
    "draft_verify:4": "Draft & Verify: exits at depth 4, drafts while a threshold that adapts is reached",
    "lite:TRACES@0.9": "LITE: a threshold a depth, calibrated on a trace set for 0.9 accepted proposals",
    "calm:0.9,128": "CALM: threshold 0.9 at first, falling by a tenth along a budget of 128 tokens",
    "del": "DEL: depth and length chosen each round by what all depths said so far",
    "adadecode:0.75": "AdaDecode: each token exits where top-1 is above 0.75; in the real decoder only",
    "PATH": "a policy file",
}

#: Entry of the settings of a data set that holds exact values: whose they are, and at which discount.
Q_TRUE_ENTRY = "q_true"


def named_policy(name: str) -> Controller:
    """The policy of a name; see `FORMS`.

    LITE's calibration takes the trace set as a whole: give another one than that to be judged on.

    Raises:
        InputError: a name that is neither a rule nor a policy file, numbers that the rule refuses, or a
            trace set that cannot be loaded.
    """
    kind, colon, rest = name.partition(":")
    parse = _RULES.get(kind)
    if parse is not None and bool(colon) == (kind != "del"):
        try:
            return parse(rest)
        except InputError:
            raise
        except ValueError:  # no numbers, or not so many
            raise _unknown(name) from None
    if not policy_paths(name)[0].is_file():
        raise _unknown(name)
    return load_policy(name)


def _static(rest: str) -> Controller:
    depth, length = rest.split(",")
    return StaticController(int(depth), int(length))


def _lite(rest: str) -> Controller:
    traces, _, target = rest.rpartition("@")
    share = float(target)
    if not traces:
        raise ValueError(rest)
    return LITEController.calibrated(load_traces(traces), share)


def _calm(rest: str) -> Controller:
    threshold, tokens = rest.split(",")
    return CALMController(float(threshold), int(tokens))


_RULES: dict[str, Callable[[str], Controller]] = {
    "static": _static,
    "threshold": lambda rest: ThresholdController(float(rest)),
    "draft_verify": lambda rest: DraftVerifyController(int(rest)),
    "lite": _lite,
    "calm": _calm,
    "del": lambda _: DELController(),
    "adadecode": lambda rest: AdaDecodeController(float(rest)),
}


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
