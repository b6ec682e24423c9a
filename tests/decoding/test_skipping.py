"""Drafts that skip sublayers: lossless whatever is skipped and whoever decides, honestly counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sde_gym.decoding import autoregressive, speculative
from sde_gym.decoding.skipping import skipping
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.models.skipping import SkipSet
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.observation import EXTENDED, Action, Phase
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from tests.decoding.conftest import agreeing_model
from tests.models.tiny_models import VARIANTS

PROMPTS = [[i, (7 * i) % 40, 3] for i in range(8)]
LATE = SkipSet(attention=(2, 3, 4, 5), mlp=(3, 4, 5))  # of six layers: 5 of 12 sublayers are left
SKIPS = [SkipSet(), LATE, SkipSet((0, 2, 5), (1,)), SkipSet(tuple(range(6)), tuple(range(6)))]
CONTROLLERS: list[Callable[[int], BaseController]] = [
    lambda depth: StaticController(depth, 1),
    lambda depth: StaticController(depth, 5),
    lambda depth: StaticController(depth, 12),
    lambda depth: ThresholdController(0.0, 0.7),
    lambda depth: ThresholdController(0.6),
    lambda depth: ThresholdController(1.0),
    lambda depth: RandomController(0.8, seed=1),
    lambda depth: DraftVerifyController(depth, 0.6),
]


@pytest.mark.parametrize("make", CONTROLLERS)
@pytest.mark.parametrize("skip", SKIPS, ids=["nothing", "late", "some", "all"])
@pytest.mark.parametrize("budget", [1, 2, 3, 40])
def test_any_skip_set_and_controller_give_the_autoregressive_text(
    model: LayeredModel, make: Callable[[int], BaseController], skip: SkipSet, budget: int
) -> None:
    depth = skip.depth(6)
    controller = make(depth)
    for prompt in PROMPTS[:2]:
        result = skipping(model, prompt, skip, controller, budget)
        assert result.tokens == autoregressive(model, prompt, budget).tokens
        assert result.fates.count("accepted") == result.accepted <= result.drafted
        for at, fate in zip(result.depths, result.fates, strict=True):
            assert at == (depth if fate == "accepted" else 6)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_architecture_gives_the_autoregressive_text(variant: str) -> None:
    """Past the window of those that have one."""
    model = LayeredModel(VARIANTS[variant]())
    prompt = list(range(3, 12))
    expected = autoregressive(model, prompt, 30).tokens
    for skip in (SkipSet((3,), (3,)), SkipSet((1, 2), (0, 2))):
        result = skipping(model, prompt, skip, StaticController(skip.depth(4), 4), 30)
        assert result.tokens == expected
        assert 0 <= result.accepted < result.drafted
    assert autoregressive(model, prompt, 30).tokens == expected  # nothing was left changed


def test_a_draft_that_skips_nothing_is_never_rejected(model: LayeredModel) -> None:
    for prompt in PROMPTS:
        result = skipping(model, prompt, SkipSet(), StaticController(5, 4), 40)
        assert result.accepted == result.drafted > 0


def test_skipping_the_last_layers_proposes_what_an_early_exit_does(model: LayeredModel) -> None:
    skip = SkipSet((4, 5), (4, 5))
    for prompt in PROMPTS:
        ours = skipping(model, prompt, skip, StaticController(4, 4), 40)
        theirs = speculative(model, prompt, StaticController(4, 4), (4,), 40)
        assert ours.rounds == theirs.rounds
        assert ours.rejected == theirs.rejected


def test_drafts_are_really_accepted_and_really_rejected(model: LayeredModel) -> None:
    rates = []
    for skip in (SkipSet((0, 1), (0, 1)), LATE, SkipSet((5,), (5,))):
        results = [skipping(model, p, skip, StaticController(skip.depth(6), 4), 60) for p in PROMPTS]
        rates.append(sum(r.accepted for r in results) / sum(r.drafted for r in results))
    assert rates[0] < rates[1] < rates[2] < 1.0
    assert rates[1] > 0.3


def test_a_compact_vocabulary_does_not_bind_these_drafts(model: LayeredModel) -> None:
    compact = agreeing_model(compact=list(range(0, 40, 2)))
    for prompt in PROMPTS:
        ours = skipping(compact, prompt, LATE, StaticController(3, 4), 40)
        assert ours.rounds == skipping(model, prompt, LATE, StaticController(3, 4), 40).rounds
    assert any(token % 2 for token in ours.tokens)


@pytest.mark.parametrize("draft_length", [1, 4, 12])
def test_an_end_of_text_inside_a_draft_ends_the_text(model: LayeredModel, draft_length: int) -> None:
    for prompt in PROMPTS:
        ending = agreeing_model(eos_token_id=autoregressive(model, prompt, 40).tokens[9])
        expected = autoregressive(ending, prompt, 40).tokens
        assert skipping(ending, prompt, LATE, StaticController(3, draft_length), 40).tokens == expected


def test_counters_of_a_static_round(model: LayeredModel) -> None:
    result = skipping(model, PROMPTS[0], LATE, StaticController(3, 3), 40)
    rounds = len(result.rounds)
    drafted = result.drafted
    last = result.rounds[-1].drafted
    unfed = int(last == 40 - 1 - sum(r.accepted + 1 for r in result.rounds[:-1]))
    # Five sublayers a proposal, two to a layer; every fed token goes through all six layers.
    draft = (5 * drafted + 1) // 2
    assert result.sequential_layers == draft + 6 * rounds
    assert result.layer_passes == draft + 6 * (rounds + drafted - unfed)
    assert result.head_calls == drafted + rounds


class Spy(BaseController):
    """Drafts four tokens, looking at everything."""

    name = "spy"
    observation = tuple(name for name in EXTENDED if name != "probe")

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, np.ndarray]] = []

    def act(self, view: View) -> np.ndarray:
        phase, length = int(view.phase[0]), int(view.draft_length[0])
        self.seen.append((phase, int(view.depth_index[0]), length, view.observation[0].copy()))
        return np.array([Action.EXIT if phase == Phase.SELECT or length < 4 else Action.CONTINUE])


def test_the_controller_sees_one_depth_and_the_skipped_stacks_confidence(model: LayeredModel) -> None:
    spy = Spy()
    skip = SkipSet((4, 5), (4, 5))
    result = skipping(model, PROMPTS[1], skip, spy, 12)
    assert spy.depths == (4,)
    assert {index for _, index, _, _ in spy.seen} == {0}
    column = {name: n for n, name in enumerate(spy.observation)}
    phase, _, length, row = spy.seen[0]
    assert (phase, length, row[column["depth"]]) == (Phase.SELECT, 0, np.float32(4 / 6))
    # The last two layers are left out, so an exit at depth 4 says the same.
    sequence = model.sequence()
    sequence.append([*PROMPTS[1], result.tokens[0]])
    sequence.advance(4)
    probability = torch.softmax(sequence.score(4)[0], -1).max().item()
    assert row[column["top1"]] == pytest.approx(probability, rel=1e-4)


def test_one_token_at_a_time_is_reported_and_errors_pass_through(model: LayeredModel) -> None:
    heard: list[list[int]] = []
    result = skipping(model, PROMPTS[0], LATE, StaticController(3, 3), 20, on_tokens=heard.append)
    assert [token for tokens in heard for token in tokens] == result.tokens
    assert len(heard[0]) == 1

    def stop(tokens: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        skipping(model, PROMPTS[0], LATE, StaticController(3, 3), 20, on_tokens=stop)
    again = skipping(model, PROMPTS[0], LATE, StaticController(3, 3), 20)
    assert again.tokens == result.tokens
    assert again.rounds == result.rounds


def test_no_budget_gives_no_tokens(model: LayeredModel) -> None:
    assert skipping(model, PROMPTS[0], LATE, StaticController(3, 3), 0).tokens == []


def test_what_does_not_fit_is_refused(model: LayeredModel) -> None:
    with pytest.raises(InputError, match=r"\[6\]"):
        skipping(model, PROMPTS[0], SkipSet((6,)), StaticController(5, 3), 20)
    with pytest.raises(InputError, match=r"\[3\]"):
        skipping(model, PROMPTS[0], LATE, StaticController(2, 3), 20)
    for attribute in ("walks_every_token", "shadows"):
        controller = StaticController(3, 3)
        setattr(controller, attribute, True)
        with pytest.raises(InputError, match="compares exit depths"):
            skipping(model, PROMPTS[0], LATE, controller, 20)
    curious = Spy()
    curious.observation = ("probe",)
    with pytest.raises(InputError, match="probe"):
        skipping(model, PROMPTS[0], LATE, curious, 20)
