"""The settings of a training of adapters."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sde_gym.errors import InputError
from sde_gym.models.adapters import KINDS
from sde_gym.models.own_states import OwnTextSettings
from sde_gym.settings import at_least_one, check_settings, setting

_COUNTS = (
    "tokens", "opening", "answer", "texts", "lanes", "top_k", "size", "batch_tokens", "checkpoint_every",
)  # fmt: skip


@dataclass(frozen=True)
class AdapterSettings:
    """Everything that determines adapters, apart from the model."""

    depths: tuple[int, ...] = setting((), "Depths that get an adapter; four even steps if none.")
    kind: str = setting("gated", f"The map: {', '.join(KINDS)}.")
    size: int = setting(512, "Inner width of a gated map, rank of a low-rank one.")
    vocabulary: int = setting(
        0, "Size of the compact vocabulary, counted in the own text; 0: the model's own, or all tokens."
    )
    tokens: int = setting(1_000_000, "Tokens that the model writes.")
    opening: int = setting(32, "Most drawn tokens at the start of a text; a chat's question.")
    answer: int = setting(96, "Most greedy tokens of a text.")
    texts: int = setting(1536, "Texts of a block, which is written to disk as a whole.")
    lanes: int = setting(512, "Texts written at once.")
    top_k: int = setting(16, "Tokens of the last layer's distribution that count.")
    passes: float = setting(2.0, "Times that the text is gone through.")
    batch_tokens: int = setting(1024, "Positions in a step.")
    learning_rate: float = setting(2e-2, "Peak learning rate of Muon, RMS-matched.")
    warmup: float = setting(0.03, "First part of the steps, in which the rate rises.")
    hard: float = setting(0.5, "Weight of the best token alone beside the distribution.")
    drawn: bool = setting(True, "Whether positions in front of drawn tokens count, too.")
    checkpoint_every: int = setting(200, "Steps between checkpoints.")
    seed: int = setting(0, "Of the text, of initial weights and of the order.")

    def __post_init__(self) -> None:
        check_settings(self, _COUNTS, at_least_one, "{name} must be at least 1, not {value}")
        for name in ("warmup", "hard"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} must lie in [0, 1], not {getattr(self, name)}")
        for name in ("passes", "learning_rate"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be positive and finite, not {getattr(self, name)}")
        for name in ("seed", "vocabulary"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.kind not in KINDS:
            raise InputError(f"kind: there is no {self.kind!r}; expected one of {', '.join(KINDS)}")

    def own_text(self) -> OwnTextSettings:
        """What the model writes."""
        names = [field.name for field in fields(OwnTextSettings)]
        return OwnTextSettings(**{name: getattr(self, name) for name in names})
