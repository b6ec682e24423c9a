"""One moment of one text as plain data, and how replay keeps what is needed for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.models.token_text import token_decoder, token_pieces
from sde_gym.policies.observation import Phase
from sde_gym.prompts.reference import resolve_source
from sde_gym.traces import TraceSet

Fate = Literal["prefill", "accepted", "final", "proposal"]
"""Where a token comes from: the prompt's own pass, a draft that the final layer confirmed, that layer
itself, or a draft that still waits for verification."""


@dataclass(frozen=True)
class ShownToken:
    """A token behind the prompt.

    Attributes:
        text: its text, or its id where there is no tokenizer.
        depth: the depth it comes from, L for the final layer's own and for prefill's.
        fate: see `Fate`.
    """

    text: str
    depth: int
    fate: Fate


@dataclass(frozen=True)
class ShownRound:
    """A round that was verified.

    Attributes:
        depth: l*, L where nothing was drafted.
        drafted: proposals made.
        accepted: proposals accepted.
        rejected: texts of the others.
    """

    depth: int
    drafted: int
    accepted: int
    rejected: tuple[str, ...]


@dataclass(frozen=True)
class Rung:
    """What one depth says about the token after the newest one.

    Attributes:
        depth: layers run.
        text: of the most probable token there, the proposal.
        probability: of that token.
    """

    depth: int
    text: str
    probability: float


@dataclass(frozen=True)
class Snapshot:
    """All that a picture of an environment shows; the environment itself is not needed.

    Attributes:
        title: name of the text.
        num_layers: L.
        depths: candidate depths, rising.
        prompt: its text, or a note in its place.
        tokens: those emitted, then the proposals that wait for verification.
        rungs: of each candidate depth at which the newest token was scored, shallow first; a
            single one in DRAFT, none once the episode is over.
        phase: `Phase`.
        last_round: the round that ended last, None before the first end.
        counters: of the episode: "decisions", "rounds", "tokens", "drafted" and "accepted" at least.
        reward: of the last step.
        total: of all steps since the reset.
        over: whether the episode is over; the whole text need not be.
    """

    title: str
    num_layers: int
    depths: tuple[int, ...]
    prompt: str
    tokens: tuple[ShownToken, ...]
    rungs: tuple[Rung, ...]
    phase: Phase
    last_round: ShownRound | None
    counters: Mapping[str, int]
    reward: float
    total: float
    over: bool


class Scene(Protocol):
    """Watches an environment and knows what it looks like; one for each source of tokens."""

    def start(self, info: Mapping[str, Any]) -> None:
        """The environment was reset and returned this info."""

    def follow(self, info: Mapping[str, Any], reward: float, over: bool) -> None:
        """It was stepped and returned these; `over` is `terminated`."""

    def snapshot(self) -> Snapshot:
        """What it looks like now."""


COUNTED = ("decisions", "rounds", "tokens", "drafted", "accepted")


class ReplayScene:
    """The scene of replay. It reads nothing but `info`; tokens come from the traces.

    Args:
        traces: recorded texts.
        depths: candidate depths of the environment.
    """

    def __init__(self, traces: TraceSet, depths: tuple[int, ...]) -> None:
        self.traces = traces
        self.depths = depths
        self._columns = {depth: traces.depths.index(depth) for depth in depths}
        self._text = -1
        self._made: list[tuple[int, Fate]] = []  # depth and fate of each emitted token
        self._last: tuple[int, int, int] | None = None  # depth, drafted and accepted
        self._rejected: list[int] = []
        self._info: dict[str, Any] = {}
        self._reward = self._total = 0.0
        self._over = False

    def start(self, info: Mapping[str, Any]) -> None:
        """Begin a text, or go on with it where the episode is only a part of it."""
        emitted = info["tokens"]
        if info["text"] != self._text or emitted + 1 < len(self._made) or not emitted:
            self._made = [(self.traces.num_layers, "prefill")]
            self._last, self._rejected = None, []
        # What went before the episode and was not watched counts as plain decoding.
        unseen = emitted + 1 - len(self._made)
        self._made += [(self.traces.num_layers, "final")] * unseen
        self._text, self._info = info["text"], dict(info)
        self._reward = self._total = 0.0
        self._over = False

    def follow(self, info: Mapping[str, Any], reward: float, over: bool) -> None:
        """Take note of a step, and of the round where one ended."""
        before, self._info = self._info, dict(info)
        self._reward, self._total, self._over = reward, self._total + reward, over
        if info["rounds"] == before["rounds"]:
            return
        drafted, accepted, emitted = (info[n] - before[n] for n in ("drafted", "accepted", "tokens"))
        depth = before["depth"] if drafted else self.traces.num_layers
        self._last = (depth, drafted, accepted)
        self._rejected = []
        if drafted:
            proposals, _ = drafted_from(
                self.traces, self._text, len(self._made), self._columns[depth], drafted
            )
            self._rejected = proposals[accepted:].tolist()
        self._made += [(depth, "accepted")] * accepted
        self._made += [(self.traces.num_layers, "final")] * (emitted - accepted)

    def snapshot(self) -> Snapshot:
        """What it looks like now.

        Raises:
            RuntimeError: no text was started.
        """
        if not self._info:
            raise RuntimeError("there is nothing to show yet: call reset first")
        traces, info, position = self.traces, self._info, len(self._made)
        decode = self._decoder()
        ids = traces.tokens_of(self._text)[:position].tolist()
        made = list(self._made)
        visited: list[tuple[int, int, float]] = []  # depth, proposal, probability
        if not self._over and info["phase"] == Phase.DRAFT:
            depth, count = info["depth"], info["draft_length"]
            proposals, chances = drafted_from(traces, self._text, position, self._columns[depth], count + 1)
            ids += proposals[:count].tolist()
            made += [(depth, "proposal")] * count
            visited = [(depth, int(proposals[count]), float(chances[count]))]
        elif not self._over:
            row = int(traces.start[self._text]) + position
            for depth in self.depths[: self.depths.index(info["depth"]) + 1]:
                best = row, self._columns[depth], 0
                visited.append((depth, int(traces.top_ids[best]), float(np.exp(traces.top_logprobs[best]))))
        pieces = token_pieces(decode, ids)
        rejected = tuple(decode([token]) for token in self._rejected)
        return Snapshot(
            title=traces.text_ids[self._text],
            num_layers=traces.num_layers,
            depths=self.depths,
            prompt=_prompt(traces, self._text),
            tokens=tuple(
                ShownToken(piece, depth, fate) for piece, (depth, fate) in zip(pieces, made, strict=True)
            ),
            rungs=tuple(Rung(depth, decode([token]), chance) for depth, token, chance in visited),
            phase=Phase(info["phase"]),
            last_round=self._last and ShownRound(*self._last, rejected),
            counters={name: info[name] for name in COUNTED},
            reward=self._reward,
            total=self._total,
            over=self._over,
        )

    def _decoder(self) -> Callable[[list[int]], str]:
        """Ids to text, looked up each time so that a scene can be copied and stored."""
        largest = int(max(self.traces.top_ids.max(), self.traces.token.max()))
        return token_decoder(str(self.traces.manifest["model"]), largest) or _ids


def drafted_from(
    traces: TraceSet, text: int, position: int, column: int, count: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """What a depth drafts from a position of a text on, right or wrong.

    Args:
        traces: recorded texts.
        text: index of the text.
        position: of the first proposal, from 1.
        column: index of the depth among the recorded ones.
        count: proposals; as many as can have been made, and at most one more than can be right
            and `traces.overrun` together.

    Returns:
        ids int32 (count,) and their probabilities float64 (count,).
    """
    first, end = int(traces.start[text]) + position, int(traces.start[text + 1])
    rows = slice(first, min(first + count, end))
    ids, logprobs = traces.top_ids[rows, column, 0], traces.top_logprobs[rows, column, 0]
    wrong = np.flatnonzero(~traces.match[rows, column])
    if wrong.size and wrong[0] + 1 < count:
        on_text = int(wrong[0]) + 1
        entry = (first + on_text - 1) * len(traces.depths) + column
        begin = int(traces.branch_start[entry])
        behind = slice(begin, min(begin + count - on_text, int(traces.branch_start[entry + 1])))
        ids = np.concatenate([ids[:on_text], traces.overrun_proposal[behind]])
        logprobs = np.concatenate([logprobs[:on_text], traces.overrun_logprobs[behind, 0]])
    return ids, np.exp(logprobs.astype(np.float64))


def _ids(ids: list[int]) -> str:
    """Token ids as text, where there is no tokenizer."""
    return "".join(f" {token}" for token in ids)


def _prompt(traces: TraceSet, text: int) -> str:
    """A text's prompt, cut again from its source if need be; a note where it cannot be."""
    prompt = traces.prompts[text]
    if prompt is not None:
        return prompt
    try:
        return resolve_source(traces.sources[text])
    except InputError:
        return f"[{traces.prompt_lengths[text]} prompt tokens: {traces.sources[text]}]\n"
