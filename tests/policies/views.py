"""Views and round outcomes written by hand, for the controllers of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sde_gym.policies.controller import RoundOutcome, Shadow, View


def view(
    phase: Sequence[int],
    depth_index: Sequence[int],
    draft_length: Sequence[int],
    top1: Sequence[float],
    lanes: Sequence[int] | None = None,
) -> View:
    """A view of n lanes for controllers that read `top1` alone."""
    n = len(phase)
    return View(
        phase=np.array(phase),
        depth_index=np.array(depth_index),
        draft_length=np.array(draft_length),
        observation=np.array(top1, dtype=np.float32)[:, None],
        lanes=np.arange(n) if lanes is None else np.array(lanes),
        text=np.zeros(n, np.int64),
        decision=np.zeros(n, np.int64),
    )


def told(
    lanes: Sequence[int],
    drafted: Sequence[int],
    accepted: Sequence[int],
    shadow: list[Shadow] | None = None,
    depth_index: int = 0,
) -> RoundOutcome:
    """What became of rounds that exited at one depth."""
    return RoundOutcome(
        np.array(lanes), np.full(len(lanes), depth_index), np.array(drafted), np.array(accepted), shadow
    )


def shadow_of(right: Sequence[Sequence[int]], probability: Sequence[Sequence[float]]) -> Shadow:
    """Shadow tokens of one round."""
    return Shadow(np.array(right, dtype=bool), np.array(probability, dtype=np.float32))


def random_rounds(seed: int, lanes: int, m: int, max_draft: int, number: int) -> list[RoundOutcome]:
    """Rounds that end in varying sets of lanes, with shadow tokens."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(number):
        ended = np.flatnonzero(rng.random(lanes) < 0.6)
        if not ended.size:
            continue
        drafted = rng.integers(0, max_draft + 1, ended.size)
        accepted = np.minimum(rng.integers(0, max_draft + 1, ended.size), drafted)
        shadow = [
            Shadow(rng.random((n, m)) < 0.6, rng.random((n, m), dtype=np.float32)) for n in accepted + 1
        ]
        rounds.append(RoundOutcome(ended, np.where(drafted > 0, 0, m), drafted, accepted, shadow))
    return rounds
