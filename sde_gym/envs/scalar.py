"""One step of one lane in plain Python: the engine's twin for environments that are stepped alone.

For a single lane numpy takes far longer to be called than to work. The twin loads the lane's state from
the engine's arrays into attributes, steps these, and stores them before anyone else looks at the arrays
(`ReplayEngine.state`), so that either may take any step. The arithmetic is the same operation by
operation, and so are the results, bit for bit. What each quantity means is said in `ReplayEngine.step`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.rewards import (
    ACCEPTED_REWARD,
    CONTINUE_REWARD,
    REJECTED_REWARD,
    LEDEReward,
    SpeedReward,
    StepOutcome,
    checked_reward,
)
from sde_gym.errors import InputError
from sde_gym.policies.observation import BOUNDS, Action, Phase

if TYPE_CHECKING:
    from sde_gym.envs.engine import ReplayEngine

_SELECT, _DRAFT = int(Phase.SELECT), int(Phase.DRAFT)
_CHAIN_LOW, _CHAIN_HIGH = BOUNDS["chain"]
_TRACE_LOW, _TRACE_HIGH = BOUNDS["trace"]


class OneLane:
    """Steps lane 0 of an engine.

    Args:
        engine: whose arrays are read and written.
    """

    _active: bool
    _resumable: bool
    _text: int
    _position: int
    _opening: int
    _index: int
    _phase: int
    _drafted: int
    _right: int
    _branch: int
    _chain: float
    _held: float
    _spent: float
    _sums: list[float]
    _layer_passes: int
    _sequential_layers: int
    _head_calls: int
    _decisions: int
    _all_drafted: int
    _all_accepted: int
    _rounds: int
    _tokens: int

    def __init__(self, engine: ReplayEngine) -> None:
        tables, state = engine.tables, engine.state
        self._layers, self._last = engine.num_layers, len(engine.depths) - 1
        self._max_draft, self._overrun = engine.max_draft, engine.traces.overrun > 0
        self._walks, self._whole = engine.episode == "token", engine.episode == "generation"
        self._by_round = engine.credit == "round"
        self._depth, self._gap = tables.depth.tolist(), tables.gap.tolist()
        self._start, self._limit = _view(tables.start), _view(tables.limit)
        self._budget, self._match = _view(tables.budget), _view(tables.match)
        self._ends_text, self._surprise = _view(tables.ends_text), _view(tables.surprise)
        self._behind, self._final_surprise = _view(tables.branch), _view(tables.final_surprise)
        self._features, self._recorded = _view(tables.features.reshape(-1)), len(tables.names)

        self._state, self._loaded = state, False
        self._wrap, self._reach = state.wrap, state.reach
        self._ids = engine.traces.text_ids
        self._plain_token = engine.cost.plain_token

        names = engine.names
        columns = {name: column for column, name in enumerate(names)}
        self._width = len(names)
        self._recorded_columns = [(names.index(name), at) for at, name in enumerate(tables.names)]
        self._stable_column, self._trace_column = columns.get("stable"), columns.get("trace")
        self._depth_column, self._phase_column = columns.get("depth"), columns.get("phase")
        self._draft_column, self._acceptance_column = columns.get("draft_length"), columns.get("acceptance")
        self._chain_column = columns.get("chain")
        self._more = not {*names} <= {*tables.names, "trace"} or "stable" in names

        reward = self._reward = engine.reward
        self._lede = reward.final_token_reward if type(reward) is LEDEReward else None
        self._rho = None
        if type(reward) is SpeedReward and reward.costs is engine.step_costs:
            self._rho = reward.rho
        costs = engine.step_costs
        self._action_cost, self._feed_cost = costs.action.tolist(), costs.feed.tolist()
        self._verify_cost = costs.verify.tolist()

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool]:
        """Take one action.

        Args:
            action: `Action`.

        Returns:
            observation float32 (f,), zeros where the episode is over; reward; whether it is.

        Raises:
            InputError: an action other than 0 and 1.
            RuntimeError: no text in progress.
        """
        proposed = action == Action.EXIT if type(action) is int and 0 <= action <= 1 else _is_exit(action)
        if not self._loaded:
            self._load()
        if not self._active:
            raise RuntimeError("lane 0 has no text in progress; reset it first")
        text, position, index = self._text, self._position, self._index
        phase, drafted, so_far = self._phase, self._drafted, self._right
        branch, depth, first_row = self._branch, self._depth[index], self._start[text]
        entry = (first_row + position) * (self._last + 1) + index if branch < 0 else branch

        # What happens.
        right = deeper = unfed = verified = final = False
        if proposed:
            drafted += 1
            right = self._match[entry]
            so_far += right
            surprise = self._surprise[entry]
            if self._walks:
                unfed = ended = True
            else:
                unfed = self._ends_text[entry] or position == self._budget[text] - 1
                verified = unfed or drafted == self._max_draft or not (self._overrun or right)
                ended = verified
                final = ended and not (unfed and right)
        elif phase == _SELECT:
            deeper = index < self._last
            ended = final = not deeper
        else:
            verified = ended = final = True
        pending = 1 + drafted - unfed

        # What it costs, and the state after.
        walked = 0
        if proposed:
            walked = 0 if unfed else depth
        elif phase == _SELECT:
            walked = self._gap[index]
        rest = self._layers - depth if verified else 0
        passes, layers = walked + rest * pending, walked + rest
        emitted = accepted = 0
        terminated = complete = False
        if proposed:
            self._sums[position + 1 & self._wrap] = self._sums[position & self._wrap] + surprise
        if ended:
            accepted = so_far
            emitted = 1 if self._walks else accepted + final
            after = self._opening + emitted
            complete = after == self._limit[text]
            terminated = complete or not self._whole
            if final or self._walks:
                at = after - 1
                own = self._final_surprise[first_row + at]
                self._sums[at + 1 & self._wrap] = self._sums[at & self._wrap] + own
            self._all_drafted += drafted
            self._all_accepted += accepted
            self._rounds += 1
            self._tokens += emitted
            next_walk = 0 if terminated else self._depth[0]
            self._layer_passes += passes + next_walk
            self._sequential_layers += layers + next_walk
            self._head_calls += (not proposed or verified) + (not terminated)
            self._position = self._opening = after
            self._index = self._drafted = self._right = 0
            self._phase = _SELECT
            self._branch = -1
            self._chain = 0.0
            if terminated:
                self._active = False
                self._resumable = not complete
        else:
            self._layer_passes += passes
            self._sequential_layers += layers
            self._head_calls += 1
            if proposed:
                self._position = position + 1
                self._phase = _DRAFT
                self._drafted, self._right = drafted, so_far
                self._chain += surprise
                if self._overrun and not right:
                    self._branch = self._behind[entry] if branch < 0 else branch + 1
            else:
                self._index = index + 1
        self._decisions += 1
        cost = self._action_cost[phase][proposed][index]
        if proposed and not unfed:
            cost += self._feed_cost[index]
        cost += self._verify_cost[index][pending if verified else 0]
        self._spent += cost

        # What it pays.
        if self._lede is not None:
            if proposed:
                reward = (ACCEPTED_REWARD if right else REJECTED_REWARD) + (
                    self._layers - depth
                ) / self._layers
            else:
                reward = CONTINUE_REWARD
            reward += self._lede * final
        elif self._rho is not None:
            reward = float(right) + final - self._rho * cost
        else:
            first_walk = self._depth[0] if phase == _SELECT and index == 0 else 0
            reward = self._paid(
                phase=phase, action=int(proposed), depth=depth, depth_index=index, proposed=proposed,
                accepted=right, ended=ended, drafted=drafted if ended else 0, round_accepted=accepted,
                final=final, emitted=emitted, fed=proposed and not unfed, verified=pending if verified else 0,
                layers=layers + first_walk, terminated=complete,
            )  # fmt: skip
        if self._by_round:
            if ended:
                reward, self._held = reward + self._held, 0.0
            elif proposed:
                reward, self._held = 0.0, self._held + reward
        return np.zeros(self._width, np.float32) if terminated else self._observe(), reward, terminated

    def _paid(self, **outcome: Any) -> float:
        """What any other reward pays for this outcome of one lane."""
        arrays = {name: np.array([value]) for name, value in outcome.items()}
        return float(checked_reward(self._reward, StepOutcome(num_layers=self._layers, **arrays))[0])

    def open(self) -> NDArray[np.float32]:
        """Go on with the next round or walk of a text that can be; its first observation, float32 (f,)."""
        if not self._loaded:
            self._load()
        self._active, self._resumable = True, False
        self._layer_passes += self._depth[0]
        self._sequential_layers += self._depth[0]
        self._head_calls += 1
        return self._observe()

    def info(self) -> dict[str, Any]:
        """What `Lanes.info` tells, as plain Python values."""
        if not self._loaded:
            self._load()
        return {
            "layer_passes": self._layer_passes,
            "sequential_layers": self._sequential_layers,
            "head_calls": self._head_calls,
            "decisions": self._decisions,
            "drafted": self._all_drafted,
            "accepted": self._all_accepted,
            "rounds": self._rounds,
            "tokens": self._tokens,
            "cost": self._spent,
            "speedup": self._plain_token * self._tokens / self._spent if self._spent > 0 else 1.0,
            "phase": self._phase,
            "depth": self._depth[self._index],
            "draft_length": self._drafted,
            "text": self._text,
            "text_id": self._ids[self._text],
            "overrun": self._overrun,
        }

    def _load(self) -> None:
        """Take the state over from the arrays."""
        state, counters = self._state, self._state.counters
        self._loaded = True
        self._active, self._resumable = bool(state.active[0]), bool(state.resumable[0])
        self._text, self._position = int(state.text[0]), int(state.position[0])
        self._opening, self._index = int(state.opening[0]), int(state.index[0])
        self._phase, self._drafted = int(state.phase[0]), int(state.drafted[0])
        self._right, self._branch = int(state.right[0]), int(state.branch[0])
        self._chain, self._held = float(state.chain[0]), float(state.held[0])
        self._spent = float(state.spent[0])
        self._sums = state.sums[0].tolist()
        self._layer_passes = int(counters["layer_passes"][0])
        self._sequential_layers = int(counters["sequential_layers"][0])
        self._head_calls, self._decisions = int(counters["head_calls"][0]), int(counters["decisions"][0])
        self._all_drafted, self._all_accepted = int(counters["drafted"][0]), int(counters["accepted"][0])
        self._rounds, self._tokens = int(counters["rounds"][0]), int(counters["tokens"][0])

    def store(self) -> None:
        """Hand the state back to the arrays; the next step takes it over again."""
        if not self._loaded:
            return
        state, counters = self._state, self._state.counters
        self._loaded = False
        state.active[0], state.resumable[0] = self._active, self._resumable
        state.text[0], state.position[0] = self._text, self._position
        state.opening[0], state.index[0] = self._opening, self._index
        state.phase[0], state.drafted[0] = self._phase, self._drafted
        state.right[0], state.branch[0] = self._right, self._branch
        state.chain[0], state.held[0], state.spent[0] = self._chain, self._held, self._spent
        state.sums[0] = self._sums
        counters["layer_passes"][0] = self._layer_passes
        counters["sequential_layers"][0] = self._sequential_layers
        counters["head_calls"][0], counters["decisions"][0] = self._head_calls, self._decisions
        counters["drafted"][0], counters["accepted"][0] = self._all_drafted, self._all_accepted
        counters["rounds"][0], counters["tokens"][0] = self._rounds, self._tokens

    def _observe(self) -> NDArray[np.float32]:
        """The observation, float32 (f,)."""
        row = [0.0] * self._width
        text, position, index = self._text, self._position, self._index
        phase, branch = self._phase, self._branch
        if self._recorded:
            entry = branch if branch >= 0 else (self._start[text] + position) * (self._last + 1) + index
            first = entry * self._recorded
            for column, at in self._recorded_columns:
                row[column] = self._features[first + at]
        if self._trace_column is not None:
            oldest = position - self._reach
            if oldest < 0:
                oldest = 0
            total = self._sums[position & self._wrap] - self._sums[oldest & self._wrap]
            trace = total / (position - oldest)
            row[self._trace_column] = min(max(trace, _TRACE_LOW), _TRACE_HIGH)
        if not self._more:
            return np.array(row, dtype=np.float32)
        # These need no clipping, but for the chain.
        if self._stable_column is not None and phase == _DRAFT:
            row[self._stable_column] = 0.0
        if self._depth_column is not None:
            row[self._depth_column] = self._depth[index] / self._layers
        if self._phase_column is not None:
            row[self._phase_column] = float(phase)
        if self._draft_column is not None:
            row[self._draft_column] = self._drafted / self._max_draft
        if self._acceptance_column is not None:
            drafted = self._all_drafted
            row[self._acceptance_column] = self._all_accepted / drafted if drafted else 1.0
        if self._chain_column is not None:
            row[self._chain_column] = min(max(self._chain, _CHAIN_LOW), _CHAIN_HIGH)
        return np.array(row, dtype=np.float32)


def _view(array: Any) -> Any:
    """An array (n,) that gives and takes plain Python values, in a third of the time that numpy takes."""
    return memoryview(array)


def _is_exit(action: Any) -> bool:
    """Whether it is `exit`; InputError unless it is one action out of the two."""
    if isinstance(action, (int, np.integer)) or np.ndim(action) == 0:
        if action == Action.EXIT:
            return True
        if action == Action.CONTINUE:
            return False
    raise InputError(f"actions: {action!r} is not one action out of 0 and 1 for each of 1 lanes")
