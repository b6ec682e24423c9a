"""Rewards on outcomes written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.rewards import LEDEReward, SpeedReward, StepOutcome, resolve_reward
from sde_gym.envs.timing import StepCosts
from sde_gym.errors import InputError
from sde_gym.models.cost import unit_cost
from sde_gym.traces import TraceSet
from tests.costs import uneven_cost


@pytest.fixture
def outcome() -> StepOutcome:
    """Five lanes of a model of 10 layers: an accepted and a rejected exit at depth 4, an exit at 4 with
    a bonus, a `continue` to a deeper depth, and one at the last depth, 8."""
    return StepOutcome(
        num_layers=10,
        phase=np.array([0, 1, 1, 0, 0]),
        action=np.array([1, 1, 1, 0, 0]),
        depth=np.array([4, 4, 4, 4, 8]),
        depth_index=np.array([0, 0, 0, 0, 1]),
        proposed=np.array([True, True, True, False, False]),
        accepted=np.array([True, False, True, False, False]),
        ended=np.array([False, True, True, False, True]),
        drafted=np.array([0, 2, 3, 0, 0]),
        round_accepted=np.array([0, 1, 3, 0, 0]),
        final=np.array([False, True, True, False, True]),
        emitted=np.array([0, 2, 4, 0, 1]),
        fed=np.array([True, True, True, False, False]),
        verified=np.array([0, 3, 4, 0, 0]),
        layers=np.array([8, 10, 10, 8, 2]),
        terminated=np.array([False, False, False, False, True]),
    )


def test_lede(outcome: StepOutcome) -> None:
    np.testing.assert_allclose(LEDEReward()(outcome), [1.6, -1.4 + 1, 1.6 + 1, -0.01, -0.01 + 1])
    np.testing.assert_allclose(LEDEReward(0.0)(outcome), [1.6, -1.4, 1.6, -0.01, -0.01])


def test_speed(outcome: StepOutcome) -> None:
    """Under the unit model the time is `layers`: depth and fed token, 6 to verify, 4 to go deeper, 2."""
    costs = StepCosts(unit_cost(10), (4, 8), 12)
    assert costs(outcome).tolist() == outcome.layers.tolist()
    expected = [1 - 0.8, 1 - 1, 2 - 1, 0 - 0.8, 1 - 0.2]
    np.testing.assert_allclose(SpeedReward(costs, 0.1)(outcome), expected)


def test_speed_under_measured_costs(outcome: StepOutcome) -> None:
    """Each step's parts, from `uneven_cost`; a head is read in DRAFT only."""
    costs = StepCosts(uneven_cost(10), (4, 8), 12, reads=[[False, False], [True, True]])
    first, later = 3.0 * 4 / 3, 1.3 * 4 / 3  # draft passes to depth 4
    blind, seeing = 0.02, 0.11 + 0.3
    np.testing.assert_allclose(
        costs(outcome),
        [
            blind + 0.3 + 0.07 + first + later,
            seeing + 0.07 + later + 6 * 1.1 + 0.82 + 0.23,  # three tokens verified
            seeing + 0.07 + later + 6 * 1.15 + 0.83 + 0.23,  # four
            blind + first + 3.0 * 4 / 3,  # to depth 4, then on to 8
            blind + 2 * 1.0 + 0.8 + 0.23,  # one token's last two layers
        ],
    )


def test_defaults() -> None:
    unit = StepCosts(unit_cost(10), (4, 8), 12)
    assert resolve_reward("lede", unit) == LEDEReward(1.0)
    for given, rho in ((None, 0.1), (0.5, 0.5)):
        reward = resolve_reward("speed", unit, rho=given)
        assert isinstance(reward, SpeedReward)
        assert (reward.costs, reward.rho) == (unit, rho)  # at 1 / L plain decoding earns nothing
    measured = resolve_reward("speed", StepCosts(uneven_cost(10), (4, 8), 12))
    assert isinstance(measured, SpeedReward)
    assert measured.rho == 1 / 11


@pytest.mark.parametrize("reward", ["math:sqrt", "os:getcwd", lambda outcome: "much"])
def test_a_reward_that_cannot_be_paid_is_named(reward: Any, toy_traces: TraceSet) -> None:
    engine = ReplayEngine(toy_traces, reward=reward)
    engine.reset_lanes([0], [0])
    with pytest.raises(InputError, match=r"reward: .* it has to take a StepOutcome"):
        engine.step([1])


def test_a_module_in_the_working_directory_is_pointed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed command does not look there; PYTHONPATH=. makes it."""
    (tmp_path / "rewards_of_mine.py").write_text("def nothing(outcome):\n    return 0.0 * outcome.layers\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    unit = StepCosts(unit_cost(10), (4, 8), 12)
    message = r"rewards_of_mine.py is in the working directory, where Python did not look: set PYTHONPATH=\."
    with pytest.raises(InputError, match=message):
        resolve_reward("rewards_of_mine:nothing", unit)
    with pytest.raises(InputError, match="the folder that it lies in has to be on PYTHONPATH"):
        resolve_reward("rewards_of_nobody:nothing", unit)
    with pytest.raises(InputError, match=r"cannot be imported \(module 'math' has no attribute 'nothing'\)$"):
        resolve_reward("math:nothing", unit)
    monkeypatch.syspath_prepend(".")
    try:
        assert callable(resolve_reward("rewards_of_mine:nothing", unit))
    finally:
        sys.modules.pop("rewards_of_mine", None)
