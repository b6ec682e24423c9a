"""The KV cache: a growing set of slots, each the place of one token in a tree of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of every slot at every layer, in buffers that double when full.

    `keys[layer]` and `values[layer]` have shape (kv_heads, capacity, head_width). A slot's
    entry at a layer is valid once its token has been run through that layer; forgetting
    a slot needs no work here, since a later token simply overwrites it.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
    ) -> None:
        self.capacity = capacity
        shape = (kv_heads, capacity, head_width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def grow(self, capacity: int) -> None:
        """Reallocate for `capacity` slots, keeping what is stored."""
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                new = torch.zeros((old.shape[0], capacity, old.shape[2]), dtype=old.dtype, device=old.device)
                new[:, : self.capacity] = old
                buffers[layer] = new
        self.capacity = capacity

    def keep(self, slots: Tensor) -> None:
        """Move these slots, int64 (n,), to the places 0..n-1; what else there was is forgotten."""
        count = len(slots)
        for buffers in (self.keys, self.values):
            for stored in buffers:
                stored[:, :count] = stored[:, slots]


@dataclass(slots=True)
class Rows:
    """The tokens that one pass runs through some layers, and what each of them may see."""

    slots: slice | Tensor  # where their keys and values go: a slice, or int64 (rows,)
    positions: slice | Tensor  # their positions in the text, likewise
    total: int  # attention spans slots 0..total-1
    #: Additive mask by attention window (None = unlimited): (rows, total), or None where
    #: every row sees every slot. For `causal` rows without a binding window it is None too.
    masks: dict[int | None, Tensor | None]
    causal: bool = False  # the rows are slots 0..total-1 themselves, in order


def chain_mask(
    first: int, total: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive causal mask of rows first..total-1 of a chain, or None where nothing is hidden.

    Args:
        first, total: the rows are slots first..total-1, positions equal slots.
        window: a row at position p sees positions p - window + 1 .. p; None = all up to p.

    Returns:
        (total - first, total), 0 where visible and -inf elsewhere.
    """
    rows = total - first
    limited = window is not None and total > window
    if rows == 1 and not limited:
        return None
    mask = torch.full((rows, total), -torch.inf, dtype=dtype, device=device).triu_(first + 1)
    if limited:
        assert window is not None
        hidden = torch.full((rows, total), -torch.inf, dtype=dtype, device=device).tril_(first - window)
        mask = torch.minimum(mask, hidden)  # 0 where visible in both
    return mask


def tree_mask(
    ancestry: Tensor, positions: Tensor, slots: Tensor, total: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Additive mask of `slots` in a tree: a token sees itself and its ancestors.

    Args:
        ancestry: bool (capacity, capacity), row s marks s and its ancestors.
        positions: int64 (capacity,) position of every slot.
        slots: int64 (rows,).
        window: as in `chain_mask`, measured in positions.

    Returns:
        (rows, total), 0 where visible and -inf elsewhere.
    """
    visible = ancestry[slots, :total]
    if window is not None:
        distance = positions[slots].unsqueeze(1) - positions[:total].unsqueeze(0)
        visible = visible & (distance < window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=ancestry.device)
    return mask.masked_fill_(~visible, -torch.inf)
