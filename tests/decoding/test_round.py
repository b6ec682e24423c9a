"""`TextDecoder`, driven by hand: any actions, read or not, give the same text and the same proposals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sde_gym.decoding import autoregressive
from sde_gym.decoding.round import TextDecoder
from sde_gym.models import LayeredModel
from sde_gym.policies.observation import EXTENDED, HEAD_FEATURES, Action, Phase

DEPTHS = (1, 2, 4)
PROMPT = [5, 35, 3]


def decoder_of(model: LayeredModel, budget: int = 40, max_draft: int = 5) -> TextDecoder:
    return TextDecoder(model, DEPTHS, budget, EXTENDED, max_draft=max_draft, k=5, window=8)


@torch.inference_mode()
def driven(
    decoder: TextDecoder, actions: Callable[[], int], read: Callable[[TextDecoder], None]
) -> list[tuple[tuple[int, ...], int]]:
    """Decode to the end; proposals and accepted ones of each round."""
    rounds = []
    decoder.prefill(PROMPT)
    while not decoder.finished:
        decoder.open_round()
        assert (decoder.phase, decoder.index, decoder.proposals) == (Phase.SELECT, 0, [])
        ended = None
        while ended is None:
            read(decoder)
            ended = decoder.act(actions())
        assert ended.drafted == len(decoder.proposals)
        rounds.append((tuple(decoder.proposals), ended.accepted))
    return rounds


def look(decoder: TextDecoder) -> None:
    decoder.read()
    assert decoder.best is None
    decoder.observation()
    assert decoder.best is not None


def glance(decoder: TextDecoder) -> None:
    decoder.read()


def show(decoder: TextDecoder) -> None:
    row = decoder.observation()[0]
    assert not row[[n for n, name in enumerate(decoder.names) if name in HEAD_FEATURES]].any()
    assert decoder.best is None


@pytest.mark.parametrize("p", [0.3, 0.8])
@pytest.mark.parametrize("budget", [2, 3, 40])
def test_reading_changes_nothing_but_the_cost(model: LayeredModel, p: float, budget: int) -> None:
    found = []
    for read in (look, glance, show, lambda _: None):
        rng = np.random.default_rng(budget)
        decoder = decoder_of(model, budget)
        rounds = driven(decoder, lambda rng=rng: int(rng.random() < p), read)
        result = decoder.result
        assert result.tokens == autoregressive(model, PROMPT, budget).tokens
        assert decoder.drafted == result.drafted
        assert decoder.accepted == result.accepted
        found.append((rounds, result.rounds, result.layer_passes, result.decisions, result.sequential_layers))
        assert result.head_calls <= result.decisions + len(result.rounds)
        if read in (look, glance):
            assert result.head_calls == result.decisions + len(result.rounds)
    assert found[0] == found[1] == found[2] == found[3]


def test_the_cap_ends_a_round(model: LayeredModel) -> None:
    rounds = driven(decoder_of(model, max_draft=3), lambda: int(Action.EXIT), look)
    assert {len(proposals) for proposals, _ in rounds[:-2]} == {3}
