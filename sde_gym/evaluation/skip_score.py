"""What a skip set promises: the speed-up of drafts that leave out its sublayers, computed.

1. The model writes its greedy text behind every prompt once, and keeps the keys and values of all layers.
2. For a skip set, *one* pass a text tells at every position whether the skipped stack proposes the token that
   follows. Each position is a slot of its own beside the text: it attends to the exact keys and values of
   the positions before it and to its own of the skipped stack, which is what the first proposal of a
   round sees.
3. Static rounds of 1, 2, ..., max_draft proposals are played along these answers and charged by a cost model;
   the fastest length counts. So a round's later proposals are taken to be right where they would be
   right as its first: in the decoder they attend to the skipped keys and values of up to max_draft - 1 tokens
   before them, too. That is the one approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.models.cost import UNIT, CostModel, head_sizes, resolve_cost
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel
from sde_gym.models.skipping import SkippedStack, SkipSet, tree_rows
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS

#: Texts written at once.
_BATCH = 8


@dataclass(frozen=True)
class SkipScore:
    """What a skip set promises on some texts.

    Attributes:
        speedup: over plain decoding, by the cost model, at the best draft length.
        draft_length: that length.
        acceptance_rate: share of its proposals accepted.
        agreement: share of positions where the skipped stack proposes the right token.
    """

    speedup: float
    draft_length: int
    acceptance_rate: float
    agreement: float


class SkipEvaluator:
    """Scores skip sets on a model's own greedy texts; each costs one pass a text.

    Args:
        model: any `LayeredModel` whose stack can skip sublayers.
        prompts: token ids.
        max_new_tokens: tokens of each text, at least 2.
        max_draft: longest draft.
        cost: "unit" (a layer costs 1, a head what its size is), the file of a calibrated model, or a model.

    Raises:
        InputError: no prompts, a number out of range, a cost model that does not fit, or texts that
            all end at once.
    """

    def __init__(
        self,
        model: LayeredModel,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        max_draft: int = DEFAULT_MAX_DRAFT,
        cost: str | Path | CostModel = UNIT,
    ) -> None:
        if not prompts or max_new_tokens < 2 or max_draft < 1:
            raise InputError(
                f"prompts and max_draft must be at least 1 and max_new_tokens at least 2; got "
                f"{len(prompts)}, {max_draft} and {max_new_tokens}"
            )
        self.model = model
        self.max_draft = max_draft
        heads = head_sizes(model)
        self.cost = resolve_cost(cost, model.num_layers, max_draft, heads)
        self.texts: list[list[int]] = []
        for start in range(0, len(prompts), _BATCH):
            self.texts += generate_greedy(model, prompts[start : start + _BATCH], max_new_tokens)
        self._recorded = [
            _Recorded(model, list(prompt), text)
            for prompt, text in zip(prompts, self.texts, strict=True)
            if len(text) > 1
        ]
        if not self._recorded:
            raise InputError(
                "every text ends with its first token, so nothing can be drafted; give other prompts"
            )
        attention, mlp = _shares(model)
        self._shares = np.array([attention, mlp])

    def agreement(self, skip: SkipSet) -> list[NDArray[np.bool_]]:
        """Per text of T > 1 tokens: bool (T - 1,), whether the token behind each is proposed."""
        stack = SkippedStack(self.model, skip)
        return [recorded.agreement(stack) for recorded in self._recorded]

    def __call__(self, skip: SkipSet) -> SkipScore:
        """Score a skip set."""
        agreement = self.agreement(skip)
        best: SkipScore | None = None
        share = self.share(skip)
        tokens = sum(len(right) for right in agreement)
        for length in range(1, self.max_draft + 1):
            rounds = [played for right in agreement for played in play(right, length)]
            cost = sum(self._cost(drafted, share) for drafted, _ in rounds)
            drafted, accepted = np.sum(rounds, axis=0).tolist()
            speedup = self.cost.speedup(tokens, cost)
            if best is None or speedup > best.speedup:
                right = sum(int(row.sum()) for row in agreement)
                best = SkipScore(speedup, length, accepted / drafted, right / tokens)
        assert best is not None
        return best

    def share(self, skip: SkipSet) -> float:
        """What a draft pass runs of all layers, by their parameters, 0..1."""
        skipped = np.array([len(skip.attention), len(skip.mlp)]) @ self._shares
        return float(1 - skipped / self.model.num_layers)

    def _cost(self, drafted: int, share: float) -> float:
        """Of a round: its draft passes and one verification."""
        cost, top = self.cost, self.model.num_layers
        first = float(cost.draft_pass(top, first=True))
        later = float(cost.draft_pass(top, first=False))
        layers = share * (first + (drafted - 1) * later)
        each = cost.final_head[0] + cost.fixed_proposal + cost.fixed_blind_decision
        return (
            layers + drafted * each + top * cost.layer[drafted] + cost.final_head[drafted] + cost.fixed_round
        )


def play(right: NDArray[np.bool_], length: int) -> list[tuple[int, int]]:
    """Static rounds along a text of T tokens: (proposals, accepted ones) of each.

    Args:
        right: bool (T - 1,), whether the token behind each is proposed.
        length: proposals of a round; fewer where the text ends.
    """
    rounds = []
    at, count = 0, len(right)
    while at < count:
        drafted = min(length, count - at)
        found = right[at : at + drafted]
        accepted = drafted if found.all() else int(found.argmin())
        rounds.append((drafted, accepted))
        at += accepted + 1
    return rounds


class _Recorded:
    """One text with its exact keys and values, and beside it a slot for each position."""

    def __init__(self, model: LayeredModel, prompt: list[int], text: list[int]) -> None:
        drafting = text[:-1]  # behind each of these a token is proposed
        whole = prompt + drafting[:-1]
        self.sequence = model.sequence(len(whole) + len(drafting))
        self.sequence.append(whole)
        self.sequence.advance(model.num_layers)
        for offset, token in enumerate(drafting):
            self.sequence.append([token], parent=len(prompt) + offset - 1)
        self.slots = range(len(whole), len(whole) + len(drafting))
        self.rows = tree_rows(self.sequence, self.slots)
        self.expected = torch.tensor(text[1:], device=model.device)

    def agreement(self, stack: SkippedStack) -> NDArray[np.bool_]:
        """Whether each position's proposal is the token that follows, bool (T - 1,)."""
        logits = stack.logits(stack.side_by_side(self.sequence, self.slots, self.rows))
        right: NDArray[np.bool_] = (logits.argmax(-1) == self.expected).cpu().numpy()
        return right


def _shares(model: LayeredModel) -> tuple[float, float]:
    """Shares of the attention and of the MLP in a layer's parameters; norms go with what they precede."""
    layer = model.hf.model.layers[0]
    whole = sum(parameter.numel() for parameter in layer.parameters())
    mlp = sum(parameter.numel() for parameter in layer.mlp.parameters())
    return 1 - mlp / whole, mlp / whole
