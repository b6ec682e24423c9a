"""The self-speculative round, one decision at a time.

A round starts with one emitted token that has not been fed. It is walked down the candidate
depths (SELECT) until somebody exits at l*, then tokens are drafted there one by one (DRAFT)
until somebody stops or nothing more may be drafted; all pending tokens go on from l* to L in one
pass, the longest agreeing prefix is kept and the final layer adds one token of its own. LayerSkip
(Elhoushi et al. 2024) is the static case; LEDE (arXiv 2606.03113) puts one policy in charge of
both choices; AdaDecode walks every token of a round down the depths anew.

`TextDecoder` halts at every decision, so that one implementation serves whoever decides: the
decoder under a controller (`speculative`), several texts in one pass (`speculative_batch`) and the
environment with the model in the loop. For the latter's sake it can also walk without rounds: depth
selection alone, LEDE's single-step formulation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequence_
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.decoding.features import TextFeatures
from sde_gym.decoding.result import NEAR_TIE, DecodeResult, Fate, Rejection, Round
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Shadow
from sde_gym.policies.observation import Action, Phase


class TokenRules(Protocol):
    """How tokens come out of logits, and where the text stops; plain greedy decoding needs none.

    Attributes:
        eos_token_ids: ids that end a text.
    """

    eos_token_ids: tuple[int, ...]

    def propose(
        self, logits: torch.Tensor, vocabulary: list[int] | None, prefix: list[int]
    ) -> tuple[int, torch.Tensor | None]:
        """A proposal, and the distribution (V,) that it was drawn from, None if none was.

        Args:
            logits: float32 (1, C), of an exit head.
            vocabulary: full-vocabulary ids of its C columns; None = all, in order.
            prefix: prompt, emitted tokens and proposals so far.
        """

    def verify(
        self,
        logits: torch.Tensor,
        prefix: list[int],
        proposals: list[int],
        drafts: list[torch.Tensor | None],
    ) -> tuple[int, int | None]:
        """How many proposals are accepted, and the final layer's own token behind them.

        Args:
            logits: float32 (n, V), of the final layer behind `prefix` and behind each of its
                continuations by proposals; n is one more than their number, or equal to it where the
                last proposal was not fed.
            prefix: prompt and emitted tokens.
            proposals: may be none.
            drafts: what `propose` said they were drawn from.

        Returns:
            The token is None where no row is left for it, or the last accepted proposal ends the text.
        """

    def stops(self, ids: list[int]) -> bool:
        """Whether the text ends here; asked after every emitted token, `ids` being prompt and all of them."""


class Frontier(Protocol):
    """What the decoder needs of a `Sequence`: a chain of tokens, each run to some depth."""

    @property
    def depths(self) -> Sequence_[int]:
        """Of all tokens."""

    def __len__(self) -> int: ...

    def append(self, tokens: Sequence_[int]) -> Any: ...

    def advance(self, depth: int) -> None: ...

    def hidden(self, depth: int, rows: int = 1) -> torch.Tensor: ...

    def score(self, depth: int, rows: int = 1) -> torch.Tensor: ...

    def rollback(self, length: int) -> None: ...


class TextDecoder:
    """One text under self-speculative decoding, halted at each decision.

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
    is proposed from it. `act` may be taken apart into `score` (where needed), `decide` and `finish`, so
    that the passes of several texts can be run together.

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
        every_token: whether each token of a round is walked down the depths anew; see
            `BaseController.walks_every_token`.
        shadows: whether to score every candidate depth at the emitted positions (`shadow`).
        rules: how tokens are chosen; None = the most probable one.
        count_near_ties: whether to look for them.

    Raises:
        InputError: the feature `probe` without an exit probe for these depths.

    Attributes:
        result: tokens, rounds and counters so far; its times are the driver's business, but for
            `idle_head_seconds`.
        phase: `Phase` of the decision.
        index: index into `depths` of the decision's depth; in DRAFT that of l*; their number m
            once the walk went on to the last layer.
        proposals: made in this round, in order; still there when it has ended.
        pending: fed proposals that wait for verification, once `decide` has ended the round.
        drafted: proposals of all finished rounds.
        accepted: accepted ones among them.
        shadow: what every depth says at the tokens of the newest round, if `shadows`.
        sequence: the depth frontier of the text, put in place by `prefill` unless it is there.
    """

    def __init__(
        self, model: LayeredModel, depths: tuple[int, ...], budget: int, names: tuple[str, ...],
        *, max_draft: int, k: int, window: int, walks: bool = False, every_token: bool = False,
        shadows: bool = False, rules: TokenRules | None = None, count_near_ties: bool = False,
    ) -> None:  # fmt: skip
        self.model = model
        self.depths = depths
        self.budget = budget
        self.names = names
        self.max_draft = max_draft
        self.walks = walks
        self.every_token = every_token
        self.shadows = shadows
        self.rules = rules
        self.result = DecodeResult(model.num_layers)
        self.features = TextFeatures(model, depths, names, max_draft=max_draft, k=k, window=window)
        self.phase = Phase.SELECT
        self.index = 0
        self.proposals: list[int] = []
        self.pending = 0
        self.drafted = self.accepted = 0
        self.shadow: Shadow | None = None
        self.sequence: Frontier | None = None
        self._eos = model.eos_token_ids if rules is None else rules.eos_token_ids
        self._stopped = False
        self._near_ties = count_near_ties
        self._times_heads = model.device.type == "cpu"
        compact = model.compact_vocabulary
        self._vocabulary: list[int] | None = None if compact is None else compact.tolist()
        self._ids: list[int] = []  # prompt and emitted tokens
        self._proposal_depths: list[int] = []
        self._drafts: list[torch.Tensor | None] = []  # what the proposals were drawn from
        self._limit = 0  # proposals that the budget allows in this round
        self._logits: torch.Tensor | None = None  # of this decision, once read
        self._found: int | None = None  # the head's best column at this decision, once observed
        self._before: int | None = None  # and at the candidate depth before
        self._head_seconds = 0.0  # of this decision's head
        self._states: list[list[torch.Tensor]] = []  # per depth, of the round's tokens, for `shadow`

    @property
    def finished(self) -> bool:
        """Whether the text is complete."""
        tokens = self.result.tokens
        return self._stopped or len(tokens) >= self.budget or tokens[-1] in self._eos

    @property
    def best(self) -> tuple[int, float] | None:
        """The head's best token at this decision and -log p of it, nats; None unless observed."""
        return None if self._found is None else (self._token(self._found), self.features.newest)

    # ------------------------------------------------------------------ the text

    def prefill(self, prompt: Sequence_[int]) -> None:
        """Run the prompt to L and emit token 0."""
        if self.sequence is None:
            draft = min(self.max_draft, self.budget)
            self.sequence = self.model.sequence(len(prompt) + self.budget + draft)
        top = self.model.num_layers
        self.sequence.append(prompt)
        self.sequence.advance(top)
        self.begin(prompt, self.sequence.score(top))

    def begin(self, prompt: Sequence_[int], logits: torch.Tensor) -> None:
        """Emit token 0, given the final layer's logits behind the prompt, float32 (1, V)."""
        self._ids = list(prompt)
        if self.rules is None:
            token: int | None = int(logits.argmax())
        else:
            token = self.rules.verify(logits, self._ids, [], [])[1]
        assert token is not None
        self._emit(token, self.model.num_layers, "prefill")
        self._look_for_ties(logits)
        self.features.emitted(logits)

    def open_round(self) -> None:
        """Feed the newest emitted token and halt at the first candidate depth."""
        assert self.sequence is not None
        tokens = self.result.tokens
        self.sequence.append(tokens[-1:])
        self._limit = self.budget - len(tokens)
        self.phase, self.index = Phase.SELECT, 0
        self.proposals, self._proposal_depths, self._drafts = [], [], []
        self.pending = 0
        self.features.open_round()
        self._forget_head()
        if self.shadows:
            self._states = [[] for _ in self.depths]

    # ------------------------------------------------------------------ a decision

    def read(self) -> None:
        """Run the newest token to the decision's depth and compute the exit head there."""
        self.score()
        if not self._times_heads:  # else the model's own time would be taken for the driver's
            torch.cuda.synchronize(self.model.device)

    def score(self) -> None:
        """`read` without waiting for the device."""
        assert self.sequence is not None
        depth = self.depths[self.index]
        self.reach(depth)
        started = time.perf_counter()
        states = self.model.heads.states(self.sequence.hidden(depth), depth)
        self.take(states, self.model.heads.project(states, depth))
        self._head_seconds = time.perf_counter() - started

    def take(self, states: torch.Tensor, logits: torch.Tensor) -> None:
        """What the exit head sees at the decision's depth, (1, hidden), and says, float32 (1, C)."""
        self.result.head_calls += 1
        self.features.states = states
        self._logits = logits

    def observation(self) -> NDArray[np.float32]:
        """What is seen at this decision, float32 (1, f); what needs a head is 0 unless it was read."""
        acceptance = self.accepted / self.drafted if self.drafted else 1.0
        drafted = len(self.proposals)
        if self._logits is None:
            return self.features.unread(self.phase, self.index, drafted, acceptance)
        rows, self._found = self.features.read(
            self._logits, self.phase, self.index, drafted, acceptance, self._before
        )
        return rows

    def act(self, action: int) -> Round | None:
        """Carry out one `Action`; returns the round if this ended it.

        The next decision, if the text goes on, comes after `open_round`.
        """
        if action == Action.EXIT and self.needs_score:
            self.score()
        if not self.decide(action):
            return None
        return self._go_on() if self.walks and self.proposals else self.finish(self._final_logits())

    @property
    def needs_score(self) -> bool:
        """Whether the exit head is still to be computed before a token can be proposed from it."""
        return self._logits is None

    def decide(self, action: int) -> bool:
        """Enter an `Action`; whether it ends the round, so that `pending` proposals are to be verified."""
        self.result.decisions += 1
        if action == Action.EXIT:
            return self._propose()
        if self._times_heads:
            self.result.idle_head_seconds += self._head_seconds
        self._head_seconds = 0.0
        self.pending = len(self.proposals)
        if self.phase == Phase.DRAFT:
            return True
        self._before, self._logits, self._found = self._found, None, None
        self.index += 1
        return self.index == len(self.depths)

    def _propose(self) -> bool:
        """One more proposal; whether it has to be verified now."""
        logits = self._logits
        assert logits is not None and self.sequence is not None
        self._head_seconds = 0.0
        if self.rules is None:
            proposal = self._token(int(logits.argmax()) if self._found is None else self._found)
        else:
            proposal, draft = self.rules.propose(logits, self._vocabulary, self._ids + self.proposals)
            self._drafts.append(draft)
        self.features.proposed(logits if self._found is None else None)
        self._proposal_depths.append(self.depths[self.index])
        self._forget_head()
        self.proposals.append(proposal)
        count = len(self.proposals)
        self.pending = count - 1
        if self.every_token:
            self.index = 0
        else:
            self.phase = Phase.DRAFT
        if self.walks or proposal in self._eos or count == self._limit:
            return True
        self.pending = count
        self.features.fed()
        self.sequence.append([proposal])
        return count == self.max_draft

    # ------------------------------------------------------------------ verification

    def finish(self, logits: torch.Tensor) -> Round:
        """Keep the proposals that the final layer confirms, emit its own token, and end the round.

        Args:
            logits: of the final layer, float32 (1 + pending, V), behind the round's first token and each
                pending proposal, which have all been run to L.
        """
        assert self.sequence is not None
        top, proposals, fed = self.model.num_layers, self.proposals, self.pending
        self.result.head_calls += 1
        before = len(self.result.tokens)
        if self.rules is None:
            accepted, token = self._confirmed(logits)
        else:
            accepted, token = self.rules.verify(logits, self._ids, proposals, self._drafts)
        for number in range(accepted):
            if self._emit(proposals[number], self._proposal_depths[number], "accepted"):
                accepted, token = number + 1, None  # the rest would come after the text's end
                break
        self.features.verified(fed, accepted)
        if token is not None:
            self._emit(token, top, "final")
            self.features.emitted(logits[accepted : accepted + 1])
        emitted = len(self.result.tokens) - before
        self._look_for_ties(logits[:emitted])
        for number in range(accepted, len(proposals)):
            self.result.rejected.append(
                Rejection(before + number, self._proposal_depths[number], proposals[number])
            )
        self.sequence.rollback(len(self.sequence) - fed + min(accepted, fed))
        if self.shadows:
            self.shadow = self._look_at_shadows(self.result.tokens[before:])
        return self._end(Round(max(self._proposal_depths, default=top), len(proposals), accepted))

    def _confirmed(self, logits: torch.Tensor) -> tuple[int, int | None]:
        """`TokenRules.verify` of greedy decoding."""
        proposals = self.proposals
        final = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(proposals) and proposals[accepted] == final[accepted]:
            accepted += 1
        ended = accepted > 0 and proposals[accepted - 1] in self._eos
        return accepted, None if ended or accepted == len(final) else final[accepted]

    def _go_on(self) -> Round:
        """End a walk at its proposal: emit the last layer's token, at nobody's cost."""
        assert self.sequence is not None
        (proposal,), (exit_depth,) = self.proposals, self._proposal_depths
        top = self.model.num_layers
        self.sequence.advance(top)
        logits = self.sequence.score(top)
        token = int(logits.argmax())
        right = token == proposal
        self._emit(token, exit_depth if right else top, "accepted" if right else "final")
        self.features.emitted(logits)
        return self._end(Round(exit_depth, 1, int(right)))

    def _end(self, ended: Round) -> Round:
        """Enter a round that has ended."""
        self.drafted += ended.drafted
        self.accepted += ended.accepted
        self.result.rounds.append(ended)
        return ended

    def _emit(self, token: int, depth: int, fate: Fate) -> bool:
        """A token of the text; whether the rules stop it here."""
        self.result.emit(token, depth, fate)
        self._ids.append(token)
        if self.rules is not None and self.rules.stops(self._ids):
            self._stopped = True
        return self._stopped

    def _look_for_ties(self, logits: torch.Tensor) -> None:
        """Count the rows whose two best logits are close."""
        if self._near_ties and len(logits):
            best = logits.topk(2, -1).values
            self.result.near_ties += int((best[:, 0] - best[:, 1] < NEAR_TIE).sum())

    # ------------------------------------------------------------------ passes

    def reach(self, depth: int) -> None:
        """Run every token of the round to `depth`, if it is not there yet, and charge that."""
        assert self.sequence is not None
        if self.shadows:
            for index, stop in enumerate(self.depths):
                if stop <= depth:
                    self._reach(stop, index)
        self._reach(depth)

    def _reach(self, depth: int, shadow: int | None = None) -> None:
        sequence = self.sequence
        assert sequence is not None
        rows = self.charge(depth)
        if rows:
            sequence.advance(depth)
            if shadow is not None:
                self._states[shadow].append(sequence.hidden(depth, rows).clone())

    def charge(self, depth: int) -> int:
        """Count the passes that bring every token of the round to `depth`; how many tokens they move."""
        assert self.sequence is not None
        reached = self.sequence.depths
        lowest, rows, last = reached[-1], 0, len(reached) - 1
        while rows <= last and reached[last - rows] < depth:
            self.result.layer_passes += depth - reached[last - rows]
            rows += 1
        if rows:
            self.result.sequential_layers += depth - lowest
        return rows

    def _final_logits(self) -> torch.Tensor:
        """Run everything pending to L; the final layer's logits of the round's fed tokens."""
        assert self.sequence is not None
        top = self.model.num_layers
        self.reach(top)
        return self.sequence.score(top, rows=1 + self.pending)

    def _look_at_shadows(self, tokens: list[int]) -> Shadow:
        """Score every candidate depth where the round emitted `tokens`."""
        started = time.perf_counter()
        count, m = len(tokens), len(self.depths)
        wanted = torch.tensor(tokens, device=self.model.device)
        right, probability = np.zeros((count, m), np.bool_), np.zeros((count, m), np.float32)
        vocabulary = self.model.compact_vocabulary
        for index, depth in enumerate(self.depths):
            logits = self.model.heads.logits(torch.cat(self._states[index])[:count], depth)
            best, columns = logits.max(-1)
            ids = columns if vocabulary is None else vocabulary[columns]
            right[:, index] = (ids == wanted).cpu().numpy()
            probability[:, index] = (best - torch.logsumexp(logits, -1)).exp().cpu().numpy()
        self.result.head_calls += m
        if self._times_heads:
            self.result.idle_head_seconds += time.perf_counter() - started
        return Shadow(right, probability)

    def _forget_head(self) -> None:
        self._logits = self._found = self._before = None
        self._head_seconds = 0.0

    def _token(self, column: int) -> int:
        """Full-vocabulary id of an exit head's column."""
        return column if self._vocabulary is None else self._vocabulary[column]
