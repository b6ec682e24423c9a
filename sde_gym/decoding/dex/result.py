"""What the lattice decoder returns: a `DecodeResult`, and how the lattice went."""

from __future__ import annotations

from dataclasses import dataclass, field

from sde_gym.decoding.dex.lattice import Node
from sde_gym.decoding.result import DecodeResult


@dataclass(slots=True)
class DexResult(DecodeResult):
    """Generated tokens, the ticks that they took, and the lattice's size.

    Of the inherited counters, `depths` holds per token the depth d_{i*} whose branch was kept, and `fates`
    "accepted" where that is below L. `layer_passes`, `sequential_layers` and `head_calls` leave out
    the ticks up to the first commit, which are prefill, as elsewhere; `sequential_layers` counts stages one
    after the other, as one device runs them.

    Attributes:
        exploration_set: X.
        selected: per token, i*: the shallowest stage whose candidate it was, N-1 if none was.
        commit_ticks: per token, the tick that emitted it.
        tick_tokens: per tick, the lattice tokens that were run (the prompt counts as one).
        round_tokens: per token, the (token, stage) evaluations since the commit before it.
        stage_seconds: per stage, wall clock in its layers and heads, prefill left out; in one process
            the others wait meanwhile.
        nodes: every lattice token there ever was, in order of arrival, if it was recorded.
    """

    exploration_set: tuple[int, ...] = ()
    selected: list[int] = field(default_factory=list)
    commit_ticks: list[int] = field(default_factory=list)
    tick_tokens: list[int] = field(default_factory=list)
    round_tokens: list[int] = field(default_factory=list)
    stage_seconds: list[float] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    @property
    def ticks(self) -> int:
        """N + the sum of i* + 1 over all tokens but the last."""
        return len(self.tick_tokens)

    @property
    def ticks_per_token(self) -> float:
        """N for plain decoding on the same stages."""
        return self.ticks / len(self.tokens) if self.tokens else 0.0

    @property
    def lattice_tokens(self) -> int:
        """(token, stage) evaluations."""
        return sum(self.tick_tokens)

    @property
    def useful_share(self) -> float:
        """Share of them that were spent on tokens of the text: N for each token emitted."""
        needed = len(self.exploration_set) * len(self.tokens)
        return needed / self.lattice_tokens if self.tokens else 0.0

    @property
    def seconds(self) -> float:
        """Wall clock, prefill included."""
        return self.prefill_seconds + self.decode_seconds

    def stage_tokens(self) -> list[list[int]]:
        """Per tick, the lattice tokens that each stage ran; of recorded nodes."""
        stages = len(self.exploration_set)
        found = [[0] * stages for _ in self.tick_tokens]
        for node in self.nodes:
            last = self.ticks if node.ended is None else node.ended
            for tick in range(node.born, min(last, node.born + stages) if node.runs else node.born):
                found[tick][tick - node.born] += 1
        return found

    def alive_at(self, tick: int) -> list[Node]:
        """The lattice at the end of a tick, before anything is dropped; empty unless it was recorded.

        `Node.stage_at(tick)` says how far each had come.
        """
        return [
            node for node in self.nodes if node.born <= tick and (node.ended is None or tick <= node.ended)
        ]
