"""The order of the shipped sets: every prefix is balanced."""

from __future__ import annotations

import pytest

from sde_gym.prompts.prompt import Prompt, interleave


def order(items: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    return interleave(items, lambda item: item[0], lambda item: item[1])


def test_tasks_take_turns_and_splits_are_merged_in_proportion() -> None:
    items = [("x", task, number) for task in "ab" for number in range(4)]
    items += [("y", task, number) for task in "ab" for number in range(2)]
    rounds = [tuple(item[::2] for item in order(items)[at : at + 2]) for at in range(0, 12, 2)]
    # Middles of x's rounds: 1/8, 3/8, 5/8, 7/8; of y's: 1/4, 3/4.
    assert [pair[0] for pair in rounds] == [("x", 0), ("y", 0), ("x", 1), ("x", 2), ("y", 1), ("x", 3)]
    assert all(pair[0] == pair[1] for pair in rounds)
    assert [item[1] for item in order(items)] == ["a", "b"] * 6


def test_a_task_that_has_run_out_is_passed_over() -> None:
    items = [("x", "b", 0), ("x", "a", 0), ("x", "a", 1), ("x", "a", 2)]
    assert order(items) == [("x", "a", 0), ("x", "b", 0), ("x", "a", 1), ("x", "a", 2)]


def test_nothing_in_nothing_out() -> None:
    assert order([]) == []


def test_a_prompt_cannot_be_changed() -> None:
    prompt = Prompt("id", "task", "text")
    assert prompt.source == ""
    with pytest.raises(AttributeError):
        prompt.text = "other"  # type: ignore[misc]
