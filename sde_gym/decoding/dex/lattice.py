"""The lattice: a tree of tokens, each on its way through the stages.

Its root is the *anchor*, the newest emitted token. After stage i a lattice token yields a candidate for
the position behind it; the candidate becomes a child, which enters stage 0 at the next tick. So a child is
always behind its parent by a tick at least, and the parent's keys and values exist wherever the child
looks for them.

Nothing here knows of models: the same lattice is kept by a decoder that runs all stages itself and, in
copies that stay equal, by explorers in processes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """A lattice token.

    Attributes:
        number: in order of arrival; the prompt's last token is 0.
        token: its id.
        index: its place among the generated tokens; -1 for the prompt's last one.
        parent: whose candidate it is; None for the prompt's last token.
        proposed_at: the stage whose candidate it is, 0..N-1; -1 for the prompt's last token.
        born: the tick that brought it, 0 for the prompt's last token; it is run from the next one on.
        runs: False for what nothing will ever follow (end of text, end of the budget).
        stage: stages that it has been through, 0..N.
        candidates: by stage, the token proposed for the position behind it; None where none was.
        branches: its children by token.
        emitted: the tick at which it became part of the text, None if it did not (yet).
        ended: the tick at which it left the lattice: dropped, or through all layers.
    """

    number: int
    token: int
    index: int
    parent: Node | None
    proposed_at: int
    born: int
    runs: bool = True
    stage: int = 0
    candidates: list[int | None] = field(default_factory=list)
    branches: dict[int, Node] = field(default_factory=dict)
    emitted: int | None = None
    ended: int | None = None

    @property
    def dropped(self) -> bool:
        """Whether a collapse has taken it away."""
        return self.ended is not None and self.emitted is None

    def stage_at(self, tick: int) -> int:
        """Stages that it had been through at the end of a tick of its life."""
        return tick - self.born if self.runs else 0


class Lattice:
    """The tokens between the newest emitted one and all that may follow it.

    Args:
        prompt: token ids, at least one.
        stages: N.
        budget: tokens that the text may have, at least 1: none that nothing may follow is run.
        eos_token_ids: likewise.
        single_exit: only the first stage opens branches (the ablation).

    Attributes:
        ids: prompt and emitted tokens.
        anchor: the newest of them.
        alive: all lattice tokens, parents before their children.
        tick: ticks so far.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        stages: int,
        budget: int,
        eos_token_ids: Sequence[int] = (),
        single_exit: bool = False,
    ) -> None:
        self.stages = stages
        self.budget = budget
        self.single_exit = single_exit
        self.ids = list(prompt)
        self.anchor = Node(0, self.ids[-1], -1, None, -1, 0, emitted=0)
        self.alive = [self.anchor]
        self.tick = 0
        self._ends = frozenset(eos_token_ids)
        self._count = 1

    def at(self, stage: int) -> list[Node]:
        """The tokens that the explorer of this stage runs in the next tick."""
        return [node for node in self.alive if node.stage == stage and node.runs]

    def proposes(self, stage: int) -> bool:
        """Whether this stage's head is asked."""
        return stage == self.stages - 1 or stage == 0 or not self.single_exit

    def text(self, node: Node) -> list[int]:
        """Prompt, emitted tokens, and those of the branch down to `node`."""
        below: list[int] = []
        while node is not self.anchor:
            below.append(node.token)
            assert node.parent is not None
            node = node.parent
        return self.ids + below[::-1]

    # The three steps of the state machine.

    def expand(self, found: Mapping[int, int | None]) -> list[Node]:
        """End a tick: every token that runs is one stage further, its candidate a new child.

        Args:
            found: by number of each token that was run, its candidate, or None.

        Returns:
            The new children.
        """
        self.tick += 1
        opened: list[Node] = []
        for node in self.alive:
            if not node.runs:
                continue
            candidate = found[node.number]
            final = node.stage == self.stages - 1
            node.candidates.append(candidate)
            node.stage += 1
            if candidate is not None and not final and candidate not in node.branches:
                opened.append(self._child(node, candidate, node.stage - 1))
        self.alive += opened
        return opened

    def commit(self) -> tuple[Node, int]:
        """Emit the anchor's final token, once the anchor is through all stages.

        Returns:
            Its lattice token, and the shallowest stage whose candidate it was: i*, N-1 if only the final
            depth said so.
        """
        anchor = self.anchor
        token = anchor.candidates[-1]
        assert anchor.stage == self.stages and token is not None
        stage = anchor.candidates.index(token)
        selected = anchor.branches.get(token)
        if selected is None:
            selected = self._child(anchor, token, stage)
        self.ids.append(token)
        selected.emitted = self.tick
        return selected, stage

    def collapse(self, selected: Node) -> list[Node]:
        """Make the emitted token the anchor; what does not descend from it is dropped.

        Returns:
            The dropped tokens.
        """
        kept, numbers = [selected], {selected.number}
        dropped: list[Node] = []
        for node in self.alive:
            if node is selected:
                continue
            if node.parent is not None and node.parent.number in numbers:
                kept.append(node)
                numbers.add(node.number)
            else:
                node.ended = self.tick
                dropped.append(node)
        dropped.remove(self.anchor)
        self.anchor = selected
        self.alive = kept
        return dropped

    def _child(self, parent: Node, token: int, stage: int) -> Node:
        """A new lattice token behind `parent`."""
        index = parent.index + 1
        runs = token not in self._ends and index + 1 < self.budget
        child = Node(self._count, token, index, parent, stage, self.tick, runs)
        self._count += 1
        parent.branches[token] = child
        return child
