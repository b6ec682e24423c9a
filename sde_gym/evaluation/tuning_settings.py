"""What `sde-gym tune` is asked for, and the input that it starts from once that is accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sde_gym.errors import InputError
from sde_gym.evaluation.decode_settings import usable_draft
from sde_gym.evaluation.measured_prompts import encoded
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.offline import DQNSettings
from sde_gym.offline.backend import import_d3rlpy
from sde_gym.prompts import Prompt, load_prompts
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS, setting

#: Where in the output folder the traces are.
TRACES_FOLDER = "traces"


@dataclass(frozen=True)
class TuneSettings:
    """What `sde-gym tune` does; the defaults take a few minutes for a small model on two cores."""

    model: str = setting("stdlib-20m", "model: a shipped name, a local path or a hub id")
    prompts: str = setting("stdlib:train", "prompt set or JSONL file: texts of the kind you will generate")
    limit: int = setting(80, "prompts used, of the first of the file")
    held_out: float = setting(0.25, "share of them kept apart to judge the result")
    max_new_tokens: int = setting(DEFAULT_NEW_TOKENS, "tokens generated per prompt")
    depths: tuple[int, ...] | None = setting(
        None, "exit depths recorded; a spread over the model's layers if not given"
    )
    offered_depths: int = setting(1, "exit depths offered to the policy: those of the best static settings")
    max_draft: int = setting(
        DEFAULT_MAX_DRAFT, "most drafts in a round; what is beyond the token budget is not tried"
    )
    cost: bool = setting(False, "measure this machine's costs first; else layers and heads are counted")
    final_token_reward: float = setting(0.0, "the policy's reward for a token of the last layer")
    gamma: float = setting(0.99, "the policy's discount per decision")
    gradient_steps: int = setting(8_000, "gradient steps of the offline DQN")
    episodes: int = setting(600, "exploratory episodes in the replay buffer")
    dtype: str = setting("float32", "float32, bfloat16, or on CUDA float16")
    device: str = setting("cpu", "cpu, cuda or cuda:N")
    threads: int = setting(2, "torch threads")
    seed: int = setting(0, "seed of the division of prompts, of exploration and of training")

    def __post_init__(self) -> None:
        for name in ("offered_depths", "max_draft", "gradient_steps", "episodes", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("limit", "max_new_tokens"):
            if getattr(self, name) < 2:
                raise InputError(f"{name} must be at least 2, not {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise InputError(
                f"held_out must lie between 0 and 1, not {self.held_out}: both parts need prompts"
            )
        self.training()

    def training(self) -> DQNSettings:
        """Settings of the policy's training, the candidate depths left open."""
        return DQNSettings(
            episodes=self.episodes,
            gradient_steps=self.gradient_steps,
            max_draft=self.max_draft,
            final_token_reward=self.final_token_reward,
            gamma=self.gamma,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Prepared:
    """A run whose input has been accepted, before anything is written.

    Attributes:
        settings: of the run.
        model: loaded.
        depths: exit depths to be recorded.
        training: prompts to learn from.
        held_out: prompts to judge on.
    """

    settings: TuneSettings
    model: LayeredModel
    depths: tuple[int, ...]
    training: list[Prompt]
    held_out: list[Prompt]


def spread_depths(num_layers: int) -> tuple[int, ...]:
    """Exit depths to try in a model that nothing is known of: the package's usual ones, and two deep ones.

    A model that was trained with early exits is fast at shallow depths; a model that was not agrees with
    itself, if anywhere, at two thirds or five sixths of its layers.
    """
    deep = (round(num_layers * 2 / 3), round(num_layers * 5 / 6))
    return tuple(sorted({d for d in (*DEFAULT_DEPTHS, *deep) if 1 <= d < num_layers}))


def divide(prompts: list[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts, at least one of each, in their order.

    Raises:
        InputError: fewer than two prompts with different texts.
    """
    by_text = {prompt.text: prompt for prompt in prompts}  # no text on both sides
    different = list(by_text.values())
    if len(different) < 2:
        raise InputError(
            f"{len(different)} different prompt{'' if len(different) == 1 else 's'} of {len(prompts)}: at "
            "least two are needed, one to learn from and one to judge on"
        )
    count = min(max(1, round(share * len(different))), len(different) - 1)
    apart = set(np.random.default_rng(seed).permutation(len(different))[:count].tolist())
    training = [prompt for n, prompt in enumerate(different) if n not in apart]
    return training, [prompt for n, prompt in enumerate(different) if n in apart]


def prepare(settings: TuneSettings) -> Prepared:
    """Load the model and the prompts.

    Raises:
        InputError: a model, depth or prompt that does not fit, more depths offered than recorded, or d3rlpy
            missing.
    """
    import_d3rlpy()
    settings = replace(settings, max_draft=usable_draft(settings.max_draft, settings.max_new_tokens))
    prompts = load_prompts(settings.prompts)[: settings.limit]
    training, held_out = divide(prompts, settings.held_out, settings.seed)
    model = load_model(settings.model, settings.dtype, settings.device)
    depths = model.check_depths(settings.depths or spread_depths(model.num_layers))
    if settings.offered_depths > len(depths):
        raise InputError(
            f"offered_depths is {settings.offered_depths}, but only {len(depths)} depths are recorded "
            f"({', '.join(map(str, depths))}); offer fewer, or record more with --depths"
        )
    encoded(model, [*training, *held_out])  # refused before anything is written
    return Prepared(settings, model, depths, training, held_out)
