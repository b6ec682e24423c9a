"""Aggregates on tables small enough to work out."""

from __future__ import annotations

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.aggregate import (
    improvement_interval,
    interquartile_mean,
    mean_score,
    probability_of_improvement,
    stratified_interval,
)


def test_a_quarter_is_cut_at_either_end() -> None:
    assert interquartile_mean(np.array([[8.0, 1.0], [3.0, 2.0]])) == 2.5
    assert (
        interquartile_mean(np.array([[100.0, 1.0, 2.0], [-50.0, 3.0, 6.0]])) == 3.0
    )  # 6 // 4 = 1 off each end
    assert interquartile_mean(np.array([[1.0, 2.0, 6.0]])) == 3.0  # nothing to cut
    stacked = np.stack([np.array([[8.0, 1.0], [3.0, 2.0]]), np.zeros((2, 2))])
    np.testing.assert_array_equal(interquartile_mean(stacked), [2.5, 0.0])


def test_improvement_counts_pairs_and_halves_ties() -> None:
    # Task 0: pairs (1,0) (1,2) (3,0) (3,2): three wins. Task 1: a tie and a loss, twice.
    first, second = np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[0.0, 5.0], [2.0, 6.0]])
    assert probability_of_improvement(first, second) == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert probability_of_improvement(second, first) == pytest.approx(1 - (3 / 4 + 1 / 4) / 2)
    assert probability_of_improvement(first, np.array([[2.0, 5.0]])) == pytest.approx((1 / 2 + 1 / 2) / 2)


def test_seeds_are_drawn_within_their_task() -> None:
    # All seeds of a task agree, so any stratified sample is the table itself.
    table = np.tile([1.0, 10.0, 100.0], (5, 1))
    found = stratified_interval(table, mean_score, samples=200)
    assert found.value == pytest.approx(37.0)
    assert found.low == found.value == found.high


def test_the_bootstrap_of_two_seeds_is_known() -> None:
    # Resampling {0, 1} twice gives means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4.
    wide = stratified_interval([0.0, 1.0], mean_score, samples=4000, level=0.6)
    assert (wide.value, wide.low, wide.high) == (0.5, 0.0, 1.0)
    narrow = stratified_interval([0.0, 1.0], mean_score, samples=4000, level=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_intervals_cover_and_repeat() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(100):
        table = rng.normal(size=(20, 3))
        found = stratified_interval(table, mean_score, samples=300, seed=trial)
        hits += found.low <= 0.0 <= found.high
    assert 85 <= hits <= 100
    assert stratified_interval(table, seed=4) == stratified_interval(table, seed=4)


def test_the_interval_of_an_improvement() -> None:
    found = improvement_interval([[2.0], [3.0]], [[0.0], [1.0], [1.0]], samples=50)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    rng = np.random.default_rng(0)
    same = improvement_interval(rng.normal(size=(30, 4)), rng.normal(size=(30, 4)), samples=300)
    assert same.low < 0.5 < same.high


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match="scores"):
        stratified_interval([[1.0, np.nan]])
    with pytest.raises(InputError, match="scores"):
        stratified_interval(np.zeros((0, 3)))
    with pytest.raises(InputError, match="level is 2"):
        stratified_interval([1.0], level=2)
    with pytest.raises(InputError, match="samples is 0"):
        stratified_interval([1.0], samples=0)
    with pytest.raises(InputError, match="seed: -1 is out of range"):
        stratified_interval([1.0], seed=-1)
    with pytest.raises(InputError, match="seed: -1 is out of range"):
        improvement_interval([1.0], [2.0], seed=-1)
    with pytest.raises(InputError, match="same tasks"):
        improvement_interval([[1.0]], [[1.0, 2.0]])
