"""The numbers, names and defaults in docs/environment.md are those of the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from functools import partial

import gymnasium
import numpy as np
import pytest

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs.accelerate import ACCELERATORS, MANY_LANES
from sde_gym.envs.engine import CREDITS, EPISODES, ReplayEngine
from sde_gym.envs.lede import LEDEEnv
from sde_gym.envs.live import LEDELiveEnv
from sde_gym.envs.order import ORDERS
from sde_gym.envs.rendering import RENDER_MODES
from sde_gym.envs.rewards import (
    ACCEPTED_REWARD,
    CONTINUE_REWARD,
    REJECTED_REWARD,
    REWARDS,
    LEDEReward,
    StepOutcome,
)
from sde_gym.envs.vector import LEDEVectorEnv
from sde_gym.envs.wallclock import LEDEWallClockEnv
from sde_gym.envs.wrappers import DepthOnly, LengthOnly
from sde_gym.errors import InputError
from sde_gym.policies.observation import BOUNDS, FEATURES, PAPER, Action
from sde_gym.traces import TraceSet
from tests.builders import random_traces
from tests.pages import documented_arguments, first_column, made_from_code, marked, read_page

PAGE = read_page("environment")


def test_every_feature_stands_with_its_bounds_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|", marked(PAGE, "observation"), re.MULTILINE)
    assert [name for name, _, _ in rows] == list(FEATURES)
    assert {name: (float(low), float(high)) for name, low, high in rows} == BOUNDS


def test_the_bounds_are_those_of_the_space() -> None:
    rows = re.findall(r"^\| `\w+` \| (\S+) \| (\S+) \|", marked(PAGE, "observation"), re.MULTILINE)
    space = LEDEEnv(random_traces(probe=True), observation=FEATURES).observation_space
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


def test_a_reward_is_told_what_it_is_given(toy_traces: TraceSet) -> None:
    """Every field of the outcome stands in order, with the dtype that the engine really gives it."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:(\w+) \(n,\), )?", marked(PAGE, "outcome"), re.MULTILINE))
    assert list(rows) == [field.name for field in dataclasses.fields(StepOutcome)]
    engine = ReplayEngine(toy_traces, lanes=3)
    engine.reset_lanes([0, 1, 2], [0, 1, 2])
    *_, outcome = engine.step([0, 1, 1])
    for name, dtype in rows.items():
        found = getattr(outcome, name)
        if name == "num_layers":
            assert (dtype, found) == ("", toy_traces.num_layers)
        else:
            assert (found.dtype.name, found.shape) == (dtype, (3,)), name


def test_the_actions_are_numbered_so() -> None:
    for action in Action:
        assert f"| {int(action)} `{action.name.lower()}` |" in PAGE


TABLES = [(page, mark) for page, mark in made_from_code() if page == "environment"]


@pytest.mark.parametrize("mark", [mark for _, mark in TABLES])
def test_tables_are_made_from_the_code(mark: str) -> None:
    """If this fails: `python -m tests.pages`."""
    assert marked(PAGE, mark) == made_from_code()["environment", mark]


@pytest.mark.parametrize("environment", [LEDEEnv, LEDELiveEnv, LEDEWallClockEnv])
def test_docstrings_explain_every_argument_and_no_other(environment: type) -> None:
    assert set(documented_arguments(environment)) == set(inspect.signature(environment).parameters)


def test_the_values_of_arguments_are_named() -> None:
    rows = marked(PAGE, "arguments")
    for value in (*ORDERS, *CREDITS, *EPISODES, "paper", "extended", *RENDER_MODES, *ACCELERATORS):
        assert f'"{value}"' in rows, value


def test_what_the_clock_does_not_take() -> None:
    live, clock = (set(inspect.signature(each).parameters) for each in (LEDELiveEnv, LEDEWallClockEnv))
    assert live - clock == {"reward", "final_token_reward", "cost"}
    assert clock <= live
    assert "but `reward`, `final_token_reward` and `cost`;" in PAGE


def test_every_kind_of_episode_and_render_mode_stands() -> None:
    assert first_column(marked(PAGE, "episodes")) == [f'"{name}"' for name in EPISODES]
    assert first_column(marked(PAGE, "render-modes")) == ["None", *RENDER_MODES]
    for environment in (LEDEEnv, LEDELiveEnv, LEDEWallClockEnv):
        assert tuple(environment.metadata["render_modes"]) == RENDER_MODES


def test_every_accelerator_stands() -> None:
    rows = marked(PAGE, "accelerators")
    assert first_column(rows) == list(ACCELERATORS)
    assert f"from {MANY_LANES} lanes on" in rows


def test_every_key_of_info_is_explained(toy_traces: TraceSet) -> None:
    _, info = LEDEEnv(toy_traces).reset(seed=0)
    assert set(first_column(marked(PAGE, "info"))) == set(info)


def test_every_registered_id_is_named() -> None:
    ids = [name for name in gymnasium.registry if name.startswith("sde_gym/")]
    assert len(ids) >= 3
    for name in ids:
        kind, _, version = name.removeprefix("sde_gym/").rpartition("-")
        assert f"| `{name}` |" in PAGE
        assert f"- {kind}: {version}, " in PAGE


def test_the_messages_are_those_raised(toy_traces: TraceSet) -> None:
    """Each message of the table that needs no special trace set is provoked."""
    messages = [line.split("`")[1] for line in PAGE.partition("## Errors")[2].splitlines() if "`" in line]
    make = partial(LEDEEnv, toy_traces)
    provoked: list[Callable[[], object]] = [
        lambda: make(depths=[5]),
        lambda: make(tasks=["..."]),
        lambda: make(k=9),
        lambda: make(max_draft=13),
        lambda: make(max_new_tokens=10**6),
        lambda: make(rho=1.0),
        lambda: make(render_mode="..."),
        lambda: LengthOnly(make(), 5),
        lambda: DepthOnly(make(), 13),
        lambda: DepthOnly(LEDEVectorEnv(2, toy_traces), 4),  # type: ignore[arg-type]
        lambda: make(reward="rewards_of_nobody:nothing"),
        lambda: make().step(0),
    ]
    for message, call in zip(messages, provoked, strict=True):
        pattern = ".*".join(map(re.escape, message.split("...")))
        with pytest.raises((InputError, RuntimeError), match=pattern):
            call()
