"""The depth frontier: tokens in a tree, each run through as many layers as was asked for.

Two verbs carry every method of this package: `advance` brings pending tokens up to a depth,
`score` asks the exit head there. Drafting leaves tokens at a shallow depth; verification
advances all of them to L in one pass, so that no layer runs twice for a token.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sde_gym.checks import token_ids
from sde_gym.errors import InputError
from sde_gym.models.slots import Rows, SlotCache, chain_mask, tree_mask

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel


class Sequence:
    """Tokens of one text (or of several, or of a tree of continuations) in KV slots.

    A slot has a token, a position, a parent slot (-1 for a root) and the depth it has been
    run to; a token attends to itself and its ancestors. Slots are numbered in order of
    arrival. While every slot's parent is the slot before it the set is a *chain*, which is
    the fast path; branches and several roots are allowed at any time.

    Invariant: no token is deeper than its parent, so every key and value that a pass reads
    exists and is exact.
    """

    def __init__(self, model: LayeredModel, capacity: int = 256) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.positions: list[int] = []
        self.depths: list[int] = []
        self._settled = 0  # leading slots known to be at depth L
        self._chain_length = 0  # leading slots that form a chain
        self._cache: SlotCache = model.stack.new_cache(capacity)
        self._hidden = torch.zeros(capacity, model.hidden_size, dtype=model.dtype, device=model.device)
        self._ancestry: Tensor | None = None  # bool (capacity, capacity), once there is a branch
        self._position_table: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Number of slots."""
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every slot's parent is the slot before it."""
        return self._chain_length == len(self.tokens)

    # ------------------------------------------------------------------ verbs

    @torch.inference_mode()
    def append(self, tokens: Sequence_[int], parent: int | None = None) -> range:
        """Add a run of tokens at depth 0, each the child of the one before it.

        Args:
            tokens: token ids.
            parent: slot of the first token's parent; -1 starts a new root at position 0;
                None continues after the newest slot.

        Returns:
            The new slots.

        Raises:
            InputError: no token ids, one outside the vocabulary, an unknown parent, or a position
                beyond the model's context limit.
        """
        first = len(self.tokens)
        # Decoding appends one int after the other: that costs a look at its type and no more.
        if type(tokens) is not list or len(tokens) != 1 or type(tokens[0]) is not int:
            tokens = token_ids("tokens", tokens)
        if not tokens:
            return range(first, first)
        if min(tokens) < 0 or max(tokens) >= self.model.vocab_size:
            raise InputError(
                f"token ids must lie in 0..{self.model.vocab_size - 1}, got {min(tokens)}..{max(tokens)}"
            )
        parent = first - 1 if parent is None else parent
        if not -1 <= parent < first:
            raise InputError(f"parent slot {parent} does not exist; there are {first} slots (-1 = new root)")
        position = 0 if parent == -1 else self.positions[parent] + 1
        limit = self.model.context_limit
        if position + len(tokens) > limit:
            raise InputError(
                f"{position + len(tokens)} tokens exceed the context limit of {limit}; "
                "shorten the prompt or max_new_tokens"
            )
        end = first + len(tokens)
        if end > self._cache.capacity:
            self._grow(max(end, 2 * self._cache.capacity))
        chained = parent == first - 1 and self._chain_length == first
        self.tokens.extend(tokens)
        self.parents.extend((parent, *range(first, end - 1)))
        self.positions.extend(range(position, position + len(tokens)))
        self.depths.extend([0] * len(tokens))
        self._hidden[first:end] = self.model.stack.embed(tokens)
        if chained:
            self._chain_length = end
        if not chained or self._ancestry is not None:
            self._extend_ancestry(first, end)
        return range(first, end)

    @torch.inference_mode()
    def advance(self, depth: int, slots: Sequence_[int] | None = None) -> None:
        """Bring pending tokens up to `depth`, in one batched pass per layer.

        Args:
            depth: 1..L; tokens already as deep are left alone.
            slots: only these (their parents must be as deep already, or among them);
                None = all.

        Raises:
            InputError: depth out of range, or a parent that is not deep enough.
        """
        if not 1 <= depth <= self.model.num_layers:
            raise InputError(f"depth {depth} must lie in 1..{self.model.num_layers}")
        if slots is None and self.is_chain:
            self._advance_chain(depth)
        else:
            chosen = range(len(self.tokens)) if slots is None else slots
            self._check_slots(chosen)
            self._advance_tree(depth, [s for s in chosen if self.depths[s] < depth])

    @torch.inference_mode()
    def score(
        self, depth: int, rows: int = 1, compact: bool = True, slots: Sequence_[int] | None = None
    ) -> Tensor:
        """Exit-head logits at `depth` of the newest `rows` tokens (or of `slots`).

        Returns:
            float32 (rows, V); the columns are `model.heads.vocabulary(depth)` when `compact`.

        Raises:
            InputError: a token that is not exactly at `depth`.
        """
        return self.model.heads.logits(self.hidden(depth, rows, slots), depth, compact)

    def hidden(self, depth: int, rows: int = 1, slots: Sequence_[int] | None = None) -> Tensor:
        """Hidden states (rows, hidden_size) at `depth`, before the final norm; a view or a copy."""
        count = len(self.tokens)
        if slots is None:
            if not 1 <= rows <= count:
                raise InputError(f"rows {rows} must lie in 1..{count}")
            found = self.depths[count - rows :]
        else:
            self._check_slots(slots)
            found = [self.depths[s] for s in slots]
        if any(d != depth for d in found):
            raise InputError(f"cannot score at depth {depth}: the tokens are at depths {sorted(set(found))}")
        return self._hidden[count - rows : count] if slots is None else self._hidden[list(slots)]

    def rollback(self, length: int) -> None:
        """Forget all slots but the first `length`.

        Raises:
            InputError: length outside 0..number of slots.
        """
        if not 0 <= length <= len(self.tokens):
            raise InputError(f"rollback length {length} must lie in 0..{len(self.tokens)}")
        del self.tokens[length:], self.parents[length:], self.positions[length:], self.depths[length:]
        self._settled = min(self._settled, length)
        self._chain_length = min(self._chain_length, length)
        if self._chain_length == length:
            self._ancestry = self._position_table = None

    @torch.inference_mode()
    def keep(self, slots: Sequence_[int]) -> None:
        """Forget all slots but these, and number them anew, 0.., in the order they had.

        Raises:
            InputError: slots that are unknown, not rising, or whose parents are not among them.
        """
        self._check_slots(slots)
        new = {old: number for number, old in enumerate(slots)}
        if any(b <= a for a, b in pairwise(slots)):
            raise InputError("slots to keep must be rising")
        orphans = [s for s in slots if self.parents[s] >= 0 and self.parents[s] not in new]
        if orphans:
            raise InputError(
                f"slot {orphans[0]} cannot be kept without its parent {self.parents[orphans[0]]}"
            )
        count = len(slots)
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.model.device)
        self._cache.keep(index)
        self._hidden[:count] = self._hidden[index]
        self.tokens = [self.tokens[s] for s in slots]
        self.positions = [self.positions[s] for s in slots]
        self.depths = [self.depths[s] for s in slots]
        self.parents = [new[self.parents[s]] if self.parents[s] >= 0 else -1 for s in slots]
        chain = 0
        while chain < count and self.parents[chain] == chain - 1:
            chain += 1
        self._chain_length = chain
        self._settled = 0
        if self._ancestry is not None and self._position_table is not None:
            if chain == count:
                self._ancestry = self._position_table = None
            else:
                self._ancestry[:count, :count] = self._ancestry[index][:, index]
                self._position_table[:count] = self._position_table[index]

    def _check_slots(self, slots: Sequence_[int]) -> None:
        if len(slots) and not 0 <= min(slots) <= max(slots) < len(self.tokens):
            raise InputError(f"slots {min(slots)}..{max(slots)} must lie in 0..{len(self.tokens) - 1}")

    # ------------------------------------------------------------------ passes

    def _advance_chain(self, depth: int) -> None:
        depths, total, top = self.depths, len(self.tokens), self.model.num_layers
        while total and depths[-1] < depth:
            low = depths[-1]
            first = total - 1
            while first > self._settled and depths[first - 1] == low:
                first -= 1
            stop = depth if first == 0 else min(depth, depths[first - 1])
            rows = self._chain_rows(first, total)
            self._hidden[first:total] = self.model.stack.run(
                self._hidden[first:total], low, stop, rows, self._cache
            )
            depths[first:] = [stop] * (total - first)
        if depth == top:
            self._settled = total

    def _chain_rows(self, first: int, total: int) -> Rows:
        stack = self.model.stack
        span = slice(first, total)
        causal = first == 0
        masks: dict[int | None, Tensor | None] = {}
        for window in stack.window_kinds:
            if causal and (window is None or total <= window):
                masks[window] = None
            else:
                masks[window] = chain_mask(first, total, window, self.model.dtype, self.model.device)
        return Rows(span, span, total, masks, causal)

    def _advance_tree(self, depth: int, slots: list[int]) -> None:
        while slots:
            low = min(self.depths[s] for s in slots)
            rows = sorted(s for s in slots if self.depths[s] == low)
            stop = min([depth, *(self.depths[s] for s in slots if self.depths[s] > low)])
            inside = set(rows)
            for slot in rows:
                parent = self.parents[slot]
                if parent >= 0 and parent not in inside and self.depths[parent] < stop:
                    raise InputError(
                        f"slot {slot} cannot reach depth {stop}: its parent, slot {parent}, "
                        f"is at depth {self.depths[parent]}"
                    )
            index = torch.tensor(rows, device=self.model.device)
            states = self.model.stack.run(self._hidden[index], low, stop, self._tree_rows(index), self._cache)
            self._hidden[index] = states
            for slot in rows:
                self.depths[slot] = stop
            slots = [s for s in slots if self.depths[s] < depth]

    def _tree_rows(self, index: Tensor) -> Rows:
        total = len(self.tokens)
        if self._ancestry is None:
            self._extend_ancestry(total, total)
        assert self._ancestry is not None and self._position_table is not None
        masks: dict[int | None, Tensor | None] = {
            window: tree_mask(self._ancestry, self._position_table, index, total, window, self.model.dtype)
            for window in self.model.stack.window_kinds
        }
        return Rows(index, self._position_table[index], total, masks)

    def _extend_ancestry(self, first: int, end: int) -> None:
        """Enter slots first..end-1 into the ancestry table, making it if there is none."""
        capacity, device = self._cache.capacity, self.model.device
        if self._ancestry is None:
            self._ancestry = torch.zeros(capacity, capacity, dtype=torch.bool, device=device)
            self._position_table = torch.zeros(capacity, dtype=torch.int64, device=device)
            first = 0
        assert self._position_table is not None
        self._position_table[first:end] = torch.tensor(
            self.positions[first:end], dtype=torch.int64, device=device
        )
        for slot in range(first, end):
            row = self._ancestry[slot]
            row.zero_()
            parent = self.parents[slot]
            if parent >= 0:
                row[: parent + 1] = self._ancestry[parent, : parent + 1]
            row[slot] = True

    def _grow(self, capacity: int) -> None:
        self._cache.grow(capacity)
        hidden = torch.zeros(
            capacity, self.model.hidden_size, dtype=self.model.dtype, device=self.model.device
        )
        hidden[: self._hidden.shape[0]] = self._hidden
        self._hidden = hidden
        if self._ancestry is not None:
            self._ancestry = self._position_table = None
            self._extend_ancestry(0, len(self.tokens))
