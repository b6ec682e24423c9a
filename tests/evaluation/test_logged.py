"""What a target would do is read off the log as replay shows it; true values start where the log does."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.logged import evaluation_problem, logged_view
from sde_gym.evaluation.player import SampledBehaviour
from sde_gym.evaluation.policy_suite import random_network
from sde_gym.evaluation.targets import check_memoryless
from sde_gym.evaluation.truth import true_value
from sde_gym.evaluation.value import policy_value
from sde_gym.offline.behaviours import EpsilonGreedy, StepMixture, UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.offline.restricted import OnePhase, restricted
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.ablation import LengthChoiceOnly
from sde_gym.policies.controller import BaseController, RoundOutcome, View
from sde_gym.policies.observation import PAPER
from sde_gym.policies.qnetwork import QController
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.builders import random_traces

TRACES = random_traces(seed=5, texts=6, overrun=3)
MAX_DRAFT = 4


def log(episode: str, behaviour: Any = None, **settings: Any) -> Transitions:
    chosen = UniformRandom() if behaviour is None else behaviour
    return collect(TRACES, chosen, 40, seed=2, episode=episode, max_draft=MAX_DRAFT, **settings)


class Alternating(BaseController):
    """Acts by what became of the last round."""

    name = "alternating"

    def act(self, view: View) -> Any:
        return np.zeros(len(view.lanes), dtype=np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        self.last = outcome


@pytest.mark.parametrize("episode", ["generation", "round"])
def test_phase_depth_and_length_are_found_without_their_features(episode: str) -> None:
    full, bare = log(episode), log(episode, observation=PAPER)
    np.testing.assert_array_equal(full.action, bare.action)
    shown, found = logged_view(full), logged_view(bare, TRACES)
    for name in ("phase", "depth_index", "draft_length"):
        np.testing.assert_array_equal(getattr(shown, name), getattr(found, name), err_msg=name)
    assert set(shown.phase) == {0, 1}
    assert shown.draft_length.max() == MAX_DRAFT - 1
    assert set(shown.depth_index) == {0, 1, 2}


@pytest.mark.parametrize(
    "behaviour",
    [
        UniformRandom(0.7),
        EpsilonGreedy(StaticController(3, 2), 0.2),
        EpsilonGreedy(ThresholdController(0.5), 0.3),
        StepMixture([UniformRandom(), EpsilonGreedy(ThresholdController(0.5), 0.3)]),
    ],
    ids=lambda behaviour: behaviour.name,
)
@pytest.mark.parametrize("episode", ["generation", "round"])
def test_the_behaviour_as_its_own_target_has_ratio_one(behaviour: Any, episode: str) -> None:
    problem = evaluation_problem(behaviour, log(episode, behaviour), 0.9)
    np.testing.assert_allclose(problem.ratio, 1.0, atol=1e-12)


def test_a_random_controller_is_the_coin_that_it_flips() -> None:
    transitions = log("round")
    problem = evaluation_problem(RandomController(0.3, p_draft=0.8), transitions, 0.9)
    np.testing.assert_array_equal(
        problem.exit_probability, np.where(logged_view(transitions).phase == 0, 0.3, 0.8)
    )


@pytest.mark.parametrize("episode", ["generation", "round"])
def test_the_truth_of_the_policy_that_was_logged_is_its_mean_return(episode: str) -> None:
    policy = StaticController(3, 2)
    transitions = log(episode, EpsilonGreedy(policy, 0.0))
    true = true_value(policy, transitions, TRACES, (1.0, 0.9))
    paid = transitions.reward * 0.9**transitions.step
    expected = [transitions.returns().mean(), np.add.reduceat(paid, transitions.start[:-1]).mean()]
    np.testing.assert_allclose(true.value, expected, atol=1e-5)


@pytest.mark.parametrize("make", [lambda _: ThresholdController(0.6), lambda data: random_network(data, 1)])
def test_the_truth_for_rounds_starts_where_the_log_had_come_to(
    make: Callable[[Transitions], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transitions = log("round")
    policy = make(transitions)
    engine = ReplayEngine(TRACES, observation=transitions.names, episode="round", max_draft=MAX_DRAFT)
    lane = np.array([0])
    columns = [transitions.names.index(name) for name in policy.observation]
    policy.bind(engine.depths, engine.num_layers, engine.max_draft)
    total, text = 0.0, -1
    for first, end in zip(transitions.start[:-1], transitions.start[1:], strict=True):
        goes_on = transitions.text[first] == text and engine.resumable(lane)[0]
        text = transitions.text[first]
        observation = engine.resume_lanes(lane) if goes_on else engine.reset_lanes(lane, [text])
        np.testing.assert_array_equal(observation[0], transitions.observation[first])
        aside, seen, over, discount = copy.deepcopy(engine), observation.copy(), False, 1.0
        while not over:
            action = policy.act(aside.view(lane, seen[:, columns]))
            seen, reward, terminated, _ = aside.step(action)
            total, discount, over = total + discount * float(reward[0]), discount * 0.9, bool(terminated[0])
        for row in range(first, end):
            engine.step(transitions.action[row : row + 1])
    for block in (1 << 16, 7):  # rounds held at a time
        monkeypatch.setattr("sde_gym.evaluation.truth._BLOCK", block)
        true = true_value(policy, transitions, TRACES, (0.9,))
        assert true.value[0] == pytest.approx(total / transitions.num_episodes, abs=1e-12)


def test_the_truth_for_rounds_of_a_coin_agrees_with_a_log_of_its_own() -> None:
    behaviour = UniformRandom(0.5)
    transitions = log("round", behaviour)
    true = true_value(behaviour, transitions, TRACES, (1.0,), repeats=64)
    spread = transitions.returns().std() / np.sqrt(transitions.num_episodes)
    assert true.standard_error[0] > 0
    assert abs(true.value[0] - transitions.returns().mean()) < 4 * np.hypot(spread, true.standard_error[0])


def test_the_truth_for_whole_texts_is_the_value_of_the_policy() -> None:
    transitions = log("generation")
    assert transitions.num_episodes > len(TRACES)  # some texts more often than others
    texts = transitions.text[transitions.start[:-1]]
    for policy in (ThresholdController(0.6), UniformRandom(0.3)):
        true = true_value(policy, transitions, TRACES, (1.0, 0.9), repeats=3, seed=4)
        found = policy_value(
            policy, TRACES, repeats=3, seed=4, gammas=(1.0, 0.9), episode="generation", max_draft=MAX_DRAFT
        )
        by_text = dict(zip(found.texts, found.returns.mean(axis=1).T, strict=True))
        np.testing.assert_allclose(true.value, np.mean([by_text[text] for text in texts], axis=0))


def test_policies_with_a_memory_are_refused() -> None:
    for policy in (
        Alternating(),
        EpsilonGreedy(Alternating(), 0.1),
        StepMixture([EpsilonGreedy(Alternating(), 0.1)]),
    ):
        with pytest.raises(InputError, match="'alternating' keeps state"):
            check_memoryless(policy)
    declared = Alternating()
    declared.stateful = False  # type: ignore[attr-defined]
    check_memoryless(declared)
    with pytest.raises(InputError, match="'alternating' keeps state"):
        true_value(Alternating(), log("round"), TRACES, (1.0,))


def test_what_does_not_fit_is_refused_by_name(toy_traces: TraceSet) -> None:
    bare = log("generation", observation=PAPER)
    with pytest.raises(InputError, match="reads top1, not among the logged features"):
        evaluation_problem(ThresholdController(0.5), bare, 0.9, logged_view(bare, TRACES))
    with pytest.raises(InputError, match="give the trace set"):
        evaluation_problem(StaticController(2, 1), bare, 0.9)
    with pytest.raises(InputError, match="were collected from the trace set"):
        logged_view(bare, toy_traces)
    with pytest.raises(InputError, match="were collected from the trace set"):
        true_value(StaticController(2, 1), bare, toy_traces, (1.0,))
    with pytest.raises(InputError, match="repeats is 1"):
        true_value(StaticController(2, 1), bare, TRACES, (1.0,), repeats=1)
    with pytest.raises(InputError, match="gamma is 2"):
        true_value(StaticController(2, 1), bare, TRACES, (2.0,))
    extended = log("generation")
    known = random_network(extended, 0)
    other = QController(known.network, known.observation, known.depths, 8, MAX_DRAFT, k=3)
    with pytest.raises(InputError, match="k: 5 was given"):
        evaluation_problem(other, extended, 0.9)
    with pytest.raises(InputError, match="do not say depths"):
        logged_view(dataclasses.replace(extended, settings={}))
    with pytest.raises(InputError, match="does not fit depths"):
        logged_view(dataclasses.replace(extended, settings={**extended.settings, "depths": [1, 2]}))


def test_the_truth_of_a_composed_policy_that_draws() -> None:
    """Every copy of it, one a seed, has to learn the setting: a rule goes by the index of its depth."""
    transitions = collect(TRACES, UniformRandom(), len(TRACES), seed=0, max_draft=MAX_DRAFT)
    depth = TRACES.depths[1]
    true = true_value(
        LengthChoiceOnly(RandomController(0.5), depth), transitions, TRACES, (1.0,), repeats=3, seed=7
    )
    played = [
        run_controller(TRACES, LengthChoiceOnly(RandomController(0.5, seed=seed), depth), max_draft=MAX_DRAFT)
        for seed in (7, 8, 9)
    ]
    assert true.value[0] == pytest.approx(np.mean([run.returns.mean() for run in played]))


def test_a_controller_that_draws_with_unknown_probabilities_is_no_target() -> None:
    transitions = log("round")
    for policy in (
        LengthChoiceOnly(RandomController(0.5), TRACES.depths[0]),
        LengthChoiceOnly(SampledBehaviour(UniformRandom()), TRACES.depths[0]),
    ):
        policy.stateful = False
        with pytest.raises(InputError, match="draws its actions and does not say with which probabilities"):
            evaluation_problem(policy, transitions, 0.9)
    evaluation_problem(RandomController(0.5), transitions, 0.9)
    evaluation_problem(LengthChoiceOnly(RandomController(1.0), TRACES.depths[0]), transitions, 0.9)


def test_transitions_of_one_phase_are_refused() -> None:
    whole = log("generation", OnePhase(UniformRandom(), StaticController(3, 2), "select"))
    part, view = restricted(whole, "select"), logged_view(whole)
    policy = StaticController(3, 2)
    for call in (
        lambda: logged_view(part),
        lambda: evaluation_problem(policy, part, 0.9),
        lambda: evaluation_problem(policy, part, 0.9, view),
        lambda: true_value(policy, part, TRACES, (1.0,)),
    ):
        with pytest.raises(InputError, match="restricted to the phase 'select', so decisions of the other"):
            call()
