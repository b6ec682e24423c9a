"""LITE and CALM: exit where the most probable token is probable enough, here verified.

LITE (Varshney et al. 2023) has one threshold a depth, calibrated on text that the model has not been
judged on; CALM (Schuster et al. 2022) one for all depths that falls with the position in the text. Both
emit what they exit with, so their texts differ from the model's; here what they exit with is a proposal.
docs/controllers.md numbers the departures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import shown, whole_number
from sde_gym.errors import InputError
from sde_gym.policies.controller import RoundOutcome, View
from sde_gym.policies.draft_verify import share
from sde_gym.policies.lane_state import RememberingController
from sde_gym.policies.rules import ThresholdController
from sde_gym.traces import TraceSet


class LITEController(ThresholdController):
    """`ThresholdController` with a threshold for each depth, which may be bound to some of them only.

    Args:
        thresholds: by depth in layers, the top-1 probability from which on to exit there and to draft
            on; above 1 (inf), never.
        name: for tables.

    Raises:
        InputError: no mapping, no depth, a depth that is no whole number, or a threshold that is no number,
            negative or NaN.
    """

    def __init__(self, thresholds: Mapping[int, float], name: str = "lite") -> None:
        if not isinstance(thresholds, Mapping):
            raise InputError(
                f"thresholds: {shown(thresholds)} is no mapping of depths; give one, such as {{4: 0.7}}"
            )
        if not thresholds or not all(map(_is_threshold, thresholds.values())):
            raise InputError(
                f"thresholds: {dict(thresholds)!r} must have a number of at least 0 for at least one depth"
            )
        self.by_depth = {
            whole_number("thresholds: depth", depth, low=1): float(value)
            for depth, value in thresholds.items()
        }
        super().__init__(0.0)
        self.made_for = tuple(sorted(self.by_depth))
        self._use(tuple(self.by_depth))
        self.name = name

    @classmethod
    def calibrated(
        cls,
        traces: TraceSet,
        target_acceptance: float = 0.9,
        depths: Sequence[int] | None = None,
        texts: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> LITEController:
        """With the thresholds of `calibrated_thresholds`; recorded depths if none are given."""
        chosen = traces.depths if depths is None else tuple(int(depth) for depth in depths)
        thresholds = calibrated_thresholds(traces, target_acceptance, chosen, texts)
        return cls(
            dict(zip(chosen, thresholds.tolist(), strict=True)), name=f"lite({float(target_acceptance):g})"
        )

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError for a depth that has no threshold."""
        missing = [depth for depth in depths if depth not in self.by_depth]
        if missing:
            raise InputError(
                f"thresholds: none for the depths {missing}, only for {list(self.made_for)}; give the "
                f"decoder depths={self.made_for} or some of them, or calibrate on traces with all"
            )
        self._use(depths)
        super().bind(depths, num_layers, max_draft)

    def _use(self, depths: tuple[int, ...]) -> None:
        self.threshold = self.draft_threshold = np.array([self.by_depth[depth] for depth in depths])


def _is_threshold(value: object) -> bool:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return number and bool(value >= 0)  # type: ignore[operator]


def calibrated_thresholds(
    traces: TraceSet,
    target_acceptance: float,
    depths: Sequence[int] | None = None,
    texts: Sequence[int] | NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """`thresholds_for` at the recorded positions that a controller decides on: all but each text's first.

    Args:
        traces: recorded texts, other ones than those to be judged on.
        target_acceptance: share of right proposals aimed at, 0..1.
        depths: m of the recorded ones; all if not given.
        texts: indices of those to calibrate on; all if not given.

    Returns:
        float64 (m,).

    Raises:
        InputError: a target out of range, a depth that was not recorded, or no position to calibrate on.
    """
    chosen = traces.depths if depths is None else tuple(depths)
    for depth in chosen:
        if depth not in traces.depths:
            raise InputError(f"depths: {depth} was not recorded; this trace set has {list(traces.depths)}")
    columns = [traces.depths.index(depth) for depth in chosen]
    first, after = traces.start[:-1], traces.start[1:]
    if texts is not None:
        numbers = np.asarray(texts)
        if not np.issubdtype(numbers.dtype, np.integer) or not np.isin(numbers, range(len(traces))).all():
            raise InputError(
                f"texts: {texts!r} are not indices in 0..{len(traces) - 1}; give one or more of these"
            )
        first, after = first[numbers], after[numbers]
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *map(np.arange, first + 1, after)])
    probability = np.exp(traces.top_logprobs[rows][:, columns, 0])
    return thresholds_for(probability, traces.match[rows][:, columns], target_acceptance)


def thresholds_for(
    probability: NDArray[np.floating], match: NDArray[np.bool_], target_acceptance: float
) -> NDArray[np.float64]:
    """At each depth the lowest threshold such that proposals at or above it are right often enough.

    Which of the lowest probabilities a threshold lets in is all that matters, so it lies halfway between
    the lowest that it lets in and the next below: rounding decides nothing.

    Args:
        probability: float (n, m), top-1 probability at n positions and m depths.
        match: bool (n, m), whether that token is the final one.
        target_acceptance: least share of right ones among those let in, 0..1.

    Returns:
        float64 (m,); 0 where all may be let in, inf where the target is reached nowhere.

    Raises:
        InputError: a target out of range, arrays of different shapes, or no position.
    """
    target = share("target_acceptance", target_acceptance)
    if probability.shape != match.shape or probability.ndim != 2 or not len(probability):
        raise InputError(
            f"probability and match: shapes {probability.shape} and {match.shape}; give two tables of the "
            "same shape (positions, depths) with at least one position"
        )
    return np.array([_threshold(*each, target) for each in zip(probability.T, match.T, strict=True)])


def _threshold(probability: NDArray[np.floating], match: NDArray[np.bool_], target: float) -> float:
    values, group = np.unique(-probability.astype(np.float64), return_inverse=True)  # falling
    right = np.cumsum(np.bincount(group, weights=match))
    total = np.cumsum(np.bincount(group))
    enough = np.flatnonzero(right / total >= target)
    if not enough.size:
        return math.inf
    last = int(enough[-1])
    return float(-(values[last] + values[last + 1]) / 2) if last + 1 < len(values) else 0.0


class CALMController(RememberingController):
    """CALM's threshold: lambda_i = lambda (0.9 + 0.1 exp(-4 i / N)), i the token's index in its text.

    SELECT: exit at the first depth whose top-1 probability reaches it. DRAFT: go on while it does.

    Args:
        threshold: lambda, 0..1; one for all depths.
        max_new_tokens: N, the token budget of a text, at least 1.

    Raises:
        InputError: one of them out of range.
    """

    observation: tuple[str, ...] = ("top1",)

    def __init__(self, threshold: float, max_new_tokens: int) -> None:
        super().__init__()
        self.threshold = share("threshold", threshold)
        whole = isinstance(max_new_tokens, (int, np.integer)) and not isinstance(max_new_tokens, bool)
        if not whole or max_new_tokens < 1:
            raise InputError(
                f"max_new_tokens: {max_new_tokens!r} is not a whole number of at least 1; give the budget of "
                "a text"
            )
        self.max_new_tokens = int(max_new_tokens)
        self.name = f"calm({self.threshold:g}, {self.max_new_tokens})"

    def threshold_at(self, index: ArrayLike) -> NDArray[np.float64]:
        """lambda_i of the tokens with these indices, int (n,), as float64 (n,)."""
        position = np.asarray(index, dtype=np.float64)
        return np.asarray(self.threshold * (0.9 + 0.1 * np.exp(-4.0 * position / self.max_new_tokens)))

    def act(self, view: View) -> NDArray[np.int64]:
        """EXIT where top-1 reaches the threshold of the token to be proposed."""
        index = self.state["emitted"][view.lanes] + view.draft_length
        return (view.observation[:, 0] >= self.threshold_at(index)).astype(np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        """Count what was emitted; where the last layer added no token of its own, the text is over."""
        self.state["emitted"][outcome.lanes] += outcome.accepted + 1

    def _fresh(self) -> Mapping[str, ArrayLike]:
        return {"emitted": np.int64(1)}  # token 0 is prefill's
