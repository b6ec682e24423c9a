"""Who runs the stages: here all explorers in one process, over one set of KV slots."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from sde_gym.decoding.dex.candidates import Proposer
from sde_gym.decoding.dex.lattice import Lattice, Node
from sde_gym.models.layered import LayeredModel
from sde_gym.models.sequence import Sequence


@dataclass(slots=True)
class Work:
    """What was run, since the counters were last set to 0; `seconds` is wall clock by stage."""

    layer_passes: int = 0
    sequential_layers: int = 0
    head_calls: int = 0
    seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class Explorers(Protocol):
    """What the state machine needs of those who run the stages."""

    work: Work

    def tick(self, lattice: Lattice) -> dict[int, int | None]:
        """Every stage once, on all lattice tokens that stand before it.

        Returns:
            By number of each token that was run, its candidate; None where none was asked for.
        """

    def drop(self, nodes: Sequence_[Node]) -> None:
        """Forget what a collapse has dropped."""


class LocalExplorers:
    """All stages in this process.

    The lattice's tokens are slots of one `Sequence`: a branch attends to the committed text and to its own
    ancestors, and its keys and values are exact at every layer that it has been through.

    Args:
        model: any `LayeredModel`.
        depths: the exploration set.
        proposer: chooses tokens.
        prompt: token ids.
        sequence: an empty one, where it is to be a special one.
    """

    def __init__(
        self,
        model: LayeredModel,
        depths: Sequence_[int],
        proposer: Proposer,
        prompt: Sequence_[int],
        sequence: Sequence | None = None,
    ) -> None:
        self.depths = tuple(depths)
        self.proposer = proposer
        self.sequence = model.sequence(len(prompt) + 64) if sequence is None else sequence
        self.slots = {0: self.sequence.append(prompt)[-1]}  # by number of the lattice token
        self.work = Work()
        self._layers = [high - low for low, high in pairwise((0, *self.depths))]
        self._garbage = 0  # slots of tokens that were dropped

    def tick(self, lattice: Lattice) -> dict[int, int | None]:
        """Every stage once, on all lattice tokens that stand before it.

        The order of the stages does not matter: what a token looks for was there before the tick.
        """
        found: dict[int, int | None] = {}
        for stage in reversed(range(len(self.depths))):
            nodes = lattice.at(stage)
            if nodes:
                found.update(zip([n.number for n in nodes], self._run(stage, nodes, lattice), strict=True))
        return found

    def drop(self, nodes: Sequence_[Node]) -> None:
        """Free the slots of dropped tokens, once they are many."""
        for node in nodes:
            self._garbage += self.slots.pop(node.number, None) is not None
        alive = len(self.sequence) - self._garbage
        # Clearing away moves the whole cache; until then these slots only widen the mask.
        if self._garbage > 16 + alive // 8:
            self._clear_away()

    def _run(self, stage: int, nodes: list[Node], lattice: Lattice) -> list[int | None]:
        """One stage's turn; its tokens' candidates."""
        started = time.perf_counter()
        found = self._candidates(stage, nodes, lattice)
        self.work.seconds[stage] += time.perf_counter() - started
        return found

    def _candidates(self, stage: int, nodes: list[Node], lattice: Lattice) -> list[int | None]:
        depth, sequence = self.depths[stage], self.sequence
        slots = [self._slot(node) for node in nodes]
        if nodes[0].parent is not None:
            sequence.advance(depth, slots)
        else:  # the prompt's tokens go through the stages together
            alone = len(sequence) == slots[0] + 1
            sequence.advance(depth, None if alone else range(slots[0] + 1))
        self.work.layer_passes += self._layers[stage] * len(nodes)
        self.work.sequential_layers += self._layers[stage]
        if not lattice.proposes(stage):
            return [None] * len(nodes)
        self.work.head_calls += 1
        logits = sequence.score(depth, slots=slots)
        if stage == len(self.depths) - 1:
            return [self.proposer.final(logits, lattice)]
        return self.proposer.candidates(logits, nodes, lattice)

    def _slot(self, node: Node) -> int:
        """Where a lattice token is, from its first stage on."""
        slot = self.slots.get(node.number)
        if slot is None:
            assert node.parent is not None
            parent = self.slots[node.parent.number]
            slot = self.slots[node.number] = self.sequence.append([node.token], parent)[0]
        return slot

    def _clear_away(self) -> None:
        first = self.slots[0]
        kept = [*range(first), *self.slots.values()]  # they arrived in this order
        self.sequence.keep(kept)
        new = {old: place for place, old in enumerate(kept)}
        self.slots = {number: new[slot] for number, slot in self.slots.items()}
        self._garbage = 0
