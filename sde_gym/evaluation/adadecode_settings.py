"""The settings of AdaDecode that are tried on training texts wherever it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from sde_gym.policies.adadecode import AdaDecodeController

#: AdaDecode's thresholds tried on training texts; the paper's are 0.75 to 0.85.
ADADECODE_THRESHOLDS = (0.4, 0.6, 0.75)

#: Depths at which AdaDecode has heads.
ADADECODE_HEADS = 3


def middle_depths(depths: Sequence[int]) -> tuple[int, ...]:
    """The `ADADECODE_HEADS` candidate depths in the middle, all if there are fewer."""
    first = max(0, (len(depths) - ADADECODE_HEADS + 1) // 2)
    return tuple(depths[first : first + ADADECODE_HEADS])


def adadecode_candidates(
    depths: Sequence[int], static_depth: int
) -> list[tuple[AdaDecodeController, tuple[int, ...]]]:
    """Every threshold at the middle depths, and at the best static setting's depth alone."""
    return [
        (AdaDecodeController(threshold), offer)
        for threshold in ADADECODE_THRESHOLDS
        for offer in (middle_depths(depths), (static_depth,))
    ]
