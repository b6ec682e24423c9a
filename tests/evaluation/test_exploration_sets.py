"""Exploration sets: splits, stages, and what is refused."""

from __future__ import annotations

import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.exploration_sets import nested_split, recorded_columns, resolution, slowest_stage
from tests.dex_sets import all_depths, with_depths


def test_known_splits() -> None:
    assert nested_split(24, 1) == (24,)
    assert nested_split(24, 4) == (6, 12, 18, 24)
    assert nested_split(24, 8) == (3, 6, 9, 12, 15, 18, 21, 24)
    assert nested_split(24, 5) == (3, 6, 12, 18, 24)
    assert nested_split(7, 3) == (2, 4, 7)


@pytest.mark.parametrize("layers", [1, 7, 8, 24, 30])
def test_every_split(layers: int) -> None:
    for explorers in range(1, layers + 1):
        split = nested_split(layers, explorers)
        assert len(split) == explorers
        assert split == tuple(sorted({*split}))
        assert split[-1] == layers
        if layers % explorers == 0:
            assert resolution(split) == layers // explorers
        else:
            assert {*nested_split(layers, explorers - 1)} < {*split}


def test_stages() -> None:
    assert resolution((3, 4, 9)) == 5
    assert slowest_stage((3, 4, 9)) == 5.0
    assert slowest_stage((5, 6, 9), exit_head=1.0, final_head=2.5) == 6.0
    assert slowest_stage((5, 6, 9), exit_head=0.25, final_head=2.5) == 5.5
    assert slowest_stage((9,), exit_head=4.0, final_head=2.0) == 11.0


@pytest.mark.parametrize("explorers", [0, 9, 2.0, True])
def test_numbers_of_explorers_are_checked(explorers: int) -> None:
    with pytest.raises(InputError, match=r"explorers: .*1\.\.8"):
        nested_split(8, explorers)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((2, 5, 5, 8), "does not rise"),
        ((5, 2, 8), "does not rise"),
        ((2, 5), "must end at the last layer"),
        ((2, 9), "must end at the last layer"),
        ((0, 8), "no layer in front"),
        ((2, 3, 8), r"depths \[3\], which were not recorded"),
        ((), "empty"),
    ],
)
def test_sets_are_checked(given: tuple[int, ...], message: str) -> None:
    traces = with_depths(all_depths(), (2, 5, 6))
    with pytest.raises(InputError, match=message):
        recorded_columns(traces, given)
    assert recorded_columns(traces, (2, 6, 8)) == [0, 2]
