"""Tiny random-weight transformers models: one per architecture and per option that matters.

The weights are drawn much wider than at the start of a training, biases and norms
included. So every part of a model has its say in the argmax, greedy texts do not fall into
a loop at once, and two best logits hardly ever tie within rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 300
LAYERS = 4
WINDOW = 16  # of the variants with sliding attention; tests decode past it

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,  # a random model would stop anywhere; tests of stopping set it
    "pad_token_id": None,
}


def _build(architecture: Any, config: Any, seed: int, attention: str = "sdpa") -> Any:
    """A model with its weights drawn afresh from `seed`, in evaluation mode."""
    # Tied embeddings that dominate the residual stream would make every text repeat its last token;
    # Gemma multiplies them by hidden_size ** 0.5.
    tied_spread = 0.2 if "gemma" in config.model_type else 2.0
    embedding_spread = tied_spread * config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0
    model = architecture._from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:  # norms, around what they are at the start, and biases
                parameter.add_(noise * (0.5 if name.endswith("bias") else 0.2))
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter.copy_(noise * embedding_spread)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    model.requires_grad_(False)
    return model.eval()


def llama(seed: int = 0, **options: Any) -> Any:
    """Llama; `options` override the configuration."""
    return _build(LlamaForCausalLM, LlamaConfig(**{**_SHAPE, **options}), seed)


def mistral(seed: int = 0, **options: Any) -> Any:
    """Mistral, with a sliding window in every layer unless overridden."""
    return _build(MistralForCausalLM, MistralConfig(**{**_SHAPE, "sliding_window": WINDOW, **options}), seed)


def qwen2(seed: int = 0, **options: Any) -> Any:
    """Qwen2: biases on query, key and value."""
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    return _build(Qwen2ForCausalLM, Qwen2Config(**{**shape, **options}), seed)


def qwen3(seed: int = 0, **options: Any) -> Any:
    """Qwen3: norms on queries and keys; heads wider than the hidden size."""
    return _build(Qwen3ForCausalLM, Qwen3Config(**{**_SHAPE, "head_dim": 16, **options}), seed)


def gemma(seed: int = 0, **options: Any) -> Any:
    """Gemma 1: scaled embeddings, norms around zero."""
    return _build(GemmaForCausalLM, GemmaConfig(**{**_SHAPE, **options}), seed)


def gemma2(seed: int = 0, **options: Any) -> Any:
    """Gemma 2: every other layer slides, attention scores and logits are soft-capped."""
    settings = {
        **_SHAPE,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 12,
        **options,
    }
    return _build(Gemma2ForCausalLM, Gemma2Config(**settings), seed, attention="eager")


def gemma3(seed: int = 0, **options: Any) -> Any:
    """Gemma 3 (text): sliding layers with rotary positions of their own, query and key norms."""
    settings = {
        **_SHAPE,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "query_pre_attn_scalar": 12,
        **options,
    }
    return _build(Gemma3ForCausalLM, Gemma3TextConfig(**settings), seed)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}

#: name -> factory of a supported model; the same call gives the same weights. The seeds are such
#: that no two best logits along the texts of the tests come close (`test_exactness` checks it).
VARIANTS: dict[str, partial[Any]] = {
    "llama-tied": partial(llama, 1, tie_word_embeddings=True),
    "llama-untied": partial(llama, 0, tie_word_embeddings=False),
    "llama-biases": partial(llama, 0, attention_bias=True, mlp_bias=True),
    "llama-equal-heads": partial(llama, 0, num_key_value_heads=4),
    "llama-one-kv-head": partial(llama, 0, num_key_value_heads=1),
    "llama-gelu": partial(llama, 1, hidden_act="gelu"),
    "llama-rope-llama3": partial(llama, 0, rope_parameters=_LLAMA3_ROPE),
    "llama-rope-yarn": partial(llama, 0, rope_parameters=_YARN_ROPE),
    "llama-rope-linear": partial(llama, 1, rope_parameters=_LINEAR_ROPE),
    "mistral-window": partial(mistral, 1),
    "mistral-unlimited": partial(mistral, 0, sliding_window=None),
    "qwen2": partial(qwen2, 0),
    "qwen2-windows": partial(qwen2, 2, **_QWEN_WINDOWS),
    "qwen3": partial(qwen3, 1, tie_word_embeddings=True),
    "qwen3-windows": partial(qwen3, 1, **_QWEN_WINDOWS),
    "gemma": partial(gemma, 2),
    "gemma2": partial(gemma2, 1),
    "gemma3": partial(gemma3, 4),
}

#: The variants in which a window hides something, without that window.
UNLIMITED: dict[str, partial[Any]] = {
    "mistral-window": partial(VARIANTS["mistral-window"], sliding_window=None),
    "qwen2-windows": partial(VARIANTS["qwen2-windows"], use_sliding_window=False),
    "qwen3-windows": partial(VARIANTS["qwen3-windows"], use_sliding_window=False),
    "gemma2": partial(VARIANTS["gemma2"], sliding_window=200),
    "gemma3": partial(VARIANTS["gemma3"], sliding_window=200),
}


def gpt2() -> Any:
    """An older decoder with learned positions: not supported."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2)).eval()


def t5() -> Any:
    """An encoder-decoder: not supported."""
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T5ForConditionalGeneration(config).eval()


def mixtral() -> Any:
    """A mixture of experts: not supported."""
    return _build(MixtralForCausalLM, MixtralConfig(**{**_SHAPE, "num_local_experts": 2}), 0)
