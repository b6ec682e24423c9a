"""Generated texts with the exit depth of every token, and the colours they are shown in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sde_gym.colours import DepthColours, luminance
from sde_gym.errors import InputError
from sde_gym.models.token_text import token_pieces

__all__ = ["FATES", "DepthColours", "Sample", "luminance", "token_pieces"]

#: Where a token came from: the prompt's own pass, an accepted draft, or the final layer.
FATES = ("prefill", "accepted", "final")


@dataclass(frozen=True)
class Sample:
    """One prompt and what was generated from it, ready to be shown.

    Args:
        prompt: the prompt's text.
        tokens: text of each generated token; joined they are the generated text.
        depths: per token, the depth whose head it came from, 1..num_layers.
        fates: per token, one of `FATES`.
        num_layers: number of layers L of the model.
        title: a short name, for instance the prompt's id.

    Raises:
        InputError: the lists differ in length, or a depth or fate is impossible.
    """

    prompt: str
    tokens: Sequence[str]
    depths: Sequence[int]
    fates: Sequence[str]
    num_layers: int
    title: str = ""

    def __post_init__(self) -> None:
        name = f"sample {self.title!r}" if self.title else "sample"
        if not len(self.tokens) == len(self.depths) == len(self.fates):
            raise InputError(
                f"{name} has {len(self.tokens)} tokens, {len(self.depths)} depths and "
                f"{len(self.fates)} fates; give one of each per token"
            )
        for depth in self.depths:
            if not 1 <= depth <= self.num_layers:
                raise InputError(f"{name} has depth {depth}; it must lie in 1..{self.num_layers}")
        for fate in self.fates:
            if fate not in FATES:
                raise InputError(f"{name} has fate {fate!r}; it must be one of {', '.join(FATES)}")
