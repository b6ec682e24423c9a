"""The order of texts: every text once, anew each time, by the seed, the same in any number of lanes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sde_gym.envs.order import TextOrder
from sde_gym.errors import InputError


def test_every_text_once_and_then_again() -> None:
    texts = np.array([3, 5, 8, 9, 11, 20])
    order = TextOrder(texts, "shuffled", 3)
    lanes = np.arange(3)
    order.seed(lanes, [0, 1, 2])
    played = np.stack([order.next(lanes) for _ in range(18)], axis=1)
    for lane in played:
        epochs = lane.reshape(3, 6)
        assert (np.sort(epochs, axis=1) == texts).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert len({tuple(lane) for lane in played.tolist()}) == 3


def test_sequential_is_as_recorded() -> None:
    order = TextOrder(np.array([2, 4, 7]), "sequential", 2)
    lanes = np.arange(2)
    assert [order.next(lanes).tolist() for _ in range(4)] == [[2, 2], [4, 4], [7, 7], [2, 2]]
    order.seed(lanes[:1], [9])
    assert order.next(lanes).tolist() == [2, 4]


def test_a_lane_among_many_plays_as_alone() -> None:
    """In whatever company and however often others were asked in between."""
    texts, many = np.arange(7), TextOrder(np.arange(7), "shuffled", 40)
    many.seed(np.arange(40), list(range(100, 140)))
    rng = np.random.default_rng(0)
    played: list[list[int]] = [[] for _ in range(40)]
    for _ in range(60):
        lanes = rng.permutation(40)[: rng.integers(1, 40)]
        for lane, text in zip(lanes, many.next(lanes), strict=True):
            played[lane].append(int(text))
    for lane in range(40):
        alone = TextOrder(texts, "shuffled")
        alone.seed(np.array([0]), [100 + lane])
        assert played[lane] == [int(alone.next(np.array([0]))[0]) for _ in played[lane]]


def test_all_orders_are_equally_likely() -> None:
    seeds = 24_000
    order = TextOrder(np.arange(4), "shuffled", seeds)
    lanes = np.arange(seeds)
    order.seed(lanes, list(range(seeds)))
    for _ in range(2):  # the second time through, too
        played = np.stack([order.next(lanes) for _ in range(4)], axis=1)
        _, counts = np.unique(played @ 4 ** np.arange(4), return_counts=True)
        assert len(counts) == math.factorial(4)
        # Chi-square with 23 degrees of freedom: above 50 with probability 0.001.
        assert ((counts - 1000) ** 2 / 1000).sum() < 50


def test_it_takes_little_memory_and_large_seeds() -> None:
    order = TextOrder(np.arange(250), "shuffled", 4000)
    assert order._queue is not None
    assert order._queue.nbytes == 4000 * 250
    order.seed(np.array([0, 1]), [2**70 + 5, 5])
    assert order.next(np.array([0]))[0] == order.next(np.array([1]))[0]  # modulo 2 ** 64


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(InputError, match="order: 'random' is not one of shuffled, sequential"):
        TextOrder(np.arange(3), "random")
