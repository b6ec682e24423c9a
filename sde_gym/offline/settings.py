"""Everything that determines a trained policy, in one dataclass with a line of help per field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sde_gym.errors import InputError
from sde_gym.offline.buffer import check_returns
from sde_gym.policies.observation import resolve_observation
from sde_gym.settings import (
    DEFAULT_MAX_DRAFT,
    at_least_one,
    check_settings,
    is_number,
    is_whole,
    setting,
)

_COUNTS = (
    "k", "window", "max_draft", "episodes", "batch_size", "gradient_steps", "target_update_interval",
    "evaluate_every", "threads",
)  # fmt: skip
_NUMBERS = ("final_token_reward", "epsilon", "gamma", "learning_rate")


@dataclass(frozen=True)
class DQNSettings:
    """Settings of the whole stage: environment, exploration, learning.

    The default observation is the extended set: the paper's three features cannot see depth or
    phase, so one network on them has to act alike at every depth. `observation="paper"` is LEDE's.
    """

    observation: str = setting("extended", "'paper', 'extended', or feature names joined by commas")
    depths: tuple[int, ...] | None = setting(None, "candidate exit depths; all recorded ones if not given")
    reward: str = setting("lede", "reward: 'lede', 'speed' or 'module:function'")
    final_token_reward: float = setting(1.0, "reward of a token that comes from the final layer")
    k: int = setting(5, "tokens behind the feature 'confidence'")
    window: int = setting(8, "tokens behind the feature 'trace'")
    max_draft: int = setting(DEFAULT_MAX_DRAFT, "most proposals in one round")
    episodes: int = setting(400, "exploratory episodes; LEDE fills its buffer with about 200")
    epsilon: float = setting(0.15, "share of random actions around static and threshold settings")
    hidden: tuple[int, ...] = setting((64, 64), "widths of the hidden layers")
    double: bool = setting(True, "double DQN instead of DQN")
    gamma: float = setting(0.95, "discount per decision")
    n_steps: int = setting(3, "rewards summed before bootstrapping")
    learning_rate: float = setting(1e-3, "peak learning rate of Adam; it falls to 0 along a cosine")
    batch_size: int = setting(256, "transitions in one gradient step")
    gradient_steps: int = setting(16_000, "gradient steps in all")
    target_update_interval: int = setting(200, "gradient steps between copies to the target network")
    evaluate_every: int = setting(1_000, "gradient steps between checkpoints")
    seed: int = setting(0, "seed of exploration, initial weights and mini-batches")
    threads: int = setting(1, "torch threads; networks of this size are fastest on one")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the observation features, in order."""
        if self.observation in ("paper", "extended"):
            return resolve_observation(self.observation)
        return resolve_observation(tuple(name.strip() for name in self.observation.split(",")))

    def __post_init__(self) -> None:
        """Refuse settings that cannot train anything.

        Raises:
            InputError: the message names the setting, its value and its limit.
        """
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if isinstance(field.default, (bool, str)) and not isinstance(given, type(field.default)):
                raise InputError(f"{field.name} is {given!r}; it must be a {type(field.default).__name__}")
        whole = (*_COUNTS, "n_steps", "seed")
        check_settings(self, whole, is_whole, "{name} is {value!r}; it must be a whole number")
        check_settings(self, _NUMBERS, is_number, "{name} is {value!r}; it must be a number")
        for name in ("hidden", "depths"):
            items = getattr(self, name)
            if items is not None and not (
                isinstance(items, tuple) and all(type(item) is int for item in items)
            ):
                raise InputError(f"{name} is {items!r}; it must be a tuple of whole numbers")
        check_settings(self, _COUNTS, at_least_one, "{name} is {value}; it must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}; it must be at least 0 and below 2**63")
        check_returns(self.n_steps, self.gamma)
        if not 0 < self.epsilon <= 1:
            raise InputError(
                f"epsilon is {self.epsilon}; it must be in (0, 1], or some actions would never be logged"
            )
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise InputError(f"learning_rate is {self.learning_rate}; it must be positive and finite")
        if not math.isfinite(self.final_token_reward):
            raise InputError(f"final_token_reward is {self.final_token_reward}; it must be finite")
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(f"hidden is {self.hidden}; it needs at least one width, each at least 1")
        if not self.features:
            raise InputError("observation is empty; a Q-network needs at least one feature")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, one per field."""
        depths = None if self.depths is None else list(self.depths)
        return {**dataclasses.asdict(self), "depths": depths, "hidden": list(self.hidden)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DQNSettings:
        """Settings from what `to_json` gave; missing fields take their defaults.

        Raises:
            InputError: an entry that is not a setting.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InputError(
                f"unknown training settings {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        prepared = dict(values)
        for name in ("hidden", "depths"):
            if prepared.get(name) is not None:
                prepared[name] = tuple(prepared[name])
        return cls(**prepared)
