"""The self-speculative round, one decision at a time.

A round starts with one emitted token that has not been fed. It is walked down the candidate
depths (SELECT) until somebody exits at l*, then tokens are drafted there one by one (DRAFT)
until somebody stops or nothing more may be drafted; all pending tokens go on from l* to L in one
pass, the longest agreeing prefix is kept and the final layer adds one token of its own. LayerSkip
(Elhoushi et al. 2024) is the static case; LEDE (arXiv 2606.03113) puts one policy in charge of
both choices.

`TextDecoder` halts at every decision, so that one implementation serves whoever decides: the
decoder under a controller (`speculative`) and the environment with the model in the loop. For the
latter's sake it can also walk without rounds: depth selection alone, LEDE's single-step formulation.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.decoding.result import DecodeResult, Round
from sde_gym.errors import InputError
from sde_gym.models.heads import summarise_row
from sde_gym.models.layered import LayeredModel
from sde_gym.models.probe import ExitProbe
from sde_gym.models.sequence import Sequence
from sde_gym.policies.observation import HEAD_FEATURES, Action, Phase, observation_rows


def check_features(
    model: LayeredModel, names: tuple[str, ...], max_draft: int, k: int, window: int
) -> None:  # fmt: skip
    """Raise InputError unless these settings are in range and the exit heads have k tokens."""
    if max_draft < 1 or k < 1 or window < 1:
        raise InputError(f"max_draft {max_draft}, k {k} and window {window} must all be at least 1")
    columns = model.vocab_size if model.compact_vocabulary is None else len(model.compact_vocabulary)
    if names and max(k, 2) > columns:
        raise InputError(
            f"k {k} exceeds the {columns} tokens of the exit heads; use a smaller k (at least 2)"
        )


def checked_probe(model: LayeredModel, names: tuple[str, ...], depths: Sequence_[int]) -> ExitProbe | None:
    """The model's exit probe if the features `names` need one.

    Raises:
        InputError: they do, and the model has none, or none that knows these depths.
    """
    if "probe" not in names:
        return None
    if model.probe is None:
        raise InputError(
            f"observation: the feature 'probe' was asked for, but {model.name!r} has no exit probe; leave it "
            "out, or train one (`sde-gym train-probe`)"
        )
    unknown = sorted(set(depths) - set(model.probe.depths))
    if unknown:
        raise InputError(
            f"observation: the exit probe of {model.name!r} knows the depths {list(model.probe.depths)}, not "
            f"{unknown}; choose among them, leave 'probe' out, or train another"
        )
    return model.probe


class TextDecoder:
    """One text under greedy self-speculative decoding, halted at each decision.

    Whoever drives it runs, under `torch.inference_mode`:

        decoder.prefill(prompt)
        while not decoder.finished:
            decoder.open_round()
            ended = None
            while ended is None:
                decoder.read()  # only if the head's features are wanted
                row = decoder.observation()
                ended = decoder.act(action)

    At a decision the newest token has been run to the depth `index` says, if it was read, and to
    the candidate depth before it, if not: a head that nobody reads is not computed unless a token
    is proposed from it.

    Args:
        model: any `LayeredModel`.
        depths: candidate exit depths, checked by `model.check_depths`.
        budget: tokens that the text may have, at least 1 (`check_request`).
        names: features of the observation.
        max_draft: most proposals in a round.
        k: tokens averaged by `confidence`.
        window: tokens averaged by `trace`.
        walks: whether a proposal ends the round at once, neither fed nor verified. The text goes on
            with the last layer's token, and what serves that alone is charged to nobody.

    Raises:
        InputError: the feature `probe` without an exit probe for these depths.

    Attributes:
        result: tokens, rounds and counters so far; its times are the driver's business.
        phase: `Phase` of the decision.
        index: index into `depths` of the decision's depth; in DRAFT that of l*; their number m
            once the walk went on to the last layer.
        proposals: made in this round, in order; still there when it has ended.
        drafted: proposals of all finished rounds.
        accepted: accepted ones among them.
    """

    def __init__(
        self, model: LayeredModel, depths: tuple[int, ...], budget: int, names: tuple[str, ...],
        *, max_draft: int, k: int, window: int, walks: bool = False,
    ) -> None:  # fmt: skip
        self.model = model
        self.depths = depths
        self.budget = budget
        self.names = names
        self.max_draft = max_draft
        self.k = k
        self.window = window
        self.walks = walks
        self.result = DecodeResult(model.num_layers)
        self.phase = Phase.SELECT
        self.index = 0
        self.proposals: list[int] = []
        self.drafted = self.accepted = 0
        self._needs_trace = "trace" in names
        self._needs_surprise = self._needs_trace or "chain" in names
        self._probe = checked_probe(model, names, depths)
        self._states: torch.Tensor | None = None  # what the head saw at this decision, for the probe
        self._free_columns = [n for n, name in enumerate(names) if name not in HEAD_FEATURES]
        self._free_names = tuple(names[column] for column in self._free_columns)
        compact = model.compact_vocabulary
        self._vocabulary: list[int] | None = None if compact is None else compact.tolist()
        # -log p(top-1) of every token of the hypothesis, by text position, each at its depth
        self._surprise: list[float] = []
        self._last_surprise = 0.0  # of the newest proposal
        self._chain = 0.0
        self._limit = 0  # proposals that the budget allows in this round
        self._logits: torch.Tensor | None = None  # of this decision, once read
        self._found: int | None = None  # what the head says at this decision, once observed
        self._previous: int | None = None  # and at the candidate depth before
        self._sequence: Sequence

    @property
    def finished(self) -> bool:
        """Whether the text is complete."""
        tokens = self.result.tokens
        return len(tokens) >= self.budget or tokens[-1] in self.model.eos_token_ids

    @property
    def best(self) -> tuple[int, float] | None:
        """The head's best token at this decision and -log p of it, nats; None unless observed."""
        return None if self._found is None else (self._found, self._last_surprise)

    def prefill(self, prompt: Sequence_[int]) -> None:
        """Run the prompt to L and emit token 0."""
        top = self.model.num_layers
        self._sequence = self.model.sequence(len(prompt) + self.budget + self.max_draft)
        self._sequence.append(prompt)
        self._sequence.advance(top)
        logits = self._sequence.score(top)
        self.result.emit(int(logits.argmax()), top, "prefill")
        if self._needs_trace:
            self._surprise.append(_surprise(logits)[0])

    def open_round(self) -> None:
        """Feed the newest emitted token and halt at the first candidate depth."""
        tokens = self.result.tokens
        self._sequence.append(tokens[-1:])
        self._limit = self.budget - len(tokens)
        self.phase, self.index = Phase.SELECT, 0
        self.proposals = []
        self._chain = 0.0
        self._logits = self._found = self._previous = None

    def read(self) -> None:
        """Run the newest token to the decision's depth and compute the exit head there."""
        self._logits = self._score()
        if self._logits.device.type == "cuda":  # else the model's own time would be taken for the driver's
            torch.cuda.synchronize(self._logits.device)

    def observation(self) -> NDArray[np.float32]:
        """What is seen at this decision, float32 (1, f); what needs a head is 0 unless it was read."""
        if self._logits is not None:
            columns, best, entropy = summarise_row(self._logits[0].cpu().numpy(), max(self.k, 2))
            self._found = self._token(int(columns[0]))
            self._last_surprise = -float(best[0])
            stable = self.phase == Phase.SELECT and self._previous == self._found
            probe = self._ask_probe(best, entropy)
            return self._observe(self.names, best[np.newaxis], entropy, stable, probe)
        rows = np.zeros((1, len(self.names)), np.float32)
        if self._free_columns:
            rows[:, self._free_columns] = self._observe(self._free_names)
        return rows

    def act(self, action: int) -> Round | None:
        """Carry out one `Action`; returns the round if this ended it.

        The next decision, if the text goes on, comes after `open_round`.
        """
        self.result.decisions += 1
        if action == Action.EXIT:
            return self._propose()
        if self.phase == Phase.DRAFT:
            return self._verify(len(self.proposals))
        self._previous = self._found
        self._logits = self._found = None
        self.index += 1
        return self._verify(0) if self.index == len(self.depths) else None

    def _propose(self) -> Round | None:
        """One more proposal at l*; the round if it has to be verified now."""
        proposal = self._found
        if proposal is None:  # nobody looked at the head
            logits = self._score() if self._logits is None else self._logits
            proposal = self._token(int(logits.argmax()))
            if self._needs_surprise:
                self._last_surprise = _surprise(logits)[0]
        self._logits = self._found = None
        self.phase = Phase.DRAFT
        self.proposals.append(proposal)
        if self.walks:
            return self._go_on(proposal)
        count = len(self.proposals)
        if proposal in self.model.eos_token_ids or count == self._limit:
            return self._verify(count - 1)
        if self._needs_surprise:
            self._chain += self._last_surprise
            self._surprise.append(self._last_surprise)
        self._sequence.append([proposal])
        return self._verify(count) if count == self.max_draft else None

    def _verify(self, fed: int) -> Round:
        """Run everything pending to L, keep the agreeing prefix, emit the final layer's token."""
        top, result, proposals = self.model.num_layers, self.result, self.proposals
        exit_depth = self.depths[self.index] if proposals else top
        reached = self._sequence.depths[-1]
        if reached < exit_depth and proposals:  # fed last and looked at by nobody
            self._count(exit_depth - reached, 1)
            reached = exit_depth
        self._count(top - reached, 1 + fed)
        self._sequence.advance(top)
        logits = self._sequence.score(top, rows=1 + fed)
        result.head_calls += 1
        final = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(proposals) and proposals[accepted] == final[accepted]:
            result.emit(proposals[accepted], exit_depth, "accepted")
            accepted += 1
        kept = len(self._sequence) - fed + min(accepted, fed)
        if self._needs_trace:  # accepted drafts keep the surprise of the depth that proposed them
            start = len(self._surprise) - fed
            if accepted > fed:
                self._surprise.append(self._last_surprise)
            else:
                del self._surprise[start + accepted :]
        ended = accepted > 0 and proposals[accepted - 1] in self.model.eos_token_ids
        if accepted < len(final) and not ended:
            result.emit(final[accepted], top, "final")
            if self._needs_trace:
                self._surprise.append(_surprise(logits[accepted : accepted + 1])[0])
        self._sequence.rollback(kept)
        return self._end(Round(exit_depth, len(proposals), accepted))

    def _go_on(self, proposal: int) -> Round:
        """End a walk at its proposal: emit the last layer's token, at nobody's cost."""
        top, exit_depth = self.model.num_layers, self.depths[self.index]
        self._sequence.advance(top)
        logits = self._sequence.score(top)
        token = int(logits.argmax())
        right = token == proposal
        self.result.emit(token, exit_depth if right else top, "accepted" if right else "final")
        if self._needs_trace:
            self._surprise.append(_surprise(logits)[0])
        return self._end(Round(exit_depth, 1, int(right)))

    def _end(self, ended: Round) -> Round:
        """Enter a round that has ended."""
        self.drafted += ended.drafted
        self.accepted += ended.accepted
        self.result.rounds.append(ended)
        return ended

    def _observe(
        self, names: tuple[str, ...], top_logprobs: NDArray[np.float32] | None = None,
        entropy: float | None = None, stable: bool = False, probe: float | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """The observation row, float32 (1, len(names))."""
        recent = self._surprise[-self.window :]
        return observation_rows(
            names,
            1,
            top_logprobs=top_logprobs,
            entropy=entropy,
            trace=sum(recent) / len(recent) if recent else 0.0,
            depth=self.depths[self.index],
            num_layers=self.model.num_layers,
            phase=int(self.phase),
            draft_length=len(self.proposals),
            max_draft=self.max_draft,
            stable=float(stable),
            acceptance=self.accepted / self.drafted if self.drafted else 1.0,
            chain=self._chain,
            probe=probe,
            k=self.k,
        )

    def _token(self, column: int) -> int:
        """Full-vocabulary id of an exit head's column."""
        return column if self._vocabulary is None else self._vocabulary[column]

    def _score(self) -> torch.Tensor:
        """Run the newest token to the decision's depth; the head's logits, float32 (1, V)."""
        depth, before = self.depths[self.index], self._sequence.depths[-1]
        if before < depth:
            self._count(depth - before, 1)
            self._sequence.advance(depth)
        self.result.head_calls += 1
        if self._probe is None:
            return self._sequence.score(depth)
        heads = self.model.heads
        self._states = heads.states(self._sequence.hidden(depth), depth)
        return heads.project(self._states, depth)

    def _ask_probe(self, logprobs: NDArray[np.float32], entropy: float) -> float | None:
        """What the exit probe says at this decision, whose head was read; None if nobody asks it."""
        if self._probe is None or self._states is None:
            return None
        depth = self.depths[self.index]
        states = self._states.float().cpu().numpy()
        return float(self._probe(depth, states, logprobs[np.newaxis], np.array([entropy], np.float32))[0])

    def _count(self, layers: int, tokens: int) -> None:
        """Charge one pass of `tokens` tokens through `layers` layers."""
        self.result.layer_passes += layers * tokens
        self.result.sequential_layers += layers


def _surprise(logits: torch.Tensor) -> list[float]:
    """-log p of the most probable token of each row, nats."""
    values: list[float] = (torch.logsumexp(logits, -1) - logits.amax(-1)).tolist()
    return values
