"""The one protocol that replay, the environments and the real decoder drive.

A controller decides for many lanes at once: lane = one text being decoded. The driver calls
`bind` once, `reset` when lanes start a text, `act` for every decision, and `feedback` whenever
rounds have been verified. Arrays are over the lanes of the call, n of them.

What a controller sees, in replay as in the decoder: the features that need no head (`trace`,
`depth`, `phase`, `draft_length`, `acceptance`, `chain`) always; those that do
(`observation.HEAD_FEATURES`) where `reads` is True, and 0 elsewhere. `stable` compares two heads, so
it is 0 as well where the head of the candidate depth before was not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.policies.observation import HEAD_FEATURES

DEFAULT_K = 5
"""Log-probabilities averaged by `confidence` where nobody says otherwise."""

DEFAULT_WINDOW = 8
"""Tokens averaged by `trace` where nobody says otherwise."""


@dataclass
class View:
    """What a controller is shown for one decision in each of n lanes.

    Attributes:
        phase: int64 (n,), `Phase`.
        depth_index: int64 (n,), index into the bound depths: of the depth that the newest
            token has reached; in DRAFT always that of l*.
        draft_length: int64 (n,), proposals made so far in this round, 0 in SELECT.
        observation: float32 (n, f), the columns the controller asked for in `observation`.
        lanes: int64 (n,), lane ids, the keys of any state a controller keeps.
        text: int64 (n,), index of the text.
        decision: int64 (n,), number of the decision in its text from 0, for counter-based
            random draws.
    """

    phase: NDArray[np.int64]
    depth_index: NDArray[np.int64]
    draft_length: NDArray[np.int64]
    observation: NDArray[np.float32]
    lanes: NDArray[np.int64]
    text: NDArray[np.int64]
    decision: NDArray[np.int64]


@dataclass
class Shadow:
    """What every candidate depth says at the positions that one round emitted, r of them.

    The hidden states there have been computed anyway, up to L; a controller with `shadows` pays for
    the heads (DEL, Zarch et al. 2025, calls these the shadow tokens).

    Attributes:
        right: bool (r, m), whether the head's best token is the one emitted.
        probability: float32 (r, m), of the head's best token, over the head's vocabulary.
    """

    right: NDArray[np.bool_]
    probability: NDArray[np.float32]


@dataclass
class RoundOutcome:
    """What became of the rounds that ended in n lanes.

    Attributes:
        lanes: int64 (n,), lane ids.
        depth_index: int64 (n,), index of l* among the bound depths; their number m where the
            walk went on to the last layer and nothing was drafted.
        drafted: int64 (n,), proposals made.
        accepted: int64 (n,), proposals accepted, a prefix of them.
        shadow: n entries if the controller has `shadows`, else None.
    """

    lanes: NDArray[np.int64]
    depth_index: NDArray[np.int64]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    shadow: list[Shadow] | None = None


@runtime_checkable
class Controller(Protocol):
    """Decides at which depth to exit and how long to draft.

    Attributes:
        name: for tables.
        observation: the features it reads, in order; may be empty. The driver fills
            `View.observation` with exactly these columns.
        k: log-probabilities that its feature `confidence` averages; None = no opinion.
        window: tokens that its feature `trace` averages; None = no opinion. Drivers take both
            from `feature_settings`.
    """

    name: str
    observation: tuple[str, ...]
    k: int | None
    window: int | None

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Learn what it will control; raises InputError if it does not fit."""

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Forget everything about these lanes: each starts a new text."""

    def act(self, view: View) -> NDArray[np.int64]:
        """One `Action` for each lane of the view, int64 (n,)."""

    def feedback(self, outcome: RoundOutcome) -> None:
        """Learn how rounds ended."""

    def reads(self, phase: int, depth_index: int) -> bool:
        """Whether `act` looks at the exit head's features in this phase at this depth.

        Where it does not, the decoder does not compute that head unless a token is proposed
        from it, and those features are 0; the others are given all the same.
        """


class NotADecodingMethod:
    """What says so where a controller is given to transformers as if it were a decoding method.

    `generate` ignores a `custom_generate` that cannot be called and decodes plainly, without a word.
    """

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        """Never returns.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{getattr(self, 'name', '') or type(self).__name__}: a controller is no decoding method; give "
            "custom_generate=huggingface(controller), from sde_gym.decoding.huggingface"
        )


class BaseController(NotADecodingMethod):
    """A controller without state between decisions: the parts most controllers share.

    Subclasses set `name` and `observation` and define `act`.

    Attributes:
        shadows: whether `feedback` is to bring what every depth says at the emitted positions.
        walks_every_token: whether each token of a round is walked down the depths anew, so that
            proposals of one round may come from several depths (AdaDecode). The phase then stays
            SELECT, `View.draft_length` tells how many proposals wait, and CONTINUE at the last depth
            verifies them all. No trace holds the states of such a round: replay refuses it.
        made_for: the only depths that it can be bound to, ascending; empty = any. They are the candidates
            where the decoder is not told others.
    """

    name: str = ""
    observation: tuple[str, ...] = ()
    k: int | None = None
    window: int | None = None
    shadows: bool = False
    walks_every_token: bool = False

    made_for: tuple[int, ...] = ()

    depths: tuple[int, ...] = ()
    num_layers: int = 0
    max_draft: int = 0

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Remember depths, layers and draft cap; subclasses refuse what does not fit."""
        self.depths = tuple(int(depth) for depth in depths)
        self.num_layers = int(num_layers)
        self.max_draft = int(max_draft)

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Nothing to forget."""

    def feedback(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def reads(self, phase: int, depth_index: int) -> bool:
        """True as soon as a feature is asked for that needs a head."""
        return not HEAD_FEATURES.isdisjoint(self.observation)


def feature_settings(controller: object, k: int | None, window: int | None) -> tuple[int, int]:
    """`k` and `window` for a run of this controller: what is given, else its own, else the defaults.

    A learned controller reads features made with the numbers it was trained with and no others;
    one that says None takes any.

    Args:
        controller: a controller, or whatever else reads features; may declare `k` and `window`.
        k: log-probabilities averaged by `confidence`, or None to leave it to the controller.
        window: tokens averaged by `trace`, or None likewise.

    Raises:
        InputError: a number is given and the controller declares another one.
    """
    resolved = []
    for name, given, default in (("k", k, DEFAULT_K), ("window", window, DEFAULT_WINDOW)):
        own = getattr(controller, name, None)
        if given is not None and own is not None and given != own:
            label = getattr(controller, "name", controller)
            raise InputError(
                f"{name}: {given} was given, but {label!r} was made for {name} {own}; "
                f"leave {name} out, or give {own}"
            )
        resolved.append(given if given is not None else default if own is None else own)
    return resolved[0], resolved[1]
