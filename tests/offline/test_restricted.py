"""Data of one phase are what an agent behind the wrapper lives through, and what it learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs import DepthOnly, LengthOnly
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import exact_q
from sde_gym.evaluation.player import SampledBehaviour
from sde_gym.offline import DQNSettings, Transitions, collect, exploratory_schedule, train, train_policy
from sde_gym.offline.behaviours import EpisodeMixture, EpsilonGreedy, UniformRandom
from sde_gym.offline.restricted import OnePhase, restricted
from sde_gym.offline.selection import environment_of, replay_metrics, settings_of
from sde_gym.offline.transitions import load_transitions, save_transitions
from sde_gym.policies.ablation import DepthChoiceOnly, LengthChoiceOnly
from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View
from sde_gym.policies.observation import PAPER, Phase
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.builders import random_traces

RULE = StaticController(3, 4)
EXPLORING: dict[str, Callable[[], Any]] = {
    "uniform": UniformRandom,
    "around a threshold": lambda: EpsilonGreedy(ThresholdController(0.5), 0.3),
}
TINY = DQNSettings(gradient_steps=12, evaluate_every=6, hidden=(8, 8), batch_size=32)


def wrapped(traces: TraceSet, phase: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    env: Any = gymnasium.make("sde_gym/LEDE-v0", traces=traces, **kwargs)
    return DepthOnly(env, RULE.draft_length) if phase == "select" else LengthOnly(env, RULE.exit_depth)


@pytest.mark.parametrize("overrun", [11, 0])
@pytest.mark.parametrize("credit", ["immediate", "round"])
@pytest.mark.parametrize("phase", ["select", "draft"])
@pytest.mark.parametrize("behaviour", EXPLORING)
def test_it_is_what_stepping_the_wrapper_yields(
    behaviour: str, phase: str, credit: str, overrun: int
) -> None:
    traces = random_traces(4, 20, max_new_tokens=8, overrun=overrun)  # some texts are one round
    whole = collect(
        traces,
        OnePhase(EXPLORING[behaviour](), RULE, phase),
        30,
        seed=1,
        observation="extended",
        credit=credit,
    )
    data = restricted(whole, phase)
    env = wrapped(traces, phase, observation="extended", credit=credit)
    for first, end in zip(data.start[:-1], data.start[1:], strict=True):
        row, _ = env.reset(options={"text": int(data.text[first])})
        for at in range(first, end):
            np.testing.assert_array_equal(row, data.observation[at])
            row, reward, over, _, _ = env.step(int(data.action[at]))
            assert reward == pytest.approx(float(data.reward[at]), abs=1e-5)
            assert over == data.terminal[at]
    # Left out are the episodes that the wrapper passes over; nothing else is lost.
    left_out = sorted(set(whole.episode.tolist()) - set(data.episode.tolist()))
    assert bool(left_out) == (phase == "draft")
    for episode in left_out:
        text = int(whole.text[whole.start[episode]])
        with pytest.raises(InputError, match="leaves nothing to decide"):
            env.reset(options={"text": text})
    np.testing.assert_allclose(data.returns(), np.delete(whole.returns(), left_out), rtol=1e-4, atol=1e-4)
    assert data.settings == {**whole.settings, "restricted": phase}
    assert data.names == whole.names
    assert (data.propensity < 1).all()


def test_rounds_as_episodes(toy_traces: TraceSet) -> None:
    """A round whose first proposal is its last is no episode of an agent that chooses the length."""
    whole = collect(toy_traces, OnePhase(UniformRandom(), RULE, "draft"), 40, seed=0, episode="round")
    data = restricted(whole, "draft")
    drafted = whole.observation[:, whole.names.index("draft_length")] > 0
    assert sorted(set(data.episode.tolist())) == sorted(set(whole.episode[drafted].tolist()))
    assert data.num_episodes < 40
    sums = np.bincount(whole.episode, whole.reward)
    np.testing.assert_allclose(data.returns(), sums[data.episode[data.start[:-1]]], atol=1e-5)


def by_hand(phases: list[list[int]]) -> Transitions:
    """Episodes of these phases; the reward of row i is 2**i, its action 1, its propensity 0.5 in DRAFT."""
    phase = np.array([each for episode in phases for each in episode])
    lengths = [len(episode) for episode in phases]
    number = np.repeat(np.arange(len(phases)), lengths)
    count = len(phase)
    return Transitions(
        observation=np.stack([phase, np.arange(count)], axis=1).astype(np.float32),
        action=np.ones(count, dtype=np.int64),
        reward=(2.0 ** np.arange(count)).astype(np.float32),
        terminal=np.append(number[1:] != number[:-1], True),
        episode=number,
        step=np.concatenate([np.arange(length) for length in lengths]),
        propensity=np.where(phase == 1, 0.5, 1.0),
        text=number + 7,
        component=np.zeros(count, dtype=np.int64),
        names=("phase", "top1"),
        settings={"seed": 0},
    )


def test_sums_by_hand() -> None:
    """Rows 0 1 2 3 | 4 5 | 6 | 7 8: of the drafting ones, 2 3 | - | 6 | 7."""
    data = restricted(by_hand([[0, 0, 1, 1], [0, 0], [1], [1, 0]]), "draft")
    assert data.observation[:, 1].tolist() == [2, 3, 6, 7]
    assert data.reward.tolist() == [1 + 2 + 4, 8, 64, 128 + 256]
    assert data.terminal.tolist() == [False, True, True, True]
    assert data.episode.tolist() == [0, 0, 2, 3]
    assert data.step.tolist() == [0, 1, 0, 0]
    assert data.text.tolist() == [7, 7, 9, 10]
    assert data.propensity.tolist() == [0.5] * 4
    assert restricted(by_hand([[0, 1, 0, 1, 0, 1]]), Phase.DRAFT).reward.tolist() == [1 + 2 + 4, 8 + 16, 32]


def test_features_can_be_left_out(toy_traces: TraceSet, tmp_path: Path) -> None:
    behaviour = OnePhase(UniformRandom(), RULE, Phase.SELECT)
    whole = collect(toy_traces, behaviour, 10, seed=0, observation=(*PAPER, "phase"))
    data = restricted(whole, "select", "paper")
    assert data.names == PAPER
    row, _ = wrapped(toy_traces, "select", observation="paper").reset(options={"text": int(data.text[0])})
    np.testing.assert_array_equal(row, data.observation[0])
    again = load_transitions(save_transitions(tmp_path / "data.npz", data))
    assert again.settings["restricted"] == "select"
    assert again.settings["behaviour"] == {
        "kind": "one_phase",
        "phase": "select",
        "behaviour": {"kind": "random", "exit_probability": 0.5},
        "rule": {"kind": "static", "exit_depth": 3, "draft_length": 4},
    }
    with pytest.raises(
        InputError, match=r"neither phase nor draft_length .*\['confidence', 'entropy', 'trace'\]"
    ):
        restricted(data, "select")
    with pytest.raises(InputError, match="observation: depth, top1 not logged"):
        restricted(whole, "select", ("depth", "entropy", "top1"))


class Told(BaseController):
    """Drafts 2 at the first depth; keeps what it was shown and told."""

    name = "told"
    observation: tuple[str, ...] = ("top1",)

    def __init__(self) -> None:
        self.phases: set[int] = set()
        self.top1: list[float] = []
        self.rounds = self.started = 0

    def reset(self, lanes: np.ndarray) -> None:
        self.started += len(lanes)

    def feedback(self, outcome: RoundOutcome) -> None:
        self.rounds += len(outcome.lanes)

    def act(self, view: View) -> np.ndarray:
        self.phases |= set(view.phase.tolist())
        self.top1 += view.observation[:, 0].tolist()
        return np.where(view.phase == Phase.SELECT, 1, view.draft_length < 2)

    def reads(self, phase: int, depth_index: int) -> bool:
        return False


def test_each_of_the_two_is_asked_in_its_own_phase(toy_traces: TraceSet) -> None:
    rule = Told()
    behaviour = OnePhase(EpsilonGreedy(ThresholdController(0.5), 0.2), rule, "select")
    assert behaviour.name == "threshold(0.5, 0.5)+0.2 in SELECT, told in DRAFT"
    assert behaviour.observation == ("top1",)
    data = collect(toy_traces, behaviour, 6, seed=0)
    drafting = data.observation[:, data.names.index("phase")] > 0
    assert rule.phases == {Phase.DRAFT}
    assert not any(rule.top1)  # it reads no head, so it is shown none
    assert len(rule.top1) == drafting.sum()
    assert rule.started == 6 < rule.rounds
    assert (data.propensity[drafting] == 1).all()
    assert set(data.propensity[~drafting].round(9).tolist()) == {0.9, 0.1}


def test_the_behaviour_is_the_composed_controller_without_chance(toy_traces: TraceSet) -> None:
    inner = ThresholdController(0.5, 0.3)
    pairs: list[tuple[str, Controller]] = [
        ("select", DepthChoiceOnly(inner, RULE.draft_length)),
        ("draft", LengthChoiceOnly(inner, RULE.exit_depth)),
    ]
    for phase, composed in pairs:
        behaviour = OnePhase(EpsilonGreedy(inner, 0.0), RULE, phase)
        found = run_controller(toy_traces, SampledBehaviour(behaviour))
        np.testing.assert_array_equal(found.returns, run_controller(toy_traces, composed).returns)


@pytest.mark.parametrize(
    ("phase", "algorithm"), [("select", "double_dqn"), ("draft", "double_dqn"), ("select", "bc")]
)
def test_a_policy_trained_on_it_plays_with_its_rule(phase: str, algorithm: str, toy_traces: TraceSet) -> None:
    data = restricted(collect(toy_traces, OnePhase(UniformRandom(), RULE, phase), 12, seed=0), phase)
    environment = environment_of(data)

    def with_rule(policy: Controller) -> Controller:
        if phase == "select":
            return DepthChoiceOnly(policy, RULE.draft_length)
        return LengthChoiceOnly(policy, RULE.exit_depth)

    log: list[dict[str, float]] = []
    policy = train(
        data, algorithm, TINY,
        evaluate=lambda policy: replay_metrics(toy_traces, with_rule(policy), **environment),
        on_checkpoint=lambda row: log.append(dict(row)),
    )  # fmt: skip
    result = run_controller(toy_traces, with_rule(policy))
    assert max(row["return"] for row in log) == pytest.approx(result.returns.mean())
    if phase == "draft":
        assert result.exits[:, 1].sum() == result.rounds.sum()


def test_a_mixture_over_episodes_explores_one_phase_by_its_members(toy_traces: TraceSet) -> None:
    schedule = exploratory_schedule(toy_traces.depths, 12)
    mixture = EpisodeMixture(
        [OnePhase(component, RULE, "draft") for component in schedule.components], schedule.weights.tolist()
    )
    data = restricted(collect(toy_traces, mixture, 40, seed=0), "draft")
    assert len(np.unique(data.component)) > 10
    assert (data.observation[:, data.names.index("depth")] == np.float32(3 / 8)).all()
    with pytest.raises(InputError, match="a mixture over episodes is no behaviour by itself"):
        OnePhase(schedule, RULE, "draft")  # type: ignore[arg-type]
    rules = [StaticController(2, 4), StaticController(3, 4)]
    mixture = EpisodeMixture([OnePhase(UniformRandom(), rule, "draft") for rule in rules])
    with pytest.raises(InputError, match="followed 2 different rules in SELECT"):
        restricted(collect(toy_traces, mixture, 8, seed=0), "draft")


def test_a_rule_that_was_left_to_chance_is_refused(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, UniformRandom(0.3), 4, seed=0)
    for phase, other in (("select", "DRAFT"), ("draft", "SELECT")):
        with pytest.raises(
            InputError, match=rf"row \d+ is a decision of {other} with propensity 0\.[37], .*OnePhase"
        ):
            restricted(data, phase)
    explored = collect(toy_traces, OnePhase(UniformRandom(), RULE, "select"), 4, seed=0)
    with pytest.raises(InputError, match=r"row 0 is a decision of SELECT with propensity 0\.5"):
        restricted(explored, "draft")
    only = by_hand([[0, 0], [0]])
    with pytest.raises(InputError, match="none of the 3 decisions is one of DRAFT"):
        restricted(only, "draft")
    assert len(restricted(dataclasses.replace(only, propensity=np.full(3, 0.2)), "select")) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OnePhase(UniformRandom(), RULE, "both"), "phase: 'both' is not one of select, draft"),
        (
            lambda: OnePhase(UniformRandom(), RandomController(), "select"),
            r"rule: 'random\(0.5, 0.5\)' draws",
        ),
        (lambda: restricted(by_hand([[1]]), 1), "phase: 1 is not one of select, draft"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_coin_that_always_falls_the_same_way_is_a_rule() -> None:
    OnePhase(UniformRandom(), RandomController(0.5, p_draft=1.0), "select")
    with pytest.raises(InputError, match="draws its actions"):
        OnePhase(UniformRandom(), RandomController(1.0, p_draft=0.5), "select")


def test_what_would_play_it_without_its_rule_is_refused(toy_traces: TraceSet, tmp_path: Path) -> None:
    data = collect(toy_traces, OnePhase(UniformRandom(), RULE, "draft"), 6, 0, observation="extended")
    kept = restricted(data, "draft")
    with pytest.raises(InputError, match=r"restricted to the phase 'draft', .* give evaluate="):
        train(kept, "double_dqn", TINY, traces=toy_traces)
    with pytest.raises(InputError, match="give the transitions that they were made from"):
        exact_q(StaticController(3, 2), kept, toy_traces)
    settings = settings_of(kept, TINY)
    with pytest.raises(InputError, match=r"restricted to the phase 'draft', .*evaluate="):
        train_policy(toy_traces, tmp_path / "out", settings, transitions=kept)
    assert not (tmp_path / "out").exists()
