"""Tokens under logits processors, greedily or by sampling; speculative sampling stands here and only here.

Speculative sampling (Leviathan, Kalman and Matias 2023, algorithm 1): a proposal x ~ q is kept with
probability min(1, p(x) / q(x)), else the token comes from norm(max(p - q, 0)), and behind the last
accepted proposal from p itself; either way it is distributed as p. Here p is the final layer's
distribution and q the exit head's, both after the same temperature and processors with the same prefix.

Processors are those of transformers, or any function of (ids (1, t), scores (1, V)). They are asked for
proposals that are rejected later, and again for the same prefix: one whose answer depends on more than its
arguments cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sde_gym.errors import InputError

#: (ids int64 (1, t), scores float32 (1, V)) -> scores (1, V).
Processor = Callable[[Tensor, Tensor], Tensor]

#: (ids int64 (1, t), None) -> whether the text ends here, one value.
Criterion = Callable[[Tensor, Any], Any]


def acceptance(p: Tensor, q: Tensor, x: int) -> float:
    """min(1, p(x) / q(x)), the probability of keeping x ~ q; p and q are (V,) and q(x) > 0."""
    return min(1.0, float(p[x]) / float(q[x]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)), float64 (V,): where the token comes from if the proposal is not kept.

    Where nothing is left, p and q are equal up to rounding, and p is returned.
    """
    excess = (p - q).clamp_min(0.0)
    total = excess.sum()
    return excess / total if total > 0 else p


def draw(distribution: Tensor, generator: torch.Generator) -> int:
    """One token id from a distribution, float64 (V,), by the inverse of its cumulative sum."""
    cumulative = distribution.cumsum(0)
    u = torch.rand(1, dtype=torch.float64, generator=generator, device=generator.device)
    point = u.to(cumulative.device) * cumulative[-1]
    # The first sum above the point: never a token of probability 0.
    return int(torch.searchsorted(cumulative, point, right=True).clamp_max(len(cumulative) - 1))


def accept_or_replace(p: Tensor, q: Tensor, x: int, generator: torch.Generator) -> int:
    """The proposal x if it is kept, else a token from the residual, which is never x itself."""
    u = torch.rand(1, dtype=torch.float64, generator=generator, device=generator.device)
    return x if float(u) < acceptance(p, q, x) else draw(residual(p, q), generator)


class GenerationRules:
    """How one text's tokens are chosen (`TokenRules`): processed scores, their best or a draw from them.

    Args:
        vocab_size: V, of the final layer's head.
        eos_token_ids: ids that end the text.
        processors: applied to every row of logits; None = the logits as they are.
        criteria: whatever else ends the text.
        generator: source of all randomness; None = greedy.
        padding: ids before the prompt that the model does not see, but processors and criteria do.
        device: where processors and criteria want their arguments; None = where the logits are.

    Attributes:
        stopped: what `stops` said last.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        processors: Processor | None = None,
        criteria: Criterion | None = None,
        generator: torch.Generator | None = None,
        *,
        padding: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.stopped = False
        # One by one, to name the one that returns nonsense; as a list a processor's signature is checked.
        self._processors = (
            None if processors is None else [_alone(processors, one) for one in _each(processors)]
        )
        self._criteria = _each(criteria)
        self._generator = generator
        self._padding = list(padding)
        self._device = device

    def propose(
        self, logits: Tensor, vocabulary: list[int] | None, prefix: list[int]
    ) -> tuple[int, Tensor | None]:
        """A proposal, and the distribution q (V,) that it was drawn from, None if greedy.

        A head that sees no token allowed, or nonsense (NaN), proposes its best one all the same: whether it
        is right is for the final layer to say.

        Args:
            logits: float32 (1, C), of an exit head.
            vocabulary: full-vocabulary ids of its C columns; None = all, in order.
            prefix: prompt, emitted tokens and proposals so far.
        """
        column = int(logits[0].nan_to_num(-torch.inf).argmax())
        best = column if vocabulary is None else vocabulary[column]
        if self._processors is None and self._generator is None:
            return best, None
        scores = self._processed(self._spread(logits, vocabulary), self._ids(prefix))
        scores = scores.masked_fill(scores.isnan(), -torch.inf)
        if self._generator is None:
            found = int(scores.argmax())
            return (found if scores[found] > -torch.inf else best), None
        q = torch.softmax(scores.double(), -1)
        if not torch.isfinite(q.sum()):
            return best, _certain(best, q)
        return draw(q, self._generator), q

    def verify(
        self, logits: Tensor, prefix: list[int], proposals: list[int], drafts: list[Tensor | None]
    ) -> tuple[int, int | None]:
        """How many proposals are accepted, and the final layer's own token behind them.

        Args:
            logits: float32 (n, V), of the final layer behind `prefix` and behind each of its continuations
                by proposals; n is one more than their number, or equal to it where the last was not fed.
            prefix: prompt and emitted tokens.
            proposals: may be none.
            drafts: what `propose` said they were drawn from; None counts as certainty.

        Returns:
            The token is None where no row is left for it, or the last accepted proposal ends the text.

        Raises:
            InputError: a row of scores with NaN, or without any token allowed, or a processor that returns
                something else than scores.
        """
        ids = None if self._processors is None else self._ids([*prefix, *proposals])
        start = len(self._padding) + len(prefix)
        for row in range(len(logits)):
            scores = logits[row]
            if ids is not None:
                scores = self._processed(logits[row : row + 1].clone(), ids[:, : start + row])
            proposal = proposals[row] if row < len(proposals) else None
            token = self._choose(scores, proposal, drafts[row] if proposal is not None else None)
            if token != proposal:
                return row, token
            if token in self.eos_token_ids:
                return row + 1, None
        return len(proposals), None

    def stops(self, ids: list[int]) -> bool:
        """Whether the text ends with the last of `ids`, prompt and emitted tokens; asked after each token."""
        self.stopped = ids[-1] in self.eos_token_ids
        seen = self._ids(ids) if self._criteria else None
        for criterion in self._criteria:
            # Asked even if the text has ended: a criterion may count on seeing every token.
            said = criterion(seen, None)
            if not isinstance(said, (bool, np.bool_, Tensor)):
                raise InputError(
                    f"{_label(criterion)}: a stopping criterion must return a bool or a tensor of them, not "
                    f"{said!r}"
                )
            self.stopped |= bool(said.all() if isinstance(said, Tensor) else said)
        return self.stopped

    def _choose(self, scores: Tensor, proposal: int | None, q: Tensor | None) -> int:
        """The token after one row of final scores (V,); equal to the proposal if that is accepted."""
        if self._generator is None:
            token = int(scores.argmax())  # of a NaN, if there is one
            if not scores[token] > -torch.inf:
                raise _no_token(scores)
            return token
        p = torch.softmax(scores.double(), -1)
        if not torch.isfinite(p.sum()):
            raise _no_token(scores)
        if proposal is None:
            return draw(p, self._generator)
        q = _certain(proposal, p) if q is None else q.to(p.device)
        return accept_or_replace(p, q, proposal, self._generator)

    def _processed(self, scores: Tensor, ids: Tensor) -> Tensor:
        """(V,) what the processors make of (1, V), which they may overwrite."""
        if self._processors is None:
            return scores[0]
        scores = scores.to(ids.device)
        for processor in self._processors:
            shape = tuple(scores.shape)
            scores = processor(ids, scores)
            if not isinstance(scores, Tensor) or tuple(scores.shape) != shape:
                found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise InputError(
                    f"{_label(processor)}: a logits processor must return scores of the shape that it was "
                    f"given, {shape}, not {found}"
                )
            if not scores.is_floating_point():
                raise InputError(
                    f"{_label(processor)}: a logits processor must return floats, not {scores.dtype}"
                )
        return scores[0]

    def _spread(self, logits: Tensor, vocabulary: list[int] | None) -> Tensor:
        """A compact head's logits over the full vocabulary, (1, V), -inf where it has no column."""
        if vocabulary is None:
            return logits.clone()
        full = logits.new_full((1, self.vocab_size), -torch.inf)
        full[:, vocabulary] = logits
        return full

    def _ids(self, ids: list[int]) -> Tensor:
        """int64 (1, t) what processors and criteria are shown."""
        return torch.tensor([[*self._padding, *ids]], device=self._device)


def _each(functions: Any) -> list[Any]:
    """None, one function, or the members of one of transformers' lists."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions]


def _alone(functions: Any, one: Any) -> Any:
    """One of these functions, in a list of their kind if they stand in one."""
    return type(functions)([one]) if isinstance(functions, list) else one


def _label(function: Any) -> str:
    """What to call a processor or criterion."""
    if isinstance(function, list):
        (function,) = function
    return getattr(function, "__name__", None) or type(function).__name__


def _certain(x: int, like: Tensor) -> Tensor:
    """All mass on x, float64 of the shape and on the device of `like`."""
    q = torch.zeros_like(like)
    q[x] = 1.0
    return q


def _no_token(scores: Tensor) -> InputError:
    """What to say of final scores (V,) that no token can be chosen by."""
    if scores.isnan().any() or (scores == torch.inf).any():
        return InputError(
            "the final layer's scores hold NaN or infinity, so no token can be chosen; look at the model's "
            "weights and dtype (try float32), a temperature close to 0 (use do_sample=False), the processors"
        )
    return InputError(
        "the logits processors rule out every token of the vocabulary; loosen them (bad_words_ids, "
        "suppress_tokens, no_repeat_ngram_size, your own)"
    )
