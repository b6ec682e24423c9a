"""`generate`: prompts of every kind, options of `GenerationConfig`, and what it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
)

from sde_gym.decoding import autoregressive
from sde_gym.decoding.generate import Decoding, generate
from sde_gym.decoding.options import GENERATION_OPTIONS
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.policies.ablation import LengthChoiceOnly
from sde_gym.policies.lite import LITEController
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from tests.decoding.conftest import agreeing_model
from tests.decoding.letters import LETTERS, letter_tokenizer

PROMPT = [5, 35, 3]
STATIC = StaticController(4, 4)


@pytest.fixture(scope="module")
def lettered() -> LayeredModel:
    """With a tokenizer, and defaults of its own that must not be used."""
    plain = agreeing_model()
    plain.hf.generation_config = GenerationConfig(
        do_sample=True, temperature=2.0, repetition_penalty=3.0, suppress_tokens=[8], pad_token_id=0
    )
    return LayeredModel(plain.hf, tokenizer=letter_tokenizer(), name="lettered")


@pytest.fixture
def policy() -> QController:
    """A learned controller with a setting of its own: exits as soon as it may."""
    network = QNetwork([(np.zeros((3, 2), np.float32), np.array([0.0, 1.0], np.float32))])
    observation = ("confidence", "entropy", "trace")
    return QController(network, observation, (2, 4), 6, 7, k=3, window=5)


def theirs(model: LayeredModel, budget: int, **options: Any) -> list[int]:
    """What transformers' own greedy `generate` says, its checkpoint's defaults set aside."""
    before, model.hf.generation_config = model.hf.generation_config, GenerationConfig(pad_token_id=0)
    try:
        return model.hf.generate(torch.tensor([PROMPT]), max_new_tokens=budget, **options)[0, 3:].tolist()
    finally:
        model.hf.generation_config = before


@pytest.mark.parametrize("controller", [None, STATIC])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.5},
        {"eos_token_id": [13, 21]},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": [8, 9]},
        {"bad_words_ids": [[21], [13, 3]], "max_time": 100.0},
    ],
)
def test_greedy_is_transformers_greedy(lettered: LayeredModel, controller: Any, options: Any) -> None:
    result = generate(lettered, PROMPT, controller, max_new_tokens=40, **options)
    assert result.tokens == theirs(lettered, 40, **options)
    assert (result.accepted > 0) == (controller is not None)
    assert lettered.hf.generation_config.temperature == 2.0


def test_prompts_of_every_kind(lettered: LayeredModel) -> None:
    text = "".join(LETTERS[token] for token in PROMPT)
    expected = autoregressive(lettered, PROMPT, 12).tokens
    for prompt in (PROMPT, tuple(PROMPT), text, np.array(PROMPT), torch.tensor(PROMPT)):
        assert generate(lettered, prompt, STATIC, max_new_tokens=12).tokens == expected
    for prompts in ([PROMPT, [1, 2]], [text, "bc"], torch.tensor([PROMPT, PROMPT]), [PROMPT]):
        for options in ({}, {"repetition_penalty": 1.0}):
            results = generate(lettered, prompts, STATIC, max_new_tokens=12, **options)
            assert len(results) == len(prompts)
            assert results[0].tokens == expected
    assert generate(lettered, PROMPT).tokens == autoregressive(lettered, PROMPT, 96).tokens


def test_several_prompts_under_processors_as_one_at_a_time(model: LayeredModel) -> None:
    prompts = [[i, (7 * i) % 40, 3][: 1 + i % 3] for i in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 20, "repetition_penalty": 1.4, "eos_token_id": [9, 13]}
    together = generate(model, prompts, STATIC, **options)
    assert [r.tokens for r in together] == [generate(model, p, STATIC, **options).tokens for p in prompts]
    assert len({len(r.tokens) for r in together}) > 1


def test_stop_strings_end_the_text_inside_a_draft(lettered: LayeredModel) -> None:
    free = autoregressive(lettered, PROMPT, 40).tokens
    stop = "".join(LETTERS[token] for token in free[14:16])
    tokens = theirs(lettered, 40, stop_strings=stop, tokenizer=lettered.tokenizer)
    assert tokens == free[: len(tokens)] != free
    assert generate(lettered, PROMPT, STATIC, max_new_tokens=40, stop_strings=stop).tokens == tokens
    assert generate(lettered, PROMPT, max_new_tokens=40, stop_strings=[stop]).tokens == tokens


def test_criteria_and_processors_of_ones_own(model: LayeredModel) -> None:
    class Long(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

    penalty = RepetitionPenaltyLogitsProcessor(1.5)
    expected = generate(model, PROMPT, max_new_tokens=6, repetition_penalty=1.5).tokens
    for one in (penalty, [penalty]):
        for criterion in (Long(), [Long()]):
            result = generate(
                model, PROMPT, STATIC, max_new_tokens=30, logits_processor=one, stopping_criteria=criterion
            )
            assert result.tokens == expected


def test_sampling_is_repeatable_by_seed(model: LayeredModel) -> None:
    def texts(seed: int | None, controller: Any = STATIC) -> list[list[int]]:
        results = generate(
            model, [PROMPT, PROMPT], controller, max_new_tokens=20, seed=seed, do_sample=True, temperature=0.9
        )
        return [result.tokens for result in results]

    first = texts(1)
    assert first == texts(1) != texts(2)
    assert first[0] != first[1]
    assert texts(1, None) == texts(1, None)
    torch.manual_seed(3)
    free = texts(None)
    torch.manual_seed(3)
    assert texts(None) == free


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_a_streamer_hears_the_prompt_and_every_token(model: LayeredModel) -> None:
    listener = Listener()
    for controller in (None, STATIC):
        listener.heard.clear()
        result = generate(model, PROMPT, controller, max_new_tokens=15, streamer=listener)
        assert listener.heard == [[PROMPT], *([token] for token in result.tokens), "end"]
    with pytest.raises(InputError, match="streamer"):
        generate(model, [PROMPT, PROMPT], STATIC, streamer=listener)


def test_a_streamer_of_an_empty_text_hears_prompt_and_end(model: LayeredModel) -> None:
    listener = Listener()
    assert generate(model, PROMPT, STATIC, max_new_tokens=0, streamer=listener).tokens == []
    assert listener.heard == [[PROMPT], "end"]


def test_a_text_that_the_context_ends_is_told_of(model: LayeredModel) -> None:
    long = [1 + i % 39 for i in range(250)]
    with pytest.warns(UserWarning, match="context of 256"):
        assert len(generate(model, long, STATIC, max_new_tokens=20).tokens) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(generate(model, long, STATIC, max_new_tokens=7).tokens) == 7
        ended = generate(model, PROMPT, STATIC, max_new_tokens=200)
        stopped = generate(model, long, max_new_tokens=20, eos_token_id=list(range(40)))
    assert (len(ended.tokens), len(stopped.tokens)) == (200, 1)


def test_a_policy_of_other_weights_is_told_of_once(model: LayeredModel, policy: QController) -> None:
    policy.meta = {"model": {"name": "another", "weights_hash": "0123456789abcdef"}}
    with pytest.warns(
        UserWarning, match=f"another with the weights 0123456789abcdef.*{model.weights_hash()}"
    ):
        generate(model, PROMPT, LengthChoiceOnly(policy, 4), max_new_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, PROMPT, policy, max_new_tokens=3)
        for meta in ({}, {"model": {"weights_hash": model.weights_hash()}}):
            policy.meta = meta
            generate(model, PROMPT, policy, max_new_tokens=3)


def test_thresholds_bring_their_depths(model: LayeredModel) -> None:
    controller = LITEController({4: 0.1, 2: 0.9})
    result = generate(model, PROMPT, controller, max_new_tokens=20)
    assert result.tokens == autoregressive(model, PROMPT, 20).tokens
    assert {r.exit_depth for r in result.rounds} <= {2, 4, 6}
    assert Decoding(controller).candidates(24) == (2, 4)
    with pytest.raises(InputError, match=r"depths=\(2, 4\)"):
        generate(model, PROMPT, controller, depths=(3,))


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_small_budgets(model: LayeredModel, budget: int) -> None:
    for options in ({}, {"repetition_penalty": 1.5}):
        result = generate(model, PROMPT, STATIC, max_new_tokens=budget, **options)
        assert len(result.tokens) == budget
        many = generate(model, [PROMPT, [1]], STATIC, max_new_tokens=budget, **options)
        assert [len(r.tokens) for r in many] == [budget, budget]


def test_a_policy_brings_its_setting(model: LayeredModel, policy: QController) -> None:
    result = generate(model, PROMPT, policy, max_new_tokens=30)
    assert result.tokens == autoregressive(model, PROMPT, 30).tokens
    assert {r.exit_depth for r in result.rounds} <= {2, 6}
    assert max(r.drafted for r in result.rounds) == 7
    wrapped = Decoding(LengthChoiceOnly(policy, 4))
    assert wrapped.candidates(6) == (2, 4)
    assert wrapped.longest_draft() == 7
    with pytest.raises(InputError, match="max_draft"):
        generate(model, PROMPT, policy, max_draft=5)


def test_depths_and_drafts_of_other_controllers(model: LayeredModel) -> None:
    assert Decoding(STATIC).candidates(6) == (4,)
    assert Decoding(STATIC, depths=[2, 4]).candidates(6) == (2, 4)
    bound = ThresholdController(0.5)
    bound.bind((3,), 6, 2)  # what it was bound to before is not what it was made for
    assert Decoding(bound).candidates(6) == (1, 2, 3, 4)
    assert Decoding(bound).longest_draft() == 12
    assert Decoding(RandomController()).candidates(24) == (1, 2, 3, 4, 6, 8, 12)
    assert Decoding(StaticController(2, 15)).longest_draft() == 15
    assert max(r.drafted for r in generate(model, PROMPT, STATIC, max_draft=4).rounds) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repetition_penality": 1.2}, "repetition_penality: no option .* did you mean repetition_penalty"),
        ({"num_beams": 4}, "num_beams: no option"),
        ({"max_length": 9}, "max_length: give max_new_tokens"),
        ({"num_return_sequences": 2}, "num_return_sequences: give the prompt several times"),
        ({"temperature": 0.7}, "temperature=0.7: without do_sample"),
        ({"do_sample": False, "top_k": 3}, "top_k=3: without do_sample"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"repetition_penalty": -1.0}, "penalty"),
        ({"stop_strings": "x"}, "tokenizer"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"depths": (6,)}, "must lie in 1"),
        ({"depths": (0, 4)}, "must lie in 1"),
        ({"depths": 4}, "depths: 4 is no list"),
        ({"seed": 1}, "seed=1: without do_sample"),
        *(({"do_sample": True, "seed": seed}, "seed: ") for seed in ("a", 1.5, True, -1, 2**65)),
        *(({"eos_token_id": ids}, "eos_token_id") for ids in ([], -5, 40, 1.5, True)),
        ({"suppress_tokens": [99999]}, "suppress_tokens.* 99999 is no token id"),
        ({"begin_suppress_tokens": [-1]}, "begin_suppress_tokens"),
        ({"bad_words_ids": [[3], [99999]]}, "bad_words_ids"),
        ({"sequence_bias": {(99999,): 1.0}}, "sequence_bias"),
        ({"sequence_bias": [[[99999], 1.0]]}, "sequence_bias"),
        ({"forced_eos_token_id": 99999}, "forced_eos_token_id"),
        ({"exponential_decay_length_penalty": (5,)}, "transformers refuses"),
        ({"watermarking_config": "a"}, "transformers refuses"),
        ({"repetition_penalty": "a", "max_new_tokens": 0}, "transformers refuses"),
        ({"suppress_tokens": [99999], "max_new_tokens": 0}, "suppress_tokens"),
        ({"max_time": "a"}, "max_time"),
        ({"stopping_criteria": 5}, "stopping_criteria: 5"),
        ({"logits_processor": [5]}, "logits_processor: 5"),
        ({"logits_processor": lambda ids, scores: None}, "<lambda>: a logits processor"),
        ({"logits_processor": lambda ids, scores: scores[0]}, "<lambda>: a logits processor"),
        ({"logits_processor": lambda ids, scores: scores.long()}, "must return floats"),
        ({"stopping_criteria": lambda ids, scores: None}, "<lambda>: a stopping criterion"),
        ({"stop_strings": 5}, "stop_strings: 5"),
        ({"streamer": object()}, "streamer: .* lacks put or end"),
    ],
)
def test_what_is_wrong_is_named(model: LayeredModel, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(model, PROMPT, STATIC, **options)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no tokens"),
        ([[5], []], "no tokens"),
        ([3, "a"], "neither text nor"),
        ([1.5], "neither text nor"),
        (list(range(40)) * 7, "context holds"),
        ("abc", "no tokenizer"),
        ([40], "token ids must lie in"),
        *((prompt, "neither text nor") for prompt in (None, 5, iter([5]), {1: 2}, b"ab", [True, False])),
    ],
)
def test_prompts_that_are_none(model: LayeredModel, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(model, prompt, STATIC)


def test_what_is_no_model_is_named(model: LayeredModel) -> None:
    with pytest.raises(InputError, match="model: a LlamaForCausalLM"):
        generate(model.hf, PROMPT, STATIC)


def test_a_watermark_with_state_is_to_be_left_out(model: LayeredModel) -> None:
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    with pytest.raises(InputError, match=r"leave it out$"):
        generate(model, PROMPT, STATIC, do_sample=True, watermarking_config=config)


def test_every_option_is_one_of_transformers() -> None:
    assert set(GENERATION_OPTIONS) <= set(vars(GenerationConfig()))
