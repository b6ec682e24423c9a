"""Shared by the tests of decoding: a model whose shallow layers often agree."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sde_gym.models import LayeredModel


def agreeing_model(
    eos_token_id: int | list[int] | None = None, context: int = 256, compact: list[int] | None = None
) -> LayeredModel:
    """Six random layers, each later one weaker: depths 1 to 5 agree with 6 more and more often."""
    torch.manual_seed(3)
    hf = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
            tie_word_embeddings=False,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=0,
        )
    ).eval()
    with torch.no_grad():
        for index, layer in enumerate(hf.model.layers):
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(0.35**index)
    return LayeredModel(hf, name="agreeing", compact_vocabulary=compact)


@pytest.fixture(scope="session")
def model() -> LayeredModel:
    """Never ends a text."""
    return agreeing_model()
