"""The common decoder family, run by calling torch functions straight on the weights.

RMSNorm, rotary positions, grouped-query attention, gated MLP; optional biases and
query/key norms: Llama, Mistral, Qwen2, Qwen3, SmolLM. A small model at batch one spends
most of its time between operations, so there are few of them here: query, key and value
share one product, gate and up another, and the residual is added inside the projection.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.models.slots import Rows, SlotCache

#: `model_type`s whose layers are of this family.
LEAN_FAMILY = ("llama", "mistral", "qwen2", "qwen3")

_ROPE_TYPES = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # those whose table does not depend on the text's length


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        width = weight.shape[-1]
        self.weight, self.epsilon, self.dtype = weight, epsilon, weight.dtype
        self._scaled = weight.detach() * width**0.5
        self._floor = weight.new_tensor((width * epsilon) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype."""
        if self.dtype is torch.float32:
            # With the factor sqrt(width) moved to the numerator it is four small operations: half
            # the time of `F.rms_norm` for a few rows on a CPU.
            root = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x / torch.hypot(root, self._floor) * self._scaled
        wide = x.float()  # as transformers computes it
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(self.dtype)


class _Layer(NamedTuple):
    norm1: RMSNorm
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor  # transposed view, for addmm
    out_bias: Tensor | None
    norm2: RMSNorm
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor  # transposed view
    down_bias: Tensor | None
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    window: int | None
    attends: bool = True  # False: the attention sublayer is left out
    feeds: bool = True  # False: the MLP sublayer is left out


class LeanStack:
    """The layers of one model of the family.

    The fused weights replace the storage of the transformers model's own parameters, which
    become views of them: both can be used, and nothing is stored twice.
    """

    def __init__(self, hf: Any) -> None:
        config = hf.config
        body = hf.model
        attention = body.layers[0].self_attn
        self.embedding: Tensor = body.embed_tokens.weight
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_width = attention.head_dim
        self.epsilon: float = config.rms_norm_eps
        self.activation: Callable[[Tensor], Tensor] = body.layers[0].mlp.act_fn
        if isinstance(self.activation, torch.nn.SiLU) or config.hidden_act == "silu":
            self.activation = F.silu
        self.scaling: float = attention.scaling
        self._rotary = body.rotary_emb
        rope_type = getattr(body.rotary_emb, "rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            raise InputError(
                f"rotary positions of type {rope_type!r} are not supported (they depend on the length); "
                f"supported: {', '.join(_ROPE_TYPES)}"
            )
        self._cos, self._sin = self.rotary_table(256)
        if config.model_type == "llama" and getattr(config, "sliding_window", None) is not None:
            # transformers' own prefill and cache disagree there about whether it applies
            raise InputError(
                f"a Llama configuration with sliding_window={config.sliding_window} is ambiguous; "
                "remove the entry"
            )
        self.layers = [self._fuse(layer) for layer in body.layers]
        hf.register_state_dict_post_hook(_make_contiguous)
        self.window_kinds = tuple(dict.fromkeys(layer.window for layer in self.layers))

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = _fused([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up, gate_up_bias = _fused([mlp.gate_proj, mlp.up_proj])
        query_norm = getattr(attention, "q_norm", None)
        key_norm = getattr(attention, "k_norm", None)
        if getattr(attention, "layer_type", None) is None:  # Llama has no windows, Mistral one for all
            window = getattr(attention.config, "sliding_window", None)
        else:
            window = attention.sliding_window
        return _Layer(
            RMSNorm(layer.input_layernorm.weight, self.epsilon), qkv, qkv_bias,
            _fused([attention.o_proj])[0].t(), attention.o_proj.bias,
            RMSNorm(layer.post_attention_layernorm.weight, self.epsilon), gate_up, gate_up_bias,
            _fused([mlp.down_proj])[0].t(), mlp.down_proj.bias,
            None if query_norm is None else RMSNorm(query_norm.weight, self.epsilon),
            None if key_norm is None else RMSNorm(key_norm.weight, self.epsilon),
            window,
        )  # fmt: skip

    def rotary_table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions, (length, 1, head_width); sin carries the sign of the rotated half."""
        positions = torch.arange(length, device=self.device).unsqueeze(0)
        cos, sin = self._rotary(self.embedding[:1].unsqueeze(0), positions)
        if cos.shape[-1] != self.head_width:
            raise InputError(
                f"partial rotary positions are not supported "
                f"({cos.shape[-1]} of {self.head_width} dimensions)"
            )
        sign = torch.ones_like(sin)
        sign[..., : self.head_width // 2] = -1
        return cos[0].unsqueeze(1), (sin * sign)[0].unsqueeze(1)

    def new_cache(self, capacity: int) -> SlotCache:
        """An empty cache for `capacity` slots."""
        return SlotCache(len(self.layers), self.kv_heads, self.head_width, self.dtype, self.device, capacity)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> LeanStack:
        """The same stack, weights shared, that leaves out the sublayers of these layers (from 0).

        What is left out of a layer is its residual branch: the states pass unchanged, and a skipped
        attention stores no keys and values.
        """
        skipping = copy.copy(self)
        skipping.layers = [
            layer._replace(attends=index not in attention, feeds=index not in mlp)
            for index, layer in enumerate(self.layers)
        ]
        return skipping

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """(rows,) token ids -> (rows, hidden_size)."""
        return F.embedding(torch.tensor(tokens, device=self.device), self.embedding)

    def run(self, hidden: Tensor, first: int, stop: int, rows: Rows, cache: SlotCache) -> Tensor:
        """Run `rows` through layers first..stop-1, storing their keys and values.

        Args:
            hidden: (rows, hidden_size) states at depth `first`.

        Returns:
            (rows, hidden_size) states at depth `stop`.
        """
        if cache.capacity > self._cos.shape[0]:
            self._cos, self._sin = self.rotary_table(cache.capacity)
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        count, total, slots = hidden.shape[0], rows.total, rows.slots
        grouped = self.heads != self.kv_heads
        for index, layer in enumerate(self.layers[first:stop], first):
            if layer.attends:
                query, key, value = self.project(layer, hidden, cos, sin)
                keys, values = cache.keys[index], cache.values[index]
                keys[:, slots], values[:, slots] = key.transpose(0, 1), value.transpose(0, 1)
                mask = rows.masks[layer.window]
                mixed = F.scaled_dot_product_attention(
                    query.transpose(0, 1).unsqueeze(0),
                    keys[:, :total].unsqueeze(0),
                    values[:, :total].unsqueeze(0),
                    attn_mask=mask,
                    is_causal=rows.causal and mask is None and count > 1,
                    scale=self.scaling,
                    enable_gqa=grouped,
                )
                hidden = self.add_attention(layer, hidden, mixed[0].transpose(0, 1).reshape(count, -1))
            if layer.feeds:
                hidden = self.add_mlp(layer, hidden)
        return hidden

    def project(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (rows, heads, head_width), keys and values (rows, kv_heads, head_width), turned.

        Args:
            layer: one of `layers`.
            hidden: (rows, hidden_size), its input.
            cos, sin: rows of `rotary_table`, one a row.
        """
        heads, kv_heads, width = self.heads, self.kv_heads, self.head_width
        qkv = F.linear(layer.norm1(hidden), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(hidden.shape[0], heads + 2 * kv_heads, width)
        turned = qkv[:, : heads + kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = torch.cat((layer.query_norm(turned[:, :heads]), layer.key_norm(turned[:, heads:])), 1)
        swapped = torch.roll(turned, width // 2, -1)
        turned = torch.addcmul(turned * cos, swapped, sin)
        return turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :]

    @staticmethod
    def add_attention(layer: _Layer, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The states (rows, hidden_size) behind attention, whose heads gave `mixed` (rows, heads * width)."""
        hidden = torch.addmm(hidden, mixed, layer.out)
        return hidden if layer.out_bias is None else hidden + layer.out_bias

    def add_mlp(self, layer: _Layer, hidden: Tensor) -> Tensor:
        """The states (rows, hidden_size) behind the gated MLP."""
        x = F.linear(layer.norm2(hidden), layer.gate_up, layer.gate_up_bias)
        gate, up = x.chunk(2, -1)
        hidden = torch.addmm(hidden, self.activation(gate) * up, layer.down)
        return hidden if layer.down_bias is None else hidden + layer.down_bias


def _fused(projections: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Stack the weights (and biases) of linear maps of one input; the originals become views."""
    weight = _by_input(torch.cat([p.weight.detach() for p in projections]))
    biases = [p.bias for p in projections]
    bias = None if any(b is None for b in biases) else torch.cat([b.detach() for b in biases])
    start = 0
    for projection in projections:
        stop = start + projection.weight.shape[0]
        projection.weight.data = weight[start:stop]
        if bias is not None:
            projection.bias.data = bias[start:stop]
        start = stop
    return weight, bias


def _make_contiguous(module: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """A state dict as others expect it: `save_pretrained` takes contiguous tensors only."""
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            state[name] = tensor.contiguous()


def _by_input(weight: Tensor) -> Tensor:
    """The same weight (outputs, inputs), in float32 on a CPU stored with its outputs side by side.

    One row through a small matrix whose weights are in cache then takes half the time.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return weight.t().contiguous().t()
