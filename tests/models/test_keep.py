"""Forgetting slots in the middle: what is kept goes on as if the others had never been."""

from __future__ import annotations

import pytest
import torch

from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from tests.decoding.conftest import agreeing_model


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return agreeing_model()


def test_a_kept_branch_goes_on_exactly(model: LayeredModel) -> None:
    tree = model.sequence(8)
    trunk = tree.append([3, 1, 4])
    tree.advance(6)
    dropped = tree.append([7, 8], parent=trunk[-1])
    kept = tree.append([1, 5, 9], parent=trunk[-1])
    tree.advance(2)
    tree.keep([*trunk, *kept])
    assert (tree.tokens, tree.parents) == ([3, 1, 4, 1, 5, 9], [-1, 0, 1, 2, 3, 4])
    assert tree.is_chain
    assert not set(dropped) & set(kept)
    tree.append([2])
    tree.advance(6)
    chain = model.sequence(8)
    chain.append([3, 1, 4, 1, 5, 9, 2])
    chain.advance(6)
    torch.testing.assert_close(tree.score(6, rows=4), chain.score(6, rows=4))


def test_of_two_roots_one_stays(model: LayeredModel) -> None:
    forest = model.sequence(4)
    first, second = forest.append([3, 1], parent=-1), forest.append([7, 2, 9], parent=-1)
    forest.advance(3)
    third = forest.append([11], parent=first[-1])
    forest.keep([*first, *third])
    forest.advance(6)
    alone = model.sequence(4)
    alone.append([3, 1, 11])
    alone.advance(6)
    torch.testing.assert_close(forest.score(6), alone.score(6))
    assert len(second) == 3


def test_branches_that_stay_branches(model: LayeredModel) -> None:
    tree = model.sequence(4)
    trunk = tree.append([3, 1])
    left, middle = tree.append([5], parent=trunk[-1]), tree.append([6], parent=trunk[-1])
    right = tree.append([7], parent=trunk[-1])
    tree.advance(4)
    tree.keep([*trunk, *left, *right])
    assert tree.parents == [-1, 0, 1, 1]
    assert not tree.is_chain
    assert len(middle) == 1
    tree.advance(6)
    for slot, token in ((2, 5), (3, 7)):
        chain = model.sequence(4)
        chain.append([3, 1, token])
        chain.advance(6)
        torch.testing.assert_close(tree.score(6, slots=[slot]), chain.score(6))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([1, 0], "rising"),
        ([0, 2], "slot 2 cannot be kept without its parent 1"),
        ([0, 9], r"must lie in 0\.\."),
    ],
)
def test_slots_that_cannot_be_kept(model: LayeredModel, slots: list[int], message: str) -> None:
    sequence = model.sequence(4)
    sequence.append([1, 2, 3])
    with pytest.raises(InputError, match=message):
        sequence.keep(slots)
