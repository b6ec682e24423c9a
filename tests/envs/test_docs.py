"""The numbers, names and defaults in docs/environment.md are those of the code."""

from __future__ import annotations

import inspect
import re

import gymnasium
import numpy as np

from sde_gym.envs.engine import CREDITS
from sde_gym.envs.lede import ORDERS, LEDEEnv
from sde_gym.envs.rewards import ACCEPTED_REWARD, CONTINUE_REWARD, REJECTED_REWARD, REWARDS, LEDEReward
from sde_gym.policies.observation import BOUNDS, EXTENDED, PAPER, Action
from sde_gym.traces import TraceSet
from tests.pages import first_column, marked, read_page

PAGE = read_page("environment")


def test_every_feature_stands_with_its_bounds_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|", marked(PAGE, "observation"), re.MULTILINE)
    assert [name for name, _, _ in rows] == list(EXTENDED)
    assert {name: (float(low), float(high)) for name, low, high in rows} == BOUNDS


def test_the_bounds_are_those_of_the_space(toy_traces: TraceSet) -> None:
    rows = re.findall(r"^\| `\w+` \| (\S+) \| (\S+) \|", marked(PAGE, "observation"), re.MULTILINE)
    space = LEDEEnv(toy_traces, observation="extended").observation_space
    assert isinstance(space, gymnasium.spaces.Box)
    np.testing.assert_array_equal(space.low, [float(low) for low, _ in rows])
    np.testing.assert_array_equal(space.high, [float(high) for _, high in rows])


def test_the_default_observation_is_said(toy_traces: TraceSet) -> None:
    assert LEDEEnv(toy_traces).engine.names == PAPER
    assert "one column a feature; 3 by default" in PAGE
    assert len(PAPER) == 3


def test_the_rewards_are_those_paid() -> None:
    found = [float(number) for number in re.findall(r"`(-?[\d.]+)`", marked(PAGE, "reward"))]
    paid = [ACCEPTED_REWARD, REJECTED_REWARD, CONTINUE_REWARD, LEDEReward().final_token_reward]
    assert found == paid
    for name in REWARDS:
        assert f'`reward="{name}"`' in PAGE


def test_the_actions_are_numbered_so() -> None:
    for action in Action:
        assert f"| {int(action)} `{action.name.lower()}` |" in PAGE


def test_every_argument_stands_with_its_default_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", marked(PAGE, "arguments"), re.MULTILINE)
    parameters = list(inspect.signature(LEDEEnv).parameters.values())
    assert rows == [(parameter.name, repr(parameter.default)) for parameter in parameters]
    for value in (*ORDERS, *CREDITS):
        assert f"`'{value}'`" in PAGE


def test_every_key_of_info_is_explained(toy_traces: TraceSet) -> None:
    _, info = LEDEEnv(toy_traces).reset(seed=0)
    assert set(first_column(marked(PAGE, "info"))) == set(info)


def test_every_registered_id_is_named() -> None:
    import sde_gym  # noqa: F401

    ids = [name for name in gymnasium.registry if name.startswith("sde_gym/")]
    assert ids
    for name in ids:
        assert name in PAGE
        assert f"\n{name.rpartition('-')[2]}: " in PAGE
