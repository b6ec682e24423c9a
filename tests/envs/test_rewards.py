"""Rewards on outcomes written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sde_gym.envs.rewards import LEDEReward, SpeedReward, StepOutcome, resolve_reward


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
        layers=np.array([8, 10, 10, 8, 2]),
        terminated=np.array([False, False, False, False, True]),
    )


def test_lede(outcome: StepOutcome) -> None:
    np.testing.assert_allclose(LEDEReward()(outcome), [1.6, -1.4 + 1, 1.6 + 1, -0.01, -0.01 + 1])
    np.testing.assert_allclose(LEDEReward(0.0)(outcome), [1.6, -1.4, 1.6, -0.01, -0.01])


def test_speed(outcome: StepOutcome) -> None:
    np.testing.assert_allclose(SpeedReward(0.1)(outcome), [1 - 0.8, 1 - 1, 2 - 1, 0 - 0.8, 1 - 0.2])


def test_defaults() -> None:
    assert resolve_reward("lede", 10) == LEDEReward(1.0)
    assert resolve_reward("speed", 10) == SpeedReward(0.1)  # plain decoding then earns nothing
    assert resolve_reward("speed", 10, rho=0.5) == SpeedReward(0.5)
