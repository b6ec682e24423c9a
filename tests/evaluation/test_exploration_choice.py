"""Chosen exploration sets: the dynamic program against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.dex_ticks import dex_ticks
from sde_gym.evaluation.exploration_choice import cheapest_set, chosen_exploration_set
from sde_gym.evaluation.exploration_sets import slowest_stage
from tests.dex_sets import all_depths, stable, with_depths


@pytest.mark.parametrize("seed", range(12))
def test_the_dynamic_program_is_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 11))
    count = int(rng.integers(1, layers))
    depths = sorted(rng.choice(np.arange(1, layers), count, replace=False).tolist())
    late = rng.integers(0, 50, len(depths)).astype(float)  # falling or not
    heads = {"exit_head": float(rng.choice([0.0, 0.3, 2.0])), "final_head": float(rng.choice([0.0, 1.4]))}
    fixed = float(rng.integers(1, 200))

    def cost(below: tuple[int, ...]) -> float:
        added = sum(late[depths.index(depth)] for depth in below)
        return slowest_stage((*below, layers), **heads) * (fixed + added)

    for explorers in range(1, len(depths) + 2):
        found = cheapest_set(depths, late, layers, explorers, fixed, **heads)
        assert len(found) == explorers
        assert found[-1] == layers
        least = min(cost(below) for below in combinations(depths, explorers - 1))
        assert cost(found[:-1]) == pytest.approx(least)


@pytest.mark.parametrize("explorers", [1, 2, 3, 5])
@pytest.mark.parametrize("heads", [(0.0, 0.0), (1.0, 1.5)])
def test_no_set_is_faster_where_right_proposals_stay_right(
    explorers: int, heads: tuple[float, float]
) -> None:
    traces = stable(all_depths(p_match=0.3, num_layers=9))
    found = chosen_exploration_set(traces, explorers, decs=False, heads=heads, exchange=False)
    every = [(*below, 9) for below in combinations(range(1, 9), explorers - 1)]
    best = max(dex_ticks(traces, chosen, decs=False, heads=heads).tick_speedup for chosen in every)
    assert dex_ticks(traces, found, decs=False, heads=heads).tick_speedup == pytest.approx(best)


def test_exchanges_only_gain_and_end_where_none_gains() -> None:
    traces = all_depths(seed=3, p_match=0.3, num_layers=10)
    gained = []
    for explorers in range(2, 8):
        plain = chosen_exploration_set(traces, explorers, exchange=False)
        better = chosen_exploration_set(traces, explorers)
        speedups = [dex_ticks(traces, chosen).tick_speedup for chosen in (plain, better)]
        gained.append(speedups[1] - speedups[0])
        for old in better[:-1]:
            for new in set(range(1, 10)) - set(better):
                other = sorted({*better, new} - {old})
                assert dex_ticks(traces, other).tick_speedup <= speedups[1]
    assert min(gained) >= 0.0
    assert max(gained) > 0.0  # unstable matches and DECS: there is something to gain


def test_only_recorded_depths_are_chosen() -> None:
    traces = with_depths(all_depths(), (1, 2, 6))
    assert chosen_exploration_set(traces, 4) == (1, 2, 6, 8)
    assert {*chosen_exploration_set(traces, 3)} < {1, 2, 6, 8}
    with pytest.raises(InputError, match="5 need 4 depths below 8, but only 3 were recorded"):
        chosen_exploration_set(traces, 5)
    with pytest.raises(InputError, match=r"explorers: 9 is out of range \(1\.\.8\)"):
        chosen_exploration_set(traces, 9)
