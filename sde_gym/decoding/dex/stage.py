"""One explorer in a process of its own: it runs one stage, and hears of the others once a tick.

Every process keeps a copy of the lattice and takes the same steps, so what travels is little: to the next
stage the hidden states of the tokens that were run, and to everyone the candidates of all stages, which tell
each copy what children there are, which token ids have been proposed already (DECS), what is emitted and
what falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sde_gym.decoding.dex.candidates import Proposer
from sde_gym.decoding.dex.explorers import LocalExplorers
from sde_gym.decoding.dex.lattice import Lattice, Node
from sde_gym.models.layered import LayeredModel
from sde_gym.models.sequence import Sequence

#: Stands for "no candidate" where ids travel.
_NOTHING = -1


class ExplorerLostError(RuntimeError):
    """Another explorer has ended or does not answer."""


@contextmanager
def lost_explorers(when: str) -> Iterator[None]:
    """Say what it means if `torch.distributed` fails here.

    Raises:
        ExplorerLostError: instead of its RuntimeError, which has no type of its own.
    """
    try:
        yield
    except RuntimeError as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ExplorerLostError(
            f"the explorer of stage {dist.get_rank()} lost another one in {when}: it has ended, or did not "
            f"answer in time; start all of them anew ({reason})"
        ) from error


class StageSequence(Sequence):
    """A `Sequence` whose tokens may come with the states of another process's layers."""

    def receive(self, states: Tensor, depth: int, slots: range) -> None:
        """Put tokens that were just appended at `depth`, their states (slots, hidden) there given."""
        self._hidden[slots.start : slots.stop] = states
        self.depths[slots.start : slots.stop] = [depth] * len(slots)


class StageExplorer(LocalExplorers):
    """The stage of this process, its rank in the default group.

    Its `Sequence` holds the tokens that have come this far; their keys and values exist at its own
    layers only.

    Args:
        model, depths, proposer, prompt: as for `LocalExplorers`.
    """

    def __init__(
        self, model: LayeredModel, depths: Sequence_[int], proposer: Proposer, prompt: Sequence_[int]
    ) -> None:
        self.arrivals = StageSequence(model, len(prompt) + 64)
        super().__init__(model, depths, proposer, prompt, self.arrivals)
        self.stage = dist.get_rank()
        self._width = model.hidden_size
        self._prompt_length = len(prompt)
        self._arrived: dict[int, Tensor] = {}  # (tokens, hidden) by number of the lattice token

    def tick(self, lattice: Lattice) -> dict[int, int | None]:
        """This stage once, on all lattice tokens that stand before it; then the exchange with the others.

        Raises:
            ExplorerLostError: another explorer has ended or does not answer in time.
        """
        nodes = [lattice.at(stage) for stage in range(len(self.depths))]
        mine = nodes[self.stage]
        answers: list[int | None] = []
        if mine:
            self._place(mine)
            answers = self._run(self.stage, mine, lattice)
        with lost_explorers(f"tick {lattice.tick + 1}"):
            self._hand_on(nodes)
            return self._share(nodes, answers)

    def drop(self, nodes: Sequence_[Node]) -> None:
        """Forget what a collapse has dropped, on the way here too."""
        super().drop(nodes)
        for node in nodes:
            self._arrived.pop(node.number, None)

    def _place(self, nodes: list[Node]) -> None:
        """Enter the states that came from the stage before."""
        if self.stage == 0:
            return
        depth = self.depths[self.stage - 1]
        for node in nodes:
            states = self._arrived.pop(node.number)
            last = self._slot(node)
            first = last + 1 - len(states)
            self.arrivals.receive(states, depth, range(first, last + 1))

    def _hand_on(self, nodes: list[list[Node]]) -> None:
        """Send the states of this stage to the next one, and take those of the stage before."""
        transfers: list[Any] = []
        before = nodes[self.stage - 1] if self.stage else []
        mine = nodes[self.stage] if self.stage < len(self.depths) - 1 else []
        incoming = torch.empty(
            (self._rows(before), self._width), dtype=self.sequence.model.dtype, device=self._device
        )
        if before:
            transfers.append(dist.P2POp(dist.irecv, incoming, self.stage - 1))
        if mine:
            slots = [slot for node in mine for slot in self._slots_of(node)]
            outgoing = self.sequence.hidden(self.depths[self.stage], slots=slots).contiguous()
            transfers.append(dist.P2POp(dist.isend, outgoing, self.stage + 1))
        if transfers:
            for transfer in dist.batch_isend_irecv(transfers):
                transfer.wait()
        start = 0
        for node in before:
            count = self._rows([node])
            self._arrived[node.number] = incoming[start : start + count]
            start += count

    def _share(self, nodes: list[list[Node]], answers: list[int | None]) -> dict[int, int | None]:
        """The candidates of all stages, by number of the lattice token; every process has them all."""
        longest = max(map(len, nodes))
        mine = torch.full((longest,), _NOTHING, dtype=torch.int64)
        mine[: len(answers)] = torch.tensor([_NOTHING if a is None else a for a in answers])
        everyones = [torch.empty(longest, dtype=torch.int64, device=self._device) for _ in nodes]
        dist.all_gather(everyones, mine.to(self._device))
        found: dict[int, int | None] = {}
        for there, theirs in zip(nodes, everyones, strict=True):
            for node, token in zip(there, theirs.tolist(), strict=False):
                found[node.number] = None if token == _NOTHING else token
        return found

    @property
    def _device(self) -> torch.device:
        return self.sequence.model.device

    def _rows(self, nodes: Sequence_[Node]) -> int:
        """States that these tokens have; the prompt's are as many as its tokens."""
        return sum(self._prompt_length if node.parent is None else 1 for node in nodes)

    def _slots_of(self, node: Node) -> range:
        last = self.slots[node.number]
        return range(last + 1 - self._rows([node]), last + 1)
