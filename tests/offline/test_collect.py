"""Collected data replay exactly, carry true propensities and do not depend on how they were run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.offline.behaviours import (
    EpisodeMixture,
    EpsilonGreedy,
    StepMixture,
    UniformRandom,
    exploratory_schedule,
)
from sde_gym.offline.collect import collect, trace_set_id
from sde_gym.offline.softmax import Softmax
from sde_gym.offline.transitions import COLUMNS, Transitions, save_transitions
from sde_gym.policies.controller import BaseController, RoundOutcome, View
from sde_gym.policies.observation import EXTENDED, PAPER
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.traces import TraceSet


def same(one: Transitions, other: Transitions) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


BEHAVIOURS: dict[str, Callable[[TraceSet], object]] = {
    "uniform": lambda traces: UniformRandom(),
    "epsilon": lambda traces: EpsilonGreedy(ThresholdController(0.5), 0.2),
    "step mixture": lambda traces: StepMixture(
        [UniformRandom(0.9), EpsilonGreedy(StaticController(3, 4), 0.1)]
    ),
    "schedule": lambda traces: exploratory_schedule(traces.depths, 12),
    "softmax": lambda traces: Softmax(q_controller(traces), 2.0),
}


def q_controller(traces: TraceSet) -> QController:
    rng = np.random.default_rng(0)
    layers = [
        (rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1]).astype(np.float32))
        for shape in ((11, 32), (32, 2))
    ]
    return QController(QNetwork(layers), EXTENDED, traces.depths, traces.num_layers, 12)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_every_logged_step_is_what_the_engine_says(toy_traces: TraceSet, name: str) -> None:
    data = collect(toy_traces, BEHAVIOURS[name](toy_traces), 20, seed=4, observation="extended")  # type: ignore[arg-type]
    assert data.names == EXTENDED
    assert data.num_episodes == 20
    engine = ReplayEngine(toy_traces, observation=EXTENDED)
    lane = np.array([0])
    for episode in range(20):
        rows = slice(data.start[episode], data.start[episode + 1])
        assert set(data.episode[rows]) == {episode}
        observation = engine.reset_lanes(lane, data.text[rows][:1])
        for row in range(rows.start, rows.stop):
            np.testing.assert_array_equal(data.observation[row], observation[0])
            observation, reward, terminated, _ = engine.step(data.action[row : row + 1])
            assert data.reward[row] == np.float32(reward[0])
            assert data.terminal[row] == terminated[0]


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_lanes_and_run_length_change_nothing(toy_traces: TraceSet, name: str) -> None:
    behaviour = BEHAVIOURS[name](toy_traces)
    whole = collect(toy_traces, behaviour, 23, seed=1)  # type: ignore[arg-type]
    assert same(whole, collect(toy_traces, behaviour, 23, seed=1, lanes=5))  # type: ignore[arg-type]
    first = collect(toy_traces, behaviour, 9, seed=1)  # type: ignore[arg-type]
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(first, column), getattr(whole, column)[: len(first)])
    assert not np.array_equal(whole.action[:50], collect(toy_traces, behaviour, 23, seed=2).action[:50])  # type: ignore[arg-type]


def test_same_seed_same_file(toy_traces: TraceSet, tmp_path: Path) -> None:
    files = [
        save_transitions(
            tmp_path / f"{run}.npz",
            collect(toy_traces, exploratory_schedule(toy_traces.depths, 12), 12, seed=0),
        ).read_bytes()
        for run in range(2)
    ]
    assert files[0] == files[1]


def test_actions_come_as_often_as_their_propensities_say(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, exploratory_schedule(toy_traces.depths, 12, 0.3), 600, seed=0)
    exit_probability = np.where(data.action == 1, data.propensity, 1 - data.propensity)
    variance = exit_probability * (1 - exit_probability)
    for probability in np.unique(exit_probability.round(6)):
        rows = np.isclose(exit_probability, probability)
        deviation = (data.action[rows] - exit_probability[rows]).sum() / np.sqrt(variance[rows].sum())
        assert abs(deviation) < 4, f"exit probability {probability}: {deviation:.1f} standard deviations"


def test_propensities_by_hand(toy_traces: TraceSet) -> None:
    assert set(collect(toy_traces, UniformRandom(0.25), 10, seed=0).propensity) == {0.25, 0.75}
    greedy = collect(toy_traces, EpsilonGreedy(StaticController(3, 2), 0.0), 10, seed=0)
    assert set(greedy.propensity) == {1.0}
    mixture = EpisodeMixture([UniformRandom(0.25), EpsilonGreedy(StaticController(3, 2), 0.5)])
    data = collect(toy_traces, mixture, 30, seed=0)
    assert set(data.propensity[data.component == 0]) == {0.25, 0.75}
    assert set(data.propensity[data.component == 1]) == {0.25, 0.75}
    assert set(np.unique(data.component)) == {0, 1}
    for episode in range(30):  # one component an episode
        assert len(set(data.component[data.start[episode] : data.start[episode + 1]])) == 1


def test_the_schedule_reaches_long_drafts_that_coin_flips_do_not(toy_traces: TraceSet) -> None:
    column = EXTENDED.index("draft_length")
    flips = collect(toy_traces, UniformRandom(), 100, seed=0)
    schedule = collect(toy_traces, exploratory_schedule(toy_traces.depths, 12), 100, seed=0)
    share = [(data.observation[:, column] >= 5 / 12).mean() for data in (flips, schedule)]
    assert share[1] > 2.5 * share[0]


def test_texts_are_played_in_shuffled_passes(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, UniformRandom(), 3 * len(toy_traces), seed=5)
    played = data.text[data.start[:-1]].reshape(3, -1)
    for one in played:
        assert sorted(one) == list(range(len(toy_traces)))
    assert not np.array_equal(played[0], played[1])


def test_no_text_is_played_twice_in_a_row(toy_traces: TraceSet) -> None:
    for texts in (2, 3):
        traces = toy_traces.subset(range(texts))
        data = collect(traces, UniformRandom(), 40, seed=0)
        played = data.text[data.start[:-1]]
        assert (played[1:] != played[:-1]).all()
        for one in played[: 40 // texts * texts].reshape(-1, texts):
            assert sorted(one) == list(range(texts))
    alone = collect(toy_traces.subset([1]), UniformRandom(), 3, seed=0)
    assert alone.num_episodes == 3


def test_logged_features_are_independent_of_what_the_behaviour_reads(toy_traces: TraceSet) -> None:
    behaviour = EpsilonGreedy(ThresholdController(0.5), 0.2)  # reads top1, which PAPER does not have
    paper = collect(toy_traces, behaviour, 10, seed=0, observation=PAPER)
    extended = collect(toy_traces, behaviour, 10, seed=0, observation=EXTENDED)
    assert paper.names == PAPER
    np.testing.assert_array_equal(paper.observation, extended.observation[:, :3])
    np.testing.assert_array_equal(paper.action, extended.action)


class Recording(BaseController):
    """Exits always and writes down what it is told."""

    name = "recording"

    def __init__(self) -> None:
        self.resets: list[int] = []
        self.outcomes: list[tuple[int, int, int, int]] = []

    def reset(self, lanes: NDArray[np.int64]) -> None:
        self.resets += lanes.tolist()

    def act(self, view: View) -> NDArray[np.int64]:
        return np.ones(len(view.lanes), dtype=np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        columns = (outcome.lanes, outcome.depth_index, outcome.drafted, outcome.accepted)
        self.outcomes += list(zip(*(column.tolist() for column in columns), strict=True))


def test_stateful_controllers_are_reset_and_told_every_round(toy_traces: TraceSet) -> None:
    controller = Recording()
    data = collect(toy_traces, EpsilonGreedy(controller, 0.6), 30, seed=0, lanes=4)
    assert len(controller.resets) == 30
    assert set(controller.resets) == {0, 1, 2, 3}
    engine = ReplayEngine(toy_traces)
    rounds = 0
    for episode in range(30):  # the rounds, counted once more
        rows = slice(data.start[episode], data.start[episode + 1])
        engine.reset_lanes(np.array([0]), data.text[rows][:1])
        for action in data.action[rows]:
            engine.step(np.array([action]))
        rounds += int(engine.counters()["rounds"][0])
    assert len(controller.outcomes) == rounds
    plain = [outcome for outcome in controller.outcomes if outcome[1] == 3]
    assert plain
    assert all(drafted == accepted == 0 for _, _, drafted, accepted in plain)
    drafted_rounds = [outcome for outcome in controller.outcomes if outcome[1] < 3]
    assert all(drafted >= 1 and accepted <= drafted for _, _, drafted, accepted in drafted_rounds)


def test_provenance_says_how_the_data_were_made(toy_traces: TraceSet) -> None:
    settings = collect(toy_traces, UniformRandom(), 5, seed=7, depths=(2, 6), k=3, max_draft=4).settings
    expected = {"seed": 7, "episodes": 5, "depths": [2, 6], "num_layers": 8, "k": 3, "max_draft": 4,
                "reward": "lede", "episode": "generation", "traces": trace_set_id(toy_traces),
                "model": {"name": "toy", "weights_hash": "0" * 64}}  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert settings["behaviour"] == {"kind": "random", "exit_probability": 0.5}


def test_the_id_of_a_trace_set_follows_its_contents(toy_traces: TraceSet) -> None:
    again = dataclasses.replace(toy_traces, token=toy_traces.token.copy())
    assert trace_set_id(again) == trace_set_id(toy_traces)
    changed = toy_traces.entropy.copy()
    changed[0, 0] += 1
    assert trace_set_id(dataclasses.replace(toy_traces, entropy=changed)) != trace_set_id(toy_traces)
    assert trace_set_id(toy_traces.subset([0, 1])) != trace_set_id(toy_traces)


def test_progress_counts_episodes(toy_traces: TraceSet) -> None:
    calls: list[tuple[int, int]] = []
    collect(toy_traces, UniformRandom(), 9, seed=0, lanes=2, progress=lambda *call: calls.append(call))
    assert calls[-1] == (9, 9)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": 0}, "episodes is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"observation": ("mood",)}, "mood"),
        ({"depths": (5,)}, "5 was not recorded"),
        ({"reward": lambda outcome: outcome.emitted}, "is no name; give one, or 'module:function'"),
        ({"episode": "token"}, "'token' is not one of generation, round"),
        ({"behaviour": EpsilonGreedy(StaticController(5, 1), 0.1)}, "exit_depth: 5"),
    ],
)
def test_bad_arguments_are_refused(toy_traces: TraceSet, changes: dict, message: str) -> None:
    arguments = {"behaviour": UniformRandom(), "episodes": 3, "seed": 0, **changes}
    with pytest.raises(InputError, match=message):
        collect(toy_traces, **arguments)


def test_a_behaviour_brings_its_k_and_window(toy_traces: TraceSet) -> None:
    controller = ThresholdController(0.5)
    controller.k, controller.window = 3, 2
    own = collect(toy_traces, EpsilonGreedy(controller, 0.2), 6, 0)
    given = collect(toy_traces, EpsilonGreedy(ThresholdController(0.5), 0.2), 6, 0, k=3, window=2)
    np.testing.assert_array_equal(own.observation, given.observation)
    with pytest.raises(InputError, match="k: 5 was given, but"):
        collect(toy_traces, EpsilonGreedy(controller, 0.2), 6, 0, k=5)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_rounds_are_the_texts_cut_at_every_verification(toy_traces: TraceSet, name: str) -> None:
    behaviour = BEHAVIOURS[name](toy_traces)
    texts = collect(toy_traces, behaviour, 30, seed=1)  # type: ignore[arg-type]
    rounds = collect(toy_traces, behaviour, 40, seed=1, episode="round")  # type: ignore[arg-type]
    assert rounds.num_episodes == 40
    assert rounds.settings["episode"] == "round"
    for column in ("observation", "action", "reward", "propensity", "text", "component"):
        np.testing.assert_array_equal(getattr(rounds, column), getattr(texts, column)[: len(rounds)])
    # Every text that was played to its end ends a round, and a round begins at depth d_1 with no draft.
    assert rounds.terminal[texts.terminal[: len(rounds)]].all()
    begins = rounds.observation[rounds.start[:-1]]
    assert (begins[:, EXTENDED.index("draft_length")] == 0).all()
    assert (begins[:, EXTENDED.index("phase")] == 0).all()
    assert rounds.num_episodes > len(np.flatnonzero(texts.terminal[: len(rounds)])) > 0


def test_rounds_do_not_depend_on_lanes_or_length(toy_traces: TraceSet) -> None:
    behaviour = exploratory_schedule(toy_traces.depths, 12)
    whole = collect(toy_traces, behaviour, 50, seed=1, episode="round")
    for lanes in (1, 3):
        assert same(whole, collect(toy_traces, behaviour, 50, seed=1, episode="round", lanes=lanes))
    first = collect(toy_traces, behaviour, 17, seed=1, episode="round")
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(first, column), getattr(whole, column)[: len(first)])
    calls: list[tuple[int, int]] = []
    collect(toy_traces, behaviour, 50, 1, episode="round", lanes=4, progress=lambda *call: calls.append(call))
    assert calls[-1] == (50, 50)
    assert len(set(calls)) == len(calls)


class ReadsOneDepth(BaseController):
    """Exits by features of a head that it reads at one depth only."""

    name = "reads one depth"
    observation: tuple[str, ...] = ("top1", "stable", "depth")

    def act(self, view: View) -> NDArray[np.int64]:
        return (view.observation[:, 0] + view.observation[:, 1] > 0.2).astype(np.int64)

    def reads(self, phase: int, depth_index: int) -> bool:
        return depth_index == 1


def test_a_controller_acts_as_where_nothing_but_it_runs(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, EpsilonGreedy(ReadsOneDepth(), 0.0), len(toy_traces), seed=0)
    alone = run_controller(toy_traces, ReadsOneDepth())
    returns = np.empty(len(toy_traces))
    returns[data.text[data.start[:-1]]] = data.returns()
    np.testing.assert_allclose(returns, alone.returns, rtol=1e-6)
    # What is logged is what there is to see, whatever the behaviour reads.
    assert (data.observation[:, EXTENDED.index("top1")] > 0).all()
