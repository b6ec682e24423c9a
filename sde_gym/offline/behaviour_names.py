"""Behaviour policies by name, for the command line, and from the descriptions that data sets carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sde_gym.errors import InputError
from sde_gym.offline.behaviours import (
    Behaviour,
    EpisodeMixture,
    EpsilonGreedy,
    StepMixture,
    UniformRandom,
    exploratory_schedule,
)
from sde_gym.offline.restricted import OnePhase
from sde_gym.offline.softmax import Softmax
from sde_gym.policies.controller import Controller
from sde_gym.policies.rules import StaticController, ThresholdController

#: What a name may look like, and what it means.
FORMS: dict[str, str] = {
    "uniform": "a fair coin",
    "random:0.3": "a coin that exits with probability 0.3",
    "static:4,6+0.1": "exits at depth 4, drafts 6 tokens; a share of 0.1 of the decisions are fair coins",
    "threshold:0.5+0.1": "exits where the top-1 probability reaches 0.5; a share of 0.1 are fair coins",
    "schedule": "LEDE's exploration: coins, static settings and thresholds, one for each episode",
    "softmax:PATH@0.5": "softmax over the action values of a saved policy, at temperature 0.5",
    "mixture:A|B|...": "one of the named behaviours for each episode, in equal shares",
    "step-mixture:A|B|...": "one of the named behaviours for each decision, in equal shares",
}


def parse_behaviour(name: str, depths: Sequence[int], max_draft: int) -> Behaviour | EpisodeMixture:
    """The behaviour of a name; see `FORMS`.

    Args:
        name: one of the forms.
        depths: candidate depths, which "schedule" spans.
        max_draft: cap on proposals, likewise.

    Raises:
        InputError: another form, whose message lists these, or numbers or a policy file that the
            behaviour itself refuses.
    """
    kind, colon, rest = name.partition(":")
    if name == "uniform":
        return UniformRandom()
    if name == "schedule":
        return exploratory_schedule(depths, max_draft)
    if colon and kind in ("mixture", "step-mixture"):
        members = [_member(part, name, depths, max_draft) for part in rest.split("|")]
        return EpisodeMixture(members) if kind == "mixture" else StepMixture(members)
    if colon and kind in _SIMPLE:
        return _SIMPLE[kind](rest, name)
    raise _unknown(name)


def rebuild_behaviour(description: Mapping[str, Any]) -> Behaviour | EpisodeMixture:
    """The behaviour that `describe()` described.

    Args:
        description: as found in `Transitions.settings["behaviour"]`.

    Raises:
        InputError: a behaviour or controller of another class, a policy file that is not there or has
            other weights than it had, or a description that is not one.
    """
    try:
        kind = description["kind"]
        if kind == "random":
            return UniformRandom(description["exit_probability"])
        if kind == "epsilon_greedy":
            return EpsilonGreedy(_controller(description["controller"]), description["epsilon"])
        if kind == "softmax":
            return _softmax_of(description)
        if kind == OnePhase.kind:
            explored = _not_by_episode(rebuild_behaviour(description["behaviour"]))
            return OnePhase(explored, _controller(description["rule"]), description["phase"])
        if kind in (EpisodeMixture.kind, StepMixture.kind):
            members = [_not_by_episode(rebuild_behaviour(each)) for each in description["components"]]
            mixture = EpisodeMixture if kind == EpisodeMixture.kind else StepMixture
            return mixture(members, description["weights"])
    except (KeyError, TypeError) as error:
        raise InputError(f"behaviour: {description!r} is no description ({error!r})") from None
    raise InputError(f"behaviour: kind {kind!r} is not one of this package; make the object yourself")


def _controller(description: Mapping[str, Any]) -> Controller:
    kind = description["kind"]
    if kind == "static":
        return StaticController(description["exit_depth"], description["draft_length"])
    if kind == "threshold":
        return ThresholdController(description["threshold"], description["draft_threshold"])
    raise InputError(
        f"behaviour: the controller {description.get('name')!r} of {description.get('class')} is none of "
        "the package's rules, so its description does not rebuild it; make the object yourself"
    )


def _softmax_of(description: Mapping[str, Any]) -> Softmax:
    path, weights = description["path"], description["weights_sha256"]
    if path is None:
        raise InputError("behaviour: a softmax over a network that was never saved cannot be rebuilt")
    softmax = Softmax.load(path, description["temperature"])
    if softmax.controller.meta["weights_sha256"] != weights:
        raise InputError(f"behaviour: {path} holds other weights than the policy that made the data")
    return softmax


def _not_by_episode(behaviour: Behaviour | EpisodeMixture) -> Behaviour:
    if isinstance(behaviour, EpisodeMixture):
        raise InputError("behaviour: a mixture over episodes cannot be a member of another mixture")
    return behaviour


def _member(part: str, name: str, depths: Sequence[int], max_draft: int) -> Behaviour:
    if part == "schedule" or part.startswith(("mixture:", "step-mixture:")):
        raise InputError(f"behaviour {name!r}: {part!r} is itself a mixture, which cannot be a member of one")
    return _not_by_episode(parse_behaviour(part, depths, max_draft))


def _random(rest: str, name: str) -> Behaviour:
    return UniformRandom(_number(float, rest, name))


def _static(rest: str, name: str) -> Behaviour:
    setting, epsilon = _around(rest, name)
    depth, comma, length = setting.partition(",")
    if not comma:
        raise _unknown(name)
    controller = StaticController(_number(int, depth, name), _number(int, length, name))
    return EpsilonGreedy(controller, epsilon)


def _threshold(rest: str, name: str) -> Behaviour:
    setting, epsilon = _around(rest, name)
    return EpsilonGreedy(ThresholdController(_number(float, setting, name)), epsilon)


def _softmax(rest: str, name: str) -> Behaviour:
    path, at, temperature = rest.rpartition("@")
    if not (path and at):
        raise _unknown(name)
    return Softmax.load(path, _number(float, temperature, name))


_SIMPLE: dict[str, Callable[[str, str], Behaviour]] = {
    "random": _random,
    "static": _static,
    "threshold": _threshold,
    "softmax": _softmax,
}


def _around(rest: str, name: str) -> tuple[str, float]:
    """The setting before the plus sign and the epsilon behind it."""
    setting, plus, epsilon = rest.partition("+")
    if not plus:
        raise _unknown(name)
    return setting, _number(float, epsilon, name)


def _number(kind: Callable[[str], Any], text: str, name: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise _unknown(name) from None


def _unknown(name: str) -> InputError:
    return InputError(f"behaviour: {name!r} is none of the forms {', '.join(FORMS)}")
