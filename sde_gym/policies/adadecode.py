"""AdaDecode: each token exits at a depth of its own, and its remaining layers are run later.

Wei et al. 2025 ("AdaDecode: Accelerating LLM Decoding with Adaptive Layer Parallelism"). A token that
exits early leaves its deeper layers undone; they are run together with those of the next token that
goes deeper. docs/controllers.md numbers the departures.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.draft_verify import share
from sde_gym.policies.observation import Phase


class AdaDecodeController(BaseController):
    """Exit at the first candidate depth whose top-1 probability is above gamma, for each token anew.

    While max_draft proposals wait no more are made: the walk goes on to the last layer, which verifies
    them all. What one depth proposed may be followed by what another one does, which no trace set
    holds: this controller runs in the real decoder only.

    Args:
        gamma: 0..1; the paper uses 0.75 to 0.85.

    Raises:
        InputError: gamma out of range.
    """

    walks_every_token = True
    observation: tuple[str, ...] = ("top1",)

    def __init__(self, gamma: float = 0.75) -> None:
        self.gamma = share("gamma", gamma)
        self.name = f"adadecode({self.gamma:g})"

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT where top-1 > gamma and there is room for a proposal."""
        exits = (view.observation[:, 0] > self.gamma) & (view.draft_length < self.max_draft)
        return exits.astype(np.int64)

    def reads(self, phase: int, depth_index: int) -> bool:
        """Everywhere in SELECT, which is the only phase it is in."""
        return phase == Phase.SELECT
