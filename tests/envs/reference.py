"""The decision problem once more, slowly: one text, plain Python, straight from its definition.

Shares nothing with the engine but the trace set and the names of features.
"""

from __future__ import annotations

import math

from sde_gym.traces import TraceSet

NAMES = (
    "confidence",
    "entropy",
    "trace",
    "depth",
    "phase",
    "draft_length",
    "top1",
    "margin",
    "stable",
    "acceptance",
    "chain",
)


class ReferenceEpisode:
    """One text; `observe()`, `step(action)`, `counters`, `over`, `complete`, `go_on()`.

    `over` says that the episode is, `complete` that its text is; `go_on()` starts the next episode of
    a text that is not.
    """

    def __init__(
        self,
        traces: TraceSet,
        text: int,
        *,
        depths: tuple[int, ...],
        k: int,
        window: int,
        max_draft: int,
        max_new_tokens: int,
        final_token_reward: float = 1.0,
        credit: str = "immediate",
        episode: str = "generation",
    ) -> None:
        self.traces, self.depths, self.k, self.window = traces, depths, k, window
        self.max_draft, self.final_token_reward, self.credit = max_draft, final_token_reward, credit
        self.episode = episode
        self.first_row = int(traces.start[text])
        recorded = [int(token) for token in traces.tokens_of(text)]
        self.text = recorded[:max_new_tokens]  # what greedy decoding with this budget emits
        # Where the recording was cut, the cut is the budget.
        room = traces.manifest["context_limit"] - traces.prompt_lengths[text] + 1
        self.allowed = min(max_new_tokens, room) if traces.ends[text] == "eos" else len(self.text)
        self.eos = set(traces.eos_token_ids)
        self.emitted = self.text[:1]
        # -log p(top-1) of each token of the hypothesis, by text position, as of where it came from.
        self.surprises = [-float(traces.final_logprobs[self.first_row, 0])]
        self.over = self.complete = False
        self.finished_drafted = self.finished_accepted = 0
        names = "layer_passes sequential_layers head_calls decisions drafted accepted rounds tokens"
        self.counters = dict.fromkeys(names.split(), 0)
        self.held = 0.0
        self._open_round()

    def go_on(self) -> None:
        """The next round or walk of this text."""
        assert self.over
        assert not self.complete
        self.over = False
        self._open_round()

    def _open_round(self) -> None:
        self.phase, self.level, self.proposals = "SELECT", 0, []
        self.reached = [0]  # layers that each pending token has been run through
        self._run_newest(self.depths[0])
        self.counters["head_calls"] += 1

    def _run_newest(self, depth: int) -> None:
        layers = depth - self.reached[-1]
        self.counters["layer_passes"] += layers
        self.counters["sequential_layers"] += layers
        self.reached[-1] = depth

    def _row(self) -> int:
        """Row of the token that is being predicted."""
        return self.first_row + len(self.emitted) + len(self.proposals)

    def _recorded(self, row: int, level: int) -> tuple[list[int], list[float], float]:
        """Ids, log-probabilities and entropy of what this depth says next."""
        wrong = self._first_wrong()
        if wrong is not None:  # only what was recorded behind this very proposal is known
            at = self.first_row + len(self.emitted) + wrong
            column = self.traces.depths.index(self.depths[level])
            first, end = self.traces.branch_start[at * len(self.traces.depths) + column :][:2]
            branch = first + (row - at) - 1
            assert first <= branch < end
            ids = [int(self.traces.overrun_proposal[branch])]
            logprobs = [float(value) for value in self.traces.overrun_logprobs[branch]]
            return ids, logprobs, float(self.traces.overrun_entropy[branch])
        column = self.traces.depths.index(self.depths[level])
        ids = [int(token) for token in self.traces.top_ids[row, column]]
        logprobs = [float(value) for value in self.traces.top_logprobs[row, column]]
        return ids, logprobs, float(self.traces.entropy[row, column])

    def _first_wrong(self) -> int | None:
        """Index of the first proposal of the round that differs from the text."""
        truth = self.text[len(self.emitted) :][: len(self.proposals)]
        for index, proposal in enumerate(self.proposals):
            if index >= len(truth) or proposal != truth[index]:
                return index
        return None

    def observe(self) -> dict[str, float]:
        """All features; zeros at the end."""
        if self.over:
            return dict.fromkeys(NAMES, 0.0)
        ids, logprobs, entropy = self._recorded(self._row(), self.level)
        recent = self.surprises[-self.window :]
        stable = False
        if self.phase == "SELECT" and self.level > 0:
            stable = self._recorded(self._row(), self.level - 1)[0][0] == ids[0]
        chain = sum(self.surprises[len(self.emitted) :])
        return {
            "confidence": min(-sum(logprobs[: self.k]) / self.k, 50.0),
            "entropy": entropy,
            "trace": sum(recent) / len(recent),
            "depth": self.depths[self.level] / self.traces.num_layers,
            "phase": 1.0 if self.phase == "DRAFT" else 0.0,
            "draft_length": len(self.proposals) / self.max_draft,
            "top1": math.exp(logprobs[0]),
            "margin": math.exp(logprobs[0]) - math.exp(logprobs[1]),
            "stable": float(stable),
            "acceptance": self.finished_accepted / self.finished_drafted if self.finished_drafted else 1.0,
            "chain": min(chain, 192.0),
        }

    def step(self, action: int) -> float:
        """One action, 1 = exit; its reward."""
        assert not self.over
        self.counters["decisions"] += 1
        if self.episode == "token":
            return self._walk(action)
        if action == 1:
            return self._exit()
        if self.phase == "DRAFT":
            return -0.01 + self._verify()
        if self.level + 1 < len(self.depths):
            self.level += 1
            self._run_newest(self.depths[self.level])
            self.counters["head_calls"] += 1
            return -0.01
        return -0.01 + self._verify()

    def _exit(self) -> float:
        layers = self.traces.num_layers
        remaining = self.allowed - len(self.emitted)
        ids, logprobs, _ = self._recorded(self._row(), self.level)
        proposal = ids[0]
        self.proposals.append(proposal)
        truth = self.text[len(self.emitted) :][: len(self.proposals)]
        right = self.proposals == truth
        reward = (1.0 if right else -2.0) + (layers - self.depths[self.level]) / layers
        self.phase = "DRAFT"
        self.surprises.append(-logprobs[0])
        last = proposal in self.eos or len(self.proposals) == remaining
        if not last:
            self.reached.append(0)
            self._run_newest(self.depths[self.level])
        if last or len(self.proposals) == self.max_draft or (not right and not self.traces.overrun):
            return self.held_and(reward + self._verify())
        self.counters["head_calls"] += 1
        if self.credit == "round":
            self.held += reward
            return 0.0
        return reward

    def _walk(self, action: int) -> float:
        """A step of a walk that is never drafted on from and never verified."""
        at, layers = len(self.emitted), self.traces.num_layers
        accepted = 0
        if action == 0 and self.level + 1 < len(self.depths):
            self.level += 1
            self._run_newest(self.depths[self.level])
            self.counters["head_calls"] += 1
            return -0.01
        if action == 0:
            self._run_newest(layers)
            self.counters["head_calls"] += 1
            reward = -0.01 + self.final_token_reward
        else:
            accepted = int(self._recorded(self._row(), self.level)[0][0] == self.text[at])
            reward = (1.0 if accepted else -2.0) + (layers - self.depths[self.level]) / layers
            self.finished_drafted += 1
            self.finished_accepted += accepted
            self.counters["drafted"] += 1
            self.counters["accepted"] += accepted
        self.counters["rounds"] += 1
        self.counters["tokens"] += 1
        self.emitted.append(self.text[at])
        self.surprises.append(-float(self.traces.final_logprobs[self.first_row + at, 0]))
        self.over, self.complete = True, len(self.emitted) == len(self.text)
        return reward

    def held_and(self, reward: float) -> float:
        """The reward, and what was held back for the end of the round."""
        reward, self.held = reward + self.held, 0.0
        return reward

    def _verify(self) -> float:
        """Everything pending to L, the agreeing prefix kept, one more token if there is room."""
        layers = self.traces.num_layers
        self.counters["sequential_layers"] += max(layers - depth for depth in self.reached)
        self.counters["layer_passes"] += sum(layers - depth for depth in self.reached)
        self.counters["head_calls"] += 1
        before = len(self.emitted)
        accepted = 0
        for proposal, token in zip(self.proposals, self.text[before:], strict=False):
            if proposal != token:
                break
            accepted += 1
        self.emitted += self.proposals[:accepted]
        del self.surprises[len(self.emitted) :]
        reward = 0.0
        if len(self.emitted) < self.allowed and self.emitted[-1] not in self.eos:
            at = len(self.emitted)
            self.emitted.append(self.text[at])
            self.surprises.append(-float(self.traces.final_logprobs[self.first_row + at, 0]))
            reward = self.final_token_reward
        assert self.emitted == self.text[: len(self.emitted)]
        self.finished_drafted += len(self.proposals)
        self.finished_accepted += accepted
        self.counters["drafted"] += len(self.proposals)
        self.counters["accepted"] += accepted
        self.counters["rounds"] += 1
        self.counters["tokens"] += len(self.emitted) - before
        self.complete = len(self.emitted) == len(self.text)
        self.over = self.complete or self.episode == "round"
        if not self.over:
            self._open_round()
        return self.held_and(reward) if self.phase == "DRAFT" or self.held else reward
