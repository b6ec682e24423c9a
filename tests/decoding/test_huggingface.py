"""`generate(custom_generate=huggingface(controller))`: the tokens of `generate`, or a refusal by name."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
    set_seed,
)

from sde_gym.decoding.huggingface import CustomGenerate, huggingface
from sde_gym.decoding.opening import _OPENED, opened
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from sde_gym.policies.controller import BaseController
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from tests.decoding.conftest import agreeing_model
from tests.decoding.letters import LETTERS, letter_tokenizer

IDS = torch.tensor([[5, 35, 3]])
BATCH = torch.tensor([[5, 35, 3, 8], [0, 0, 9, 1], [0, 7, 7, 30]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])


@pytest.fixture
def hf(model: LayeredModel) -> Iterator[Any]:
    """The transformers model, with its generation config put back afterwards."""
    before = model.hf.generation_config
    model.hf.generation_config = GenerationConfig(pad_token_id=0)
    yield model.hf
    model.hf.generation_config = before


@pytest.fixture
def method(model: LayeredModel) -> CustomGenerate:
    return huggingface(StaticController(4, 4), model=model)


class Listener:
    """A streamer that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


class After(StoppingCriteria):
    """Ends a text right after some token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


class Lift(LogitsProcessor):
    """A processor of one's own: what came two tokens ago gets more likely."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raised = scores.clone()
        raised[torch.arange(len(scores)), input_ids[:, -2]] += 2.0
        return raised


# ---------------------------------------------------------------- greedy: the same tokens

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "one end": lambda: {"eos_token_id": 21},
    "ends": lambda: {"eos_token_id": [13, 21, 36]},
    "min_new_tokens": lambda: {"eos_token_id": [9, 22, 8], "min_new_tokens": 11},
    "min_length": lambda: {"eos_token_id": [9, 22, 8], "min_length": 11},
    "max_length": lambda: {"max_new_tokens": None, "max_length": 17},
    "repetition_penalty": lambda: {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda: {"bad_words_ids": [[21], [13, 3], [27, 12]]},
    "sequence_bias": lambda: {"sequence_bias": [[[21], -8.0], [[9, 13], 5.0]]},
    "suppress_tokens": lambda: {"suppress_tokens": [21, 13, 27], "begin_suppress_tokens": [8, 22]},
    "forced": lambda: {"forced_eos_token_id": 7, "eos_token_id": 7},
    "decay": lambda: {"exponential_decay_length_penalty": (6, 1.3), "eos_token_id": 7},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "prefix": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [row, *range(int(ids[-1]) % 5, 40, 3)]},
    "own processor": lambda: {"logits_processor": LogitsProcessorList([Lift()])},
    "own criterion": lambda: {"stopping_criteria": StoppingCriteriaList([After(21)])},
    "own max_length": lambda: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(11)])},
    "renormalised": lambda: {"renormalize_logits": True, "remove_invalid_values": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_prompt_as_generate(hf: Any, method: CustomGenerate, name: str) -> None:
    options = {"max_new_tokens": 40, **OPTIONS[name]()}
    expected = hf.generate(IDS, **options)
    found = hf.generate(IDS, custom_generate=method, **options)
    assert found.tolist() == expected.tolist()
    (result,) = method.results
    assert result.tokens == found[0, 3:].tolist()
    assert result.accepted > 0


@pytest.mark.parametrize(
    "name", [name for name in OPTIONS if name not in ("own criterion", "own max_length")]
)
def test_a_batch_padded_on_the_left_as_generate(hf: Any, method: CustomGenerate, name: str) -> None:
    options = {"max_new_tokens": 24, **OPTIONS[name]()}
    expected = hf.generate(BATCH, attention_mask=MASK, **options)
    found = hf.generate(BATCH, attention_mask=MASK, custom_generate=method, **options)
    assert found.tolist() == expected.tolist()


def test_a_batch_is_decoded_as_its_prompts_one_at_a_time(hf: Any, method: CustomGenerate) -> None:
    together = hf.generate(
        BATCH, attention_mask=MASK, max_new_tokens=24, eos_token_id=[13, 21], custom_generate=method
    )
    lengths = set()
    for row, mask, tokens in zip(BATCH, MASK, together[:, 4:].tolist(), strict=True):
        alone = hf.generate(
            row[mask > 0][None], max_new_tokens=24, eos_token_id=[13, 21], custom_generate=method
        )[0, mask.sum() :].tolist()
        assert tokens == alone + [0] * (len(tokens) - len(alone))
        lengths.add(len(alone))
    assert len(lengths) > 1  # ragged, so that something was padded


@pytest.mark.parametrize(
    "controller", [ThresholdController(0.4), RandomController(0.7, seed=1), StaticController(1, 12), None]
)
def test_any_controller(hf: Any, model: LayeredModel, controller: BaseController | None) -> None:
    method = huggingface(controller, model=model)
    for options in ({}, {"repetition_penalty": 1.4, "eos_token_id": [13, 21]}):
        expected = hf.generate(IDS, max_new_tokens=40, **options)
        assert torch.equal(hf.generate(IDS, max_new_tokens=40, custom_generate=method, **options), expected)


@pytest.mark.parametrize("draft_length", [1, 5])
def test_a_stop_string_inside_a_draft_ends_the_text(hf: Any, model: LayeredModel, draft_length: int) -> None:
    free = hf.generate(IDS, max_new_tokens=40)[0, 3:].tolist()
    stop = "".join(LETTERS[token] for token in free[14:16])
    tokenizer = letter_tokenizer()
    options = {"max_new_tokens": 40, "stop_strings": [stop, "zzz"]}
    expected = hf.generate(IDS, tokenizer=tokenizer, **options)
    assert expected.shape[1] < 43
    method = huggingface(StaticController(4, draft_length), model=model)
    found = hf.generate(IDS, tokenizer=tokenizer, custom_generate=method, **options)
    assert found.tolist() == expected.tolist()
    with_own = huggingface(StaticController(4, draft_length), model=model, tokenizer=tokenizer)
    assert torch.equal(hf.generate(IDS, custom_generate=with_own, **options), expected)
    with pytest.raises(InputError, match="stop_strings: a tokenizer"):
        hf.generate(IDS, custom_generate=method, **options)


def test_max_time_ends_the_text(hf: Any, method: CustomGenerate) -> None:
    assert hf.generate(IDS, max_new_tokens=40, max_time=0.0, custom_generate=method).shape == (1, 4)


def test_the_checkpoints_own_defaults_hold(hf: Any, method: CustomGenerate) -> None:
    hf.generation_config = GenerationConfig(repetition_penalty=1.5, max_new_tokens=30, eos_token_id=[13, 21])
    expected = hf.generate(IDS)
    assert torch.equal(hf.generate(IDS, custom_generate=method), expected)


def test_a_dictionary_comes_back_if_asked_for(hf: Any, method: CustomGenerate) -> None:
    options = {"max_new_tokens": 9, "return_dict_in_generate": True}
    expected, found = hf.generate(IDS, **options), hf.generate(IDS, custom_generate=method, **options)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)


def test_a_text_that_the_context_ends_is_told_of(hf: Any, method: CustomGenerate) -> None:
    long = 1 + torch.arange(250)[None] % 39
    with pytest.warns(UserWarning, match="context of 256"):
        assert hf.generate(long, max_new_tokens=20, custom_generate=method).shape == (1, 257)


# ---------------------------------------------------------------- streaming and accidents


@pytest.mark.parametrize("options", [{}, {"eos_token_id": [13]}, {"repetition_penalty": 1.5}])
def test_a_streamer_hears_what_it_hears_from_generate(hf: Any, method: Any, options: dict[str, Any]) -> None:
    theirs, ours = Listener(), Listener()
    hf.generate(IDS, max_new_tokens=30, streamer=theirs, **options)
    found = hf.generate(IDS, max_new_tokens=30, streamer=ours, custom_generate=method, **options)
    assert ours.heard == theirs.heard
    assert ours.heard == [IDS.tolist(), *([token] for token in found[0, 3:].tolist())]
    assert ours.ended == theirs.ended == 1


class Interrupting(Listener):
    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.heard) == 8:
            raise KeyboardInterrupt


class Failing(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] == 9:
            raise RuntimeError("a criterion of the user's failed")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (KeyboardInterrupt, lambda: {"streamer": Interrupting()}),
        (RuntimeError, lambda: {"stopping_criteria": StoppingCriteriaList([Failing()])}),
        (RuntimeError, lambda: {"stopping_criteria": StoppingCriteriaList([Failing()]), "do_sample": True}),
    ],
)
def test_an_exception_passes_through_and_leaves_the_model_as_it_was(
    hf: Any, method: CustomGenerate, error: type[BaseException], options: Any
) -> None:
    expected = hf.generate(IDS, max_new_tokens=30)
    state = {name: weight.clone() for name, weight in hf.state_dict().items()}
    with pytest.raises(error):
        hf.generate(IDS, max_new_tokens=30, custom_generate=method, **options())
    assert torch.equal(hf.generate(IDS, max_new_tokens=30, custom_generate=method), expected)
    assert torch.equal(hf.generate(IDS, max_new_tokens=30), expected)
    assert all(torch.equal(weight, state[name]) for name, weight in hf.state_dict().items())


# ---------------------------------------------------------------- sampling


def test_set_seed_and_seed_make_samples_repeatable(hf: Any, model: LayeredModel) -> None:
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    free, seeded = (huggingface(StaticController(4, 3), model=model, seed=seed) for seed in (None, 5))

    def text(method: CustomGenerate, seed: int) -> list[int]:
        set_seed(seed)
        return hf.generate(IDS, custom_generate=method, **options)[0].tolist()

    assert text(free, 1) == text(free, 1) != text(free, 2)
    assert text(seeded, 1) == text(seeded, 2)


def test_several_samples_of_a_prompt(hf: Any, method: CustomGenerate) -> None:
    set_seed(0)
    found = hf.generate(
        IDS, max_new_tokens=12, do_sample=True, num_return_sequences=4, repetition_penalty=1.2,
        prefix_allowed_tokens_fn=lambda prompt, ids: range(5 + prompt, 40), custom_generate=method,
    )  # fmt: skip
    assert found.shape == (4, 15)
    assert len({tuple(row) for row in found.tolist()}) == 4
    assert (found[:, 3:] >= 5).all()


def test_the_smallest_temperature_is_greedy(hf: Any, method: CustomGenerate) -> None:
    expected = hf.generate(IDS, max_new_tokens=30)
    found = hf.generate(IDS, max_new_tokens=30, do_sample=True, temperature=1e-4, custom_generate=method)
    assert torch.equal(found, expected)


# ---------------------------------------------------------------- refusals by name


def _synthid() -> dict[str, Any]:
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    return {"watermarking_config": config, "do_sample": True}


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "num_beams": lambda: {"num_beams": 2},
    "num_beam_groups": lambda: {"num_beams": 1, "num_beam_groups": 2},
    "assistant_model": lambda: {"assistant_model": agreeing_model().hf},
    "prompt_lookup_num_tokens": lambda: {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": lambda: {"assistant_early_exit": 2},
    "penalty_alpha": lambda: {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": lambda: {"dola_layers": "low"},
    "output_scores": lambda: {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": lambda: {"output_logits": True, "return_dict_in_generate": True},
    "output_attentions": lambda: {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
    "guidance_scale": lambda: {"guidance_scale": 1.5},
    "cache_implementation": lambda: {"cache_implementation": "static"},
    "use_cache": lambda: {"use_cache": False},
    "prefill_chunk_size": lambda: {"prefill_chunk_size": 2},
    "past_key_values": lambda: {"cache": DynamicCache()},
    "inputs_embeds": lambda: {"inputs_embeds": torch.zeros(1, 3, 48)},
    "SynthIDTextWatermarkLogitsProcessor": _synthid,
    "position_ids": lambda: {"position_ids": torch.tensor([[4, 5, 6]])},
    "padded on the right": lambda: {"attention_mask": torch.tensor([[1, 1, 0]])},
    "attention_mask: only 0": lambda: {"attention_mask": torch.tensor([[1, 1, 2]])},
    "attention_mask of the shape": lambda: {"attention_mask": torch.tensor([[1, 1]])},
    "gaps": lambda: {"attention_mask": torch.tensor([[1, 0, 1]])},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(hf: Any, method: CustomGenerate, name: str) -> None:
    with pytest.raises(InputError, match=name):
        hf.generate(IDS, max_new_tokens=5, custom_generate=method, **REFUSED[name]())


def test_refusals_that_depend_on_the_batch(hf: Any, method: CustomGenerate) -> None:
    options = {"attention_mask": MASK, "max_new_tokens": 4, "custom_generate": method}
    with pytest.raises(InputError, match="streamer: it follows one text, not 3"):
        hf.generate(BATCH, streamer=Listener(), **options)
    with pytest.raises(InputError, match="EncoderRepetitionPenaltyLogitsProcessor"):
        hf.generate(BATCH, encoder_repetition_penalty=1.2, **options)
    hf.generation_config = GenerationConfig()
    with pytest.raises(InputError, match="pad_token_id"):
        hf.generate(BATCH, **options)


def test_a_prompt_beyond_the_context_and_a_bad_depth_are_refused(hf: Any, model: LayeredModel) -> None:
    with pytest.raises(InputError, match="context holds 256"):
        hf.generate(
            torch.ones(1, 256, dtype=torch.int64), max_new_tokens=2, custom_generate=huggingface(None)
        )
    with pytest.raises(InputError, match="must lie in 1"):
        hf.generate(IDS, custom_generate=huggingface(StaticController(6, 2), model=model))


# ---------------------------------------------------------------- the model behind it


def test_a_model_is_opened_once_and_let_go_with_its_model() -> None:
    hf = agreeing_model().hf
    layered = opened(hf)
    assert opened(hf) is layered
    assert layered.hf.config is hf.config
    watched = weakref.ref(hf)
    entries = len(_OPENED)
    del hf, layered
    gc.collect()
    assert watched() is None
    assert len(_OPENED) == entries - 1


def test_changed_or_moved_weights_are_noticed() -> None:
    layered = agreeing_model()
    hf, free, tied = layered.hf, huggingface(None), huggingface(None, model=layered)
    before = hf.generate(IDS, max_new_tokens=20, custom_generate=tied)
    assert torch.equal(hf.generate(IDS, max_new_tokens=20, custom_generate=free), before)
    with torch.no_grad():
        hf.model.norm.weight.mul_(torch.linspace(0.1, 3.0, 48))
    expected = hf.generate(IDS, max_new_tokens=20)
    assert not torch.equal(before, expected)
    assert torch.equal(hf.generate(IDS, max_new_tokens=20, custom_generate=free), expected)
    with pytest.raises(InputError, match="changed or moved"):
        hf.generate(IDS, max_new_tokens=20, custom_generate=tied)
    hf.double()
    expected = hf.generate(IDS, max_new_tokens=20)
    assert torch.equal(hf.generate(IDS, max_new_tokens=20, custom_generate=free), expected)


def _hooked(hf: Any) -> Any:
    return hf.model.layers[2].mlp.register_forward_hook(lambda module, inputs, output: output * 0.5)


def _prehooked(hf: Any) -> Any:
    return hf.model.layers[3].register_forward_pre_hook(lambda module, inputs: None)


def _replaced(hf: Any) -> Any:
    mlp = hf.model.layers[5].mlp
    mlp.forward = types.MethodType(lambda self, x: x * 0, mlp)
    return types.SimpleNamespace(remove=lambda: delattr(mlp, "forward"))


@pytest.mark.parametrize(
    ("touch", "words"),
    [
        (_hooked, r"model\.layers\.2\.mlp has a forward hook"),
        (_prehooked, r"model\.layers\.3 has a forward pre-hook"),
        (_replaced, r"model\.layers\.5\.mlp has a forward of its own"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_modules_that_do_more_than_their_class_says_are_refused(touch: Any, words: str, given: bool) -> None:
    layered = agreeing_model()
    hf, method = layered.hf, huggingface(None, model=layered if given else None)
    expected = hf.generate(IDS, max_new_tokens=9, custom_generate=method)
    handle = touch(hf)
    with pytest.raises(InputError, match=words):
        hf.generate(IDS, max_new_tokens=9, custom_generate=method)
    handle.remove()
    assert torch.equal(hf.generate(IDS, max_new_tokens=9, custom_generate=method), expected)


def test_what_transformers_itself_leaves_on_a_model_is_no_obstacle(hf: Any, method: CustomGenerate) -> None:
    hf(IDS, output_hidden_states=True)  # leaves hooks that only look
    assert any(module._forward_hooks for module in hf.modules())
    hf.forward = torch.compile(hf.forward)
    try:
        assert hf.generate(IDS, max_new_tokens=3, custom_generate=method).shape == (1, 6)
    finally:
        del hf.forward


@pytest.mark.parametrize("change", ["rotary", "layers"])
@pytest.mark.parametrize("given", [False, True])
def test_changed_buffers_and_layers_are_noticed(change: str, given: bool) -> None:
    layered = agreeing_model()
    hf, method = layered.hf, huggingface(None, model=layered if given else None)
    before = hf.generate(IDS, max_new_tokens=20, custom_generate=method)
    if change == "rotary":
        hf.model.rotary_emb.inv_freq.mul_(0.25)
    else:
        layers = hf.model.layers
        hf.model.layers = torch.nn.ModuleList([layers[0], layers[2], layers[1], *layers[3:]])
        for index, layer in enumerate(hf.model.layers):
            layer.self_attn.layer_idx = index
    expected = hf.generate(IDS, max_new_tokens=20)
    assert not torch.equal(before, expected)
    if given:
        with pytest.raises(InputError, match="changed or moved"):
            hf.generate(IDS, max_new_tokens=20, custom_generate=method)
    else:
        assert torch.equal(hf.generate(IDS, max_new_tokens=20, custom_generate=method), expected)


def test_a_layer_in_two_places_is_noticed() -> None:
    hf = agreeing_model().hf
    layered = opened(hf)
    hf.model.layers[4] = hf.model.layers[3]
    assert opened(hf) is not layered


def test_wrapped_heads_are_refused() -> None:
    hf = agreeing_model().hf
    hf.lm_head = torch.nn.Sequential(hf.lm_head)
    with pytest.raises(InputError, match="head is a Sequential"):
        hf.generate(IDS, max_new_tokens=2, custom_generate=huggingface(None))


def test_a_controller_in_the_place_of_a_method_is_refused(hf: Any) -> None:
    network = QNetwork([(np.zeros((1, 2), np.float32), np.zeros(2, np.float32))])
    for controller in (StaticController(4, 4), QController(network, ("entropy",), (4,), 6, 4)):
        with pytest.raises(InputError, match=r"custom_generate=huggingface\(controller\)"):
            hf.generate(IDS, max_new_tokens=5, custom_generate=controller)


def test_arguments_are_checked_at_once(model: LayeredModel) -> None:
    with pytest.raises(InputError, match="model: a LlamaForCausalLM"):
        huggingface(None, model=model.hf)
    with pytest.raises(InputError, match="seed"):
        huggingface(None, seed=1.5)  # type: ignore[arg-type]


def test_a_failed_call_leaves_no_results(hf: Any, method: CustomGenerate) -> None:
    hf.generate(IDS, max_new_tokens=5, custom_generate=method)
    assert method.results
    with pytest.raises(InputError):
        hf.generate(IDS, max_new_tokens=5, num_beams=2, custom_generate=method)
    assert method.results == []


def test_a_policy_of_other_weights_is_told_of(hf: Any, model: LayeredModel) -> None:
    network = QNetwork([(np.zeros((1, 2), np.float32), np.zeros(2, np.float32))])
    meta = {"model": {"name": "another", "weights_hash": "0123456789abcdef"}}
    policy = QController(network, ("entropy",), (4,), 6, 4, meta=meta)
    with pytest.warns(UserWarning, match=f"0123456789abcdef.*{model.weights_hash()}"):
        hf.generate(IDS, max_new_tokens=3, custom_generate=huggingface(policy, model=model))


def test_models_that_cannot_be_decoded_are_refused(hf: Any, method: CustomGenerate) -> None:
    other = agreeing_model().hf
    with pytest.raises(InputError, match="not the LayeredModel"):
        other.generate(IDS, custom_generate=method)
    with pytest.raises(InputError, match=r"model\.eval"):
        other.train().generate(IDS, custom_generate=huggingface(None))
    other.eval()

    class Adapted(torch.nn.Linear):
        """As LoRA puts in the place of a linear map."""

    other.model.layers[2].mlp.up_proj = Adapted(48, 80, bias=False)
    with pytest.raises(InputError, match=r"layers\.2\.mlp\.up_proj is a Adapted"):
        other.generate(IDS, custom_generate=huggingface(None))


def test_a_list_of_processors_of_ones_own_with_sampling(hf: Any, method: CustomGenerate) -> None:
    cold = LogitsProcessorList([TemperatureLogitsWarper(1e-4)])
    options = {"max_new_tokens": 20, "do_sample": True, "logits_processor": cold, "custom_generate": method}
    assert torch.equal(hf.generate(IDS, **options), hf.generate(IDS, max_new_tokens=20))
