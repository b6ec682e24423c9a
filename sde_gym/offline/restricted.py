"""Offline data for an agent that has one of the two decisions: what an ablation is trained on.

`OnePhase` explores one phase and follows a rule in the other; `restricted` then drops the rule's
decisions from what was collected. What is left is the semi-MDP that the agent of
`sde_gym.envs.wrappers` lives in: a step lasts one or more decisions of the environment, whose rewards
are summed, and discounts count the agent's steps. A policy trained on it belongs into
`sde_gym.policies.ablation`, with the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.offline.behaviours import (
    Behaviour,
    EpisodeMixture,
    EpsilonGreedy,
    StepMixture,
    describe_controller,
    select,
)
from sde_gym.offline.transitions import RESTRICTED, Transitions
from sde_gym.policies.ablation import draws
from sde_gym.policies.controller import Controller, View
from sde_gym.policies.observation import Phase, resolve_observation

#: Phases by name.
PHASES: dict[str, Phase] = {phase.name.lower(): phase for phase in Phase}


class OnePhase(StepMixture):
    """A behaviour decides in one phase, a deterministic controller in the other, with propensity 1.

    A `StepMixture` whose member is not drawn but follows from the phase. The two see what they would
    see alone; each is asked in its own phase only, and both are told how rounds end.
    """

    kind = "one_phase"

    def __init__(self, behaviour: Behaviour, rule: Controller, phase: Phase | str) -> None:
        """Args:
            behaviour: decides in `phase`. Of a mixture over episodes, wrap each component.
            rule: decides in the other phase: `StaticController` for the rules of the wrappers.
            phase: "select" or "draft".

        Raises:
            InputError: another phase, a mixture over episodes, a rule that draws its actions, or two that
                were made for different `k` or `window`.
        """
        self.phase = _phase(phase)
        other = Phase(1 - self.phase)
        if isinstance(behaviour, EpisodeMixture):
            raise InputError(
                "behaviour: a mixture over episodes is no behaviour by itself; make an EpisodeMixture of "
                "OnePhase(component, rule, phase) for each of its components, with its weights"
            )
        if draws(rule, other):
            raise InputError(
                f"rule: {rule.name!r} draws its actions, so they would not have propensity 1; give a "
                "deterministic controller"
            )
        # Epsilon 0 turns a controller into a behaviour that sees what the decoder would show it.
        super().__init__([behaviour, EpsilonGreedy(rule, 0.0, asked=(other,))])
        self.behaviour, self.rule = behaviour, rule
        self.name = f"{behaviour.name} in {self.phase.name}, {rule.name} in {other.name}"

    def exit_probability(self, view: View) -> NDArray[np.float64]:
        """The behaviour's in its phase; 0 or 1 in the other."""
        probability = np.zeros(len(view.lanes))
        explored = view.phase == self.phase
        for component, rows in zip(self.components, (explored, ~explored), strict=True):
            if rows.any():
                columns = [self.observation.index(name) for name in component.observation]
                shown = select(view, np.flatnonzero(rows), columns)
                probability[rows] = component.exit_probability(shown)
        return probability

    def describe(self) -> dict[str, Any]:
        """The phase, the behaviour and the rule."""
        return {
            "kind": self.kind,
            "phase": self.phase.name.lower(),
            "behaviour": self.behaviour.describe(),
            "rule": describe_controller(self.rule),
        }


def restricted(
    transitions: Transitions, phase: Phase | str, observation: str | Iterable[str] | None = None
) -> Transitions:
    """The semi-MDP of an agent that decides in one phase, out of data that followed a rule in the other.

    Kept are the rows of `phase`, with their propensities; steps are numbered anew. The reward of a kept
    row is its own and those of the rows behind it up to the next one that is kept; what the rule earned
    before the first one of an episode is paid with that one, as under `LengthOnly`. So the returns of
    all episodes with a kept row are what they were. An episode without one is left out, and its return
    with it: its agent has nothing to decide. Episodes keep their numbers.

    Settings are those of the transitions, with `restricted` added ("select" or "draft"). They describe
    the environment without the rule, so whatever plays logged actions again, such as `exact_q`, needs
    the transitions as they were collected.

    Args:
        transitions: collected by `OnePhase`, or by whatever else has propensity 1 in the other phase.
            Rows are told apart by their feature `phase` or `draft_length`.
        phase: "select" or "draft", the phase that the agent decides in.
        observation: features to keep, in order, out of those that were logged; all if None. `phase`
            never varies in what is returned.

    Raises:
        InputError: no feature that tells the phase, a feature that was not logged, a decision of the
            other phase that was left to chance, episodes that followed different rules, or no decision
            in the phase.
    """
    chosen = _phase(phase)
    other = Phase(1 - chosen)
    names = transitions.names if observation is None else resolve_observation(observation)
    missing = [name for name in names if name not in transitions.names]
    if missing:
        raise InputError(f"observation: {', '.join(missing)} not logged; there are {list(transitions.names)}")
    kept = _phases(transitions) == chosen
    _check_rule(transitions, ~kept, other)
    if not kept.any():
        raise InputError(f"transitions: none of the {len(kept)} decisions is one of {chosen.name}")

    lengths = np.diff(transitions.start)
    decided = np.logical_or.reduceat(kept, transitions.start[:-1])
    played = np.flatnonzero(np.repeat(decided, lengths))  # rows of the episodes that stay
    at = np.flatnonzero(kept[played])
    episode = transitions.episode[played]
    opens = np.append(True, episode[at[1:]] != episode[at[:-1]])
    first = at.copy()  # of the rows whose rewards a kept row gets
    first[opens] = np.flatnonzero(np.append(True, episode[1:] != episode[:-1]))
    reward = np.add.reduceat(transitions.reward[played].astype(np.float64), first)
    rows = played[at]
    count = np.arange(len(rows))
    return Transitions(
        observation=transitions.observation[rows][:, [transitions.names.index(name) for name in names]],
        action=transitions.action[rows],
        reward=reward.astype(np.float32),
        terminal=np.append(opens[1:], True),
        episode=transitions.episode[rows],
        step=count - np.maximum.accumulate(np.where(opens, count, 0)),
        propensity=transitions.propensity[rows],
        text=transitions.text[rows],
        component=transitions.component[rows],
        names=names,
        settings={**transitions.settings, RESTRICTED: chosen.name.lower()},
    )


def _phase(phase: Phase | str) -> Phase:
    """A phase by its name or number; InputError for anything else."""
    if isinstance(phase, Phase):
        return phase
    if not isinstance(phase, str) or phase not in PHASES:
        raise InputError(f"phase: {phase!r} is not one of {', '.join(PHASES)}")
    return PHASES[phase]


def _phases(transitions: Transitions) -> NDArray[np.int64]:
    """`Phase` of each row, int64 (n,): in DRAFT, and only there, something was proposed already."""
    for name in ("phase", "draft_length"):
        if name in transitions.names:
            column = transitions.observation[:, transitions.names.index(name)]
            return np.where(column > 0, int(Phase.DRAFT), int(Phase.SELECT))
    raise InputError(
        f"transitions: neither phase nor draft_length is among their features {list(transitions.names)}, so "
        "nobody knows which decision a row was; collect with one of them, and leave it out here if unwanted"
    )


def _check_rule(transitions: Transitions, ruled: NDArray[np.bool_], other: Phase) -> None:
    """InputError unless the rows `ruled`, bool (n,), all decisions of `other`, followed one fixed rule."""
    drawn = ruled & (transitions.propensity != 1.0)
    if drawn.any():
        row = int(np.argmax(drawn))
        raise InputError(
            f"transitions: row {row} is a decision of {other.name} with propensity "
            f"{float(transitions.propensity[row]):g}, but an agent without that decision needs data whose "
            f"behaviour follows a fixed rule in {other.name}: propensity 1; collect with OnePhase"
        )
    rules: list[Any] = []
    for rule in _rules(transitions.settings.get("behaviour")):
        if rule not in rules:
            rules.append(rule)
    if len(rules) > 1:
        raise InputError(
            f"transitions: their episodes followed {len(rules)} different rules in {other.name}, {rules[0]} "
            f"and {rules[1]}; collect those of one rule at a time"
        )


def _rules(behaviour: Any) -> Iterator[Any]:
    """Descriptions of the rules in the description of a behaviour."""
    if isinstance(behaviour, Mapping):
        if behaviour.get("kind") == OnePhase.kind:
            yield behaviour.get("rule")
        for component in behaviour.get("components", ()):
            yield from _rules(component)
