"""The state machine of depth exploration (DEX, arXiv 2606.29223): expand, commit, collapse.

EXPAND: a tick, in which every explorer runs its stage once on all lattice tokens that stand before it.
Repeated until the anchor has been through all stages.
COMMIT: the anchor's final token is emitted, always that one: the text is that of plain decoding.
COLLAPSE: among the anchor's own candidates the shallowest equal to it is kept with all that descends from it,
the rest is dropped. If it was stage i's, the kept token is N-1-i stages deep already and the next commit
comes after i+1 ticks; if there was none, after N.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from sde_gym.decoding.dex.explorers import Explorers, Work
from sde_gym.decoding.dex.lattice import Lattice, Node
from sde_gym.decoding.dex.result import DexResult
from sde_gym.decoding.round import TokenRules


class State(Enum):
    """What the machine does next."""

    EXPAND = "expand"
    COMMIT = "commit"
    COLLAPSE = "collapse"
    DONE = "done"


class Machine:
    """One text, decoded step by step.

    Args:
        lattice: with the prompt as its only token.
        explorers: run the stages.
        result: filled as the text grows.
        rules: may end the text; None = only the model's end-of-text ids and the budget do.
        eos_token_ids: end the text.
        on_tokens: given each token, in a list of one, as soon as it is emitted.
        record: whether to keep every lattice token in `result.nodes`.
    """

    def __init__(
        self,
        lattice: Lattice,
        explorers: Explorers,
        result: DexResult,
        *,
        rules: TokenRules | None,
        eos_token_ids: tuple[int, ...],
        on_tokens: Callable[[list[int]], None] | None,
        record: bool,
    ) -> None:
        self.state = State.EXPAND
        self.lattice = lattice
        self.explorers = explorers
        self.result = result
        self._rules = rules
        self._ends = eos_token_ids
        self._on_tokens = on_tokens
        self._record = record
        self._selected = lattice.anchor
        self._first_tick = 0  # of the round
        self._started = time.perf_counter()
        if record:
            result.nodes.append(lattice.anchor)

    def run(self) -> None:
        """Go on until the text ends."""
        while self.state is not State.DONE:
            self.step()

    def step(self) -> None:
        """One transition."""
        if self.state is State.EXPAND:
            self._expand()
        elif self.state is State.COMMIT:
            self._commit()
        elif self.state is State.COLLAPSE:
            self._collapse()

    def _expand(self) -> None:
        lattice = self.lattice
        found = self.explorers.tick(lattice)
        self.result.tick_tokens.append(len(found))
        self._keep_record(lattice.expand(found))
        if lattice.anchor.stage == lattice.stages:
            self.state = State.COMMIT

    def _commit(self) -> None:
        lattice, result = self.lattice, self.result
        selected, stage = lattice.commit()
        self._selected = selected
        if selected.born == lattice.tick:  # no branch was open for it
            self._keep_record([selected])
        depth = result.exploration_set[stage]
        first = not result.tokens
        accepted = stage < lattice.stages - 1
        result.emit(selected.token, depth, "prefill" if first else "accepted" if accepted else "final")
        result.selected.append(stage)
        result.commit_ticks.append(lattice.tick)
        result.round_tokens.append(sum(result.tick_tokens[self._first_tick :]))
        self._first_tick = lattice.tick
        if first:
            now = time.perf_counter()
            result.prefill_seconds = now - self._started
            self._started = now
            self.explorers.work = Work()
        if self._on_tokens is not None:
            self._on_tokens([selected.token])
        ended = selected.token in self._ends or len(result.tokens) == lattice.budget
        if self._rules is not None:
            ended |= self._rules.stops(lattice.ids)
        self.state = State.COLLAPSE
        if ended:
            self._finish()

    def _collapse(self) -> None:
        self.explorers.drop(self.lattice.collapse(self._selected))
        self.state = State.EXPAND

    def _finish(self) -> None:
        self.lattice.collapse(self._selected)
        result, work = self.result, self.explorers.work
        result.decode_seconds = time.perf_counter() - self._started
        result.layer_passes = work.layer_passes
        result.sequential_layers = work.sequential_layers
        result.head_calls = work.head_calls
        result.stage_seconds = [work.seconds[stage] for stage in range(self.lattice.stages)]
        self.state = State.DONE

    def _keep_record(self, nodes: list[Node]) -> None:
        if self._record:
            self.result.nodes += nodes
