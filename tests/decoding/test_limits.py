"""The shortest and the longest prompts, budgets of nothing, depths that there are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sde_gym.decoding import DecodeResult, autoregressive, generate, speculative, speculative_batch
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.policies import AdaDecodeController, DELController, StaticController

Decode = Callable[..., DecodeResult]


def by_generate(model: LayeredModel, prompt: list[int], budget: int, depths: tuple[int, ...]) -> DecodeResult:
    return generate(model, prompt, DELController(), depths=depths, max_new_tokens=budget)


def alone(model: LayeredModel, prompt: list[int], budget: int, depths: tuple[int, ...]) -> DecodeResult:
    return speculative(model, prompt, AdaDecodeController(0.3), depths, budget)


def in_a_batch(model: LayeredModel, prompt: list[int], budget: int, depths: tuple[int, ...]) -> DecodeResult:
    static = StaticController(max(1, *depths[:1]) if depths else 1, 3)
    return speculative_batch(model, [[3, 1], prompt], static, depths, budget)[1]


DECODERS = pytest.mark.parametrize("decode", [by_generate, alone, in_a_batch])


@DECODERS
@pytest.mark.parametrize("budget", [0, 1, 2, 9])
@pytest.mark.parametrize("length", [1, 2, 250, 254, 255])  # of a context of 256
def test_short_and_long_prompts(model: LayeredModel, decode: Decode, length: int, budget: int) -> None:
    prompt = [(7 * n + 1) % 40 for n in range(length)]
    found = decode(model, prompt, budget, (1, 2, 4))
    assert found.tokens == autoregressive(model, prompt, budget).tokens
    assert len(found.tokens) == min(budget, model.context_limit - length + 1)
    assert len(found.depths) == len(found.fates) == len(found.tokens)


@DECODERS
@pytest.mark.parametrize(
    ("prompt", "budget", "depths", "message"),
    [
        ([], 5, (1, 2), "the prompt has no tokens"),
        ([1] * 256, 5, (1, 2), "the prompt has 256 tokens and the context holds 256: shorten it"),
        ([1] * 1000, 5, (1, 2), "the prompt has 1000 tokens"),
        ([1], -1, (1, 2), "max_new_tokens must be at least 0, not -1"),
        ([1], 5, (0, 2), r"must lie in 1\.\.5"),
        ([1], 5, (2, 6), r"must lie in 1\.\.5"),
        ([1], 5, (2, 2), "increasing"),
        ([1], 5, (), "increasing|depth"),
        ([1, 40], 5, (1, 2), r"token ids must lie in 0\.\.39"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    model: LayeredModel, decode: Decode, prompt: list[int], budget: int, depths: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        decode(model, prompt, budget, depths)
