"""Sampling whose depths agree: the same Gumbel noise at a position, whatever the depth and the branch.

If g is a vector of independent standard Gumbel variables, argmax(log p + g) is a draw from p (the
Gumbel-max trick; Gumbel 1954, Maddison, Tarlow and Minka 2014). Here every depth adds the *same* g to its
own scores. Depths whose distributions are close then mostly choose the same token, and the final depth's
choice, the only one emitted, is an exact draw from its own distribution: the noise of a position is
independent of that of all earlier ones, and so of the text before it.

Noise is drawn position by position in order. The text of a seed is therefore the same for any exploration
set, with or without DECS, and for plain decoding under the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sde_gym.decoding.round import TokenRules
from sde_gym.decoding.rules import GenerationRules, Processor


class PositionNoise:
    """A logits processor that adds a position's Gumbel noise, drawn once and kept until forgotten.

    Args:
        generator: of the draws.
        processors: applied before, in order.
    """

    def __init__(self, generator: torch.Generator, processors: Sequence[Processor] = ()) -> None:
        self._generator = generator
        self._processors = processors
        self._noise: dict[int, Tensor] = {}
        self._next: int | None = None  # the first position that has no noise yet

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (1, V) with noise, float64; NaN throughout where they are no distribution."""
        for processor in self._processors:
            scores = processor(ids, scores)
        scores = scores.double()
        noise = self.at(ids.shape[1], scores.shape[1]).to(scores.device)
        # NaN and infinity would decide by their place, not by their probability.
        return scores + noise if scores.max() < torch.inf else torch.full_like(scores, torch.nan)

    def at(self, position: int, size: int) -> Tensor:
        """The noise of a position, float64 (V,)."""
        if self._next is None:
            self._next = position
        while self._next <= position:
            exponential = torch.empty(size, dtype=torch.float64, device=self._generator.device)
            self._noise[self._next] = -exponential.exponential_(1.0, generator=self._generator).log()
            self._next += 1
        return self._noise[position]

    def forget(self, position: int) -> None:
        """Let go of all noise up to a position."""
        for known in [p for p in self._noise if p <= position]:
            del self._noise[known]


class CoupledRules(GenerationRules):
    """Sampling rules of one text whose depths share their noise, made of independent ones.

    They serve plain decoding (`autoregressive`), too, and give the same text there.
    """

    def __init__(self, rules: GenerationRules) -> None:
        assert rules._generator is not None
        self._shared = PositionNoise(rules._generator, rules._processors or ())
        self._independent = rules
        # To what stands above them, these rules are greedy: noise is one more processor.
        super().__init__(
            rules.vocab_size, rules.eos_token_ids, self._shared, None, None,
            padding=rules._padding, device=rules._device,
        )  # fmt: skip
        self._criteria = rules._criteria

    def stops(self, ids: list[int]) -> bool:
        """Whether the text ends with the last of `ids`; the noise that chose it is forgotten."""
        self._shared.forget(len(self._padding) + len(ids) - 1)
        self._independent.stopped = super().stops(ids)
        return self.stopped


def coupled(rules: TokenRules | None) -> TokenRules | None:
    """Rules that sample, with noise that the depths share; any others as they are."""
    if isinstance(rules, GenerationRules) and rules._generator is not None:
        return CoupledRules(rules)
    return rules
