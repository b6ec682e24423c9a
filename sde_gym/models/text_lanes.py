"""Many texts written at once, one token of each a step: for data, where throughput is all that counts.

Every text has a *lane*, a row of the KV cache with a length of its own. A step costs about what its matrix
products cost, so hundreds of lanes make good use of a CPU; a lane whose text has ended takes up another.
Speculative decoding keeps its tokens in a tree instead, see `sde_gym.models.sequence`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.lean import LeanStack

#: Slots looked at are a multiple of this, so that shapes seldom change.
_STRIDE = 32


class TextLanes:
    """The KV caches of n lanes of at most `capacity` tokens.

    Args:
        model: of the Llama family (`sde_gym.models.lean`), without a sliding window.
        lanes: n, at least 1.
        capacity: most tokens of a lane.

    Attributes:
        lengths: int64 (n,), tokens that each lane holds.

    Raises:
        InputError: another architecture, a window, or a capacity above the model's context.
    """

    def __init__(self, model: LayeredModel, lanes: int, capacity: int) -> None:
        stack = model.stack
        if not isinstance(stack, LeanStack) or stack.window_kinds != (None,):
            raise InputError(
                f"{model.name}: many texts at once need a model of the Llama family without a sliding window"
            )
        if lanes < 1 or not 1 <= capacity <= model.context_limit:
            raise InputError(
                f"lanes {lanes} must be at least 1, and tokens of a text {capacity} lie in "
                f"1..{model.context_limit}, the context of {model.name}"
            )
        self._stack, self._capacity = stack, capacity
        shape = (lanes, stack.kv_heads, capacity, stack.head_width)
        self._keys = [torch.zeros(shape, dtype=stack.dtype, device=stack.device) for _ in stack.layers]
        self._values = [torch.zeros(shape, dtype=stack.dtype, device=stack.device) for _ in stack.layers]
        self._positions = torch.arange(capacity, device=stack.device)
        self._cos, self._sin = stack.rotary_table(capacity)
        self.lengths = torch.zeros(lanes, dtype=torch.int64, device=stack.device)

    def restart(self, lanes: Sequence[int], length: int = 0) -> None:
        """Cut these lanes to their first `length` tokens."""
        chosen = torch.tensor(list(lanes), device=self.lengths.device)
        self.lengths = self.lengths.index_fill(0, chosen, length)

    def keep(self, lanes: Sequence[int]) -> None:
        """Drop all other lanes; these are lanes 0, 1, ... from now on."""
        chosen = torch.tensor(list(lanes), device=self.lengths.device)
        for buffers in (self._keys, self._values):
            for layer, stored in enumerate(buffers):
                buffers[layer] = stored[chosen]
        self.lengths = self.lengths[chosen]

    @torch.inference_mode()
    def step(self, tokens: Tensor, depths: Sequence[int]) -> dict[int, Tensor]:
        """Append a token to every lane and run it through all layers.

        Args:
            tokens: int64 (n,).
            depths: whose hidden states are wanted.

        Returns:
            Hidden states at these depths, (n, hidden_size).

        Raises:
            InputError: a lane is full.
        """
        stack = self._stack
        count = len(tokens)
        longest = int(self.lengths.max()) + 1
        if longest > self._capacity:
            raise InputError(f"a lane holds {self._capacity} tokens already, its capacity")
        total = min(self._capacity, -(-longest // _STRIDE) * _STRIDE)
        seen = self._positions[:total] <= self.lengths.unsqueeze(1)
        mask = torch.zeros((count, 1, 1, total), dtype=stack.dtype, device=stack.device)
        mask.masked_fill_(~seen[:, None, None], -torch.inf)
        lane, places = torch.arange(count, device=stack.device), self.lengths
        cos, sin = self._cos[places], self._sin[places]
        hidden = F.embedding(tokens, stack.embedding)
        found = {}
        for index, layer in enumerate(stack.layers):
            query, key, value = stack.project(layer, hidden, cos, sin)
            keys, values = self._keys[index], self._values[index]
            keys[lane, :, places], values[lane, :, places] = key, value
            mixed = F.scaled_dot_product_attention(
                query.unsqueeze(2), keys[:, :, :total], values[:, :, :total], attn_mask=mask,
                scale=stack.scaling, enable_gqa=stack.heads != stack.kv_heads,
            )  # fmt: skip
            hidden = stack.add_attention(layer, hidden, mixed.reshape(count, -1))
            hidden = stack.add_mlp(layer, hidden)
            if index + 1 in depths:
                found[index + 1] = hidden
        self.lengths = places + 1
        return found
