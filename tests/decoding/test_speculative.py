"""The speculative round: lossless under any controller, forced where it must be, honestly counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sde_gym.decoding import DecodeResult, autoregressive, speculative
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.observation import EXTENDED, Action, Phase
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from tests.decoding.conftest import agreeing_model

DEPTHS = (1, 2, 4)
PROMPTS = [[i, (7 * i) % 40, 3] for i in range(8)]
CONTROLLERS: list[Callable[[], BaseController]] = [
    *(lambda e=e, d=d: StaticController(e, d) for e in DEPTHS for d in (1, 3, 12)),
    lambda: ThresholdController(0.5),
    lambda: ThresholdController(1.0),
    lambda: RandomController(0.8, seed=1),
]


@pytest.mark.parametrize("make", CONTROLLERS)
@pytest.mark.parametrize("budget", [1, 2, 3, 40])
def test_any_controller_gives_the_autoregressive_text(
    model: LayeredModel, make: Callable[[], BaseController], budget: int
) -> None:
    controller = make()
    for prompt in PROMPTS:
        result = speculative(model, prompt, controller, DEPTHS, budget)
        assert result.tokens == autoregressive(model, prompt, budget).tokens
        check_history(result, budget)


def check_history(result: DecodeResult, budget: int) -> None:
    """Fates, depths and rounds tell one story."""
    assert len(result.depths) == len(result.fates) == len(result.tokens) <= budget
    assert result.fates[0] == "prefill"
    assert result.fates.count("accepted") == result.accepted <= result.drafted
    for depth, fate in zip(result.depths, result.fates, strict=True):
        assert (depth in DEPTHS) == (fate == "accepted")
    for number in result.rounds:
        assert 0 <= number.accepted <= number.drafted <= 12
        assert (number.drafted == 0) == (number.exit_depth == 6)


def test_drafts_are_really_accepted_and_really_rejected(model: LayeredModel) -> None:
    rates = []
    for depth in DEPTHS:
        results = [speculative(model, p, StaticController(depth, 4), DEPTHS, 60) for p in PROMPTS]
        rates.append(sum(r.accepted for r in results) / sum(r.drafted for r in results))
    assert 0.1 < rates[0] < rates[-1] < 1.0


@pytest.mark.parametrize("draft_length", [1, 4, 12])
def test_an_end_of_text_inside_a_draft_ends_the_text(model: LayeredModel, draft_length: int) -> None:
    for prompt in PROMPTS:
        free = autoregressive(model, prompt, 40).tokens
        ending = agreeing_model(eos_token_id=free[9])
        expected = autoregressive(ending, prompt, 40).tokens
        assert expected[-1] == free[9]
        assert speculative(ending, prompt, StaticController(4, draft_length), DEPTHS, 40).tokens == expected


def test_a_compact_vocabulary_changes_the_drafts_but_not_the_text(model: LayeredModel) -> None:
    compact = agreeing_model(compact=list(range(0, 40, 2)))
    for prompt in PROMPTS:
        result = speculative(compact, prompt, StaticController(4, 4), DEPTHS, 40)
        assert result.tokens == autoregressive(model, prompt, 40).tokens
        accepted = [t for t, fate in zip(result.tokens, result.fates, strict=True) if fate == "accepted"]
        assert all(token % 2 == 0 for token in accepted)


def test_counters_of_a_static_round(model: LayeredModel) -> None:
    result = speculative(model, PROMPTS[0], StaticController(2, 3), DEPTHS, 40)
    rounds = result.rounds
    assert [r.drafted for r in rounds[:-2]] == [3] * (len(rounds) - 2)
    drafted = sum(r.drafted for r in rounds)
    before_last = 1 + sum(r.accepted + 1 for r in rounds[:-1])
    unfed = int(rounds[-1].drafted == 40 - before_last)  # the budget's last proposal is not fed
    # Every fed token runs 2 layers on its own; a verification runs the other 4 once, for all.
    fed = drafted - unfed
    assert result.sequential_layers == 2 * (len(rounds) + fed) + 4 * len(rounds)
    assert result.layer_passes == 6 * (len(rounds) + fed)
    assert result.head_calls == drafted + len(rounds)


class Spy(BaseController):
    """Drafts at a depth like a static controller, and keeps every observation."""

    def __init__(self, depth_index: int, length: int) -> None:
        self.name = "spy"
        self.observation = EXTENDED
        self.depth_index = depth_index
        self.length = length
        self.seen: list[tuple[int, int, int, np.ndarray]] = []

    def act(self, view: View) -> np.ndarray:
        phase, index, length = int(view.phase[0]), int(view.depth_index[0]), int(view.draft_length[0])
        self.seen.append((phase, index, length, view.observation[0].copy()))
        leave = index >= self.depth_index if phase == Phase.SELECT else length < self.length
        return np.array([Action.EXIT if leave else Action.CONTINUE])


def test_observations_equal_their_definitions(model: LayeredModel) -> None:
    """Recomputed from whole forward passes of the transformers model over the true hypothesis."""
    spy = Spy(depth_index=1, length=3)
    prompt = PROMPTS[2]
    result = speculative(model, prompt, spy, DEPTHS, 40, window=4)
    column = {name: i for i, name in enumerate(EXTENDED)}
    tokens = result.tokens
    surprise = [_features(model, prompt, 6)["surprise"]]  # by text position, of the hypothesis
    seen = iter(spy.seen)
    emitted, drafted, accepted = 1, 0, 0
    for done in result.rounds:
        hypothesis = list(tokens[:emitted])
        previous = None
        for index in range(2):  # the walk to depth 2
            phase, at, length, row = next(seen)
            found = _features(model, prompt + hypothesis, DEPTHS[index])
            assert (phase, at, length) == (Phase.SELECT, index, 0)
            _compare(row, column, found, surprise, DEPTHS[index], 0, 0.0, drafted, accepted)
            assert row[column["stable"]] == float(previous == found["argmax"])
            previous = found["argmax"]
        chain, proposals = found["surprise"], [found["argmax"]]
        while len(proposals) < done.drafted or (done.drafted == 3 and len(proposals) == 3):
            hypothesis.append(proposals[-1])
            surprise.append(found["surprise"])
            if len(proposals) == 39 or emitted + len(proposals) == 40:
                break
            phase, _, length, row = next(seen)
            found = _features(model, prompt + hypothesis, 2)
            assert (phase, length) == (Phase.DRAFT, len(proposals))
            _compare(row, column, found, surprise, 2, length, chain, drafted, accepted)
            assert row[column["stable"]] == 0.0
            if len(proposals) == done.drafted:
                break
            proposals.append(found["argmax"])
            chain += found["surprise"]
        start = emitted
        emitted += done.accepted + 1
        drafted, accepted = drafted + done.drafted, accepted + done.accepted
        surprise = surprise[: start + done.accepted]
        surprise.append(_features(model, prompt + list(tokens[: start + done.accepted]), 6)["surprise"])
    assert len(spy.seen) > 40


def _compare(
    row: np.ndarray, column: dict[str, int], found: dict, surprise: list[float], depth: int,
    length: int, chain: float, drafted: int, accepted: int,
) -> None:  # fmt: skip
    expected = {
        "confidence": found["confidence"],
        "entropy": found["entropy"],
        "trace": float(np.mean(surprise[-4:])),
        "depth": depth / 6,
        "draft_length": length / 12,
        "top1": np.exp(-found["surprise"]),
        "margin": found["margin"],
        "acceptance": accepted / drafted if drafted else 1.0,
        "chain": chain,
    }
    for name, value in expected.items():
        assert row[column[name]] == pytest.approx(value, abs=1e-4), name


def _features(model: LayeredModel, tokens: list[int], depth: int) -> dict:
    """Straight from the definitions, by one uncached forward pass."""
    with torch.no_grad():
        body = model.hf.model
        states = body(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        state = states[depth][0, -1]
        logits = model.hf.lm_head(state if depth == 6 else body.norm(state)).double()
    log_p = torch.log_softmax(logits, -1)
    best = log_p.sort(descending=True).values
    return {
        "argmax": int(log_p.argmax()),
        "surprise": -float(best[0]),
        "margin": float(best[0].exp() - best[1].exp()),
        "confidence": -float(best[:5].mean()),
        "entropy": -float((log_p.exp() * log_p).sum()),
    }


def test_nothing_leaks_from_one_text_into_the_next(model: LayeredModel) -> None:
    spy = Spy(1, 3)
    speculative(model, PROMPTS[1], spy, DEPTHS, 30)
    first = spy.seen
    speculative(model, PROMPTS[4], spy, DEPTHS, 30)
    spy.seen = []
    speculative(model, PROMPTS[1], spy, DEPTHS, 30)
    assert len(first) >= len(spy.seen)
    for before, after in zip(first, spy.seen, strict=False):
        np.testing.assert_array_equal(before[3], after[3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depths": (0, 2)}, "1..5"),
        ({"depths": (2, 6)}, "1..5"),
        ({"depths": (2, 2)}, "increasing"),
        ({"depths": ()}, "increasing"),
        ({"max_draft": 0}, "max_draft: 0 is out of range"),
        ({"window": 0}, "window: 0 is out of range"),
        ({"k": 0}, "k: 0 is out of range"),
        ({"max_new_tokens": -3}, "max_new_tokens"),
        ({"prompt": []}, "no tokens"),
        ({"controller": StaticController(3, 2)}, "exit_depth"),
        ({"controller": StaticController(2, 13)}, "draft_length"),
    ],
)
def test_bad_arguments_are_refused(model: LayeredModel, change: dict, words: str) -> None:
    arguments = {
        "model": model, "prompt": [1, 2], "controller": StaticController(2, 2), "depths": DEPTHS,
        "max_new_tokens": 8,
    }  # fmt: skip
    with pytest.raises(InputError, match=words):
        speculative(**{**arguments, **change})
