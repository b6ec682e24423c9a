"""Exit heads: what the model would say if it stopped at a given depth."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sde_gym.errors import InputError

Adapter = Callable[[Tensor], Tensor]

#: What `summarise_row` is.
RowSummary = Callable[[NDArray[np.float32], int], tuple[int, list[float], float]]


class ExitHeads:
    """The model's final norm and head at every depth, below the last one optionally shortened.

    At depth L the full head is always used. Below it, an *adapter* (a per-token map from
    hidden state to hidden state) may come first, and a *compact vocabulary* may restrict
    the head to the tokens that the model uses most: a draft outside it is impossible, and
    exactness is the verifier's business.
    """

    def __init__(
        self,
        norm: Callable[[Tensor], Tensor],
        weight: Tensor,
        bias: Tensor | None,
        num_layers: int,
        eos_token_ids: Sequence[int],
        softcap: float | None = None,
        compact_vocabulary: Sequence[int] | None = None,
        adapters: Mapping[int, Adapter] | None = None,
    ) -> None:
        self.norm = norm
        self.weight = weight
        self.bias = bias
        self.num_layers = num_layers
        self.softcap = softcap
        self.adapters: dict[int, Adapter] = dict(adapters or {})
        for depth in self.adapters:
            if not 1 <= depth < num_layers:
                raise InputError(f"adapter depth {depth} must lie in 1..{num_layers - 1}")
        self.compact_vocabulary: Tensor | None = None
        if compact_vocabulary is not None:
            self.compact_vocabulary = self._checked(compact_vocabulary, eos_token_ids)
            self.compact_weight = weight[self.compact_vocabulary].contiguous()
            self.compact_bias = None if bias is None else bias[self.compact_vocabulary].contiguous()

    def _checked(self, ids: Sequence[int], eos_token_ids: Sequence[int]) -> Tensor:
        size = self.weight.shape[0]
        unique = sorted({int(i) for i in ids} | set(eos_token_ids))
        if len(unique) < 2 or unique[0] < 0 or unique[-1] >= size:
            raise InputError(
                f"a compact vocabulary needs at least two token ids, all in 0..{size - 1}; "
                f"got {len(unique)} from {unique[0] if unique else '-'} to {unique[-1] if unique else '-'}"
            )
        return torch.tensor(unique, dtype=torch.int64, device=self.weight.device)

    def vocabulary(self, depth: int) -> Tensor | None:
        """Full-vocabulary ids of the head's columns at `depth`, int64; None = all, in order."""
        return self.compact_vocabulary if depth < self.num_layers else None

    def logits(self, hidden: Tensor, depth: int, compact: bool = True) -> Tensor:
        """Raw logits.

        Args:
            hidden: (rows, hidden_size) states at `depth`.
            depth: 1..L.
            compact: use the compact vocabulary where there is one (never at depth L).

        Returns:
            (rows, vocabulary) float32.
        """
        return self.project(self.states(hidden, depth), depth, compact)

    def states(self, hidden: Tensor, depth: int) -> Tensor:
        """What the head sees, (rows, hidden_size): the states at `depth` adapted and normalised."""
        if depth < self.num_layers:
            adapter = self.adapters.get(depth)
            if adapter is not None:
                hidden = adapter(hidden)
        return self.norm(hidden)

    def project(self, hidden: Tensor, depth: int, compact: bool = True) -> Tensor:
        """`logits` of what `states` gives."""
        if compact and depth < self.num_layers and self.compact_vocabulary is not None:
            logits = F.linear(hidden, self.compact_weight, self.compact_bias)
        else:
            logits = F.linear(hidden, self.weight, self.bias)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.float()


def summarise_row(logits: NDArray[np.float32], k: int) -> tuple[int, list[float], float]:
    """What `summarise` says of one row, in few numpy calls.

    It is asked at every token of a draft, where the model's weights have just pushed everything else
    out of the caches: each further call costs several times what it costs in a loop of its own.

    Args:
        logits: float32 (V,).
        k: 1..V.

    Returns:
        The most probable column; the k highest log-probabilities, best first; the entropy, nats.
    """
    column = int(logits.argmax())
    shifted = logits - logits[column]
    np.maximum(shifted, np.float32(-1e4), out=shifted)  # keeps 0 * -inf out of the entropy
    best = sorted(np.partition(shifted, -k)[-k:].tolist(), reverse=True)
    weights = np.exp(shifted)
    total = float(weights.sum())
    log_total = math.log(total)
    entropy = log_total - float(weights.dot(shifted)) / total
    return column, [value - log_total for value in best], entropy


@cache
def row_summary() -> RowSummary:
    """`summarise_row`, compiled where numba is installed (the extra `fast`): half the time."""
    if importlib.util.find_spec("numba") is None:
        return summarise_row
    from sde_gym.models import row_summary as compiled

    compiled.summarise_row(np.zeros(2, np.float32), 2)  # compile now, not at the first token
    return compiled.summarise_row


def summarise(logits: Tensor, k: int, vocabulary: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The k best tokens and the entropy of each row, in one pass over the logits.

    Args:
        logits: (rows, V) float32.
        k: 1..V.
        vocabulary: full-vocabulary id of every column, or None where columns are ids.

    Returns:
        ids int64 (rows, k), most probable first; log-probabilities float32 (rows, k);
        entropy float32 (rows,), nats, over the V columns.
    """
    log_probs = torch.log_softmax(logits, -1)
    best, columns = log_probs.topk(k, -1)
    # exp(-inf) * -inf is NaN: clamping changes nothing that float32 could represent.
    entropy = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(-1)
    ids = columns if vocabulary is None else vocabulary[columns]
    return ids, best, entropy
