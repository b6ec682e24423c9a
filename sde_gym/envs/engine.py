"""Batched replay: the whole decision problem as table look-ups, many texts at once.

Greedy lossless decoding emits the same text whatever the controller does, so the outcome of every
action follows from what was recorded along that text. `ReplayEngine` holds n lanes, each with a
text in some state, and steps them together in numpy; there is no Python loop over lanes. The
gymnasium environment is a face of one lane.

Behind a wrong proposal a policy sees what was recorded there (overrun), until something ends the
round. Where a set was recorded without, the round is verified as soon as a proposal is wrong, within
the same step: the wrong proposal is run to l* like any other, its layers are charged, but nobody
scores it. That hides the cost of drafting on in vain, so what comes out is not to be compared with
live runs.

An episode is a whole text, one round, or one walk of one token down the depths. The last is the
paper's formulation of depth selection alone: every walk starts from the true text with all earlier
tokens from the last layer, and nothing is drafted on or verified, so its counters are those of the
walks and say nothing about speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.envs.arguments import candidate_depths, choice, indices, token_budget, whole_number
from sde_gym.envs.rewards import Reward, StepOutcome, resolve_reward
from sde_gym.envs.tables import Tables
from sde_gym.envs.timing import StepCosts
from sde_gym.errors import InputError
from sde_gym.models.cost import CostModel, resolve_cost
from sde_gym.policies.controller import View
from sde_gym.policies.observation import (
    HEAD_FEATURES,
    PAPER,
    Action,
    Phase,
    acceptance,
    observation_rows,
    resolve_observation,
)
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.traces import TraceSet

COUNTERS = (
    "layer_passes",
    "sequential_layers",
    "head_calls",
    "decisions",
    "drafted",
    "accepted",
    "rounds",
    "tokens",
)
"""Counted for each text since prefill, whose own costs and token do not count.

`layer_passes` are layers times tokens; `sequential_layers` counts a layer once however many tokens
pass it together; `head_calls` counts a head once however many tokens it scores, the last layer's
at each end of a round included. Work behind the observation just returned is already counted.
With episode "token" a walk counts as a round that emits one token, whoever it comes from, and
verification, which there is none of, costs nothing.
"""

CREDITS = ("immediate", "round")
"""When a proposal is paid: in the step that made it, or in the step that ends its round."""

EPISODES = ("generation", "round", "token")
"""What ends an episode: the text, a round, or one token's walk down the depths."""


class ReplayEngine:
    """Lanes of texts replayed from a trace set.

    State of a lane: `position` p is the row whose token is being predicted, so the newest fed
    token is y_{p-1}; `opening` is p at the start of the round; `index` is that of the depth
    reached, `entry` that of what this depth says there (`Tables`). On the true text that follows from
    position and index; behind a wrong proposal it is a row of its branch.

    Args:
        traces: recorded texts; shared, never copied by lane.
        depths: candidate depths, a rising subset of the recorded ones; all if not given.
        observation: "paper", "extended" or feature names.
        reward: "lede", "speed", "module:function" or a callable of `StepOutcome`.
        credit: "immediate" or "round".
        episode: "generation", "round" or "token"; with the last two `resume_lanes` goes on in the text.
        k: log-probabilities averaged by `confidence`, 1..traces.k.
        window: tokens averaged by `trace`, at least 1; fewer where the text has not that many yet.
        max_draft: cap on the proposals of a round, at least 1; with recorded overrun at most one
            more than that. No matter for episode "token", which drafts nothing.
        max_new_tokens: token budget, at least 2; the recorded one if not given. More than was
            recorded only if no text ended by its budget and there is no overrun.
        final_token_reward: of the "lede" reward.
        rho: of the "speed" reward.
        cost: cost model behind the "speed" reward and `step_costs`: "unit", the path of a calibrated
            JSON file, or a `CostModel`.
        reads: bool (2, m), by `Phase` and depth index, where `step_costs` charges a head and its
            features to the decision; where not given, everywhere if the observation has such
            features and else nowhere. A proposal's head is always charged.
        lanes: number of lanes.

    Raises:
        InputError: an argument out of range; the message names it.
    """

    def __init__(
        self,
        traces: TraceSet,
        *,
        depths: Sequence[int] | None = None,
        observation: str | Iterable[str] = PAPER,
        reward: str | Reward = "lede",
        credit: str = "immediate",
        episode: str = "generation",
        k: int = 5,
        window: int = 8,
        max_draft: int = DEFAULT_MAX_DRAFT,
        max_new_tokens: int | None = None,
        final_token_reward: float = 1.0,
        rho: float | None = None,
        cost: str | Path | CostModel = "unit",
        reads: ArrayLike | None = None,
        lanes: int = 1,
    ) -> None:
        self.traces = traces
        self.num_layers = traces.num_layers
        self.depths = candidate_depths(depths, traces)
        self.names = resolve_observation(observation)
        self.credit = choice("credit", credit, CREDITS)
        self.episode = choice("episode", episode, EPISODES)
        self.k = whole_number("k", k, 1, traces.k)
        self.window = whole_number("window", window, 1)
        limited = traces.overrun > 0 and self.episode != "token"
        self.max_draft = whole_number("max_draft", max_draft, 1, traces.overrun + 1 if limited else None)
        self.max_new_tokens = token_budget(max_new_tokens, traces)
        self.cost = resolve_cost(cost, self.num_layers, self.max_draft)
        if reads is None:
            reads = not HEAD_FEATURES.isdisjoint(self.names)
        self.step_costs = StepCosts(self.cost, self.depths, self.max_draft, reads)
        self.reward = resolve_reward(reward, self.step_costs, final_token_reward, rho)
        self.lanes = whole_number("lanes", lanes, 1)
        self.tables = Tables(traces, self.depths, self.names, self.k, self.max_new_tokens)
        running = tuple(name for name in self.names if name not in self.tables.names)
        self._running_names = running
        self._running_columns = [self.names.index(name) for name in running]
        self._recorded_columns = [self.names.index(name) for name in self.tables.names]
        self._stable_column = self.names.index("stable") if "stable" in self.names else None
        self._allocate()

    def _allocate(self) -> None:
        """State of all lanes."""
        n = self.lanes
        self._lane = np.arange(n, dtype=np.int64)
        self._active = np.zeros(n, dtype=bool)
        self._resumable = np.zeros(n, dtype=bool)  # the episode is over, its text is not
        self._text = np.zeros(n, dtype=np.int64)
        self._position = np.ones(n, dtype=np.int64)
        self._opening = np.ones(n, dtype=np.int64)
        self._index = np.zeros(n, dtype=np.int64)
        self._phase = np.zeros(n, dtype=np.int64)
        self._drafted = np.zeros(n, dtype=np.int64)
        self._right = np.zeros(n, dtype=np.int64)  # proposals of the round before its first wrong one
        self._branch = np.full(n, -1, dtype=np.int64)  # entry behind a wrong proposal, else -1
        self._chain = np.zeros(n, dtype=np.float64)
        self._held = np.zeros(n, dtype=np.float64)  # rewards that credit="round" still owes
        self._counters = {name: np.zeros(n, dtype=np.int64) for name in COUNTERS}
        # Entry x modulo the size is the sum of the surprises of the hypothesis' first x tokens, so
        # a window's mean is one difference and a rollback is nothing but overwriting. The size
        # covers a window behind the opening of a round and the longest draft after it, and needs
        # to cover no more than the longest text that its budget allows.
        longest = int(self.tables.budget.max(initial=0))
        self._reach = min(self.window, longest + 1)
        size = 1 << (min(self.window + self.max_draft, longest) + 2).bit_length()
        self._sums = np.zeros((n, size), dtype=np.float64)
        self._wrap = size - 1

    def reset_lanes(self, lanes: ArrayLike, texts: ArrayLike) -> NDArray[np.float32]:
        """Start texts in these lanes; returns their first observations, float32 (n, f).

        Args:
            lanes: int (n,), distinct lanes.
            texts: int (n,), index of the text for each of them.

        Raises:
            InputError: a lane or text out of range, or a text of fewer than two tokens.
        """
        lane = indices("lanes", lanes, self.lanes)
        text = indices("texts", texts, len(self.traces))
        if len(lane) != len(text):
            raise InputError(f"texts: {len(text)} texts for {len(lane)} lanes")
        if not self.tables.playable[text].all():
            short = int(text[~self.tables.playable[text]][0])
            raise InputError(
                f"texts: {short} is no episode: {int(self.tables.limit[short])} tokens, at least 2 are needed"
            )
        self._text[lane] = text
        self._position[lane] = self._opening[lane] = 1  # token 0 came from prefill
        self._index[lane] = 0
        self._phase[lane] = int(Phase.SELECT)
        self._drafted[lane] = self._right[lane] = 0
        self._branch[lane] = -1
        self._chain[lane] = self._held[lane] = 0.0
        for counter in self._counters.values():
            counter[lane] = 0
        self._sums[lane, 0] = 0.0
        self._sums[lane, 1] = self.tables.final_surprise[self.tables.start[text]]
        return self._open(lane)

    def resume_lanes(self, lanes: ArrayLike) -> NDArray[np.float32]:
        """Go on in the texts of these lanes with the next round or walk; its observations, float32 (n, f).

        Counters, window and acceptance go on with the text, too.

        Raises:
            InputError: a lane out of range.
            RuntimeError: a lane that is not `resumable`.
        """
        lane = indices("lanes", lanes, self.lanes)
        if not self._resumable[lane].all():
            idle = int(lane[~self._resumable[lane]][0])
            raise RuntimeError(f"lane {idle} has no text to go on with; start one with reset_lanes")
        return self._open(lane)

    def resumable(self, lanes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these lanes ended an episode, but not yet its text: bool (n,)."""
        return self._resumable[lanes]

    def abandon(self, lanes: NDArray[np.int64]) -> None:
        """Give up the texts of these lanes: none can be stepped or resumed any more."""
        self._active[lanes] = self._resumable[lanes] = False

    def _open(self, lane: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run the newest token to the first depth: where every episode starts."""
        self._active[lane] = True
        self._resumable[lane] = False
        self._count(lane, "layer_passes", self.tables.depth[0])
        self._count(lane, "sequential_layers", self.tables.depth[0])
        self._count(lane, "head_calls", 1)
        return self._observe(lane)

    def step(
        self, actions: ArrayLike, lanes: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], StepOutcome]:
        """Take one action in each of these lanes.

        Args:
            actions: int (n,), `Action`.
            lanes: int64 (n,), distinct lanes; all if not given.

        Returns:
            observation float32 (n, f), zeros where the episode is over; reward float64 (n,);
            terminated bool (n,), whether it is; and what happened.

        Raises:
            InputError: an action other than 0 and 1, or not one for each lane.
            RuntimeError: a lane without a text in progress.
        """
        lane = self._lane if lanes is None else lanes
        tables = self.tables
        action = np.asarray(actions)
        if action.shape != lane.shape or not ((action == Action.CONTINUE) | (action == Action.EXIT)).all():
            raise InputError(
                f"actions: {actions!r} is not one action out of 0 and 1 for each of {len(lane)} lanes"
            )
        if not self._active[lane].all():
            idle = int(lane[~self._active[lane]][0])
            raise RuntimeError(f"lane {idle} has no text in progress; reset it first")
        text, position, opening = self._text[lane], self._position[lane], self._opening[lane]
        index, phase = self._index[lane], self._phase[lane]
        depth = tables.depth[index]
        branch = self._branch[lane]
        entry = self._entry(lane)

        # What happens.
        proposed = action == Action.EXIT
        select = phase == Phase.SELECT
        drafted = self._drafted[lane] + proposed
        right = proposed & tables.match[entry]
        deeper = select & ~proposed & (index < len(self.depths) - 1)
        plain = select & ~proposed & ~deeper  # `continue` at the last depth: the last layer decides
        if self.episode == "token":
            # A proposal ends the walk: neither fed nor verified, and the text goes on all the same.
            unfed, verified = proposed, np.zeros_like(proposed)
            ended, final = proposed | plain, plain
        else:
            # An end-of-text proposal, or the last that the budget allows, is not fed: nothing follows.
            unfed = proposed & (tables.ends_text[entry] | (position == tables.budget[text] - 1))
            verified = ~select & ~proposed
            verified |= proposed & (unfed | (drafted == self.max_draft))
            if not self.traces.overrun:
                verified |= proposed & ~right
            ended = verified | plain
            final = ended & ~(unfed & right)
        so_far = self._right[lane] + right
        accepted = np.where(ended, so_far, 0)
        emitted = ended.astype(np.int64) if self.episode == "token" else accepted + final
        after = np.where(ended, opening + emitted, position + proposed)
        complete = ended & (after == tables.limit[text])
        terminated = complete if self.episode == "generation" else ended

        # What it costs.
        walked = np.where(deeper | plain, tables.gap[index], 0) + np.where(proposed & ~unfed, depth, 0)
        rest = np.where(verified, self.num_layers - depth, 0)
        pending = 1 + drafted - unfed
        next_walk = np.where(ended & ~terminated, tables.depth[0], 0)
        self._count(lane, "layer_passes", walked + rest * pending + next_walk)
        self._count(lane, "sequential_layers", walked + rest + next_walk)
        self._count(lane, "head_calls", (verified | plain).astype(np.int64) + ~terminated)
        self._count(lane, "decisions", 1)
        self._count(lane, "drafted", np.where(ended, drafted, 0))
        self._count(lane, "accepted", accepted)
        self._count(lane, "rounds", ended)
        self._count(lane, "tokens", emitted)

        # The surprises of the hypothesis: the proposal's, then the last layer's own token, which is
        # all that stays of a walk.
        surprise = tables.surprise[entry]
        self._sums[lane, (position + 1) & self._wrap] = self._sums[lane, position & self._wrap] + surprise
        own = np.flatnonzero(ended if self.episode == "token" else final)
        at = after[own] - 1
        final_surprise = tables.final_surprise[tables.start[text[own]] + at]
        before = self._sums[lane[own], at & self._wrap]
        self._sums[lane[own], (at + 1) & self._wrap] = before + final_surprise

        self._position[lane] = after
        self._opening[lane] = np.where(ended, after, opening)
        self._index[lane] = np.where(ended, 0, index + deeper)
        self._phase[lane] = np.where(ended, int(Phase.SELECT), np.where(proposed, int(Phase.DRAFT), phase))
        self._drafted[lane] = np.where(ended, 0, drafted)
        self._right[lane] = np.where(ended, 0, so_far)
        if self.traces.overrun:
            behind = np.where(branch < 0, tables.branch[np.where(branch < 0, entry, 0)], branch + 1)
            self._branch[lane] = np.where(ended, -1, np.where(proposed & ~right, behind, branch))
        self._chain[lane] = np.where(ended, 0.0, self._chain[lane] + np.where(proposed, surprise, 0.0))
        self._active[lane] = ~terminated
        self._resumable[lane] = terminated & ~complete

        outcome = StepOutcome(
            num_layers=self.num_layers,
            phase=phase,
            action=action.astype(np.int64),
            depth=depth,
            depth_index=index,
            proposed=proposed,
            accepted=right,
            ended=ended,
            drafted=np.where(ended, drafted, 0),
            round_accepted=accepted,
            final=final,
            emitted=emitted,
            fed=proposed & ~unfed,
            verified=np.where(verified, pending, 0),
            layers=walked + rest + np.where(select & (index == 0), tables.depth[0], 0),
            terminated=complete,
        )
        return self._observe(lane), self._pay(lane, outcome), terminated, outcome

    def view(self, lanes: NDArray[np.int64], observation: NDArray[np.float32]) -> View:
        """What a controller is shown of these lanes, int64 (n,), with their observations."""
        return View(
            phase=self._phase[lanes],
            depth_index=self._index[lanes],
            draft_length=self._drafted[lanes],
            observation=observation,
            lanes=lanes,
            text=self._text[lanes],
            decision=self._counters["decisions"][lanes],
        )

    def counters(self, lanes: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.int64]]:
        """Copies of the counters of these lanes, all if not given: `COUNTERS` to int64 (n,)."""
        chosen = self._lane if lanes is None else lanes
        return {name: counter[chosen] for name, counter in self._counters.items()}

    def _entry(self, lane: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entry of `Tables` for what these lanes are shown, int64 (n,)."""
        row = self.tables.start[self._text[lane]] + self._position[lane]
        branch = self._branch[lane]
        return np.where(branch < 0, row * len(self.depths) + self._index[lane], branch)

    def _observe(self, lane: NDArray[np.int64]) -> NDArray[np.float32]:
        """Observations float32 (n, f) of these lanes; zeros where no text is in progress."""
        rows = np.zeros((len(lane), len(self.names)), dtype=np.float32)
        if not self.names:
            return rows
        active = self._active[lane]
        phase, index, position = self._phase[lane], self._index[lane], self._position[lane]
        if self.tables.names:
            rows[:, self._recorded_columns] = self.tables.features[np.where(active, self._entry(lane), 0)]
        if self._stable_column is not None:
            rows[phase == Phase.DRAFT, self._stable_column] = 0.0
        if self._running_names:
            oldest = np.maximum(position - self._reach, 0)
            window_sum = self._sums[lane, position & self._wrap] - self._sums[lane, oldest & self._wrap]
            rows[:, self._running_columns] = observation_rows(
                self._running_names,
                len(lane),
                trace=window_sum / (position - oldest),
                depth=self.tables.depth[index],
                num_layers=self.num_layers,
                phase=phase,
                draft_length=self._drafted[lane],
                max_draft=self.max_draft,
                acceptance=acceptance(self._counters["accepted"][lane], self._counters["drafted"][lane]),
                chain=self._chain[lane],
            )
        rows[~active] = 0.0
        return rows

    def _pay(self, lane: NDArray[np.int64], outcome: StepOutcome) -> NDArray[np.float64]:
        """The step's reward, float64 (n,); with credit "round", proposals are paid at its end."""
        reward = np.asarray(self.reward(outcome), dtype=np.float64)
        if reward.shape != lane.shape:
            raise InputError(f"reward: {self.reward!r} returned shape {reward.shape}, expected {lane.shape}")
        if self.credit == "immediate":
            return reward
        waits = outcome.proposed & ~outcome.ended
        held = self._held[lane]
        self._held[lane] = np.where(outcome.ended, 0.0, held + np.where(waits, reward, 0.0))
        return np.where(waits, 0.0, reward) + np.where(outcome.ended, held, 0.0)

    def _count(self, lane: NDArray[np.int64], name: str, amount: Any) -> None:
        self._counters[name][lane] += amount
