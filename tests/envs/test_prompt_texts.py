"""Which prompt's text comes next when a model makes the texts."""

from __future__ import annotations

import numpy as np
import pytest

from sde_gym.envs.order import TextOrder
from sde_gym.envs.prompt_texts import PromptTexts
from sde_gym.errors import InputError
from sde_gym.prompts import Prompt

PROMPTS = [Prompt(id=f"p{n}", task=("even", "odd")[n % 2], text=str(n)) for n in range(6)]
ENTROPY = np.random.default_rng(0)


def test_only_prompts_of_the_tasks_are_played() -> None:
    texts = PromptTexts(PROMPTS, ["odd"], "sequential")
    texts.seed(0, ENTROPY)
    assert [texts.next() for _ in range(4)] == [1, 3, 5, 1]
    assert texts.prompts == PROMPTS
    assert texts.chosen({"text": "p3"}) == texts.chosen({"text": 3}) == 3
    assert texts.chosen(None) is None
    with pytest.raises(InputError, match="options: text 2 is not among the 3 texts"):
        texts.chosen({"text": 2})


def test_a_text_left_out_is_passed_over_until_none_is_left() -> None:
    texts = PromptTexts(PROMPTS[:3], None, "sequential")
    texts.seed(0, ENTROPY)
    texts.leave_out(1)
    assert [texts.next() for _ in range(4)] == [0, 2, 0, 2]
    texts.leave_out(0)
    texts.leave_out(2)
    with pytest.raises(InputError, match="none of 3 gives a text of at least two tokens"):
        texts.next()


def test_the_order_is_that_of_its_seed() -> None:
    texts, order = PromptTexts(PROMPTS, None, "shuffled"), TextOrder(np.arange(6))
    lane = np.zeros(1, np.int64)
    order.seed(lane, [7])
    expected = [int(order.next(lane)[0]) for _ in range(12)]
    for _ in range(2):
        texts.seed(7, ENTROPY)
        texts.seed(None, ENTROPY)  # changes nothing
        assert [texts.next() for _ in range(12)] == expected
