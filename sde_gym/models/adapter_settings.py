"""The settings of a training of adapters, and of the text that they learn from."""

from __future__ import annotations

from dataclasses import dataclass

from sde_gym.errors import InputError
from sde_gym.models.adapters import KINDS
from sde_gym.settings import at_least_one, check_settings, is_number, is_whole, setting

#: Every so manieth text of a block is of the model's own, with a greedy answer: held out of training.
HELD_OUT = 20

_TEXT_COUNTS = ("tokens", "opening", "answer", "texts", "lanes", "top_k")
_COUNTS = ("size", "batch_tokens", "checkpoint_every")


@dataclass(frozen=True)
class OwnTextSettings:
    """What a model writes.

    Raises:
        InputError: a number out of range; the message names it.
    """

    tokens: int = setting(1_000_000, "Tokens that the model writes, drawn and greedy ones.")
    opening: int = setting(32, "Most drawn tokens at the start of a text; a chat's question.")
    answer: int = setting(96, "Most tokens of a text behind it.")
    texts: int = setting(1536, "Texts of a block, which is written to disk as a whole.")
    lanes: int = setting(512, "Texts written at once.")
    top_k: int = setting(16, "Tokens of the last layer's distribution that count.")
    min_p: float = setting(
        0.02,
        "Least probability of a drawn token over that of the best; a text's first is free of it.",
    )
    first_temperature: float = setting(2.0, "Temperature of a text's first token: varied subjects.")
    draw_answers: bool = setting(
        True, "Whether answers are drawn, too; every twentieth text's is greedy, to judge on."
    )
    prompt_share: float = setting(0.5, "Share of the texts that answer given prompts, if there are any.")
    longest_prompt: int = setting(256, "Given prompts of more tokens are left out.")
    seed: int = setting(0, "Of the text, of initial weights and of the order.")

    def __post_init__(self) -> None:
        whole = (*_TEXT_COUNTS, "longest_prompt", "seed")
        check_settings(self, whole, is_whole, "{name}: {value!r} must be a whole number")
        check_settings(self, whole[:-1], at_least_one, "{name} must be at least 1, not {value}")
        shares = ("min_p", "prompt_share")
        check_settings(self, (*shares, "first_temperature"), is_number, "{name}: {value!r} must be a number")
        check_settings(self, shares, _is_share, "{name} must lie in [0, 1], not {value}")
        check_settings(
            self, ("first_temperature",), _is_positive, "{name} must be positive and finite, not {value}"
        )
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, not {self.seed}")


@dataclass(frozen=True)
class AdapterSettings(OwnTextSettings):
    """Everything that determines adapters, apart from the model."""

    depths: tuple[int, ...] | None = setting(None, "Depths that get an adapter; four even steps if none.")
    prompts: str | None = setting(None, "Prompt set or JSONL file whose prompts are answered, too.")
    kind: str = setting("linear_gated", f"The map: {', '.join(KINDS)}.")
    size: int = setting(448, "Inner width of a gated map, rank of a low-rank one.")
    vocabulary: int = setting(
        0, "Size of the compact vocabulary, counted in the own text; 0: the model's own, or all tokens."
    )
    passes: float = setting(2.0, "Times that the text is gone through.")
    batch_tokens: int = setting(1024, "Positions in a step.")
    learning_rate: float = setting(2e-2, "Peak learning rate of Muon, RMS-matched.")
    warmup: float = setting(0.03, "First part of the steps, in which the rate rises.")
    hard: float = setting(0.5, "Weight of the best token alone beside the distribution.")
    drawn: bool = setting(True, "Whether positions in front of drawn tokens count, too.")
    checkpoint_every: int = setting(200, "Steps between checkpoints.")

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = (*_COUNTS, "vocabulary")
        check_settings(self, whole, is_whole, "{name}: {value!r} must be a whole number")
        check_settings(self, _COUNTS, at_least_one, "{name} must be at least 1, not {value}")
        numbers = ("warmup", "hard", "passes", "learning_rate")
        check_settings(self, numbers, is_number, "{name}: {value!r} must be a number")
        check_settings(self, ("warmup", "hard"), _is_share, "{name} must lie in [0, 1], not {value}")
        check_settings(
            self, ("passes", "learning_rate"), _is_positive, "{name} must be positive and finite, not {value}"
        )
        if self.vocabulary < 0:
            raise InputError(f"vocabulary must be at least 0, not {self.vocabulary}")
        if self.kind not in KINDS:
            raise InputError(f"kind: there is no {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.texts < HELD_OUT:
            raise InputError(
                f"texts must be at least {HELD_OUT}, not {self.texts}: one in {HELD_OUT} is held out"
            )
        if self.draw_answers and not self.drawn:
            raise InputError(
                "drawn=False leaves nothing to learn from if answers are drawn; give draw_answers=False, too"
            )


def _is_share(value: float) -> bool:
    return 0.0 <= value <= 1.0


def _is_positive(value: float) -> bool:
    return 0.0 < value < float("inf")
