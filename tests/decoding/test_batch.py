"""Several texts at once: the same as one at a time, tokens, rounds and counters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sde_gym.decoding import autoregressive, speculative
from sde_gym.decoding.batch import speculative_batch
from sde_gym.decoding.result import DecodeResult
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.models.sequence import Sequence
from sde_gym.policies.controller import Controller, RoundOutcome
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from tests.decoding.conftest import agreeing_model

DEPTHS = (1, 2, 4)
PROMPTS = [[number + 1, 3, 7, (5 * number) % 40][: 1 + number % 4] for number in range(7)]


class EveryToken(ThresholdController):
    walks_every_token = True


class Shadowed(ThresholdController):
    shadows = True

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)
        self.seen: dict[int, list[NDArray[np.bool_]]] = {}

    def feedback(self, outcome: RoundOutcome) -> None:
        assert outcome.shadow is not None
        for lane, shadow in zip(outcome.lanes.tolist(), outcome.shadow, strict=True):
            self.seen.setdefault(lane, []).append(shadow.right)


def untimed(result: DecodeResult) -> dict[str, Any]:
    return {f.name: getattr(result, f.name) for f in fields(result) if "seconds" not in f.name}


@pytest.mark.parametrize(
    "controller",
    [
        StaticController(2, 3), ThresholdController(0.3), RandomController(0.5, seed=4), EveryToken(0.3),
        Shadowed(0.3),
    ],
    ids=lambda controller: type(controller).__name__,
)  # fmt: skip
@pytest.mark.parametrize("compact", [None, list(range(0, 40, 2))], ids=["full heads", "compact heads"])
def test_a_batch_is_its_texts_one_at_a_time(controller: Controller, compact: list[int] | None) -> None:
    model = agreeing_model(eos_token_id=17, compact=compact)
    budget = 40
    together = speculative_batch(model, PROMPTS, controller, DEPTHS, budget, max_draft=5)
    for number, (prompt, result) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = speculative(model, prompt, controller, DEPTHS, budget, max_draft=5, text=number)
        assert untimed(result) == untimed(alone)
        assert result.tokens == autoregressive(model, prompt, budget).tokens
    assert len({len(result.rounds) for result in together}) > 1  # ragged


def test_slots_of_rejected_tokens_are_used_again(
    model: LayeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[tuple[int, int]] = []
    keep = Sequence.keep

    def watched(self: Sequence, slots: list[int]) -> None:
        before = len(self)
        keep(self, slots)
        lengths.append((before, len(self)))

    monkeypatch.setattr(Sequence, "keep", watched)
    results = speculative_batch(model, PROMPTS, StaticController(1, 5), DEPTHS, 60, max_draft=5)
    assert len(lengths) > 1
    assert all(2 * after <= before for before, after in lengths)
    alive = sum(len(prompt) + len(r.tokens) for prompt, r in zip(PROMPTS, results, strict=True))
    assert max(before for before, _ in lengths) < 2 * alive + 64 + 6 * len(PROMPTS)


def test_shadows_say_what_the_heads_say(model: LayeredModel) -> None:
    controller = Shadowed(0.3)
    results = speculative_batch(model, PROMPTS[:2], controller, DEPTHS, 40, max_draft=5)
    for lane, result in enumerate(results):
        right = np.concatenate(controller.seen[lane])
        text = [*PROMPTS[lane], *result.tokens]
        assert len(right) == len(result.tokens) - 1
        for row in (0, 7, 20, 38):
            for index, depth in enumerate(DEPTHS):
                sequence = model.sequence()
                sequence.append(text[: len(PROMPTS[lane]) + row + 1])
                sequence.advance(depth)
                assert right[row, index] == (int(sequence.score(depth).argmax()) == result.tokens[row + 1])


def test_tokens_are_told_as_they_come(model: LayeredModel) -> None:
    heard: dict[int, list[int]] = {}
    results = speculative_batch(
        model, PROMPTS, StaticController(4, 3), DEPTHS, 30,
        on_tokens=lambda text, tokens: heard.setdefault(text, []).extend(tokens),
    )  # fmt: skip
    assert [heard[text] for text in range(len(PROMPTS))] == [result.tokens for result in results]


def test_budgets_of_nothing_and_of_one(model: LayeredModel) -> None:
    assert [r.tokens for r in speculative_batch(model, PROMPTS[:2], StaticController(1, 2), DEPTHS, 0)] == [
        [],
        [],
    ]
    one = speculative_batch(model, PROMPTS[:2], StaticController(1, 2), DEPTHS, 1)
    assert [len(r.tokens) for r in one] == [1, 1]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: none was given"),
        ([[1], []], {}, "prompt 1: the prompt has no tokens"),
        ([[1]], {"texts": [1, 2]}, "texts: 2 for 1 prompts"),
        ([[1] * 300], {}, "prompt 0: the prompt has 300 tokens"),
        ([[1]], {"max_draft": 0}, "max_draft: 0 is out of range"),
    ],
)
def test_bad_input(
    model: LayeredModel, prompts: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        speculative_batch(model, prompts, ThresholdController(0.5), DEPTHS, 5, **options)
