"""Self-speculative greedy decoding under a controller, lossless.

A round starts with one emitted token that has not been fed. The controller walks it down
the candidate depths (SELECT) until it exits at l*, then drafts there token by token (DRAFT)
until it stops or must; all pending tokens go on from l* to L in one pass, the longest
agreeing prefix is kept and the final layer adds one token of its own. LayerSkip
(Elhoushi et al. 2024) is the static case; LEDE (arXiv 2606.03113) puts one policy in charge
of both choices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequence_

import numpy as np
import torch

from sde_gym.decoding.result import DecodeResult, Round, check_request
from sde_gym.errors import InputError
from sde_gym.models.heads import summarise_row
from sde_gym.models.layered import LayeredModel
from sde_gym.models.sequence import Sequence
from sde_gym.policies.controller import Controller, RoundOutcome, View, feature_settings
from sde_gym.policies.observation import HEAD_FEATURES, Action, Phase, observation_rows
from sde_gym.settings import DEFAULT_MAX_DRAFT

_LANE = np.zeros(1, np.int64)


@torch.inference_mode()
def speculative(
    model: LayeredModel,
    prompt: list[int],
    controller: Controller,
    depths: Sequence_[int],
    max_new_tokens: int,
    *,
    max_draft: int = DEFAULT_MAX_DRAFT,
    k: int | None = None,
    window: int | None = None,
    text: int = 0,
) -> DecodeResult:
    """Greedy self-speculative decoding of one prompt.

    Args:
        model: any `LayeredModel`.
        prompt: token ids, at least one.
        controller: decides depth and draft length; it is bound and reset here.
        depths: candidate exit depths, increasing, below L.
        max_new_tokens: budget, at least 0.
        max_draft: most proposals in a round (LEDE's cap is 12).
        k: tokens averaged by the `confidence` feature; None takes what the controller was made
            for, else 5.
        window: tokens averaged by the `trace` feature; None likewise, else 8.
        text: number of the text, for controllers that draw random numbers.

    Returns:
        Tokens equal to `autoregressive`'s in float32.
    """
    k, window = feature_settings(controller, k, window)
    if max_draft < 1 or k < 1 or window < 1:
        raise InputError(f"max_draft {max_draft}, k {k} and window {window} must all be at least 1")
    candidates = model.check_depths(depths)
    columns = model.vocab_size if model.compact_vocabulary is None else len(model.compact_vocabulary)
    if controller.observation and max(k, 2) > columns:
        raise InputError(
            f"k {k} exceeds the {columns} tokens of the exit heads; use a smaller k (at least 2)"
        )
    budget = check_request(model, prompt, max_new_tokens)
    result = DecodeResult(model.num_layers)
    controller.bind(candidates, model.num_layers, max_draft)
    controller.reset(_LANE)
    if budget == 0:
        return result
    started = time.perf_counter()
    decoder = _Decoder(model, controller, candidates, budget, max_draft, k, window, text, result)
    decoder.prefill(prompt)
    result.prefill_seconds = time.perf_counter() - started
    started = time.perf_counter()
    while not decoder.finished:
        decoder.round()
    result.decode_seconds = time.perf_counter() - started
    return result


class _Decoder:
    """The state of one text between rounds."""

    def __init__(
        self, model: LayeredModel, controller: Controller, depths: tuple[int, ...], budget: int,
        max_draft: int, k: int, window: int, text: int, result: DecodeResult,
    ) -> None:  # fmt: skip
        self.model = model
        self.controller = controller
        self.depths = depths
        self.budget = budget
        self.max_draft = max_draft
        self.k = k
        self.window = window
        self.result = result
        self.names = controller.observation
        self.needs_trace = "trace" in self.names
        self.free_columns = [n for n, name in enumerate(self.names) if name not in HEAD_FEATURES]
        compact = model.compact_vocabulary
        self.vocabulary: list[int] | None = None if compact is None else compact.tolist()
        self.surprise: list[float] = []  # -log p(top-1) of every token of the hypothesis, by text position
        self.drafted = self.accepted = 0
        self.text = np.array([text], np.int64)
        self.sequence: Sequence

    @property
    def finished(self) -> bool:
        tokens = self.result.tokens
        return len(tokens) >= self.budget or tokens[-1] in self.model.eos_token_ids

    def prefill(self, prompt: list[int]) -> None:
        """Run the prompt to L and emit token 0."""
        top = self.model.num_layers
        self.sequence = self.model.sequence(len(prompt) + self.budget + self.max_draft)
        self.sequence.append(prompt)
        self.sequence.advance(top)
        logits = self.sequence.score(top)
        self.result.emit(int(logits.argmax()), top, "prefill")
        if self.needs_trace:
            self.surprise.append(_surprise(logits)[0])

    def round(self) -> None:
        """One round: select a depth, draft, verify."""
        self.sequence.append(self.result.tokens[-1:])
        index, first = self._select()
        proposals: list[int] = []
        fed = 0
        if first is not None:
            proposals, fed = self._draft(index, first)
        self._verify(index, proposals, fed)

    def _select(self) -> tuple[int, int | None]:
        """Walk the newest token down; (index of l*, first proposal), or (m, None)."""
        previous: int | None = None
        for index in range(len(self.depths)):
            action, proposal = self._decide(Phase.SELECT, index, [], 0.0, previous)
            if action == Action.EXIT:
                return index, self._propose(index) if proposal is None else proposal
            previous = proposal
        return len(self.depths), None

    def _draft(self, index: int, proposal: int) -> tuple[list[int], int]:
        """Propose at l* until told to stop or forced to; (proposals, how many were fed)."""
        limit = self.budget - len(self.result.tokens)
        proposals: list[int] = []
        chain = 0.0
        while True:
            proposals.append(proposal)
            if proposal in self.model.eos_token_ids or len(proposals) == limit:
                return proposals, len(proposals) - 1
            if self.needs_trace or "chain" in self.names:
                chain += self._last_surprise
                self.surprise.append(self._last_surprise)
            self.sequence.append([proposal])
            if len(proposals) == self.max_draft:
                return proposals, len(proposals)
            action, found = self._decide(Phase.DRAFT, index, proposals, chain, None)
            if action == Action.CONTINUE:
                return proposals, len(proposals)
            proposal = self._propose(index) if found is None else found

    def _verify(self, index: int, proposals: list[int], fed: int) -> None:
        """Run everything pending to L, keep the agreeing prefix, emit the final layer's token."""
        top, result = self.model.num_layers, self.result
        exit_depth = self.depths[index] if proposals else top
        reached = self.sequence.depths[-1]
        if reached < exit_depth and proposals:  # fed last and looked at by nobody
            self._count(exit_depth - reached, 1)
            reached = exit_depth
        self._count(top - reached, 1 + fed)
        self.sequence.advance(top)
        logits = self.sequence.score(top, rows=1 + fed)
        result.head_calls += 1
        final = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(proposals) and proposals[accepted] == final[accepted]:
            result.emit(proposals[accepted], exit_depth, "accepted")
            accepted += 1
        kept = len(self.sequence) - fed + min(accepted, fed)
        if self.needs_trace:  # accepted drafts keep the surprise of the depth that proposed them
            start = len(self.surprise) - fed
            if accepted > fed:
                self.surprise.append(self._last_surprise)
            else:
                del self.surprise[start + accepted :]
        ended = accepted > 0 and proposals[accepted - 1] in self.model.eos_token_ids
        if accepted < len(final) and not ended:
            result.emit(final[accepted], top, "final")
            if self.needs_trace:
                self.surprise.append(_surprise(logits[accepted : accepted + 1])[0])
        self.sequence.rollback(kept)
        if proposals:
            self.drafted += len(proposals)
            self.accepted += accepted
        result.rounds.append(Round(exit_depth, len(proposals), accepted))
        self.controller.feedback(
            RoundOutcome(_LANE, np.array([index]), np.array([len(proposals)]), np.array([accepted]))
        )

    # -------------------------------------------------------------- decisions

    def _decide(
        self, phase: Phase, index: int, proposals: list[int], chain: float, previous: int | None
    ) -> tuple[int, int | None]:
        """One action, and the head's argmax if the head was read."""
        proposal: int | None = None
        rows = np.zeros((1, len(self.names)), np.float32)
        reads = bool(self.names) and self.controller.reads(phase, index)
        if reads:
            self._advance(index)
            logits = self._logits(index)
            if logits.device.type == "cuda":  # else the model's own time would count as the controller's
                torch.cuda.synchronize(logits.device)
        started = time.perf_counter()
        if reads:
            columns, best, entropy = summarise_row(logits[0].cpu().numpy(), max(self.k, 2))
            proposal = self._token(int(columns[0]))
            self._last_surprise = -float(best[0])
            stable = phase == Phase.SELECT and previous == proposal
            rows = self._observe(
                self.names, phase, index, len(proposals), chain, best[np.newaxis], entropy, stable
            )
        elif self.free_columns:  # what needs no head is shown all the same
            names = tuple(self.names[column] for column in self.free_columns)
            rows[:, self.free_columns] = self._observe(names, phase, index, len(proposals), chain)
        view = View(
            np.array([phase], np.int64),
            np.array([index], np.int64),
            np.array([len(proposals)], np.int64),
            rows,
            _LANE,
            self.text,
            np.array([self.result.decisions], np.int64),
        )
        action = int(self.controller.act(view)[0])
        self.result.controller_seconds += time.perf_counter() - started
        self.result.decisions += 1
        return action, proposal

    def _observe(
        self, names: tuple[str, ...], phase: Phase, index: int, length: int, chain: float,
        top_logprobs: np.ndarray | None = None, entropy: float | None = None, stable: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """The observation row, float32 (1, len(names))."""
        recent = self.surprise[-self.window :]
        return observation_rows(
            names,
            1,
            top_logprobs=top_logprobs,
            entropy=entropy,
            trace=sum(recent) / len(recent) if recent else 0.0,
            depth=self.depths[index],
            num_layers=self.model.num_layers,
            phase=int(phase),
            draft_length=length,
            max_draft=self.max_draft,
            stable=float(stable),
            acceptance=self.accepted / self.drafted if self.drafted else 1.0,
            chain=chain,
            k=self.k,
        )

    def _token(self, column: int) -> int:
        """Full-vocabulary id of an exit head's column."""
        return column if self.vocabulary is None else self.vocabulary[column]

    _last_surprise = 0.0

    def _propose(self, index: int) -> int:
        """The proposal at a depth whose features nobody read."""
        self._advance(index)
        logits = self._logits(index)
        if self.needs_trace or "chain" in self.names:
            self._last_surprise = _surprise(logits)[0]
        return self._token(int(logits.argmax()))

    def _advance(self, index: int) -> None:
        """Run the newest token to candidate depth `index`."""
        depth, before = self.depths[index], self.sequence.depths[-1]
        if before < depth:
            self._count(depth - before, 1)
            self.sequence.advance(depth)

    def _logits(self, index: int) -> torch.Tensor:
        self.result.head_calls += 1
        return self.sequence.score(self.depths[index])

    def _count(self, layers: int, tokens: int) -> None:
        """Charge one pass of `tokens` tokens through `layers` layers."""
        self.result.layer_passes += layers * tokens
        self.result.sequential_layers += layers


def _surprise(logits: torch.Tensor) -> list[float]:
    """-log p of the most probable token of each row, nats."""
    values: list[float] = (torch.logsumexp(logits, -1) - logits.amax(-1)).tolist()
    return values
