"""Draft & Verify: one exit depth, and a confidence threshold that adapts to what is accepted.

Zhang et al. 2023 ("Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding"). The original drafts by skipping sublayers anywhere in the stack; here by exiting at a depth,
with the same rule for the length. docs/controllers.md numbers the departures.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import flag, is_whole
from sde_gym.errors import InputError
from sde_gym.policies.controller import RoundOutcome, View
from sde_gym.policies.lane_state import RememberingController
from sde_gym.policies.observation import Phase


class DraftVerifyController(RememberingController):
    """Always exit at one depth; draft on while the top-1 probability reaches a threshold that adapts.

    After a verification with `accepted` of `drafted` proposals, m being the running acceptance of the
    text (0 at its start) and t the threshold:

        m = a m + (1 - a) accepted / drafted
        t' = t + step  if m < target,  t  if drafted = max_draft,  t - step  otherwise
        t = b t + (1 - b) t'

    A round's first proposal is made without looking; the threshold stays within 0..1.

    Args:
        exit_depth: depth to exit at, in layers; `bind` refuses one that is not a candidate.
        threshold: t at the start of a text, 0..1.
        target: acceptance aimed at, 0..1.
        step: by which the threshold moves before it is smoothed, 0..1.
        acceptance_memory: a, 0..1.
        threshold_memory: b, 0..1.
        carry_over: whether m and t go on from text to text, see `RememberingController`.

    Raises:
        InputError: a number out of its range, or anything but a number.
    """

    observation: tuple[str, ...] = ("top1",)

    def __init__(
        self,
        exit_depth: int,
        threshold: float = 0.8,
        *,
        target: float = 0.9,
        step: float = 0.01,
        acceptance_memory: float = 0.5,
        threshold_memory: float = 0.9,
        carry_over: bool = False,
    ) -> None:
        super().__init__(flag("carry_over", carry_over))
        if not is_whole(exit_depth):
            raise InputError(f"exit_depth: {exit_depth!r} is not a whole number of layers; give a depth")
        self.exit_depth = int(exit_depth)
        self.threshold = share("threshold", threshold)
        self.target = share("target", target)
        self.step = share("step", step)
        self.acceptance_memory = share("acceptance_memory", acceptance_memory)
        self.threshold_memory = share("threshold_memory", threshold_memory)
        parts = [str(self.exit_depth)]
        parts += [f"{self.threshold:g}"] * (self.threshold != 0.8) + ["carry_over"] * self.carry_over
        self.name = f"draft_verify({', '.join(parts)})"
        self._exit_index = -1

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError for an exit depth that is no candidate."""
        if self.exit_depth not in depths:
            raise InputError(
                f"exit_depth: {self.exit_depth} is not one of the depths {list(depths)}; choose one of these"
            )
        super().bind(depths, num_layers, max_draft)
        self._exit_index = self.depths.index(self.exit_depth)

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT at the depth in SELECT; in DRAFT while top-1 reaches the lane's threshold."""
        confident = view.observation[:, 0] >= self.state["threshold"][view.lanes]
        exits = np.where(view.phase == Phase.SELECT, view.depth_index >= self._exit_index, confident)
        return exits.astype(np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Adapt the thresholds of the lanes whose round had a draft."""
        proposed = outcome.drafted > 0
        lanes, drafted = outcome.lanes[proposed], outcome.drafted[proposed]
        accepted = outcome.accepted[proposed]
        kept = self.acceptance_memory
        acceptance = kept * self.state["acceptance"][lanes] + (1 - kept) * accepted / drafted
        down = np.where(drafted == self.max_draft, 0.0, -self.step)
        move = np.where(acceptance < self.target, self.step, down)
        threshold = self.state["threshold"][lanes] + (1 - self.threshold_memory) * move
        self.state["acceptance"][lanes] = acceptance
        self.state["threshold"][lanes] = np.clip(threshold, 0.0, 1.0)

    def reads(self, phase: int, depth_index: int) -> bool:
        """In DRAFT, which under its own actions is at the exit depth only."""
        return phase == Phase.DRAFT

    def _fresh(self) -> Mapping[str, ArrayLike]:
        return {"threshold": self.threshold, "acceptance": 0.0}


def share(name: str, value: float) -> float:
    """`value` as a float; InputError naming the argument unless it is a number in 0..1."""
    number = not isinstance(value, (bool, np.bool_)) and isinstance(value, (int, float, np.number))
    if not number or not 0.0 <= float(value) <= 1.0:
        raise InputError(f"{name}: {value!r} is not a number in 0..1; give one")
    return float(value)
