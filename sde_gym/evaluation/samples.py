"""Generated texts with the exit depth of every token, and the colours they are shown in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sde_gym.errors import InputError

#: Where a token came from: the prompt's own pass, an accepted draft, or the final layer.
FATES = ("prefill", "accepted", "final")

#: Shallow to deep. Lightness falls steadily, so that the order also shows without colour vision.
_ANCHORS = ((250, 231, 131), (160, 217, 143), (84, 190, 176), (98, 158, 214), (84, 72, 150))


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


class DepthColours:
    """A colour for every exit depth that occurs; the final layer has none (None).

    Depths are spread evenly over the scale by rank, because those in use lie close together.
    """

    def __init__(self, depths: Iterable[int], num_layers: int) -> None:
        self.num_layers = num_layers
        self.depths = tuple(sorted({depth for depth in depths if depth < num_layers}))

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> DepthColours:
        """The colours of several samples of one model.

        Raises:
            InputError: there is no sample, or they are of models with different depths.
        """
        layers = {sample.num_layers for sample in samples}
        if len(layers) != 1:
            raise InputError(f"samples must be of one model, not of models with {sorted(layers)} layers")
        return cls((depth for sample in samples for depth in sample.depths), layers.pop())

    def background(self, depth: int) -> str | None:
        """'#rrggbb' of a depth that occurs, None for the final layer."""
        if depth == self.num_layers:
            return None
        place = self.depths.index(depth) / max(1, len(self.depths) - 1) * (len(_ANCHORS) - 1)
        left = min(int(place), len(_ANCHORS) - 2)
        share = place - left
        mixed = (a + (b - a) * share for a, b in zip(_ANCHORS[left], _ANCHORS[left + 1], strict=True))
        return "#" + "".join(f"{round(channel):02x}" for channel in mixed)

    def ink(self, depth: int) -> str | None:
        """Black or white, whichever has the higher contrast on the background (WCAG 2)."""
        background = self.background(depth)
        if background is None:
            return None
        # (1.05) / (Y + .05) for white against (Y + .05) / .05 for black: equal at Y = 0.179
        return "#000000" if luminance(background) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Relative luminance of '#rrggbb' by WCAG 2: linear light, weighted by the eye's response."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def token_pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Split a decoded text into one piece per token.

    A token may hold only a part of a character (byte-level vocabularies); the character then
    appears with the token that completes it and the pieces before it are empty. Joined, the
    pieces equal `decode(ids)`.
    """
    pieces: list[str] = []
    shown = ""
    for count in range(1, len(ids) + 1):
        text = decode(list(ids[:count]))
        complete = text.startswith(shown) and (not text.endswith("\ufffd") or count == len(ids))
        pieces.append(text[len(shown) :] if complete else "")
        if complete:
            shown = text
    return pieces
