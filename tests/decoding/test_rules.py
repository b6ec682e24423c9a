"""Tokens under processors: the speculative step on its own, then whole texts against the exact distribution.

The exact distribution of the first tokens is made from the model itself, without any drafting; speculative
sampling must draw from it under every temperature and processor, and a wrong acceptance rule must not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sde_gym.decoding import autoregressive, rules, speculative
from sde_gym.decoding.batch import speculative_batch
from sde_gym.decoding.rules import GenerationRules, accept_or_replace, acceptance, draw, residual
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.policies.rules import RandomController, StaticController

PROMPT = [5, 11, 3]
NAN, INF = float("nan"), float("inf")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distribution(*weights: float) -> Tensor:
    weighed = torch.tensor(weights, dtype=torch.float64)
    return weighed / weighed.sum()


# ---------------------------------------------------------------- one step, by hand and by counting


def test_the_formulas_by_hand() -> None:
    p, q = distribution(5, 3, 2), distribution(2, 6, 2)
    assert [acceptance(p, q, x) for x in range(3)] == pytest.approx([1.0, 0.5, 1.0])
    assert residual(p, q).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert residual(p, p).tolist() == p.tolist()


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((5, 3, 2, 0), (1, 1, 1, 1)),
        ((0, 0, 1, 3), (9, 1, 0, 0)),  # nothing in common
        ((1, 2, 3, 4), (1, 2, 3, 4)),
        ((1, 2, 3, 4), (0, 1, 0, 0)),  # a certain draft
        ((0, 1, 0, 0), (1, 2, 3, 4)),  # a certain target
    ],
)
def test_one_step_draws_from_p(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    target, draft = distribution(*p), distribution(*q)
    source = generator(1)
    counts = Counter(accept_or_replace(target, draft, draw(draft, source), source) for _ in range(4000))
    observed = [counts[x] for x in range(4) if p[x]]
    assert sum(observed) == 4000  # nothing that p rules out
    expected = [4000 * float(target[x]) for x in range(4) if p[x]]
    assert len(observed) == 1 or chisquare(observed, expected).pvalue > 0.01


def test_what_is_not_kept_is_never_the_proposal() -> None:
    p, q = distribution(1, 2, 3, 4), distribution(4, 3, 2, 1)
    assert all(residual(p, q)[x] == 0 for x in range(4) if acceptance(p, q, x) < 1)


# ---------------------------------------------------------------- rows


def test_greedy_rules_are_the_argmax_of_processed_scores() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [4.0, 3.0, 2.0, 1.0], [0.0, 0.5, 0.0, 0.0]])
    seen: list[list[int]] = []

    def forbid_the_last(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        scores[0, ids[0, -1]] = -INF  # in place: the logits must not change
        return scores

    made = GenerationRules(4, (), forbid_the_last, padding=[9, 9])
    before = logits.clone()
    assert made.propose(logits[:1], None, [1]) == (2, None)
    assert made.verify(logits, [1], [2, 0], [None, None]) == (2, 1)
    assert made.verify(logits[:2], [1], [2, 0], [None, None]) == (2, None)
    assert made.verify(logits, [1], [2, 1], [None, None]) == (1, 0)
    assert torch.equal(logits, before)
    assert seen[0] == seen[1] == [9, 9, 1]
    assert seen[2:4] == [[9, 9, 1, 2], [9, 9, 1, 2, 0]]


def test_nothing_follows_an_accepted_end_of_text() -> None:
    logits = torch.eye(4)
    for source in (None, generator()):
        made = GenerationRules(4, [1], lambda ids, scores: scores * 1e9, generator=source)
        certain = [torch.eye(4, dtype=torch.float64)[x] for x in (0, 1)] if source else [None, None]
        assert made.verify(logits[:3], [3], [0, 1], certain) == (2, None)
        assert made.verify(logits[:3], [3], [0, 3], [None, None]) == (1, 1)


def test_a_compact_head_proposes_full_vocabulary_ids() -> None:
    def favour_five(ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape == (1, 6)
        assert (scores == -INF).tolist() == [[True, False, True, False, True, False]]
        return scores + torch.tensor([[0.0, 0, 0, 0, 0, 10]])

    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for source in (None, generator()):
        made = GenerationRules(6, (), favour_five, generator=source)
        token, q = made.propose(logits, [1, 3, 5], [0])
        assert token == 5
        if q is not None:
            assert q.nonzero().flatten().tolist() == [1, 3, 5]
            assert float(q.sum()) == pytest.approx(1.0)
    assert GenerationRules(6, ()).propose(logits, [1, 3, 5], [0]) == (1, None)


@pytest.mark.parametrize("source", [None, generator()])
@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 1.0, 2.0], [0.0, -INF, 3.0]])
def test_a_broken_draft_is_still_a_proposal(row: list[float], source: torch.Generator | None) -> None:
    """All columns ruled out, or NaN: something is proposed, with all its mass, and can be rejected."""

    def forbid(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -INF)

    for processors in (None, forbid):
        made = GenerationRules(6, (), processors, generator=source)
        token, q = made.propose(torch.tensor([row]), [1, 3, 5], [0])
        assert token in (1, 3, 5)
        if q is not None:
            assert float(q[token]) > 0
            assert float(q.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("source", [None, generator()])
@pytest.mark.parametrize(
    ("row", "words"),
    [([1.0, NAN, 2.0], "NaN"), ([NAN] * 3, "NaN"), ([-INF] * 3, "rule out every token")],
)
def test_a_broken_final_row_is_refused(row: list[float], words: str, source: torch.Generator | None) -> None:
    with pytest.raises(InputError, match=words):
        GenerationRules(3, (), generator=source).verify(torch.tensor([row]), [0], [], [])


def test_sampling_without_a_draft_distribution_takes_it_for_certain() -> None:
    source = generator(2)
    made = GenerationRules(3, (), generator=source)
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    counts: Counter[int] = Counter()
    for _ in range(2000):
        accepted, token = made.verify(logits, [0], [1], [None])
        counts[1 if accepted else token if token is not None else -1] += 1
    assert chisquare([counts[x] for x in range(3)], [1000, 600, 400]).pvalue > 0.01


def test_a_vanishing_temperature_is_greedy_until_it_overflows() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    cold = GenerationRules(3, (), LogitsProcessorList([TemperatureLogitsWarper(1e-6)]), generator=generator())
    token, q = cold.propose(logits, None, [0])
    assert token == 1
    assert q is not None
    assert q.tolist() == [0.0, 1.0, 0.0]
    assert cold.verify(logits, [0], [1], [q]) == (1, None)
    frozen = GenerationRules(
        3, (), LogitsProcessorList([TemperatureLogitsWarper(1e-39)]), generator=generator()
    )
    assert frozen.propose(logits, None, [0])[0] == 1
    with pytest.raises(InputError, match="temperature"):
        frozen.verify(logits, [0], [], [])


def test_criteria_are_asked_after_every_token() -> None:
    asked: list[list[int]] = []

    def criterion(ids: Tensor, scores: Any) -> Tensor:
        asked.append(ids[0].tolist())
        return torch.tensor([ids.shape[1] > 3])

    made = GenerationRules(9, [7], criteria=criterion, padding=[0])
    assert [made.stops(ids) for ids in ([1, 2], [1, 2, 3], [7])] == [False, True, True]
    assert asked == [[0, 1, 2], [0, 1, 2, 3], [0, 7]]


# ---------------------------------------------------------------- whole texts

VOCABULARY = 12
DEPTHS = (1, 2)
LENGTH = 3
DRAWS = 400

Processors = Callable[[], LogitsProcessorList]

SETTINGS: dict[str, Processors] = {
    "plain": lambda: LogitsProcessorList(),
    "cold": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.6)]),
    "hot, top-k": lambda: LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(4)]),
    "top-p": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.8)]),
    "penalty": lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8), TopKLogitsWarper(6)]),
}


def sampled_model(compact: list[int] | None = None) -> LayeredModel:
    """Three layers over twelve tokens; depth 1 and 2 say something else than the last, but not nothing."""
    torch.manual_seed(4)
    hf = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
            tie_word_embeddings=False, initializer_range=0.35, bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    return LayeredModel(hf, name="sampled", compact_vocabulary=compact)


@torch.inference_mode()
def exact(model: LayeredModel, processors: LogitsProcessorList) -> dict[tuple[int, ...], float]:
    """The probability of every text of `LENGTH` tokens, each token through all layers."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        sequence, ids = model.sequence(), [[*PROMPT, *text] for text in texts]
        last = [sequence.append(row, parent=-1)[-1] for row in ids]
        sequence.advance(model.num_layers)
        scores = processors(torch.tensor(ids), sequence.score(model.num_layers, slots=last).clone())
        shares = scores.double().softmax(-1).tolist()
        texts = {
            (*text, token): probability * share
            for (text, probability), row in zip(texts.items(), shares, strict=True)
            for token, share in enumerate(row)
            if share > 0
        }
    assert sum(texts.values()) == pytest.approx(1.0)
    return texts


def fit(expected: dict[tuple[int, ...], float], texts: Sequence[Sequence[int]]) -> float:
    """p-value of texts under a distribution; the rare ones, in order of text, share classes of 5 or more."""
    counts = Counter(tuple(text) for text in texts)
    assert set(counts) <= set(expected)  # nothing impossible
    observed, wanted = [0.0], [0.0]
    for text in sorted(expected):
        if wanted[-1] >= 5:
            observed.append(0)
            wanted.append(0)
        observed[-1] += counts[text]
        wanted[-1] += expected[text] * len(texts)
    assert len(observed) > 20
    return float(chisquare(observed, wanted).pvalue)


def sampled(model: LayeredModel, processors: LogitsProcessorList, controller: Any) -> list[list[int]]:
    """`DRAWS` texts, many at a time."""
    source, at_once = generator(), 100
    found: list[list[int]] = []
    for start in range(0, DRAWS, at_once):
        made = [GenerationRules(VOCABULARY, (), processors or None, generator=source) for _ in range(at_once)]
        numbers = range(start, start + at_once)
        results = speculative_batch(
            model, [PROMPT] * at_once, controller, DEPTHS, LENGTH, texts=numbers, rules=made
        )
        found += [result.tokens for result in results]
    return found


@pytest.fixture(scope="module")
def small() -> LayeredModel:
    """The exit heads know all tokens."""
    return sampled_model()


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_texts_are_distributed_as_without_drafts(small: LayeredModel, name: str) -> None:
    processors = SETTINGS[name]()
    assert fit(exact(small, processors), sampled(small, processors, StaticController(1, 2))) > 0.01


def test_so_are_those_decoded_one_at_a_time(small: LayeredModel) -> None:
    processors, source = SETTINGS["cold"](), generator()
    made = GenerationRules(VOCABULARY, (), processors, generator=source)
    texts = [
        speculative(small, PROMPT, StaticController(2, 2), DEPTHS, LENGTH, rules=made).tokens
        for _ in range(DRAWS // 2)
    ]
    assert fit(exact(small, processors), texts) > 0.01


@pytest.mark.parametrize(
    ("name", "controller"), [("cold", StaticController(1, 2)), ("penalty", RandomController(0.6, seed=1))]
)
def test_so_are_those_drafted_by_compact_heads(name: str, controller: Any) -> None:
    compact, processors = sampled_model(list(range(0, VOCABULARY, 2))), SETTINGS[name]()
    assert fit(exact(compact, processors), sampled(compact, processors, controller)) > 0.01


BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "keeps whatever was proposed": ("acceptance", lambda p, q, x: 1.0),
    "takes p for q": ("acceptance", lambda p, q, x: min(1.0, float(q[x]) / max(float(p[x]), 1e-30))),
    "forgets to subtract q": ("residual", lambda p, q: p),
    "compares another token": ("acceptance", lambda p, q, x: acceptance(p.roll(1), q, x)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_rule_is_caught(small: LayeredModel, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processors = SETTINGS["cold"]()
    name, wrong = BUGS[bug]
    monkeypatch.setattr(rules, name, wrong)
    assert fit(exact(small, processors), sampled(small, processors, StaticController(1, 2))) < 1e-4


def test_the_wrong_row_is_caught(small: LayeredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final layer's rows moved by one, as by a verifier that is off by a position."""
    right = GenerationRules.verify

    def moved(self: GenerationRules, logits: Tensor, *rest: Any) -> tuple[int, int | None]:
        return right(self, logits.roll(-1, 0), *rest)

    monkeypatch.setattr(GenerationRules, "verify", moved)
    processors = SETTINGS["cold"]()
    assert fit(exact(small, processors), sampled(small, processors, StaticController(1, 2))) < 1e-4


def test_the_same_seed_gives_the_same_tokens(model: LayeredModel) -> None:
    def text(seed: int) -> list[int]:
        made = GenerationRules(40, (), generator=generator(seed))
        return speculative(model, PROMPT, StaticController(4, 3), (4,), 30, rules=made).tokens

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize("wrong", [None, torch.zeros(40), torch.zeros(1, 40, dtype=torch.int64)])
def test_a_processor_that_returns_no_scores_is_named(model: LayeredModel, wrong: Any) -> None:
    def broken(ids: Tensor, scores: Tensor) -> Any:
        return wrong

    for processors in (broken, LogitsProcessorList([broken, RepetitionPenaltyLogitsProcessor(1.4)])):
        with pytest.raises(InputError, match="broken: a logits processor"):
            autoregressive(model, PROMPT, 3, rules=GenerationRules(40, (), processors))


@pytest.mark.parametrize("draft_length", [1, 4])
def test_greedy_with_processors_is_the_autoregressive_text(model: LayeredModel, draft_length: int) -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2)])
    made = GenerationRules(40, (), processors)
    plain = autoregressive(model, PROMPT, 60, rules=made)
    fast = speculative(model, PROMPT, StaticController(4, draft_length), (4,), 60, rules=made)
    assert fast.tokens == plain.tokens != autoregressive(model, PROMPT, 60).tokens
    assert 0 < fast.accepted < fast.drafted
