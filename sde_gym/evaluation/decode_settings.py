"""What `sde-gym bench decode` is asked to do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sde_gym.errors import InputError
from sde_gym.models.cost import UNIT
from sde_gym.settings import (
    DEFAULT_MAX_DRAFT,
    DEFAULT_NEW_TOKENS,
    at_least_one,
    check_settings,
    is_number,
    is_whole,
    setting,
)

_COUNTS = (
    "limit", "train_limit", "max_new_tokens", "repeats", "threads", "max_draft", "prompt_lookup_tokens",
    "episodes", "gradient_steps",
)  # fmt: skip


@dataclass(frozen=True)
class DecodeSettings:
    """What the decoding benchmark does."""

    model: str = setting("stdlib-20m", "model: a shipped name, a local path or a hub id")
    dtype: str = setting("float32", "float32 or bfloat16; the latter parts from plain decoding at near-ties")
    device: str = setting("cpu", "cpu, cuda or cuda:N")
    prompts: str = setting("stdlib:held-out", "prompt set or JSONL file to measure on")
    train_prompts: str = setting("stdlib:train", "prompt set or JSONL file to tune and train on")
    task: str | None = setting(None, "measure prompts of this task only")
    limit: int = setting(24, "prompts measured")
    train_limit: int = setting(60, "prompts tuned and trained on")
    max_new_tokens: int = setting(DEFAULT_NEW_TOKENS, "tokens generated per prompt")
    temperature: float = setting(0.0, "0 decodes greedily; above it, methods sample")
    methods: tuple[str, ...] | None = setting(None, "methods, by name; all that apply if none")
    repeats: int = setting(3, "passes over the measured prompts")
    threads: int = setting(2, "torch threads")
    seed: int = setting(0, "seed of the order of turns, of draws, of exploration and training")
    depths: tuple[int, ...] | None = setting(None, "candidate exit depths; usual ones below L if none")
    policy_depths: tuple[int, ...] | None = setting(
        None, "exit depths offered to policies trained here; the static setting's if none"
    )
    max_draft: int = setting(
        DEFAULT_MAX_DRAFT, "most drafts in a round; what is beyond the token budget is not tried"
    )
    prompt_lookup_tokens: int = setting(10, "tokens that prompt lookup copies at most")
    policy: str | None = setting(None, "folder of the policy `lede`; trained in the run if none")
    speed_policy: str | None = setting(None, "folder of the policy `lede_speed`; trained in the run if none")
    episodes: int = setting(600, "exploratory episodes behind each policy trained here")
    gradient_steps: int = setting(6_000, "gradient steps of each policy trained here")
    cost: str = setting(UNIT, "cost model of simulated speed-ups: 'unit' or a file of `sde-gym calibrate`")

    def __post_init__(self) -> None:
        """Refuse numbers out of range.

        Raises:
            InputError: the message names the setting, its value and its limit.
        """
        check_settings(self, (*_COUNTS, "seed"), is_whole, "{name} is {value!r}; it must be a whole number")
        check_settings(self, _COUNTS, at_least_one, "{name} must be at least 1, not {value}")
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens must be at least 2, not {self.max_new_tokens}")
        if self.policy_depths is not None and not self._trains:
            raise InputError("policy_depths: no method of this run trains a policy; leave it out")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, not {self.seed}")
        if not is_number(self.temperature) or not (0 <= self.temperature < math.inf):
            raise InputError(f"temperature must be a number of at least 0, not {self.temperature}")

    @property
    def _trains(self) -> bool:
        """Whether a method that is asked for takes a policy that is not given."""
        given = {"lede": self.policy, "lede_speed": self.speed_policy}
        asked = self.methods or tuple(given)
        return any(given.get(name.removesuffix("_no_depth").removesuffix("_no_length"), "") is None
                   for name in asked if name.startswith("lede"))  # fmt: skip

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0


def completed(stored: Any) -> Any:
    """Settings that an earlier version stored as JSON, those that it did not have yet at their defaults."""
    return {**asdict(DecodeSettings()), **stored} if isinstance(stored, dict) else stored


def usable_draft(max_draft: int, max_new_tokens: int) -> int:
    """The cap on drafts that a run works with: more than the budget can never be drafted.

    It is not lowered below the package's default, so that runs that were begun with it go on.
    """
    return min(max_draft, max(max_new_tokens, DEFAULT_MAX_DRAFT))
