"""Any other supported architecture, run through its own transformers layer modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sde_gym.models.slots import Rows, SlotCache

#: `model_type`s whose decoder layers take (hidden states, position embeddings, 4-D mask, cache).
MODULAR_FAMILY = ("gemma", "gemma2", "gemma3_text")


class _CacheView:
    """The one method of a transformers cache that a layer calls, writing into KV slots."""

    def __init__(self) -> None:
        self.cache: SlotCache | None = None
        self.rows: Rows | None = None

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store (1, kv_heads, rows, width) and return all slots so far, (1, kv_heads, total, width)."""
        assert self.cache is not None and self.rows is not None
        stored_keys, stored_values = self.cache.keys[layer], self.cache.values[layer]
        stored_keys[:, self.rows.slots] = keys[0]
        stored_values[:, self.rows.slots] = values[0]
        total = self.rows.total
        return stored_keys[:, :total].unsqueeze(0), stored_values[:, :total].unsqueeze(0)


class ModularStack:
    """The layers of a model whose architecture `LeanStack` does not know."""

    def __init__(self, hf: Any) -> None:
        self.config = hf.config
        self.body = hf.model
        self.layers: list[Callable[..., Any]] = list(hf.model.layers)
        weight: Tensor = hf.model.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device
        attention = hf.model.layers[0].self_attn
        self.kv_heads = hf.config.num_key_value_heads
        self.head_width = attention.head_dim
        kinds = getattr(hf.config, "layer_types", None) or ["full_attention"] * len(self.layers)
        self.layer_kinds: list[str] = list(kinds)
        self.windows: list[int | None] = [
            hf.config.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ]
        self.window_kinds = tuple(dict.fromkeys(self.windows))
        self._rotary_by_kind = "layer_type" in inspect.signature(hf.model.rotary_emb.forward).parameters
        self._view = _CacheView()

    def new_cache(self, capacity: int) -> SlotCache:
        """An empty cache for `capacity` slots."""
        return SlotCache(len(self.layers), self.kv_heads, self.head_width, self.dtype, self.device, capacity)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> ModularStack:
        """As `LeanStack.without`."""
        skipping = copy.copy(self)
        skipping._view = _CacheView()
        skipping.layers = [
            _without(layer, index in attention, index in mlp) for index, layer in enumerate(self.layers)
        ]
        return skipping

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """(rows,) token ids -> (rows, hidden_size), scaled as the model scales them."""
        embedded: Tensor = self.body.embed_tokens(torch.tensor([list(tokens)], device=self.device))[0]
        return embedded

    def run(self, hidden: Tensor, first: int, stop: int, rows: Rows, cache: SlotCache) -> Tensor:
        """As `LeanStack.run`."""
        positions = rows.positions
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=self.device)
        positions = positions.unsqueeze(0)
        states = hidden.unsqueeze(0)
        if self._rotary_by_kind:
            rotary = {k: self.body.rotary_emb(states, positions, k) for k in dict.fromkeys(self.layer_kinds)}
        else:
            shared = self.body.rotary_emb(states, positions)
            rotary = dict.fromkeys(self.layer_kinds, shared)
        self._view.cache, self._view.rows = cache, rows
        for index in range(first, stop):
            output = self.layers[index](
                states,
                position_embeddings=rotary[self.layer_kinds[index]],
                attention_mask=self._mask(rows, self.windows[index]),
                position_ids=positions,
                cache=self._view,
            )
            states = output[0] if isinstance(output, tuple) else output
        self._view.cache = self._view.rows = None  # a finished text's keys and values may go
        return states[0]

    def _mask(self, rows: Rows, window: int | None) -> Tensor:
        """(1, 1, rows, total) additive; always explicit, since modules guess causality from shapes."""
        mask = rows.masks[window]
        if mask is None:
            count = rows.total if rows.causal else 1
            mask = torch.zeros(count, rows.total, dtype=self.dtype, device=self.device)
            if rows.causal:
                mask = torch.full_like(mask, -torch.inf).triu_(1)
        return mask.unsqueeze(0).unsqueeze(0)


def _without(layer: Any, attention: bool, mlp: bool) -> Callable[..., Any]:
    """A callable that takes what a layer takes, and leaves out its attention, its MLP or both."""
    if attention and mlp:
        return lambda states, **_: states
    if attention:
        return partial(_feed, layer)
    return partial(_attend, layer) if mlp else layer


def _attend(layer: Any, states: Tensor, **arguments: Any) -> Tensor:
    """The first half of a Gemma layer's forward: states plus their attention."""
    mixed = layer.self_attn(hidden_states=layer.input_layernorm(states), **arguments)[0]
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 2 and 3 norm both ends of a branch
        mixed = layer.post_attention_layernorm(mixed)
    return states + mixed


def _feed(layer: Any, states: Tensor, **_: Any) -> Tensor:
    """The second half: states plus their MLP."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return states + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(states)))
    return states + layer.mlp(layer.post_attention_layernorm(states))
