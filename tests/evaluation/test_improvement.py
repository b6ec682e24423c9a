"""Policy iteration with exact values: it takes the better action, and so it gets better."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.improvement import better_action, improve
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet
from tests.builders import random_traces


@pytest.fixture(scope="module")
def traces() -> TraceSet:
    return random_traces(2, 40, p_match=0.7, max_new_tokens=24, overrun=11)


def test_the_larger_output_is_the_better_action() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(4000, 2)).astype(np.float32)
    advantage = states[:, 0].astype(np.float64) - 0.5 * states[:, 1] ** 2
    network = better_action(states, advantage, (32, 32), 60, seed=1)
    scores = network(states)
    assert not scores[:, 0].any()
    chosen = np.where(scores[:, 1] > scores[:, 0], advantage, 0.0).sum()
    assert chosen > 0.97 * np.maximum(advantage, 0.0).sum()


def test_what_matters_more_weighs_more() -> None:
    """A state seen nine times out of ten with a small advantage yields to the tenth with a large one."""
    states = np.zeros((2000, 1), dtype=np.float32)
    advantage = np.where(np.arange(2000) % 10 == 0, 10.0, -0.1)
    scores = better_action(states, advantage, (4,), 20, seed=0)(states[:1])
    assert scores[0, 1] > 0


def test_it_beats_where_it_started(traces: TraceSet) -> None:
    start = StaticController(traces.depths[0], 4)
    found = improve(traces, start, iterations=2, episodes=40, hidden=(16,), epochs=10, seed=3)
    begin = run_controller(traces, start, reward="speed").returns.mean()
    assert max(entry.mean_return for entry in found) > begin
    for entry in found:
        again = run_controller(traces, entry.policy, reward="speed").returns.mean()
        assert again == pytest.approx(entry.mean_return)
    assert found[1].states > found[0].states


def test_the_same_seed_gives_the_same_policies(traces: TraceSet) -> None:
    start = StaticController(traces.depths[1], 2)
    settings = {"iterations": 1, "episodes": 10, "hidden": (8,), "epochs": 2, "seed": 5}
    one, other = (improve(traces, start, **settings)[0].policy.network for _ in range(2))  # type: ignore[arg-type]
    for left, right in zip(one.layers, other.layers, strict=True):
        np.testing.assert_array_equal(left[0], right[0])


@pytest.mark.parametrize(
    "wrong", [{"iterations": 0}, {"episodes": 0}, {"epochs": 0}, {"hidden": ()}, {"seed": -1}]
)
def test_wrong_arguments_are_named(wrong: dict[str, object], traces: TraceSet) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        improve(traces, StaticController(traces.depths[0], 1), **wrong)  # type: ignore[arg-type]


def test_features_that_need_no_head(traces: TraceSet) -> None:
    """The exploratory schedule reads heads even so; they are not charged, nor are they in the values."""
    dear = dataclasses.replace(traces, manifest={**traces.manifest, "exit_head": 0.8, "final_head": 1.5})
    settings: dict[str, Any] = {"iterations": 1, "episodes": 10, "hidden": (8,), "epochs": 2}
    found = improve(dear, StaticController(3, 2), observation=("depth", "draft_length"), **settings)
    again = run_controller(dear, found[0].policy, reward="speed").returns.mean()
    assert again == pytest.approx(found[0].mean_return)
