"""Driving controllers over many texts: against one environment at a time, and known answers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.lede import LEDEEnv
from sde_gym.envs.ranking import rank_correlation, ranking_table, ranking_text, reward_ranking
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.models.cost import unit_cost
from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View
from sde_gym.policies.observation import FEATURES, HEAD_FEATURES, Phase
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.builders import random_traces, written_traces
from tests.costs import uneven_cost

CONTROLLERS: dict[str, Controller] = {
    "static": StaticController(3, 4),
    "threshold": ThresholdController(0.6, 0.4),
    "random": RandomController(0.5, seed=3, p_draft=0.8),
}


@pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)
def test_equals_one_environment_after_the_other(controller: Controller, toy_traces: TraceSet) -> None:
    cost = uneven_cost(toy_traces.num_layers)
    result = run_controller(toy_traces, controller, credit="round", cost=cost)
    env = LEDEEnv(toy_traces, observation=controller.observation or ("depth",), credit="round", cost=cost)
    controller.bind(env.engine.depths, env.engine.num_layers, env.engine.max_draft)
    lane = np.zeros(1, np.int64)
    for text in range(len(toy_traces)):
        row, info = env.reset(options={"text": text})
        controller.reset(lane)
        total, heads, over = 0.0, 0, False
        while not over:
            view = env.engine.view(lane, row[None])
            action = int(controller.act(view)[0])
            heads += controller.reads(int(view.phase[0]), int(view.depth_index[0])) or action
            row, reward, over, _, info = env.step(action)
            total += reward
        assert total == pytest.approx(result.returns[text])
        for name in ("tokens", "rounds", "drafted", "accepted", "decisions", "layer_passes"):
            assert info[name] == getattr(result, name)[text], name
        assert info["sequential_layers"] == result.sequential_layers[text]
        assert heads + info["rounds"] == result.head_calls[text]
        # The environment charges every head or none, and so do these controllers.
        assert info["cost"] == result.cost[text] > 0
        assert info["speedup"] == result.cost_model.speedup(result.tokens[text], result.cost[text])
    assert result.exits.sum(axis=1).tolist() == result.rounds.tolist()


def test_plain_decoding_has_speed_up_one(toy_traces: TraceSet) -> None:
    result = run_controller(toy_traces, RandomController(0.0))
    assert result.speedup == result.layer_speedup == 1.0
    assert result.mean_exit_depth == 8.0
    assert result.mean_draft_length == 0.0
    assert result.acceptance_rate == 1.0
    assert result.head_calls.tolist() == result.tokens.tolist()  # no exit head was read


def test_a_case_on_paper() -> None:
    """Depth 2 of 8, three a round, eight tokens after prefill, the sixth proposed wrong."""
    tokens = list(range(1, 10))
    proposals = [[99 if t == 6 else token] for t, token in enumerate(tokens)]
    traces = written_traces(tokens, proposals, end="budget", depths=(2,), num_layers=8)
    result = run_controller(traces, StaticController(2, 3))
    # Rounds: y1..y4 (3 drafts, bonus), y5, y6 (1 right, 1 wrong: correction), y7, y8 (2 allowed).
    assert (result.tokens, result.rounds, result.drafted, result.accepted) == (8, 3, 7, 6)
    # Sequential: 2 a fed token and 6 a verification, 4 + 3 + 2 tokens fed.
    assert result.sequential_layers == 9 * 2 + 3 * 6
    assert result.layer_passes == 9 * 8
    assert result.speedup == result.layer_speedup == 8 * 8 / 36
    assert result.acceptance_rate == 6 / 7
    assert result.mean_draft_length == 7 / 3
    # With what lies behind the wrong proposal, the second round drafts a third token in vain.
    traces = written_traces(
        tokens, proposals, end="budget", depths=(2,), num_layers=8, branches={(6, 0): [5, 5]}, overrun=11
    )
    live = run_controller(traces, StaticController(2, 3))
    assert (live.tokens, live.rounds, live.drafted, live.accepted) == (8, 3, 8, 6)
    assert live.sequential_layers == 10 * 2 + 3 * 6
    assert live.returns == pytest.approx(6 * 1.75 - 2 * 1.25 - 2 * 0.01 + 2)


def test_the_same_case_in_measured_time() -> None:
    """The live rounds of the case above, part by part, under a controller that reads nothing or all."""
    tokens = list(range(1, 10))
    proposals = [[99 if t == 6 else token] for t, token in enumerate(tokens)]
    traces = written_traces(
        tokens, proposals, end="budget", depths=(2,), num_layers=8, branches={(6, 0): [5, 5]}, overrun=11
    )
    cost = uneven_cost(8)
    result = run_controller(traces, StaticController(2, 3), cost=cost)
    drafts = 3 * 2.05 + 7 * 0.9  # first passes to depth 2; of 8 proposals the last is not fed
    layers = 6 * (1.15 + 1.15 + 1.05)  # verified: 1 + 3, 1 + 3, and 1 + 1 tokens
    heads = 8 * 0.3 + 0.83 + 0.83 + 0.81
    fixed = 8 * 0.07 + 10 * 0.02 + 3 * 0.23  # decisions: 4 in each round but the last, which is forced
    assert result.decisions[0] == 10
    assert result.cost[0] == pytest.approx(drafts + layers + heads + fixed)
    assert result.speedup == pytest.approx(9.0 * 8 / result.cost[0])
    assert result.layer_speedup == 8 * 8 / 38
    reading = ThresholdController(0.0, 0.0)  # reads everywhere, and always goes on: 8 in one draft
    result = run_controller(traces, reading, cost=cost, max_draft=3)
    # As before, but that a third proposal is never looked at: three decisions a round, two at the end.
    assert result.decisions[0] == 8
    fixed = 8 * 0.07 + 8 * 0.11 + 3 * 0.23
    assert result.cost[0] == pytest.approx(drafts + layers + heads + fixed)


def test_heads_are_charged_where_they_are_read_or_proposed_from() -> None:
    """As `head_calls` counts them; a last layer's head is none of these."""
    traces = random_traces(overrun=11, probe=True)
    free = unit_cost(8)
    for reader in (Seer({0, 2}), Seer(set()), StaticController(3, 4), ThresholdController(0.6, 0.4)):
        result = run_controller(traces, reader, cost=dataclasses.replace(free, exit_head=0.5))
        heads = result.head_calls - result.rounds
        np.testing.assert_allclose(result.cost, result.sequential_layers + 0.5 * heads)


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_static_settings_against_a_loop(length: int) -> None:
    """Wrong proposals too, text by text in plain Python."""
    traces = random_traces(6, 12, p_match=0.6, p_eos=0.2, overrun=11)
    for index, depth in enumerate(traces.depths):
        result = run_controller(traces, StaticController(depth, length))
        for text in range(len(traces)):
            tokens = traces.tokens_of(text).tolist()
            first = int(traces.start[text])
            budget = 20 if traces.ends[text] == "eos" else len(tokens)
            t, sequential, drafted, accepted = 1, 0, 0, 0
            while t < len(tokens):
                right, made, fed = True, 0, 0
                kept = 0
                while made < length:
                    if right:
                        entry = (first + t + made) * 3 + index
                        proposal = int(traces.top_ids[first + t + made, index, 0])
                    else:  # the first wrong one was number `kept` of the round
                        proposal = int(traces.overrun_proposal[traces.branch_start[entry] + made - kept - 1])
                    made += 1
                    right = right and proposal == tokens[t + made - 1]
                    kept += right
                    if proposal == 0 or t + made == budget:
                        break
                    fed += 1
                drafted, accepted = drafted + made, accepted + kept
                sequential += depth * (1 + fed) + 8 - depth
                t += kept + (0 if kept == made and fed < made else 1)
            assert (drafted, accepted) == (result.drafted[text], result.accepted[text])
            assert sequential == result.sequential_layers[text]
            assert result.tokens[text] == len(tokens) - 1


class Recorder(BaseController):
    """Exits always, and remembers what it was told."""

    name = "recorder"

    def __init__(self) -> None:
        self.started: list[int] = []
        self.rounds: list[tuple[int, ...]] = []
        self.decisions: dict[int, list[int]] = {}

    def reset(self, lanes: np.ndarray) -> None:
        self.started += lanes.tolist()

    def act(self, view: View) -> np.ndarray:
        for lane, decision in zip(view.lanes.tolist(), view.decision.tolist(), strict=True):
            self.decisions.setdefault(lane, []).append(decision)
        return np.where(view.draft_length < 2, 1, 0)

    def feedback(self, outcome: RoundOutcome) -> None:
        self.rounds += zip(
            outcome.lanes.tolist(),
            outcome.depth_index.tolist(),
            outcome.drafted.tolist(),
            outcome.accepted.tolist(),
            strict=True,
        )


def test_controllers_are_told_everything(toy_traces: TraceSet) -> None:
    controller = Recorder()
    result = run_controller(toy_traces, controller, texts=[4, 0, 2])
    assert controller.started == [0, 1, 2]
    assert result.texts.tolist() == [4, 0, 2]
    for lane in range(3):
        mine = [told for told in controller.rounds if told[0] == lane]
        assert len(mine) == result.rounds[lane]
        assert sum(told[2] for told in mine) == result.drafted[lane]
        assert sum(told[3] for told in mine) == result.accepted[lane]
        assert {told[1] for told in mine} == {0}
        assert controller.decisions[lane] == list(range(result.decisions[lane]))
    plain = Recorder()
    plain.act = lambda view: np.zeros(len(view.lanes), int)  # type: ignore[method-assign]
    run_controller(toy_traces, plain, texts=[0])
    assert set(plain.rounds) == {(0, 3, 0, 0)}  # depth index m: nothing was drafted


def test_totals_are_plain_json(toy_traces: TraceSet) -> None:
    totals = run_controller(toy_traces, CONTROLLERS["static"]).totals()
    assert json.loads(json.dumps(totals)) == totals
    assert totals["tokens"] == int((toy_traces.lengths - 1).sum())


@pytest.mark.parametrize("texts", [[], [0, 0], [6], [-1], ["toy/0"], 3])
def test_wrong_texts_are_named(texts: Any, toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match="texts: "):
        run_controller(toy_traces, RandomController(), texts)


def test_texts_are_run_as_a_whole(toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match="episode: 'round' was given, but texts are run as a whole"):
        run_controller(toy_traces, RandomController(), episode="round")


def test_a_controller_that_does_not_fit_is_refused(toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match="exit_depth: 4 is not one of the depths"):
        run_controller(toy_traces, StaticController(4, 2))
    with pytest.raises(InputError, match=r"draft_length: 5 is outside 1\.\.4"):
        run_controller(toy_traces, StaticController(2, 5), max_draft=4)


def test_the_return_ranks_like_speed_over_static_settings() -> None:
    """On a set with informative depths, the default reward's order is that of the simulated speed-up."""
    traces = random_traces(8, 30, max_new_tokens=40, p_match=0.8, overrun=11)
    results = [
        run_controller(traces, StaticController(depth, length))
        for depth in traces.depths
        for length in (1, 2, 4)
    ]
    speed = np.argsort(np.argsort([result.speedup for result in results]))
    returns = np.argsort(np.argsort([result.returns.sum() for result in results]))
    assert np.corrcoef(speed, returns)[0, 1] > 0.5


def test_engine_and_runner_share_defaults(toy_traces: TraceSet) -> None:
    assert ReplayEngine(toy_traces).depths == run_controller(toy_traces, RandomController()).depths


class Seer(BaseController):
    """Keeps what it is shown; reads the heads of the first phase at the given depths only."""

    name = "seer"
    observation = FEATURES

    def __init__(self, read: set[int], k: int | None = None, window: int | None = None) -> None:
        self.read, self.k, self.window = read, k, window
        self.seen: list[View] = []

    def reads(self, phase: int, depth_index: int) -> bool:
        return phase == Phase.SELECT and depth_index in self.read

    def act(self, view: View) -> np.ndarray:
        self.seen.append(dataclasses.replace(view, observation=view.observation.copy()))
        return RandomController(0.4, seed=1, p_draft=0.7).act(view)


def test_heads_that_are_not_read_show_nothing_and_the_rest_is_always_there() -> None:
    traces = random_traces(overrun=11, probe=True)
    everything, some = Seer({0, 1, 2}), Seer({0, 2})
    everything.reads = lambda phase, depth_index: True  # type: ignore[method-assign]
    run_controller(traces, everything)
    run_controller(traces, some)
    head = np.array([name in HEAD_FEATURES for name in FEATURES])
    stable = FEATURES.index("stable")
    hidden_stable = 0
    for whole, partial in zip(everything.seen, some.seen, strict=True):
        np.testing.assert_array_equal(partial.observation[:, ~head], whole.observation[:, ~head])
        read = (partial.phase == Phase.SELECT) & (partial.depth_index != 1)
        assert not partial.observation[~read][:, head].any()
        expected = whole.observation.copy()
        hidden_stable += int(expected[read & (partial.depth_index == 2), stable].sum())
        expected[partial.depth_index == 2, stable] = 0  # the head at index 1 was not read
        np.testing.assert_array_equal(partial.observation[read], expected[read])
    assert hidden_stable > 0
    assert set(FEATURES) > HEAD_FEATURES


def test_a_controller_brings_its_k_and_window() -> None:
    toy_traces = random_traces(overrun=11, probe=True)
    own, given, default = Seer({0}, k=3, window=2), Seer({0}), Seer({0})
    run_controller(toy_traces, own)
    run_controller(toy_traces, given, k=3, window=2)
    run_controller(toy_traces, default)
    for mine, same in zip(own.seen, given.seen, strict=True):
        np.testing.assert_array_equal(mine.observation, same.observation)
    for column in (FEATURES.index("confidence"), FEATURES.index("trace")):
        assert any(
            (mine.observation[:, column] != other.observation[:, column]).any()
            for mine, other in zip(own.seen, default.seen, strict=True)
        )
    run_controller(toy_traces, Seer({0}, k=3, window=2), k=3)
    for wrong in ({"k": 5}, {"window": 8}):
        (name,) = wrong
        with pytest.raises(InputError, match=f"{name}: . was given, but 'seer' was made for {name} "):
            run_controller(toy_traces, Seer({0}, k=3, window=2), **wrong)


def test_a_huge_window_is_the_whole_text(toy_traces: TraceSet) -> None:
    engines = [ReplayEngine(toy_traces, observation=("trace",), window=window) for window in (20, 10**30)]
    rows = [engine.reset_lanes([0], [1]) for engine in engines]
    over = False
    while not over:
        np.testing.assert_array_equal(*rows)
        steps = [engine.step([1]) for engine in engines]
        rows, over = [step[0] for step in steps], bool(steps[0][2][0])
    assert engines[1].state.sums.nbytes < 1000


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 40, 90]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: 4.5 / sqrt(4.5 x 5).
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / 22.5**0.5)
    for undefined in (([1], [2]), ([1, 1], [1, 2]), ([1, float("nan")], [1, 2])):
        assert np.isnan(rank_correlation(*undefined))


def test_rewards_are_ranked_against_speed(toy_traces: TraceSet) -> None:
    """The speed reward is speed but for a constant, so its ranking is perfect."""
    assert reward_ranking(toy_traces, reward="speed") == pytest.approx(1.0)
    assert -1 <= reward_ranking(toy_traces, max_draft=4) <= 1
    tokens_only = reward_ranking(toy_traces, reward=lambda outcome: outcome.emitted.astype(float))
    assert np.isnan(tokens_only)  # every setting emits the same text


def test_the_table_of_the_shipped_rewards(toy_traces: TraceSet) -> None:
    ranks = ranking_table(toy_traces, max_draft=4, cost=uneven_cost(8))
    assert [rank.reward for rank in ranks] == ["lede", "lede, final_token_reward=0", "speed"]
    assert ranks[0].correlation == reward_ranking(toy_traces, max_draft=4, cost=uneven_cost(8))
    assert ranks[1].correlation == reward_ranking(
        toy_traces, max_draft=4, cost=uneven_cost(8), final_token_reward=0.0
    )
    assert ranks[2].correlation == pytest.approx(1.0)
    results = {
        (depth, length): run_controller(toy_traces, StaticController(depth, length), cost=uneven_cost(8))
        for depth in toy_traces.depths
        for length in range(1, 5)
    }
    fastest = max(results, key=lambda setting: results[setting].speedup)
    kindest = max(results, key=lambda setting: results[setting].returns.sum())
    assert {rank.fastest for rank in ranks} == {fastest} == {ranks[2].best}
    assert ranks[0].best == kindest
    assert ranks[0].best_speedup == pytest.approx(results[kindest].speedup)
    assert ranks[0].fastest_speedup == pytest.approx(results[fastest].speedup)
    shown = ranking_text(ranks).splitlines()
    assert len(shown) == 5
    assert shown[4].startswith("| speed | 1.000 | depth ")
    tokens_only = {"tokens": {"reward": lambda outcome: outcome.emitted.astype(float)}}
    assert "| tokens | undefined |" in ranking_text(ranking_table(toy_traces, tokens_only, max_draft=2))


def test_static_settings_are_not_compared_where_drafting_in_vain_is_free() -> None:
    with pytest.raises(InputError, match="without overrun"):
        reward_ranking(random_traces())
