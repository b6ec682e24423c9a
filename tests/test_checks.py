"""What counts as a whole number, a flag, a list of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sde_gym.checks import flag, token_ids, whole_number
from sde_gym.errors import InputError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers(value: Any) -> None:
    found = whole_number("n", value, 1, 3)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [2.0, 2.5, "5", float("nan"), float("inf"), None, True, np.True_, [3]])
def test_what_is_no_whole_number_is_named(value: Any) -> None:
    with pytest.raises(InputError, match=r"n: .* is not a whole number \(at least 1\); give one"):
        whole_number("n", value, 1)


@pytest.mark.parametrize(
    ("value", "limits"), [(0, (1, None)), (4, (1, 3)), (-(10**30), (1, 3)), (10**30, (1, 3))]
)
def test_what_is_out_of_range_is_named(value: int, limits: tuple[int, int | None]) -> None:
    with pytest.raises(InputError, match=f"n: {value} is out of range"):
        whole_number("n", value, *limits)
    assert whole_number("n", value) == value


def test_flags() -> None:
    assert flag("f", True) is True
    assert flag("f", np.False_) is False
    for wrong in ("no", 1, None):
        with pytest.raises(InputError, match=r"f: .* is neither True nor False"):
            flag("f", wrong)


@pytest.mark.parametrize(
    "given",
    [
        [1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2],
        list(torch.tensor([1, 2])),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_token_ids(given: Any) -> None:
    found = token_ids("prompt", given)
    assert found == [1, 2]
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    "given",
    [
        None, 5, 1.5, "abc", b"ab", {1: 2}, {1, 2}, [1.5], [True], ["a"], [None], [[1, 2]],
        torch.tensor([[1, 2]]), torch.tensor(3), np.array([0.5]), np.array([True]),
    ],
)  # fmt: skip
def test_what_is_no_list_of_token_ids_is_named(given: Any) -> None:
    with pytest.raises(InputError, match=r"prompt: .* is no (list of )?token id"):
        token_ids("prompt", given)


def test_what_can_be_read_once_is_no_list() -> None:
    with pytest.raises(InputError, match=r"prompt: <list.* is no list of token ids"):
        token_ids("prompt", iter([1]))
