"""The trained decoder, as Hugging Face knows it and as the compiled layers that train it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sde_gym.models import corpus
from sde_gym.models.lm_settings import LMTrainingSettings

#: Weights of one layer in the order in which `layer` takes them.
LAYER_WEIGHTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip


def configuration(settings: LMTrainingSettings) -> Any:
    """The `LlamaConfig` of these settings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.mlp_width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        bos_token_id=corpus.END_OF_TEXT_ID,
        eos_token_id=corpus.END_OF_TEXT_ID,
        rms_norm_eps=1e-5,
    )


def new_model(settings: LMTrainingSettings) -> Any:
    """A `LlamaForCausalLM` with random weights, by torch's global generator."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(configuration(settings))
    with torch.no_grad():  # residual branches start small, so that deep stacks train stably
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_((2 * settings.layers) ** -0.5)
    return model


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).bfloat16()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Written on halves: torch 2.13's inductor gives NaN gradients for the usual
    # `x * cos + cat([-right, left]) * sin` followed by the repeat of grouped heads.
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def layer(  # the nine weights of `LAYER_WEIGHTS`, float32, cast inside the compiled graph
    hidden: Tensor, norm1: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, norm2: Tensor,
    gate: Tensor, up: Tensor, down: Tensor, cos: Tensor, sin: Tensor, mask: Tensor,
    heads: int, kv_heads: int,
) -> Tensor:  # fmt: skip
    """One Llama layer in bfloat16. Attention is spelled out: at these lengths the compiled
    softmax is faster on CPUs than the fused kernel's backward pass."""
    rows, length, _ = hidden.shape
    x = _rms_norm(hidden, norm1)
    query = F.linear(x, q.bfloat16()).view(rows, length, heads, -1).transpose(1, 2)
    key = F.linear(x, k.bfloat16()).view(rows, length, kv_heads, -1).transpose(1, 2)
    value = F.linear(x, v.bfloat16()).view(rows, length, kv_heads, -1).transpose(1, 2)
    query = _rotate(query, cos, sin) * query.shape[-1] ** -0.5
    key = _rotate(key, cos, sin).repeat_interleave(heads // kv_heads, 1)
    value = value.repeat_interleave(heads // kv_heads, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() + mask
    mixed = torch.matmul(torch.softmax(scores, -1).bfloat16(), value)
    hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), o.bfloat16())
    x = _rms_norm(hidden, norm2)
    x = F.silu(F.linear(x, gate.bfloat16())) * F.linear(x, up.bfloat16())
    return hidden + F.linear(x, down.bfloat16())


def losses(
    final: Tensor, early: Tensor, norm: Tensor, head: Tensor, targets: Tensor, counted: Tensor,
    distillation: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(final losses, early-exit losses), one a row of the batch, nats per token.

    `counted` (rows, length) says with 1 which tokens an early exit is trained on.
    """
    weight = head.bfloat16()
    log_final = torch.log_softmax(F.linear(_rms_norm(final, norm), weight).float(), -1)
    log_early = torch.log_softmax(F.linear(_rms_norm(early, norm), weight).float(), -1)
    true_final = log_final.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    true_early = log_early.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    soft = (log_final.detach().exp() * log_early).sum(-1)
    early_loss = -(1 - distillation) * true_early - distillation * soft
    return -true_final.mean(-1), (early_loss * counted).sum(-1) / counted.sum(-1)
