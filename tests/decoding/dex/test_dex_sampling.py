"""Sampling with shared noise: exact by count, the same text at every exploration set, and bugs are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sde_gym.decoding import autoregressive
from sde_gym.decoding.dex import coupled, dex
from sde_gym.decoding.dex.candidates import Proposer
from sde_gym.decoding.dex.lattice import Lattice
from sde_gym.decoding.dex.noise import PositionNoise
from sde_gym.decoding.rules import GenerationRules
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from tests.decoding.test_rules import VOCABULARY, sampled_model

PROMPT = [5, 11, 3]
DEPTHS = (1, 2, 3)
DRAWS = 200

SETTINGS: dict[str, Callable[[], LogitsProcessorList]] = {
    "plain": lambda: LogitsProcessorList(),
    "cold": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.6)]),
    "hot, top-k": lambda: LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(4)]),
    "top-p": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.8)]),
}


@pytest.fixture(scope="module")
def small() -> LayeredModel:
    return sampled_model()


def rules(processors: LogitsProcessorList, source: torch.Generator) -> GenerationRules:
    return GenerationRules(VOCABULARY, (), processors or None, generator=source)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.inference_mode()
def exact(model: LayeredModel, processors: LogitsProcessorList) -> Tensor:
    """float64 (V, V): the probability of every text of two tokens, by enumeration."""

    def shares(ids: list[list[int]]) -> Tensor:
        sequence = model.sequence()
        last = [sequence.append(row, parent=-1)[-1] for row in ids]
        sequence.advance(model.num_layers)
        scores = processors(torch.tensor(ids), sequence.score(model.num_layers, slots=last).clone())
        return scores.double().softmax(-1)

    first = shares([PROMPT])[0]
    return first[:, None] * shares([[*PROMPT, token] for token in range(VOCABULARY)])


def fit(expected: Tensor, texts: list[list[int]]) -> float:
    """p-value of texts of two tokens; rare ones, in order, share classes of 5 or more."""
    counts = torch.zeros_like(expected)
    for first, second in texts:
        counts[first, second] += 1
    assert not counts[expected == 0].any()  # nothing impossible
    observed, wanted = [0.0], [0.0]
    possible = expected > 0
    for count, share in zip(counts[possible].tolist(), expected[possible].tolist(), strict=True):
        if wanted[-1] >= 5:
            observed.append(0.0)
            wanted.append(0.0)
        observed[-1] += count
        wanted[-1] += share * len(texts)
    assert len(observed) > 12
    return float(chisquare(observed, wanted).pvalue)


def sampled(model: LayeredModel, processors: LogitsProcessorList, **options: Any) -> list[list[int]]:
    made = rules(processors, seeded())
    return [dex(model, PROMPT, DEPTHS, 2, rules=made, **options).tokens for _ in range(DRAWS)]


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_texts_are_distributed_as_the_final_layer_says(small: LayeredModel, name: str) -> None:
    processors = SETTINGS[name]()
    assert fit(exact(small, processors), sampled(small, processors)) > 0.01


def test_so_are_those_explored_by_compact_heads() -> None:
    compact = sampled_model(list(range(0, VOCABULARY, 2)))
    processors = SETTINGS["cold"]()
    assert fit(exact(compact, processors), sampled(compact, processors, decs=False)) > 0.01


def _masks_the_final_depth(self: Proposer, logits: Tensor, lattice: Lattice) -> int:
    logits[0, [token for token in lattice.anchor.candidates if token is not None]] = -torch.inf
    return _FINAL(self, logits, lattice)


def _emits_the_shallowest(self: Proposer, logits: Tensor, lattice: Lattice) -> int:
    token = lattice.anchor.candidates[0]
    assert token is not None
    return token


def _emits_the_most_probable(self: Proposer, logits: Tensor, lattice: Lattice) -> int:
    return int(logits.argmax())


_FINAL, _AT = Proposer.final, PositionNoise.at

BUGS: dict[str, tuple[Any, str, Any]] = {
    "the final depth is masked": (Proposer, "final", _masks_the_final_depth),
    "the shallowest candidate is emitted": (Proposer, "final", _emits_the_shallowest),
    "no noise at the final depth": (Proposer, "final", _emits_the_most_probable),
    "positions share their noise": (PositionNoise, "at", lambda self, position, size: _AT(self, 3, size)),
    "half the noise": (PositionNoise, "at", lambda self, position, size: _AT(self, position, size) / 2),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_sampler_is_caught(small: LayeredModel, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong = BUGS[bug]
    monkeypatch.setattr(where, name, wrong)
    monkeypatch.setattr(PositionNoise, "forget", lambda self, position: None)
    processors = SETTINGS["plain"]()
    made = [rules(processors, seeded(seed)) for seed in range(DRAWS)]  # a new noise for each text
    texts = [dex(small, PROMPT, DEPTHS, 2, rules=one).tokens for one in made]
    assert fit(exact(small, processors), texts) < 1e-4


@pytest.mark.parametrize("options", [{}, {"decs": False}, {"single_exit": True}])
def test_a_seed_gives_plain_decodings_text_at_every_exploration_set(
    model: LayeredModel, options: dict[str, bool]
) -> None:
    def text(depths: tuple[int, ...], seed: int) -> list[int]:
        made = GenerationRules(40, (), TemperatureLogitsWarper(0.9), generator=seeded(seed))
        return dex(model, PROMPT, depths, 25, rules=made, **options).tokens

    def plain(seed: int) -> list[int]:
        made = GenerationRules(40, (), TemperatureLogitsWarper(0.9), generator=seeded(seed))
        return autoregressive(model, PROMPT, 25, rules=coupled(made)).tokens

    assert text((6,), 1) != text((6,), 2)
    for depths in ((6,), (1, 6), (2, 4, 6), (1, 2, 3, 4, 5, 6)):
        assert text(depths, 1) == plain(1)


def test_shared_noise_makes_depths_agree(model: LayeredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn anew each time it is asked for, the noise would leave the text exact and the branches useless."""

    def ticks() -> int:
        made = GenerationRules(40, (), TemperatureLogitsWarper(2.0), generator=seeded(3))
        return dex(model, PROMPT, (2, 4, 6), 40, rules=made).ticks

    together = ticks()

    def afresh(self: PositionNoise, position: int, size: int) -> Tensor:
        return -torch.empty(size, dtype=torch.float64).exponential_(generator=self._generator).log()

    monkeypatch.setattr(PositionNoise, "at", afresh)
    assert together < 0.9 * ticks()


def test_noise_is_gumbel_one_vector_a_position_and_forgotten_behind() -> None:
    noise = PositionNoise(seeded())
    late = noise.at(7, 400)
    assert noise.at(9, 400) is not late
    assert noise.at(7, 400) is late
    assert sorted(noise._noise) == [7, 8, 9]
    assert not torch.equal(noise.at(8, 400), noise.at(9, 400))
    noise.forget(8)
    assert sorted(noise._noise) == [9]
    assert kstest(torch.cat([late, noise.at(9, 400)]).numpy(), "gumbel_r").pvalue > 0.01


def test_memory_of_noise_does_not_grow_with_the_text(model: LayeredModel) -> None:
    made = coupled(GenerationRules(40, (), generator=seeded()))
    dex(model, PROMPT, (1, 2, 3, 6), 60, rules=made)
    assert len(made._shared._noise) <= 4  # type: ignore[union-attr]


def test_rules_that_do_not_sample_stay_as_they_are() -> None:
    greedy = GenerationRules(40, ())
    assert coupled(greedy) is greedy
    assert coupled(None) is None
    once = coupled(GenerationRules(40, (), generator=seeded()))
    assert coupled(once) is once


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_scores_that_are_no_distribution_are_refused(model: LayeredModel, scale: float) -> None:
    made = GenerationRules(40, (), lambda ids, scores: scores * scale, generator=seeded())
    with pytest.raises(InputError, match="NaN or infinity"):
        dex(model, PROMPT, (2, 6), 5, rules=made)


def test_processors_that_allow_nothing_are_refused(model: LayeredModel) -> None:
    made = GenerationRules(
        40, (), lambda ids, scores: torch.full_like(scores, -torch.inf), generator=seeded()
    )
    with pytest.raises(InputError, match="rule out every token"):
        dex(model, PROMPT, (2, 6), 5, rules=made)
