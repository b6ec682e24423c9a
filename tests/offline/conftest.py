"""Fixtures shared by the offline tests: small transitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sde_gym.offline.transitions import Transitions


@pytest.fixture
def make_transitions() -> Callable[..., Transitions]:
    return encoded_transitions


def encoded_transitions(lengths: Sequence[int] = (3, 1, 4, 1, 1, 6), seed: int = 0) -> Transitions:
    """Episodes of these lengths whose observation is (100 + episode, 1 + step): every row says who it is."""
    rng = np.random.default_rng(seed)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    step = np.concatenate([np.arange(length) for length in lengths])
    count = len(episode)
    return Transitions(
        observation=np.stack([100 + episode, 1 + step], axis=1).astype(np.float32),
        action=rng.integers(2, size=count),
        reward=rng.normal(size=count).astype(np.float32),
        terminal=np.append(episode[1:] != episode[:-1], True),
        episode=episode,
        step=step,
        propensity=rng.uniform(0.1, 1.0, size=count),
        text=episode % 2,
        component=np.zeros(count, dtype=np.int64),
        names=("top1", "margin"),
        settings={"seed": seed},
    )
