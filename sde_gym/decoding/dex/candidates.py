"""What a lattice token proposes for the position behind it, and what is finally emitted there.

Depth-exclusive candidates (DECS): a stage does not repeat what a shallower one has proposed for the same
position behind the same parent; its next best token is proposed instead. The final depth is never masked,
so that what is emitted does not change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sde_gym.decoding.dex.lattice import Lattice, Node
from sde_gym.decoding.result import NEAR_TIE
from sde_gym.decoding.round import TokenRules
from sde_gym.models.layered import LayeredModel


class Proposer:
    """Chooses tokens by the rows of a stage's head.

    Args:
        model: its heads' compact vocabulary is respected.
        rules: how tokens are chosen; None = the most probable one.
        decs: whether stages avoid what shallower ones have proposed.
        count_near_ties: whether to count them.

    Attributes:
        near_ties: final tokens chosen at one so far.
    """

    def __init__(
        self, model: LayeredModel, rules: TokenRules | None, decs: bool, count_near_ties: bool = False
    ) -> None:
        self.near_ties = 0
        self._counts_near_ties = count_near_ties
        self.rules = rules
        self.decs = decs
        ids = model.compact_vocabulary
        self._vocabulary: list[int] | None = None if ids is None else ids.tolist()
        self._columns = (
            None if self._vocabulary is None else {token: n for n, token in enumerate(self._vocabulary)}
        )

    def candidates(self, logits: Tensor, nodes: Sequence[Node], lattice: Lattice) -> list[int | None]:
        """A candidate for each lattice token.

        Args:
            logits: float32 (nodes, C) of an exit head below L; overwritten.
            nodes: the lattice tokens of its rows.
            lattice: theirs.

        Returns:
            Token ids; None where every column of the head has been proposed before.
        """
        rows, columns = [], []
        exhausted = set()
        if self.decs:
            for row, node in enumerate(nodes):
                taken = [column for column in map(self._column, node.candidates) if column is not None]
                if len(taken) == logits.shape[1]:
                    exhausted.add(row)
                rows += [row] * len(taken)
                columns += taken
            logits[rows, columns] = -torch.inf
        if self.rules is None:
            best = logits.argmax(-1).tolist()
            found = best if self._vocabulary is None else [self._vocabulary[column] for column in best]
        else:
            found = [
                self.rules.propose(logits[row : row + 1], self._vocabulary, lattice.text(node))[0]
                for row, node in enumerate(nodes)
            ]
        return [None if row in exhausted else token for row, token in enumerate(found)]

    def final(self, logits: Tensor, lattice: Lattice) -> int:
        """The token behind the anchor, by its final logits (1, V): what plain decoding emits.

        Raises:
            InputError: of the rules, if no token can be chosen.
        """
        if self._counts_near_ties:
            best = logits[0].topk(2).values
            self.near_ties += int(best[0] - best[1] < NEAR_TIE)
        if self.rules is None:
            return int(logits.argmax())
        token = self.rules.verify(logits, lattice.ids, [], [])[1]
        assert token is not None
        return token

    def _column(self, token: int | None) -> int | None:
        """A token's column in the exit heads."""
        if token is None or self._columns is None:
            return token
        return self._columns.get(token)
