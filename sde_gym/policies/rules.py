"""Controllers that need no training: fixed depth and length, confidence thresholds, coin flips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import shown, whole_number
from sde_gym.errors import InputError
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.draft_verify import share
from sde_gym.policies.observation import Action, Phase
from sde_gym.settings import LONGEST_DRAFT


class StaticController(BaseController):
    """LayerSkip's setting: always exit at one depth and draft one number of tokens.

    It looks at no feature, so the only heads it costs are those it proposes from. Drafts are
    shorter only where verification is forced (end of text, token budget).

    Args:
        exit_depth: depth to exit at, in layers; `bind` refuses one that is not a candidate.
        draft_length: proposals in a round, 1..max_draft.

    Raises:
        InputError: one of them is no whole number of at least 1, or more than `settings.LONGEST_DRAFT`.
    """

    observation: tuple[str, ...] = ()

    def __init__(self, exit_depth: int, draft_length: int) -> None:
        self.exit_depth = whole_number("exit_depth", exit_depth, 1)
        self.draft_length = whole_number("draft_length", draft_length, 1, LONGEST_DRAFT)
        self.name = f"static({self.exit_depth}, {self.draft_length})"
        self._exit_index = -1

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError for an exit depth that is no candidate or a draft beyond max_draft."""
        super().bind(depths, num_layers, max_draft)
        if self.exit_depth not in self.depths:
            raise InputError(f"exit_depth: {self.exit_depth} is not one of the depths {list(self.depths)}")
        if self.draft_length > max_draft:
            raise InputError(f"draft_length: {self.draft_length} is outside 1..{max_draft} (max_draft)")
        self._exit_index = self.depths.index(self.exit_depth)

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT at the depth in SELECT, EXIT until the draft is long enough in DRAFT."""
        exits = np.where(
            view.phase == Phase.SELECT,
            view.depth_index >= self._exit_index,
            view.draft_length < self.draft_length,
        )
        return exits.astype(np.int64)

    def reads(self, phase: int, depth_index: int) -> bool:
        """Never."""
        return False


class ThresholdController(BaseController):
    """Exit where the most probable token is probable enough (LITE's rule, here verified).

    SELECT: exit at the first depth whose top-1 probability reaches that depth's threshold;
    where none does, the token goes to the last layer. DRAFT: go on while the top-1 probability
    at l* reaches the threshold of that depth.

    Args:
        threshold: one probability for all depths, or one for each depth in order.
        draft_threshold: the same for DRAFT; `threshold` if not given.

    Raises:
        InputError: anything but probabilities.
    """

    observation: tuple[str, ...] = ("top1",)

    def __init__(
        self,
        threshold: float | Sequence[float],
        draft_threshold: float | Sequence[float] | None = None,
    ) -> None:
        self.threshold = _probabilities(threshold, "threshold")
        self.draft_threshold = (
            self.threshold if draft_threshold is None else _probabilities(draft_threshold, "draft_threshold")
        )
        self.name = f"threshold({_label(self.threshold)}, {_label(self.draft_threshold)})"
        self._by_phase = np.zeros((2, 0))

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError where the number of thresholds is not that of the depths."""
        super().bind(depths, num_layers, max_draft)
        rows = []
        for name, values in (("threshold", self.threshold), ("draft_threshold", self.draft_threshold)):
            if len(values) not in (1, len(depths)):
                raise InputError(
                    f"{name}: {len(values)} values for {len(depths)} depths; give one, or one for each depth"
                )
            rows.append(np.broadcast_to(values, (len(depths),)))
        self._by_phase = np.stack(rows)

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT where top-1 >= threshold."""
        return (view.observation[:, 0] >= self._by_phase[view.phase, view.depth_index]).astype(np.int64)


class RandomController(BaseController):
    """Exit with a fixed probability, whatever is seen: exploration and tests.

    Draws depend on (seed, text, decision number) only, not on the order of calls or on the
    number of lanes, so replay, environments and decoder see the same actions.

    Args:
        p_exit: probability of EXIT in SELECT.
        seed: of the draws.
        p_draft: probability of EXIT in DRAFT; `p_exit` if not given.

    Raises:
        InputError: anything but a probability each, or a seed that is no whole number.
    """

    observation: tuple[str, ...] = ()

    def __init__(self, p_exit: float = 0.5, seed: int = 0, p_draft: float | None = None) -> None:
        self.p_exit = share("p_exit", p_exit)
        self.p_draft = self.p_exit if p_draft is None else share("p_draft", p_draft)
        self.seed = whole_number("seed", seed)
        self.name = f"random({self.p_exit:g}, {self.p_draft:g})"

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT with the phase's probability."""
        probability = np.where(view.phase == Phase.SELECT, self.p_exit, self.p_draft)
        exits = counter_uniform(self.seed, view.text, view.decision) < probability
        return np.where(exits, int(Action.EXIT), int(Action.CONTINUE))

    def reads(self, phase: int, depth_index: int) -> bool:
        """Never."""
        return False


def counter_uniform(seed: int, text: ArrayLike, decision: ArrayLike, stream: int = 0) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), each a pure function of (seed, stream, text, decision).

    SplitMix64's finaliser (Steele, Lea and Flood 2014) absorbs one number after the other;
    the upper 53 bits of the result become a float64.

    Args:
        seed: any integer; taken modulo 2**64.
        text: int (n,) or scalar, index of the text.
        decision: int (n,) or scalar, decision number in the text.
        stream: separates several draws for the same decision.
    """
    key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    for number in (np.atleast_1d(stream), np.atleast_1d(text), np.atleast_1d(decision)):
        key = _mix(key ^ _mix(number.astype(np.int64).view(np.uint64)))
    return (key >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One SplitMix64 step: a bijection of 64 bits that spreads every bit over all others."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _probabilities(values: float | Sequence[float], name: str) -> NDArray[np.float64]:
    """One or more probabilities as an array; InputError for anything else."""
    try:
        array = np.atleast_1d(np.asarray(values))
    except (TypeError, ValueError):  # lists of different lengths
        array = np.zeros(0)
    right = array.ndim == 1 and array.size > 0 and array.dtype.kind in "iuf"
    if not right or not np.all((array >= 0.0) & (array <= 1.0)):
        raise InputError(f"{name}: {shown(values)} is not a probability in 0..1 or a list of them; give one")
    return array.astype(np.float64)


def _label(values: NDArray[np.float64]) -> str:
    return "/".join(f"{value:g}" for value in values)
