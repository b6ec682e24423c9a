"""The hindsight optimum against all action sequences, and above every controller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.hindsight import best_return, best_speedup, headroom, least_cost
from sde_gym.envs.rewards import StepOutcome
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.models.cost import CostModel
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.builders import random_traces, written_traces
from tests.costs import uneven_cost

REWARDS: dict[str, dict[str, Any]] = {
    "lede": {},
    "literal": {"final_token_reward": 0.0},
    "speed": {"reward": "speed", "rho": 0.4},
    "speed, measured costs": {"reward": "speed"},
}


def tiny(seed: int, overrun: int) -> TraceSet:
    """Three texts of at most six tokens, one of each kind of end."""
    return random_traces(
        seed, 3, num_layers=6, depths=(1, 4), max_new_tokens=6, p_match=0.6, p_eos=0.3, overrun=overrun
    )


def brute_force(traces: TraceSet, text: int, **settings: Any) -> tuple[float, float, int]:
    """The highest return and the least cost over all action sequences, and how many there are.

    Level by level, each sequence so far a lane; the lanes of a level are played from the start.
    """
    played = np.zeros((1, 0), dtype=np.int64)
    best, least, count = -np.inf, np.inf, 0
    while len(played):
        sequences = np.concatenate([np.repeat(played, 2, axis=0), np.tile([[0], [1]], (len(played), 1))], 1)
        engine = ReplayEngine(traces, observation=(), lanes=len(sequences), **settings)
        engine.reset_lanes(np.arange(len(sequences)), np.full(len(sequences), text))
        returns, cost = np.zeros(len(sequences)), np.zeros(len(sequences))
        for actions in sequences.T:
            _, reward, over, outcome = engine.step(actions)
            returns += reward
            cost += engine.step_costs(outcome)
        if over.any():
            best, least = max(best, returns[over].max()), min(least, cost[over].min())
            count += int(over.sum())
        played = sequences[~over]
    return best, least, count


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("overrun", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_sequence_of_actions_is_better(seed: int, overrun: int, reward: str) -> None:
    traces = tiny(seed, overrun)
    settings = {**REWARDS[reward], "max_draft": 3}
    if "measured" in reward:
        settings["cost"] = uneven_cost(traces.num_layers, max_draft=3)
    returns, costs = best_return(traces, **settings), least_cost(traces, **settings)
    checked = 0
    for text in range(3):
        best, least, count = brute_force(traces, text, **settings)
        assert returns.values[text] == pytest.approx(best)
        assert costs.values[text] == pytest.approx(least)
        checked += count
    assert checked > 100


@pytest.mark.parametrize("max_draft", [1, 3, 12])
@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("overrun", [0, 11])
def test_its_actions_earn_its_value(overrun: int, reward: str, max_draft: int) -> None:
    """Played by a controller, on longer texts, fewer depths and a smaller budget."""
    traces = random_traces(3, 12, max_new_tokens=30, p_eos=0.2, overrun=overrun)
    settings = {**REWARDS[reward], "max_draft": max_draft, "depths": (2, 6), "max_new_tokens": 24}
    if overrun == 0:
        settings["max_new_tokens"] = 30
    if "measured" in reward:
        settings["cost"] = uneven_cost(traces.num_layers, max_draft)
    for found, name in (
        (best_return(traces, **settings), "returns"),
        (least_cost(traces, **settings), "cost"),
    ):
        result = run_controller(traces, found.controller(), **settings)
        np.testing.assert_allclose(getattr(result, name), found.values)
        np.testing.assert_array_equal(result.tokens, found.tokens)
        np.testing.assert_array_equal(result.decisions, [len(actions) for actions in found.actions])
    assert result.speedup == pytest.approx(best_speedup(traces, **settings))


@pytest.mark.parametrize("cost", ["unit", "uneven"])
@pytest.mark.parametrize("reward", [{}, {"final_token_reward": 0.0}, {"reward": "speed"}])
def test_no_controller_is_better(reward: dict[str, Any], cost: str) -> None:
    traces = random_traces(5, 20, max_new_tokens=40, overrun=11)
    model: str | CostModel = cost if cost == "unit" else uneven_cost(traces.num_layers)
    returns, fastest = best_return(traces, cost=model, **reward), least_cost(traces, cost=model)
    controllers = [
        *(StaticController(depth, length) for depth in traces.depths for length in (1, 2, 3, 5, 8, 12)),
        *(RandomController(p, seed) for seed, p in enumerate((0.0, 0.3, 0.6, 0.9))),
        *(ThresholdController(threshold) for threshold in (0.2, 0.5, 0.8)),
    ]
    for controller in controllers:
        result = run_controller(traces, controller, cost=model, **reward)
        assert (result.returns <= returns.values + 1e-9).all()
        assert (result.cost >= fastest.values - 1e-9).all()
        assert result.speedup < best_speedup(traces, cost=model)


def test_a_case_on_paper() -> None:
    """Depth 2 of 8 is right but at y3; four tokens after prefill.

    Two drafts and their correction, 2 layers for the walk, 2 x 2 for what is fed, 6 to verify. Then the
    last token: drafted or not it takes 8 layers, since the last that the budget allows is not fed.
    """
    traces = written_traces(
        range(1, 6), [[1], [2], [3], [99], [5]], end="budget", depths=(2,), num_layers=8,
        branches={(3, 0): [7]}, overrun=11,
    )  # fmt: skip
    found = least_cost(traces)
    assert found.values.tolist() == [12 + 8]
    assert found.actions[0].tolist() == [1, 1, 0, 0]
    assert found.tokens.tolist() == [4]
    assert best_speedup(traces) == 8 * 4 / 20
    # The paper's reward: 2 x 1.75 for the drafts, 1 for the correction, 1.75, less 0.01 for stopping.
    earned = best_return(traces)
    assert earned.values.tolist() == pytest.approx([3.5 + 1 + 1.75 - 0.01])
    assert earned.actions[0].tolist() == [1, 1, 0, 1]


def test_the_time_of_a_text_is_its_speed_return() -> None:
    """Tokens are fixed over a text, so the two optima differ by a constant and a factor."""
    traces = random_traces(2, 8, overrun=11)
    speed, fastest = best_return(traces, reward="speed", rho=0.1), least_cost(traces)
    np.testing.assert_allclose(speed.values, speed.tokens - 0.1 * fastest.values)


def test_any_reward_of_the_step_will_do() -> None:
    """Exits in DRAFT alone: as many as the rules allow."""
    traces = random_traces(4, 3, num_layers=6, depths=(1, 4), max_new_tokens=6, p_eos=0.3, overrun=2)

    def drafting(outcome: StepOutcome) -> np.ndarray:
        return (outcome.phase * outcome.proposed).astype(float)

    found = best_return(traces, [2, 1], reward=drafting, max_draft=3)
    assert found.texts.tolist() == [2, 1]
    for value, text in zip(found.values, (2, 1), strict=True):
        assert value == brute_force(traces, text, reward=drafting, max_draft=3)[0]


def test_heads_that_are_read_can_be_charged() -> None:
    traces = random_traces(2, 8, overrun=11)
    cost = uneven_cost(traces.num_layers)
    blind, seeing = (least_cost(traces, cost=cost, reads=reads).values for reads in (False, True))
    assert (seeing > blind).all()


def test_headroom() -> None:
    assert headroom(2.0, 1.5, 2.5) == 0.5
    assert headroom(1.0, 1.5, 2.5) == -0.5
    assert np.isnan(headroom(1.0, 1.0, 1.0))


def test_what_has_no_optimum_is_refused(toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match="episode: 'round' has no hindsight optimum"):
        best_return(toy_traces, episode="round")
    with pytest.raises(InputError, match="texts: "):
        least_cost(toy_traces, [0, 0])
