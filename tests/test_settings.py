"""Checks that settings dataclasses share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from sde_gym.errors import InputError
from sde_gym.models.lm_settings import LMTrainingSettings
from sde_gym.offline.settings import DQNSettings
from sde_gym.settings import at_least_one, check_settings, is_number, is_whole, setting


@dataclass(frozen=True)
class Numbers:
    first: Any = setting(1, "one")
    second: Any = setting(1, "another")


def test_the_first_field_that_fails_is_named() -> None:
    message = "{name} is {value!r}; it must be a whole number"
    check_settings(Numbers(3, 4), ("first", "second"), is_whole, message)
    check_settings(Numbers("3", 4), ("second",), is_whole, message)
    with pytest.raises(InputError, match=r"^second is '4'; it must be a whole number$"):
        check_settings(Numbers(3, "4"), ("first", "second"), is_whole, message)


@pytest.mark.parametrize(
    ("value", "whole", "number"),
    [(3, True, True), (-3, True, True), (3.0, False, True), (True, False, False), ("3", False, False),
     (None, False, False)],
)  # fmt: skip
def test_numbers_are_told_from_what_looks_like_them(value: Any, whole: bool, number: bool) -> None:
    assert (is_whole(value), is_number(value)) == (whole, number)


def test_at_least_one() -> None:
    assert [at_least_one(value) for value in (0, 1, 2, -1)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("settings", "left_out", "limit"),
    [
        (DQNSettings, {"seed"}, "{} is 0; it must be at least 1"),
        (LMTrainingSettings, {"seed", "own_tokens"}, "{} must be at least 1, not 0"),
    ],
)
def test_every_count_is_at_least_one(settings: type[Any], left_out: set[str], limit: str) -> None:
    counts = [field.name for field in fields(settings) if is_whole(field.default)]
    for name in set(counts) - left_out:
        with pytest.raises(InputError, match=limit.format(name)):
            settings(**{name: 0})
