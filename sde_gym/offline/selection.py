"""The environment that transitions come from, and what a policy reaches in it, by exact replay."""

from __future__ import annotations

import dataclasses
from typing import Any

from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.transitions import Transitions, refuse_restricted
from sde_gym.policies.controller import Controller
from sde_gym.traces import TraceSet

#: Settings of `ReplayEngine` that collected transitions name.
_REQUIRED = ("depths", "reward", "final_token_reward", "k", "window", "max_draft")
_OPTIONAL = ("credit", "max_new_tokens", "cost", "rho")


def environment_of(transitions: Transitions) -> dict[str, Any]:
    """Settings of `ReplayEngine` under which these transitions were collected, but the observation.

    Raises:
        InputError: they do not say.
    """
    missing = [name for name in (*_REQUIRED, "num_layers") if transitions.settings.get(name) is None]
    if missing:
        raise InputError(
            f"the transitions do not say under which {', '.join(missing)} they were collected; a policy has "
            "to know: collect them with sde_gym.offline.collect, or add that to their settings"
        )
    found = {name: transitions.settings[name] for name in _REQUIRED}
    given = {name: transitions.settings.get(name) for name in _OPTIONAL}
    found |= {name: value for name, value in given.items() if value is not None}
    return {**found, "depths": tuple(found["depths"])}


def settings_of(transitions: Transitions, settings: DQNSettings) -> DQNSettings:
    """These settings, with the observation and the environment of the transitions.

    Raises:
        InputError: the transitions do not say.
    """
    environment = environment_of(transitions)
    return dataclasses.replace(
        settings,
        observation=",".join(transitions.names),
        **{name: environment[name] for name in _REQUIRED},
    )


def check_fit(transitions: Transitions, settings: DQNSettings, traces: TraceSet) -> None:
    """Refuse transitions of another environment than the one that settings and traces make.

    Raises:
        InputError: the message names the setting that differs and both values, or transitions that are
            restricted to one phase.
    """
    refuse_restricted(
        transitions,
        "so a policy has to be played together with the rule of the other; train with "
        "sde_gym.offline.train(..., evaluate=...) (sde_gym.policies.ablation joins policy and rule)",
    )
    environment = environment_of(transitions)
    depths = settings.depths or traces.depths
    wanted = {name: getattr(settings, name) for name in _REQUIRED} | {"depths": depths}
    pairs = [(name, environment[name], wanted[name]) for name in _REQUIRED]
    pairs.append(("observation", transitions.names, settings.features))
    pairs.append(("num_layers", transitions.settings["num_layers"], traces.num_layers))
    for name, found, expected in pairs:
        if found != expected:
            raise InputError(
                f"the transitions were collected with {name} {found}, but the run has {expected}; collect "
                f"anew, or train with {name} {found}"
            )


def replay_metrics(traces: TraceSet, controller: Controller, **environment: Any) -> dict[str, float]:
    """What a policy reaches on these texts; "return" is the mean over them.

    Args:
        traces: recorded texts.
        controller: the policy.
        **environment: as `run_controller` takes it.
    """
    result = run_controller(traces, controller, **environment)
    return {
        "return": float(result.returns.mean()),
        "speedup": result.speedup,
        "acceptance_rate": result.acceptance_rate,
        "mean_exit_depth": result.mean_exit_depth,
        "mean_draft_length": result.mean_draft_length,
    }


def check_same_model(train: TraceSet, test: TraceSet) -> None:
    """Refuse to judge a policy on texts of another model than it was trained on.

    Raises:
        InputError: the trace sets come from different models.
    """
    if train.manifest["model_hash"] != test.manifest["model_hash"]:
        raise InputError(
            f"the training texts were recorded with {train.manifest['model']} and the test texts with "
            f"{test.manifest['model']} of other weights; give two sets of one model"
        )
