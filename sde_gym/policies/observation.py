"""What the agent sees: the features of one decision, their bounds, and the names of phases and actions.

Replay and live decoding build their observations with the one function here, so that a policy
trained on recorded traces reads the same numbers in the real decoder. Definitions: LEDE
(arXiv 2606.03113) for the first three features, this project's own for the others. All features
come from raw logits at temperature 1, before any processor; an exit head with a compact
vocabulary is normalised over that vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError

FloatArray = NDArray[np.floating[Any]]


class Action(IntEnum):
    """The two actions, the same in both phases."""

    CONTINUE = 0  # SELECT: run the token deeper; DRAFT: stop drafting and verify
    EXIT = 1  # SELECT: propose a token at this depth and stay at it; DRAFT: propose one more


class Phase(IntEnum):
    """The two phases of a round."""

    SELECT = 0  # the newest token is walked down the candidate depths
    DRAFT = 1  # a depth was chosen; proposals are made at it one after the other


PAPER: tuple[str, ...] = ("confidence", "entropy", "trace")
"""The three features of the paper, in its order: the default observation."""

EXTENDED: tuple[str, ...] = (
    *PAPER,
    "depth",
    "phase",
    "draft_length",
    "top1",
    "margin",
    "stable",
    "acceptance",
    "chain",
)
"""The features that any model and any trace set has. Saved policies depend on the names and their order."""

FEATURES: tuple[str, ...] = (*EXTENDED, "probe")
"""Every feature there is. `probe` needs a model with an exit probe (`sde_gym.models.probe`), or traces
that were recorded with one; it is asked for by name."""

HEAD_FEATURES: frozenset[str] = frozenset({"confidence", "entropy", "top1", "margin", "stable", "probe"})
"""Features that need the exit head at the newest token's depth (`stable` also the one before). They
are 0 where a controller does not read that head; all others are always there."""

SURPRISE_LIMIT = 16.0
"""Upper bound of -log p of a most probable token, in nats: it is at most log V, 12.5 for V = 262 144."""

BOUNDS: dict[str, tuple[float, float]] = {
    "confidence": (0.0, 50.0),  # nats; low-ranked tokens can be arbitrarily improbable, so this one clips
    "entropy": (0.0, SURPRISE_LIMIT),  # nats, at most log V
    "trace": (0.0, SURPRISE_LIMIT),  # nats
    "depth": (0.0, 1.0),
    "phase": (0.0, 1.0),
    "draft_length": (0.0, 1.0),
    "top1": (0.0, 1.0),
    "margin": (0.0, 1.0),
    "stable": (0.0, 1.0),
    "acceptance": (0.0, 1.0),
    "chain": (0.0, 12 * SURPRISE_LIMIT),  # nats; 12 is the default max_draft, longer chains clip
    "probe": (0.0, 1.0),
}
"""Lowest and highest value of each feature; values outside are clipped to them."""

_NAMED_SETS = {"paper": PAPER, "extended": EXTENDED}


def resolve_observation(observation: str | Iterable[str]) -> tuple[str, ...]:
    """The feature names behind an `observation` argument.

    Args:
        observation: "paper", "extended", or feature names in the order wanted (may be empty).

    Raises:
        InputError: an unknown set or feature, or a feature named twice.
    """
    if isinstance(observation, str):
        if observation not in _NAMED_SETS:
            raise InputError(
                f"observation: {observation!r} is not a feature set; use 'paper', 'extended' "
                f"or a list of names out of {', '.join(FEATURES)}"
            )
        return _NAMED_SETS[observation]
    if not isinstance(observation, Iterable):
        raise InputError(f"observation: {observation!r} is neither a set's name nor a list of feature names")
    names = tuple(observation)
    for name in names:
        if not isinstance(name, str) or name not in BOUNDS:
            raise InputError(f"observation: {name!r} is not a feature; there are {', '.join(FEATURES)}")
    if len(set(names)) != len(names):
        raise InputError(f"observation: a feature is named twice in {list(names)}")
    return names


@lru_cache(maxsize=64)
def bounds(names: tuple[str, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lowest and highest values of these features, two read-only float32 arrays (f,)."""
    low = np.array([BOUNDS[name][0] for name in names], dtype=np.float32)
    high = np.array([BOUNDS[name][1] for name in names], dtype=np.float32)
    low.setflags(write=False)
    high.setflags(write=False)
    return low, high


def clip(rows: NDArray[np.float32], names: tuple[str, ...]) -> NDArray[np.float32]:
    """Clip observation rows (n, f) to the bounds of their features, in place; returns `rows`."""
    low, high = bounds(names)
    np.maximum(rows, low, out=rows)
    np.minimum(rows, high, out=rows)
    return rows


def confidence(top_logprobs: FloatArray, k: int) -> FloatArray:
    """C_k = -(1/k) sum of log p over the k most probable tokens, in nats: (n, >= k) -> (n,).

    LEDE's confidence. A large value means a peaked distribution: the tokens behind the first
    are then very improbable.

    Raises:
        InputError: fewer than k log-probabilities are given.
    """
    if not 1 <= k <= top_logprobs.shape[1]:
        raise InputError(f"k: {k} is outside 1..{top_logprobs.shape[1]}, the log-probabilities at hand")
    return np.add.reduce(top_logprobs[:, :k], axis=1) * np.float32(-1.0 / k)


def top1(top_logprobs: FloatArray) -> FloatArray:
    """Probability of the most probable token: (n, >= 1) -> (n,)."""
    return np.exp(top_logprobs[:, 0])


def margin(top_logprobs: FloatArray) -> FloatArray:
    """Probability of the most probable token less that of the second: (n, >= 2) -> (n,)."""
    return np.exp(top_logprobs[:, 0]) - np.exp(top_logprobs[:, 1])


def acceptance(accepted: NDArray[np.int64], proposed: NDArray[np.int64]) -> FloatArray:
    """Accepted over proposed tokens, 1.0 where nothing was proposed yet: (n,), (n,) -> float64 (n,)."""
    return np.where(proposed > 0, accepted / np.maximum(proposed, 1), 1.0)


def observation_rows(
    names: tuple[str, ...],
    n: int,
    *,
    top_logprobs: FloatArray | None = None,
    entropy: Any = None,
    trace: Any = None,
    depth: Any = None,
    num_layers: int | None = None,
    phase: Any = None,
    draft_length: Any = None,
    max_draft: int | None = None,
    stable: Any = None,
    acceptance: Any = None,
    chain: Any = None,
    probe: Any = None,
    k: int = 5,
) -> NDArray[np.float32]:
    """Observation rows of n decisions, clipped: float32 (n, f), in the order of `names`.

    Only the columns asked for are computed and only their ingredients need be given; those may
    be arrays (n,) or, but for `top_logprobs`, scalars that hold for every row.

    Args:
        names: features, as `resolve_observation` returns them.
        n: number of rows.
        top_logprobs: float (n, >= k), log-probabilities of the most probable tokens at this
            depth, best first, in nats. Serves `confidence`, `top1` and `margin`.
        entropy: of the head's distribution, nats.
        trace: C_trace, the mean surprise over the window of the current hypothesis, nats.
        depth: layers the token has been run through, 1..num_layers.
        num_layers: layers of the model.
        phase: `Phase`.
        draft_length: proposals made so far in this round (0 in SELECT).
        max_draft: the cap on proposals.
        stable: whether the candidate depth before this one had the same argmax; False at the
            first depth and in DRAFT.
        acceptance: as `acceptance()` gives it, over the finished rounds of this text.
        chain: -sum of log p(top-1) over the proposals of the current round, nats (0 in SELECT).
        probe: the exit probe's probability that the proposal is the last layer's token.
        k: how many log-probabilities `confidence` averages.
    """
    rows = np.empty((n, len(names)), dtype=np.float32)
    values: Any
    for column, name in enumerate(names):
        if name == "confidence":
            values = confidence(_given(top_logprobs, name), k)
        elif name == "entropy":
            values = entropy
        elif name == "trace":
            values = trace
        elif name == "depth":
            values = _given(depth, name) / _given(num_layers, name)
        elif name == "phase":
            values = phase
        elif name == "draft_length":
            values = _given(draft_length, name) / _given(max_draft, name)
        elif name == "top1":
            values = top1(_given(top_logprobs, name))
        elif name == "margin":
            values = margin(_given(top_logprobs, name))
        elif name == "stable":
            values = stable
        elif name == "acceptance":
            values = acceptance
        elif name == "chain":
            values = chain
        elif name == "probe":
            values = probe
        else:
            raise InputError(f"observation: {name!r} is not a feature; there are {', '.join(FEATURES)}")
        rows[:, column] = _given(values, name)
    return clip(rows, names)


def observation_row(
    names: tuple[str, ...],
    *,
    top_logprobs: Sequence[float] = (),
    entropy: float = 0.0,
    trace: float = 0.0,
    depth: int = 0,
    num_layers: int = 1,
    phase: int = 0,
    draft_length: int = 0,
    max_draft: int = 1,
    stable: bool = False,
    acceptance: float = 1.0,
    chain: float = 0.0,
    probe: float = 0.0,
    k: int = 5,
) -> NDArray[np.float32]:
    """One row of `observation_rows`, float32 (1, f): the decoder's, where one row is all there is.

    Plain Python numbers on purpose: for one row a numpy call costs more than the arithmetic. The
    arguments are those of `observation_rows`, scalars; equal to it but for float32 rounding.
    """
    values = []
    for name in names:
        if name == "confidence":
            value = -sum(top_logprobs[:k]) / k
        elif name == "entropy":
            value = entropy
        elif name == "trace":
            value = trace
        elif name == "depth":
            value = depth / num_layers
        elif name == "phase":
            value = phase
        elif name == "draft_length":
            value = draft_length / max_draft
        elif name == "top1":
            value = math.exp(top_logprobs[0])
        elif name == "margin":
            value = math.exp(top_logprobs[0]) - math.exp(top_logprobs[1])
        elif name == "stable":
            value = stable
        elif name == "acceptance":
            value = acceptance
        elif name == "chain":
            value = chain
        elif name == "probe":
            value = probe
        else:
            raise InputError(f"observation: {name!r} is not a feature; there are {', '.join(FEATURES)}")
        low, high = BOUNDS[name]
        values.append(low if value < low else high if value > high else value)
    return np.array([values], np.float32)


def _given(value: Any, name: str) -> Any:
    """`value`, which feature `name` cannot do without."""
    if value is None:
        raise TypeError(f"the feature {name!r} was asked for, but what it is computed from was not given")
    return value
