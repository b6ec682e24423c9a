"""The colours in which exit depths are shown, in terminals, pictures and reports alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from sde_gym.errors import InputError

#: Shallow to deep. Lightness falls steadily, so that the order also shows without colour vision.
_ANCHORS = ((250, 231, 131), (160, 217, 143), (84, 190, 176), (98, 158, 214), (84, 72, 150))


class HasDepths(Protocol):
    """A text of a model with `num_layers` layers, each of its tokens from one of `depths`."""

    @property
    def num_layers(self) -> int:
        """L."""

    @property
    def depths(self) -> Sequence[int]:
        """Exit depth of each token, 1..L."""


class DepthColours:
    """A colour for every exit depth that occurs; the final layer has none (None).

    Depths are spread evenly over the scale by rank, because those in use lie close together.
    """

    def __init__(self, depths: Iterable[int], num_layers: int) -> None:
        self.num_layers = num_layers
        self.depths = tuple(sorted({depth for depth in depths if depth < num_layers}))

    @classmethod
    def of(cls, samples: Sequence[HasDepths]) -> DepthColours:
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
