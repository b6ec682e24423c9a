"""What a depth drafts on behind its own wrong proposal, until a verification stops it.

A policy does not know that a proposal is wrong, so it may go on drafting; what it sees then is
off the true text. It depends on the position, the depth and the wrong token alone (every key and
value it reads is that of the true prefix, in the layers up to that depth), so one branch for each
wrong proposal serves every policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.traces.schema import TraceSettings, text_budget


@dataclass(frozen=True, eq=False)
class Overrun:
    """The branches of one text of T tokens, at m depths.

    Attributes:
        lengths: int64 (T, m), rows behind each proposal, 0 where it is right.
        proposal: int32 (R,), the proposals, ordered by position, depth and step.
        logprobs: float32 (R, k), nats, best first.
        entropy: float32 (R,), nats.
        probe: float32 (R,), what the exit probe says; None without one.
    """

    lengths: NDArray[np.int64]
    proposal: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    probe: NDArray[np.float32] | None = None


def no_overrun(length: int, m: int, k: int, probe: bool = False) -> Overrun:
    """No branch at any of `length` positions and m depths, in a set with an exit probe or without."""
    return Overrun(
        np.zeros((length, m), np.int64),
        np.zeros(0, np.int32),
        np.zeros((0, k), np.float32),
        np.zeros(0, np.float32),
        np.zeros(0, np.float32) if probe else None,
    )


def joined(parts: list[Overrun]) -> Overrun:
    """The branches of all depths, each part those of one depth, in order of position, depth and step."""
    lengths = np.concatenate([part.lengths for part in parts], axis=1)
    m = lengths.shape[1]
    entry = np.concatenate(
        [
            np.repeat(np.arange(len(lengths)) * m + column, part.lengths[:, 0])
            for column, part in enumerate(parts)
        ]
    )
    order = np.argsort(entry, kind="stable")
    names = ["proposal", "logprobs", "entropy"]
    if all(part.probe is not None for part in parts):
        names.append("probe")
    return Overrun(
        lengths, *(np.concatenate([getattr(part, name) for part in parts])[order] for name in names)
    )


def most_rows(
    proposals: NDArray[np.int32], token: NDArray[np.int32], prompt_length: int, settings: TraceSettings
) -> NDArray[np.int64]:
    """Most overrun rows behind each proposal of a text, int64 (T, m); 0 where there are none.

    None behind a right proposal, an end-of-text proposal, or at position 0, which prefill decides.
    The last proposal that the budget allows is not scored.

    Args:
        proposals: int32 (T, m).
        token: int32 (T,), the emitted tokens.
        prompt_length: tokens of the prompt.
        settings: of the set.
    """
    position = np.arange(len(token))
    budget = int(text_budget(settings.max_new_tokens, settings.context_limit, prompt_length))
    room = np.clip(budget - 1 - position, 0, settings.overrun)
    room[0] = 0
    none = (proposals == token[:, None]) | np.isin(proposals, settings.eos_token_ids)
    return np.where(none, 0, room[:, None]).astype(np.int64)


def check_overrun(
    where: str, overrun: Overrun, proposals: NDArray[np.int32], token: NDArray[np.int32],
    prompt_length: int, settings: TraceSettings,
) -> None:  # fmt: skip
    """Raise InputError unless there is a branch behind every wrong proposal, as long as it must be."""
    most = most_rows(proposals, token, prompt_length, settings)
    count = int(overrun.lengths.sum()) if overrun.lengths.shape == most.shape else -1
    shapes = {"proposal": (count,), "logprobs": (count, settings.k), "entropy": (count,)}
    if (overrun.probe is not None) != (settings.probe is not None):
        raise InputError(
            f"{where}: its overrun rows are {'without' if overrun.probe is None else 'with'} what an exit "
            f"probe says, but the set has probe {settings.probe!r}"
        )
    if overrun.probe is not None:
        shapes["probe"] = (count,)
    if count < 0 or any(getattr(overrun, name).shape != shape for name, shape in shapes.items()):
        raise InputError(
            f"{where}: its overrun arrays do not fit {most.shape[0]} tokens at {most.shape[1]} depths"
        )
    lengths, limits = overrun.lengths.ravel(), most.ravel()
    last = np.cumsum(lengths)[lengths > 0] - 1
    ends_text = np.isin(overrun.proposal, settings.eos_token_ids)
    complete = np.zeros(lengths.size, bool)
    complete[lengths > 0] = ends_text[last]
    inner = ends_text.copy()
    inner[last] = False
    good = (lengths <= limits) & ((lengths == limits) | complete) & ((lengths > 0) == (limits > 0))
    if inner.any() or not good.all():
        raise InputError(
            f"{where}: an overrun branch has the wrong length; it ends after {settings.overrun} rows, at an "
            "end-of-text proposal or with the budget, and exists behind wrong proposals only"
        )
