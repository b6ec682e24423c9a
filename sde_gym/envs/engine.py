"""Batched replay: the whole decision problem as table look-ups, many texts at once.

Greedy lossless decoding emits the same text whatever the controller does, so the outcome of every
action follows from what was recorded along that text. `ReplayEngine` holds n lanes, each with a
text in some state, and steps them together in numpy; there is no Python loop over lanes. The
gymnasium environment is a face of one lane. `advance` does the same faster (`sde_gym.envs.scalar` for
one lane, `sde_gym.envs.kernel` for many), `step` is the reference and tells all that happened.

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
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.accelerate import Kernel, resolve_accelerator
from sde_gym.envs.arguments import candidate_depths, choice, indices, token_budget
from sde_gym.envs.rewards import Reward, StepOutcome, checked_reward, resolve_reward
from sde_gym.envs.scalar import OneLane
from sde_gym.envs.state import COUNTERS as COUNTERS
from sde_gym.envs.state import ROUND, TOLD, LaneState
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
        accelerator: what `advance` and `begin` do the work with, always with the same results: "numpy",
            "python" (one lane only), "numba" (built-in rewards only), or "auto", which is "python" for
            one lane, "numba" for many where it is installed, else "numpy".
        threads: with "numba", that share the lanes, at least 1.

    Attributes:
        accelerator: "numpy", "python" or "numba".
        tables: what they look up, shared by all lanes.

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
        accelerator: str = "auto",
        threads: int = 1,
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
        heads = (traces.manifest.get("exit_head", 0.0), traces.manifest.get("final_head", 0.0))
        self.cost = resolve_cost(cost, self.num_layers, self.max_draft, heads)
        if reads is None:
            reads = not HEAD_FEATURES.isdisjoint(self.names)
        self.step_costs = StepCosts(self.cost, self.depths, self.max_draft, reads)
        self.reward = resolve_reward(reward, self.step_costs, final_token_reward, rho)
        self.lanes = whole_number("lanes", lanes, 1)
        self.accelerator = resolve_accelerator(accelerator, self.lanes, self.reward, self.step_costs)
        self.threads = whole_number("threads", threads, 1)
        self.tables = Tables(traces, self.depths, self.names, self.k, self.max_new_tokens)
        running = tuple(name for name in self.names if name not in self.tables.names)
        self._running_names = running
        self._running_columns = [self.names.index(name) for name in running]
        self._recorded_columns = [self.names.index(name) for name in self.tables.names]
        self._stable_column = self.names.index("stable") if "stable" in self.names else None
        self._state = LaneState(
            self.lanes, self.window, self.max_draft, int(self.tables.budget.max(initial=0))
        )
        self._lane = np.arange(self.lanes, dtype=np.int64)

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
        self.state.start(lane, text, self.tables.final_surprise[self.tables.start[text]])
        return self._open(lane)

    def resume_lanes(self, lanes: ArrayLike) -> NDArray[np.float32]:
        """Go on in the texts of these lanes with the next round or walk; its observations, float32 (n, f).

        Counters, window and acceptance go on with the text, too.

        Raises:
            InputError: a lane out of range.
            RuntimeError: a lane that is not `resumable`.
        """
        lane = indices("lanes", lanes, self.lanes)
        if not self.state.resumable[lane].all():
            idle = int(lane[~self.state.resumable[lane]][0])
            raise RuntimeError(f"lane {idle} has no text to go on with; start one with reset_lanes")
        return self._open(lane)

    def resumable(self, lanes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these lanes ended an episode, but not yet its text: bool (n,)."""
        return self._seen.resumable[lanes]

    def abandon(self, lanes: NDArray[np.int64]) -> None:
        """Give up the texts of these lanes: none can be stepped or resumed any more."""
        self.state.active[lanes] = self.state.resumable[lanes] = False

    def copy_lanes(self, source: ArrayLike, target: ArrayLike) -> None:
        """Make lanes what other lanes are, episode, text and counters alike: from here either goes its way.

        Args:
            source: int (n,), lanes; repeats are allowed.
            target: int (n,), distinct lanes.

        Raises:
            InputError: a lane out of range, a target named twice, or not one source for each target.
        """
        origin, copy = indices("source", source, self.lanes), indices("target", target, self.lanes)
        if len(origin) != len(copy) or len(np.unique(copy)) != len(copy):
            raise InputError(
                f"target: {len(copy)} lanes for {len(origin)} sources; give one each, none twice"
            )
        self.state.copy(origin, copy)

    def begin(self, lanes: NDArray[np.int64], texts: NDArray[np.int64]) -> NDArray[np.float32]:
        """`reset_lanes` where a text is given, `resume_lanes` where it is negative, by the accelerator.

        Args:
            lanes: int64 (n,), distinct lanes.
            texts: int64 (n,).

        Returns:
            observations, float32 (n, f).

        Raises:
            InputError: a text that is out of range or too short.
            RuntimeError: a lane that has no text to go on with.
        """
        if self.accelerator == "numba" and not self.kernel.unfit(lanes, texts):
            return self.kernel.begin(lanes, texts)
        resumed = texts < 0
        if not resumed.any():
            return self.reset_lanes(lanes, texts)
        if self.accelerator == "python" and self._seen.resumable[lanes].all():
            return self.one.open()[None]
        observation = np.empty((len(lanes), len(self.names)), dtype=np.float32)
        observation[~resumed] = self.reset_lanes(lanes[~resumed], texts[~resumed])
        observation[resumed] = self.resume_lanes(lanes[resumed])
        return observation

    def _open(self, lane: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run the newest token to the first depth: where every episode starts."""
        self.state.active[lane] = True
        self.state.resumable[lane] = False
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
        tables, state = self.tables, self.state
        action = np.asarray(actions)
        if action.shape != lane.shape or not ((action == Action.CONTINUE) | (action == Action.EXIT)).all():
            raise InputError(
                f"actions: {actions!r} is not one action out of 0 and 1 for each of {len(lane)} lanes"
            )
        if not state.active[lane].all():
            idle = int(lane[~state.active[lane]][0])
            raise RuntimeError(f"lane {idle} has no text in progress; reset it first")
        text, position, opening = state.text[lane], state.position[lane], state.opening[lane]
        index, phase = state.index[lane], state.phase[lane]
        depth = tables.depth[index]
        branch = state.branch[lane]
        entry = self._entry(lane)

        # What happens.
        proposed = action == Action.EXIT
        select = phase == Phase.SELECT
        drafted = state.drafted[lane] + proposed
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
        so_far = state.right[lane] + right
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
        state.sums[lane, (position + 1) & state.wrap] = state.sums[lane, position & state.wrap] + surprise
        own = np.flatnonzero(ended if self.episode == "token" else final)
        at = after[own] - 1
        final_surprise = tables.final_surprise[tables.start[text[own]] + at]
        before = state.sums[lane[own], at & state.wrap]
        state.sums[lane[own], (at + 1) & state.wrap] = before + final_surprise

        state.position[lane] = after
        state.opening[lane] = np.where(ended, after, opening)
        state.index[lane] = np.where(ended, 0, index + deeper)
        state.phase[lane] = np.where(ended, int(Phase.SELECT), np.where(proposed, int(Phase.DRAFT), phase))
        state.drafted[lane] = np.where(ended, 0, drafted)
        state.right[lane] = np.where(ended, 0, so_far)
        if self.traces.overrun:
            behind = np.where(branch < 0, tables.branch[np.where(branch < 0, entry, 0)], branch + 1)
            state.branch[lane] = np.where(ended, -1, np.where(proposed & ~right, behind, branch))
        state.chain[lane] = np.where(ended, 0.0, state.chain[lane] + np.where(proposed, surprise, 0.0))
        state.active[lane] = ~terminated
        state.resumable[lane] = terminated & ~complete

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
        state.spent[lane] += self.step_costs(outcome)
        return self._observe(lane), self._pay(lane, outcome), terminated, outcome

    def advance(
        self, actions: ArrayLike, skip: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_]]:
        """`step` in all lanes but those to skip, by the accelerator; what happened is not told.

        Args:
            actions: int (n,), `Action`, anything where a lane is skipped.
            skip: bool (n,); none if not given.

        Returns:
            observation float32 (n, f), reward float64 (n,) and terminated bool (n,); zeros where a lane
            was skipped.

        Raises:
            InputError, RuntimeError: as `step`; nothing was done then.
        """
        action = np.asarray(actions)
        if self.accelerator == "numba" and action.shape == self._lane.shape and action.dtype.kind in "iu":
            chosen = np.ascontiguousarray(action, dtype=np.int64)
            left_out = np.zeros(self.lanes, dtype=bool) if skip is None else skip
            if self.kernel.first_wrong(chosen, left_out) < 0:
                return self.kernel.step(chosen, left_out)
        if self.accelerator == "python" and action.shape == (1,) and skip is None:
            row, paid, over = self.one.step(action[0])
            return row[None], np.array([paid]), np.array([over])
        if skip is None:
            return self.step(action)[:3]
        lanes = np.flatnonzero(~skip)
        observation = np.zeros((self.lanes, len(self.names)), dtype=np.float32)
        reward, terminated = np.zeros(self.lanes), np.zeros(self.lanes, dtype=bool)
        if lanes.size:
            stepped = self.step(action[lanes], lanes)
            observation[lanes], reward[lanes], terminated[lanes] = stepped[:3]
        return observation, reward, terminated

    @property
    def state(self) -> LaneState:
        """Where the lanes stand, to read and to write; look it up anew after each step."""
        if "kernel" in vars(self):
            self.kernel.forget()
        return self._seen

    @property
    def _seen(self) -> LaneState:
        """The same, to read only."""
        if "one" in vars(self):
            self.one.store()
        return self._state

    @cached_property
    def one(self) -> OneLane:
        """Steps the only lane, with accelerator "python"."""
        return OneLane(self)

    @cached_property
    def kernel(self) -> Kernel:
        """Steps all lanes, with accelerator "numba"."""
        return Kernel(self, self.threads)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs; `one` and `kernel`, which look into the arrays, are made anew."""
        one = vars(self).get("one")
        if one is not None:
            one.store()
        return {name: value for name, value in vars(self).items() if name not in ("one", "kernel")}

    def view(self, lanes: NDArray[np.int64], observation: NDArray[np.float32]) -> View:
        """What a controller is shown of these lanes, int64 (n,), with their observations."""
        return View(
            phase=self.state.phase[lanes],
            depth_index=self.state.index[lanes],
            draft_length=self.state.drafted[lanes],
            observation=observation,
            lanes=lanes,
            text=self.state.text[lanes],
            decision=self.state.counters["decisions"][lanes],
        )

    def columns(self, lanes: NDArray[np.int64] | None = None) -> dict[str, NDArray[Any]]:
        """Copies of the state of these lanes, all if not given: `state.TOLD` to int64 (n,).

        `cost` and `speedup`, float64 (n,), are what the texts cost so far under the cost model, and what
        speed-up that makes. A step is charged in full when it is taken, a round's first step for the
        walk to d_1, too.
        """
        if lanes is None and self.accelerator == "numba":
            told, simulated = self.kernel.told()
            return {**dict(zip(TOLD, told, strict=True)), "cost": simulated[0], "speedup": simulated[1]}
        chosen = self._lane if lanes is None else lanes
        columns = dict(zip((*ROUND, *COUNTERS), self._seen.rows[chosen].T, strict=True))
        columns["depth"] = self.tables.depth[columns["index"]]
        spent = self._seen.spent[chosen]
        speedup = self.cost.speedups(columns["tokens"], spent)
        return {**{name: columns[name] for name in TOLD}, "cost": spent, "speedup": speedup}

    def counters(self, lanes: NDArray[np.int64] | None = None) -> dict[str, NDArray[np.int64]]:
        """Copies of the counters of these lanes, all if not given: `COUNTERS` to int64 (n,)."""
        chosen = self._lane if lanes is None else lanes
        return {name: counter[chosen] for name, counter in self.state.counters.items()}

    def _entry(self, lane: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entry of `Tables` for what these lanes are shown, int64 (n,)."""
        row = self.tables.start[self.state.text[lane]] + self.state.position[lane]
        branch = self.state.branch[lane]
        return np.where(branch < 0, row * len(self.depths) + self.state.index[lane], branch)

    def _observe(self, lane: NDArray[np.int64]) -> NDArray[np.float32]:
        """Observations float32 (n, f) of these lanes; zeros where no text is in progress."""
        rows = np.zeros((len(lane), len(self.names)), dtype=np.float32)
        if not self.names:
            return rows
        state = self.state
        active = state.active[lane]
        phase, index, position = state.phase[lane], state.index[lane], state.position[lane]
        if self.tables.names:
            rows[:, self._recorded_columns] = self.tables.features[np.where(active, self._entry(lane), 0)]
        if self._stable_column is not None:
            rows[phase == Phase.DRAFT, self._stable_column] = 0.0
        if self._running_names:
            oldest = np.maximum(position - state.reach, 0)
            window_sum = state.sums[lane, position & state.wrap] - state.sums[lane, oldest & state.wrap]
            rows[:, self._running_columns] = observation_rows(
                self._running_names,
                len(lane),
                trace=window_sum / (position - oldest),
                depth=self.tables.depth[index],
                num_layers=self.num_layers,
                phase=phase,
                draft_length=state.drafted[lane],
                max_draft=self.max_draft,
                acceptance=acceptance(state.counters["accepted"][lane], state.counters["drafted"][lane]),
                chain=state.chain[lane],
            )
        rows[~active] = 0.0
        return rows

    def _pay(self, lane: NDArray[np.int64], outcome: StepOutcome) -> NDArray[np.float64]:
        """The step's reward, float64 (n,); with credit "round", proposals are paid at its end."""
        reward = checked_reward(self.reward, outcome)
        if self.credit == "immediate":
            return reward
        waits = outcome.proposed & ~outcome.ended
        held = self.state.held[lane]
        self.state.held[lane] = np.where(outcome.ended, 0.0, held + np.where(waits, reward, 0.0))
        return np.where(waits, 0.0, reward) + np.where(outcome.ended, held, 0.0)

    def _count(self, lane: NDArray[np.int64], name: str, amount: Any) -> None:
        self._state.counters[name][lane] += amount
