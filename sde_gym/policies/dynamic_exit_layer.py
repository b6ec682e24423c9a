"""DEL: exit depth and draft length chosen anew for each round, by what all depths said so far.

Zarch et al. 2025 ("DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding"). The
hidden states of the tokens that a round emitted have been computed at every depth anyway; the heads that
turn them into *shadow tokens* are paid for. docs/controllers.md numbers the departures.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import flag, is_whole
from sde_gym.errors import InputError
from sde_gym.policies.controller import RoundOutcome, View
from sde_gym.policies.draft_verify import share
from sde_gym.policies.lane_state import RememberingController
from sde_gym.policies.observation import Phase

LONGEST = 18
"""Longest draft that the public code considers."""


class DELController(RememberingController):
    """Exit at the depth, and draft the number of tokens, that promise the most tokens per layer.

    After each verification, S+ and S- being right and wrong shadow tokens of a depth l:

        S+ = omega S+ + right ones of the round,  S- likewise,  alpha = S+ / (S+ + S-)
        TPL(l, g) = (1 + alpha + ... + alpha^g) / (L + g l)

    The next round exits at the l and drafts the g of the largest TPL, g = 0 being a plain step; of equals
    the shallowest and then the shortest. A draft stops before where the top-1 probability at l falls
    below (c+ + c-) / 2, the mean confidences of all right and of all wrong shadow tokens at l so far; as
    long as no right one was seen c+ is 1, and c- is 0 as long as no wrong one was. A round's first
    proposal is made without looking. The first round of a text, about which nothing is known, is a plain
    step: it brings the first shadow tokens.

    Args:
        omega: what a round's counts are worth one round later, 0..1.
        longest: longest draft considered, at least 1; max_draft if that is less.
        carry_over: whether all this goes on from text to text, see `RememberingController`.

    Raises:
        InputError: a number out of its range.
    """

    shadows = True
    observation: tuple[str, ...] = ("top1",)

    def __init__(self, omega: float = 0.95, longest: int = LONGEST, *, carry_over: bool = False) -> None:
        super().__init__(flag("carry_over", carry_over))
        self.omega = share("omega", omega)
        if not is_whole(longest) or longest < 1:
            raise InputError(f"longest: {longest!r} is not a whole number of at least 1; {LONGEST} is usual")
        self.longest = int(longest)
        parts = [f"omega={self.omega:g}"] * (self.omega != 0.95)
        parts += [f"longest={self.longest}"] * (self.longest != LONGEST) + ["carry_over"] * self.carry_over
        self.name = f"del({', '.join(parts)})" if parts else "del"

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT at the round's depth; in DRAFT up to the round's length, while top-1 is high enough."""
        lanes, state = view.lanes, self.state
        length = state["length"][lanes]
        select = (view.depth_index >= state["index"][lanes]) & (length > 0)
        confident = view.observation[:, 0] >= state["threshold"][lanes, view.depth_index]
        draft = (view.draft_length < length) & confident
        return np.where(view.phase == Phase.SELECT, select, draft).astype(np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Learn from the shadow tokens, and choose depth and length of the lanes' next rounds.

        Raises:
            InputError: there are none, so the driver does not know `shadows`.
        """
        if outcome.shadow is None:
            raise InputError(
                f"controller: {self.name!r} learns from what all depths say, but its driver gave "
                "RoundOutcome without `shadow`; one that wraps it must have its attribute `shadows`, too"
            )
        lanes, state = outcome.lanes, self.state
        counts = np.array([len(shadow.right) for shadow in outcome.shadow], dtype=np.int64)
        first = np.cumsum(counts) - counts
        right = np.concatenate([shadow.right for shadow in outcome.shadow])
        probability = np.concatenate([shadow.probability for shadow in outcome.shadow]).astype(np.float64)
        for kind, mask in enumerate((right, ~right)):  # summed by lane: each round emits a token or more
            number = np.add.reduceat(mask, first, axis=0, dtype=np.float64)
            state["recent"][lanes, kind] = self.omega * state["recent"][lanes, kind] + number
            state["number"][lanes, kind] += number
            state["confidence"][lanes, kind] += np.add.reduceat(mask * probability, first, axis=0)

        number, total = state["number"][lanes], state["confidence"][lanes]
        unseen = np.broadcast_to(np.array([[1.0], [0.0]]), total.shape)
        state["threshold"][lanes] = np.divide(total, number, out=unseen.copy(), where=number > 0).mean(axis=1)
        recent = state["recent"][lanes]
        state["index"][lanes], state["length"][lanes] = self._choice(recent[:, 0] / recent.sum(axis=1))

    def tokens_per_layer(self, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
        """TPL(l, g) for g = 0..min(longest, max_draft): alpha float64 (n, m) to float64 (n, m, g + 1)."""
        length = np.arange(min(self.longest, self.max_draft) + 1)
        tokens = np.cumsum(alpha[..., None] ** length, axis=-1)
        return np.asarray(tokens / (self.num_layers + np.outer(self.depths, length)))

    def reads(self, phase: int, depth_index: int) -> bool:
        """In DRAFT, for the threshold."""
        return phase == Phase.DRAFT

    def _choice(self, alpha: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Depth index and length of the largest TPL, int64 (n,) each."""
        rates = self.tokens_per_layer(alpha)
        index, length = divmod(rates.reshape(len(rates), -1).argmax(axis=1), rates.shape[2])
        return index, length

    def _fresh(self) -> Mapping[str, ArrayLike]:
        m = len(self.depths)
        kinds = np.zeros((2, m))  # right, wrong
        return {
            "recent": kinds,
            "number": kinds,
            "confidence": kinds,
            "threshold": np.full(m, 0.5),
            "index": np.int64(0),
            "length": np.int64(0),
        }
