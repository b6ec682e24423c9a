"""Earliest available depths: by hand, by definition, and what a coarser grid says of them."""

from __future__ import annotations

import numpy as np
import pytest

from sde_gym.traces.ead import ead_bounds, ead_summaries, earliest_depths
from tests.builders import written_traces
from tests.dex_sets import all_depths, with_depths


def test_by_hand() -> None:
    proposals = [(1, 1, 1), (9, 2, 2), (3, 9, 3), (4, 4, 9), (9, 9, 9)]
    traces = written_traces([1, 2, 3, 4, 5], proposals, end="budget", depths=(1, 2, 4), num_layers=6)
    assert earliest_depths(traces).tolist() == [1, 2, 4, 6, 6]
    least, greatest = ead_bounds(traces)
    assert least.tolist() == [1, 2, 3, 5, 5]
    assert greatest.tolist() == [6, 6, 6, 6, 6]  # depth 5 may be wrong everywhere
    (all_of_them, function) = ead_summaries(traces)
    assert (all_of_them.task, function.task) == (None, "function")
    assert all_of_them.counts == {1: 1, 2: 1, 4: 1, 6: 2}
    assert all_of_them.mean == 19 / 5
    assert all_of_them.oracle_speedup == pytest.approx(6 * 5 / 19)
    assert all_of_them.oracle_bounds == pytest.approx((1.0, 30 / 16))


def test_every_position_by_the_definition() -> None:
    traces = all_depths()
    for row, ead in enumerate(earliest_depths(traces)):
        right = {depth: bool(traces.match[row, depth - 1]) for depth in traces.depths} | {8: True}
        stays = [depth for depth in right if all(right[deeper] for deeper in range(depth, 9))]
        assert ead == min(stays)


@pytest.mark.parametrize("depths", [(4,), (1, 2, 3), (2, 5, 7), (1, 2, 3, 4, 5, 6, 7)])
def test_a_coarser_grid_bounds_it(depths: tuple[int, ...]) -> None:
    traces = all_depths(p_match=0.8)
    exact = earliest_depths(traces)
    coarse = with_depths(traces, depths)
    least, greatest = ead_bounds(coarse)
    assert ((least <= exact) & (exact <= greatest)).all()
    assert (least <= earliest_depths(coarse)).all()
    # No recorded depth from the EAD on is wrong.
    rounded = np.array([*depths, 8])[np.searchsorted([*depths, 8], exact)]
    assert (earliest_depths(coarse) <= rounded).all()
    summary = ead_summaries(coarse)[0]
    low, high = summary.oracle_bounds
    assert low <= 8 / exact.mean() <= high
    if len(depths) == 7:
        assert low == high == summary.oracle_speedup


def test_tasks_share_out_the_positions() -> None:
    traces = all_depths()
    total, *tasks = ead_summaries(traces)
    assert [part.task for part in tasks] == sorted(set(traces.tasks))
    assert sum(part.positions for part in tasks) == total.positions == len(traces.token)
    assert sum(part.mean * part.positions for part in tasks) == pytest.approx(total.mean * total.positions)
    for part in (total, *tasks):
        assert list(part.counts) == list(range(1, 9))
        assert sum(part.shares.values()) == pytest.approx(1.0)
        assert sum(depth * share for depth, share in part.shares.items()) == pytest.approx(part.mean)
