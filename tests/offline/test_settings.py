"""Settings survive JSON, explain themselves and refuse what trains nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sde_gym.errors import InputError
from sde_gym.offline.settings import DQNSettings
from sde_gym.policies.observation import EXTENDED, PAPER


def test_round_trip_through_json() -> None:
    settings = DQNSettings(hidden=(32, 16), observation="top1,depth", gamma=0.5)
    assert DQNSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert DQNSettings.from_json({}) == DQNSettings()


def test_every_field_has_a_line_of_help_and_the_defaults_are_valid() -> None:
    for field in dataclasses.fields(DQNSettings):
        assert len(field.metadata["help"]) > 10, field.name
    DQNSettings()


def test_observation_sets() -> None:
    assert DQNSettings(observation="paper").features == PAPER
    assert DQNSettings(observation="extended").features == EXTENDED
    assert DQNSettings(observation="top1, depth").features == ("top1", "depth")
    with pytest.raises(InputError, match="mood"):
        DQNSettings(observation="top1,mood")


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(InputError, match="unknown training settings lerning_rate; known are batch_size"):
        DQNSettings.from_json({"lerning_rate": 1.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_steps": 0}, "gradient_steps is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"episodes": 0}, "episodes is 0"),
        ({"target_update_interval": 0}, "target_update_interval is 0"),
        ({"n_steps": 0}, "n_steps is 0"),
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"final_token_reward": float("inf")}, "final_token_reward is inf"),
        ({"hidden": ()}, "hidden is"),
        ({"hidden": (64, 0)}, "hidden is"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, r"seed is 9223372036854775808; it must be at least 0 and below 2\*\*63"),
        ({"seed": "0"}, "seed is '0'; it must be a whole number"),
        ({"k": 5.0}, "k is 5.0; it must be a whole number"),
        ({"gamma": "0.9"}, "gamma is '0.9'; it must be a number"),
        ({"hidden": (8.5,)}, "hidden is"),
        ({"double": 1}, "double is 1"),
        ({"observation": ("top1",)}, "observation is"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_settings_that_train_nothing_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DQNSettings(**changes)
