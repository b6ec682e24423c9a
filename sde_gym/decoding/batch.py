"""Several texts at once, each in its own round: passes are shared, decisions and lengths are not.

All texts live in one `Sequence`, each the chain below a root of its own, so a pass takes whatever tokens
stand at its depth, from as many texts as there are. Acceptance is ragged: no text waits for another,
and none is padded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.checks import shown, token_ids
from sde_gym.decoding.decisions import ask, check_controller
from sde_gym.decoding.features import check_features
from sde_gym.decoding.result import DecodeResult, Round, check_model, check_request
from sde_gym.decoding.round import TextDecoder, TokenRules
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.sequence import Sequence
from sde_gym.policies.controller import Controller, RoundOutcome, View, feature_settings
from sde_gym.policies.observation import Action
from sde_gym.settings import DEFAULT_MAX_DRAFT


class Branch:
    """One text of a shared `Sequence`, as a `Frontier`: the chain of slots that are its tokens.

    Args:
        shared: holds the tokens of all texts.

    Attributes:
        slots: of this text's tokens in `shared`.
    """

    def __init__(self, shared: Sequence) -> None:
        self.shared = shared
        self.slots: list[int] = []

    @property
    def depths(self) -> _Depths:
        """Of all tokens."""
        return _Depths(self)

    def __len__(self) -> int:
        return len(self.slots)

    def append(self, tokens: Sequence_[int]) -> None:
        """Add a run of tokens at depth 0."""
        parent = self.slots[-1] if self.slots else -1
        self.slots.extend(self.shared.append(tokens, parent))

    def behind(self, depth: int) -> list[int]:
        """Slots of the newest tokens that have not reached `depth`."""
        first, depths = len(self.slots), self.shared.depths
        while first and depths[self.slots[first - 1]] < depth:
            first -= 1
        return self.slots[first:]

    def advance(self, depth: int) -> None:
        """Bring this text's tokens up to `depth`."""
        self.shared.advance(depth, self.behind(depth))

    def hidden(self, depth: int, rows: int = 1) -> torch.Tensor:
        """States of the newest tokens at `depth`, (rows, hidden)."""
        return self.shared.hidden(depth, slots=self.slots[-rows:])

    def score(self, depth: int, rows: int = 1) -> torch.Tensor:
        """Logits at `depth` of the newest tokens, float32 (rows, V)."""
        return self.shared.score(depth, slots=self.slots[-rows:])

    def rollback(self, length: int) -> None:
        """Let go of all tokens but the first `length`; their slots are cleared away later."""
        del self.slots[length:]


@dataclass(frozen=True)
class _Depths(Sequence_[int]):
    """The depths of a branch's tokens, looked up when asked for."""

    branch: Branch

    def __len__(self) -> int:
        return len(self.branch.slots)

    def __getitem__(self, index: Any) -> Any:
        return self.branch.shared.depths[self.branch.slots[index]]


@torch.inference_mode()
def speculative_batch(
    model: LayeredModel,
    prompts: Sequence_[Sequence_[int]],
    controller: Controller,
    depths: Sequence_[int],
    max_new_tokens: int,
    *,
    max_draft: int = DEFAULT_MAX_DRAFT,
    k: int | None = None,
    window: int | None = None,
    texts: Sequence_[int] | None = None,
    rules: Sequence_[TokenRules] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    count_near_ties: bool = False,
) -> list[DecodeResult]:
    """`speculative` for several prompts at once, of any lengths.

    All texts share one table of which token may see which, so that the memory and the time of prefill grow
    with the square of the tokens of all texts together: pass a few dozen texts at a time, not a data set.

    Args:
        model: any `LayeredModel`.
        prompts: token ids, at least one prompt; none may be empty.
        controller: sees the texts as lanes 0.., in their order; bound and reset here.
        depths: candidate exit depths.
        max_new_tokens: budget of each text.
        max_draft, k, window, count_near_ties: as for `speculative`.
        texts: numbers of the texts, for controllers that draw random numbers; 0.. if not given.
        rules: one for each text; None = the most probable token for all.
        on_tokens: given the number of the text (0..) and its newest tokens.

    Returns:
        One result for each prompt. Tokens are those of `speculative` in float32, but where two logits tie;
        counters are those of the text alone, as if its passes had not been shared. `prefill_seconds` is
        that of all prompts, `decode_seconds` lasts from then until the text ended.

    Raises:
        InputError: as `speculative`; the message names the prompt by its number.
    """
    check_model(model)
    check_controller(controller)
    k, window = feature_settings(controller, k, window)
    max_draft, k, window = check_features(model, controller.observation, max_draft, k, window)
    candidates = model.check_depths(depths)
    given_prompts: Any = prompts
    if isinstance(given_prompts, (str, bytes)) or not hasattr(given_prompts, "__len__"):
        raise InputError(f"prompts: {shown(prompts)} is no list of prompts; give one, such as [[1, 2], [3]]")
    numbers = np.arange(len(prompts)) if texts is None else np.asarray(texts, dtype=np.int64)
    for name, given in (("texts", numbers), ("rules", rules)):
        if given is not None and len(given) != len(prompts):
            raise InputError(f"{name}: {len(given)} for {len(prompts)} prompts; give one for each")
    budgets = []
    for number, prompt in enumerate(prompts):
        try:
            budgets.append(check_request(model, prompt, max_new_tokens))
        except InputError as error:
            raise InputError(f"prompt {number}: {error}") from None
    if not budgets:
        raise InputError("prompts: none was given; give at least one")
    prompts = [token_ids("prompt", prompt) for prompt in prompts]
    controller.bind(candidates, model.num_layers, max_draft)
    controller.reset(np.arange(len(prompts)))
    if not any(budgets):
        return [DecodeResult(model.num_layers) for _ in prompts]
    decoders = [
        TextDecoder(
            model, candidates, budget, controller.observation, max_draft=max_draft, k=k, window=window,
            every_token=getattr(controller, "walks_every_token", False),
            shadows=getattr(controller, "shadows", False),
            rules=None if rules is None else rules[number], count_near_ties=count_near_ties,
        )
        for number, budget in enumerate(budgets)
    ]  # fmt: skip
    batch = _Batch(model, decoders, controller, numbers, on_tokens)
    batch.prefill(prompts)
    batch.decode()
    return [decoder.result for decoder in decoders]


class _Batch:
    """Texts of one `Sequence` under one controller."""

    def __init__(
        self, model: LayeredModel, decoders: list[TextDecoder], controller: Controller,
        texts: NDArray[np.int64], on_tokens: Callable[[int, list[int]], None] | None,
    ) -> None:  # fmt: skip
        self.model = model
        self.decoders = decoders
        self.controller = controller
        self.texts = texts
        self.on_tokens = on_tokens
        self.shared = model.sequence()
        self.branches = [Branch(self.shared) for _ in decoders]
        self.running: list[int] = []

    def prefill(self, prompts: Sequence_[Sequence_[int]]) -> None:
        """Run every prompt to L and emit every token 0."""
        started = time.perf_counter()
        for decoder, branch, prompt in zip(self.decoders, self.branches, prompts, strict=True):
            decoder.sequence = branch
            decoder.prefill(prompt)
        seconds = time.perf_counter() - started
        for lane, decoder in enumerate(self.decoders):
            decoder.result.prefill_seconds = seconds
            self._tell(lane, 0)
        self.running = [lane for lane, decoder in enumerate(self.decoders) if not decoder.finished]

    def decode(self) -> None:
        """Go on until every text has ended."""
        started = time.perf_counter()
        for lane in self.running:
            self.decoders[lane].open_round()
        while self.running:
            asked, view = self._look()
            for lane in asked:  # the time is shared, so each pays its part
                self.decoders[lane].result.controller_seconds += view.seconds / len(asked)
            exiting = [
                lane
                for lane, action in zip(asked, view.actions, strict=True)
                if action == Action.EXIT and self.decoders[lane].needs_score
            ]
            self._score(exiting)
            ended = [
                lane
                for lane, action in zip(asked, view.actions, strict=True)
                if self.decoders[lane].decide(action)
            ]
            if not ended:
                continue
            self._verify(ended)
            for lane in ended:
                decoder = self.decoders[lane]
                if decoder.finished:
                    decoder.result.decode_seconds = time.perf_counter() - started
                    self.branches[lane].slots = []
                    self.running.remove(lane)
            self._clear_away()
            for lane in ended:
                if not self.decoders[lane].finished:
                    self.decoders[lane].open_round()

    def _look(self) -> tuple[list[int], _Decisions]:
        """Read the heads that are wanted and ask the controller, for all running texts."""
        lanes, reads = self.running, self.controller.reads
        decoders = [self.decoders[lane] for lane in lanes]
        if self.controller.observation:
            self._score(
                [
                    lane
                    for lane, decoder in zip(lanes, decoders, strict=True)
                    if decoder.needs_score and reads(decoder.phase, decoder.index)
                ]
            )
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        started = time.perf_counter()
        view = View(
            np.array([decoder.phase for decoder in decoders], np.int64),
            np.array([decoder.index for decoder in decoders], np.int64),
            np.array([len(decoder.proposals) for decoder in decoders], np.int64),
            np.concatenate([decoder.observation() for decoder in decoders]),
            np.array(lanes, np.int64),
            self.texts[lanes],
            np.array([decoder.result.decisions for decoder in decoders], np.int64),
        )
        actions = ask(self.controller, view)
        return list(lanes), _Decisions(actions, time.perf_counter() - started)

    def _score(self, lanes: list[int]) -> None:
        """Compute the exit heads of these texts' decisions, those of one depth in one pass."""
        by_depth: dict[int, list[int]] = {}
        for lane in lanes:
            decoder = self.decoders[lane]
            by_depth.setdefault(decoder.depths[decoder.index], []).append(lane)
        for depth, together in sorted(by_depth.items()):
            self._reach(depth, together)
            newest = [self.branches[lane].slots[-1] for lane in together]
            states = self.model.heads.states(self.shared.hidden(depth, slots=newest), depth)
            logits = self.model.heads.project(states, depth)
            for row, lane in enumerate(together):
                self.decoders[lane].take(states[row : row + 1], logits[row : row + 1])

    def _verify(self, lanes: list[int]) -> None:
        """Verify these texts' rounds in one pass, tell the controller, and whoever listens."""
        top = self.model.num_layers
        self._reach(top, lanes)
        counts = [1 + self.decoders[lane].pending for lane in lanes]
        slots = [
            slot
            for lane, count in zip(lanes, counts, strict=True)
            for slot in self.branches[lane].slots[-count:]
        ]
        logits = self.shared.score(top, slots=slots).split(counts)
        known = [len(self.decoders[lane].result.tokens) for lane in lanes]
        rounds: list[Round] = []
        for lane, rows in zip(lanes, logits, strict=True):
            rounds.append(self.decoders[lane].finish(rows))
        shadows = [self.decoders[lane].shadow for lane in lanes]
        self.controller.feedback(
            RoundOutcome(
                np.array(lanes, np.int64),
                np.array([self.decoders[lane].index for lane in lanes], np.int64),
                np.array([ended.drafted for ended in rounds], np.int64),
                np.array([ended.accepted for ended in rounds], np.int64),
                [shadow for shadow in shadows if shadow is not None] or None,
            )
        )
        for lane, count in zip(lanes, known, strict=True):
            self._tell(lane, count)

    def _reach(self, depth: int, lanes: list[int]) -> None:
        """Run the newest tokens of these texts to `depth` together."""
        if self.decoders[lanes[0]].shadows:  # their states on the way are wanted, text by text
            for lane in lanes:
                self.decoders[lane].reach(depth)
            return
        behind: list[int] = []
        for lane in lanes:
            self.decoders[lane].charge(depth)
            behind += self.branches[lane].behind(depth)
        self.shared.advance(depth, behind)

    def _clear_away(self) -> None:
        """Drop the slots of rejected tokens and finished texts once they are as many as the others."""
        alive = sorted(slot for branch in self.branches for slot in branch.slots)
        if len(self.shared) < 2 * len(alive) + 64:
            return
        self.shared.keep(alive)
        new = {old: number for number, old in enumerate(alive)}
        for branch in self.branches:
            branch.slots = [new[slot] for slot in branch.slots]

    def _tell(self, lane: int, known: int) -> None:
        if self.on_tokens is not None:
            self.on_tokens(lane, self.decoders[lane].result.tokens[known:])


@dataclass(frozen=True)
class _Decisions:
    """What a controller decided, and the time that it and the features took."""

    actions: list[int]
    seconds: float
