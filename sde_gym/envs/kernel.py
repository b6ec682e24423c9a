"""One step of all lanes, compiled by numba: the engine's twin for very many lanes.

The twin reads and writes the engine's own arrays, lane by lane in one pass, so that either may take
any step; the arithmetic is the same operation by operation, and so are the results, bit for bit. What
each quantity means is said in `ReplayEngine.step`. Only `sde_gym.envs.accelerate` imports this module;
compiled code is kept on disk where numba finds a place for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np

from sde_gym.policies.observation import Action, Phase

Function = TypeVar("Function", bound=Callable[..., Any])

TRACE, DEPTH, PHASE, DRAFT_LENGTH, ACCEPTANCE, CHAIN = -1, -2, -3, -4, -5, -6
"""Columns of the observation that are computed; those from 0 on are columns of the tables."""

# Columns of `LaneState.rows`; written out since compiled code on disk follows changes of this file only.
(
    _TEXT, _POSITION, _OPENING, _INDEX, _PHASE, _PROPOSALS, _RIGHT, _BRANCH,
    _LAYER_PASSES, _SEQUENTIAL_LAYERS, _HEAD_CALLS, _DECISIONS, _DRAFTED, _ACCEPTED, _ROUNDS, _TOKENS,
) = range(16)  # fmt: skip

_CONTINUE, _EXIT = int(Action.CONTINUE), int(Action.EXIT)
_SELECT, _DRAFT = int(Phase.SELECT), int(Phase.DRAFT)

# Compiled code on disk names the classes below: numba cannot read what an earlier version left there
# once one of them is gone, so they keep their names.


class Settings(NamedTuple):
    """What does not change from step to step; `accelerate.Kernel` fills it."""

    num_layers: int
    max_draft: int
    overrun: bool
    walks: bool  # episode "token"
    whole: bool  # episode "generation"
    by_round: bool  # credit "round"
    lede: bool  # reward "lede", else "speed"
    final_token_reward: float
    rho: float
    wrap: int
    reach: int
    # Rewards are no constants here: compiled code on disk would not follow a change of theirs.
    accepted: float
    rejected: float
    continued: float


class Data(NamedTuple):
    """Arrays that are only read: of `Tables`, of `StepCosts`, and how observations are made."""

    depth: Any
    gap: Any
    proposals: Any  # `accelerate.PROPOSAL`: what a step asks of one lies together
    final_surprise: Any
    start: Any
    limit: Any
    budget: Any
    features: Any
    action_cost: Any
    feed_cost: Any
    verify_cost: Any
    sources: Any  # int64 (f,), where each column of the observation comes from
    stable: int  # which of them is `stable`, -1 if none
    low: Any  # bounds of each column, float32 (f,)
    high: Any


class Lanes(NamedTuple):
    """Arrays of `LaneState`."""

    rows: Any
    active: Any
    resumable: Any
    chain: Any
    held: Any
    spent: Any
    sums: Any


def _compiled(function: Function) -> Function:
    """`function`, compiled when it is first called, without the interpreter's lock."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    found: Any
    try:
        found = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep compiled code in
        found = numba.njit(**options)(function)
    return cast(Function, found)


@_compiled
def first_wrong(actions: Any, active: Any, skip: Any) -> int:
    """The first lane, of those not to skip, that has a wrong action or no episode; -1 if none."""
    for lane in range(len(actions)):
        if not skip[lane] and not (active[lane] and (actions[lane] == _CONTINUE or actions[lane] == _EXIT)):
            return lane
    return -1


@numba.njit(inline="always")
def observe(lane: int, observation: Any, at: int, settings: Settings, data: Data, state: Lanes) -> None:
    """Write the observation of a lane whose episode goes on into row `at` of float32 (n, f)."""
    rows = state.rows
    position, index, branch = rows[lane, _POSITION], rows[lane, _INDEX], rows[lane, _BRANCH]
    entry = branch
    if branch < 0:
        entry = (data.start[rows[lane, _TEXT]] + position) * len(data.depth) + index
    for column in range(len(data.sources)):
        source = data.sources[column]
        if source >= 0:
            # Behind a proposal the depth before was not read.
            unknown = source == data.stable and rows[lane, _PHASE] == _DRAFT
            observation[at, column] = np.float32(0.0) if unknown else data.features[entry, source]
            continue
        value = 0.0
        if source == TRACE:
            oldest = max(position - settings.reach, 0)
            total = state.sums[lane, position & settings.wrap] - state.sums[lane, oldest & settings.wrap]
            value = total / (position - oldest)
        elif source == DEPTH:
            value = data.depth[index] / settings.num_layers
        elif source == PHASE:
            value = float(rows[lane, _PHASE])
        elif source == DRAFT_LENGTH:
            value = rows[lane, _PROPOSALS] / settings.max_draft
        elif source == ACCEPTANCE:
            value = 1.0
            if rows[lane, _DRAFTED] > 0:
                value = rows[lane, _ACCEPTED] / rows[lane, _DRAFTED]
        elif source == CHAIN:
            value = state.chain[lane]
        observation[at, column] = min(max(np.float32(value), data.low[column]), data.high[column])


@_compiled
def open_lanes(
    lanes: Any, texts: Any, observation: Any, settings: Settings, data: Data, state: Lanes
) -> None:
    """Begin episodes in these lanes, of a new text or, where it is negative, of the old one.

    Args:
        lanes: int64 (n,), distinct.
        texts: int64 (n,).
        observation: float32 (n, f), written to.
        settings, data, state: of the engine.
    """
    rows = state.rows
    for at in range(len(lanes)):
        lane, text = lanes[at], texts[at]
        if text >= 0:
            rows[lane, _TEXT] = text
            rows[lane, _POSITION] = rows[lane, _OPENING] = 1
            rows[lane, _INDEX] = rows[lane, _PROPOSALS] = rows[lane, _RIGHT] = 0
            rows[lane, _PHASE] = _SELECT
            rows[lane, _BRANCH] = -1
            state.chain[lane] = state.held[lane] = state.spent[lane] = 0.0
            rows[lane, _LAYER_PASSES] = rows[lane, _SEQUENTIAL_LAYERS] = rows[lane, _HEAD_CALLS] = 0
            rows[lane, _DECISIONS] = rows[lane, _DRAFTED] = rows[lane, _ACCEPTED] = 0
            rows[lane, _ROUNDS] = rows[lane, _TOKENS] = 0
            state.sums[lane, 0] = 0.0
            state.sums[lane, 1] = data.final_surprise[data.start[text]]
        state.active[lane] = True
        state.resumable[lane] = False
        rows[lane, _LAYER_PASSES] += data.depth[0]
        rows[lane, _SEQUENTIAL_LAYERS] += data.depth[0]
        rows[lane, _HEAD_CALLS] += 1
        observe(lane, observation, at, settings, data, state)


@_compiled
def tell(rows: Any, told: Any) -> None:
    """Copy the columns that `state.TOLD` names: `LaneState.rows`, int64 (n, 16), to `told`, int64 (12, n)."""
    for lane in range(len(rows)):
        told[0, lane], told[1, lane] = rows[lane, _TEXT], rows[lane, _INDEX]
        told[2, lane], told[3, lane] = rows[lane, _PHASE], rows[lane, _PROPOSALS]
        for counter in range(_LAYER_PASSES, _TOKENS + 1):
            told[4 + counter - _LAYER_PASSES, lane] = rows[lane, counter]


@_compiled
def step_lanes(
    first: int,
    end: int,
    actions: Any,
    skip: Any,
    observation: Any,
    reward: Any,
    terminated: Any,
    settings: Settings,
    data: Data,
    state: Lanes,
) -> None:
    """Take one action in each of the lanes first..end-1 but those to skip.

    Args:
        first, end: lanes.
        actions: int64 (n,), checked.
        skip: bool (n,).
        observation: float32 (n, f), zeros, written to where an episode goes on.
        reward: float64 (n,), zeros, written to.
        terminated: bool (n,), False, written to.
        settings, data, state: of the engine.
    """
    rows, last = state.rows, len(data.depth) - 1
    for lane in range(first, end):
        if skip[lane]:
            continue
        text, position, index = rows[lane, _TEXT], rows[lane, _POSITION], rows[lane, _INDEX]
        phase, drafted, so_far = rows[lane, _PHASE], rows[lane, _PROPOSALS], rows[lane, _RIGHT]
        branch, depth, first_row = rows[lane, _BRANCH], data.depth[index], data.start[text]
        proposed = actions[lane] == _EXIT
        entry = branch
        if branch < 0:
            entry = (first_row + position) * (last + 1) + index

        # What happens.
        right = unfed = verified = ended = final = False
        surprise = 0.0
        walked = 0
        if proposed:
            drafted += 1
            right = data.proposals[entry].match
            so_far += right
            surprise = data.proposals[entry].surprise
            if settings.walks:
                unfed = ended = True
            else:
                unfed = data.proposals[entry].ends_text or position == data.budget[text] - 1
                verified = unfed or drafted == settings.max_draft or not (settings.overrun or right)
                ended = verified
                final = ended and not (unfed and right)
            if not unfed:
                walked = depth
        elif phase == _SELECT:
            ended = final = index == last
            walked = data.gap[index]
        else:
            verified = ended = final = True
        pending = 1 + drafted - unfed

        # What it costs, and the state after.
        passes = layers = walked
        if verified:
            passes += (settings.num_layers - depth) * pending
            layers += settings.num_layers - depth
        over = False
        if proposed:
            before = state.sums[lane, position & settings.wrap]
            state.sums[lane, (position + 1) & settings.wrap] = before + surprise
        if ended:
            emitted = 1 if settings.walks else so_far + final
            after = rows[lane, _OPENING] + emitted
            complete = after == data.limit[text]
            over = complete or not settings.whole
            if final or settings.walks:
                at = after - 1
                before = state.sums[lane, at & settings.wrap]
                own = data.final_surprise[first_row + at]
                state.sums[lane, (at + 1) & settings.wrap] = before + own
            rows[lane, _DRAFTED] += drafted
            rows[lane, _ACCEPTED] += so_far
            rows[lane, _ROUNDS] += 1
            rows[lane, _TOKENS] += emitted
            if over:
                state.active[lane] = False
                state.resumable[lane] = not complete
                terminated[lane] = True
            else:
                passes += data.depth[0]
                layers += data.depth[0]
            rows[lane, _HEAD_CALLS] += (not proposed or verified) + (not over)
            rows[lane, _POSITION] = rows[lane, _OPENING] = after
            rows[lane, _INDEX] = rows[lane, _PROPOSALS] = rows[lane, _RIGHT] = 0
            rows[lane, _PHASE] = _SELECT
            rows[lane, _BRANCH] = -1
            state.chain[lane] = 0.0
        else:
            rows[lane, _HEAD_CALLS] += 1
            if proposed:
                rows[lane, _POSITION] = position + 1
                rows[lane, _PHASE] = _DRAFT
                rows[lane, _PROPOSALS], rows[lane, _RIGHT] = drafted, so_far
                state.chain[lane] += surprise
                if settings.overrun and not right:
                    rows[lane, _BRANCH] = data.proposals[entry].branch if branch < 0 else branch + 1
            else:
                rows[lane, _INDEX] = index + 1
        rows[lane, _LAYER_PASSES] += passes
        rows[lane, _SEQUENTIAL_LAYERS] += layers
        rows[lane, _DECISIONS] += 1
        cost = data.action_cost[phase, actions[lane], index]
        cost += data.feed_cost[index] * (proposed and not unfed)
        cost += data.verify_cost[index, pending if verified else 0]
        state.spent[lane] += cost

        # What it pays.
        if settings.lede:
            paid = settings.continued
            if proposed:
                paid = settings.accepted if right else settings.rejected
                paid += (settings.num_layers - depth) / settings.num_layers
            paid += settings.final_token_reward * final
        else:
            paid = right + final - settings.rho * cost
        if settings.by_round:
            if ended:
                paid += state.held[lane]
                state.held[lane] = 0.0
            elif proposed:
                state.held[lane] += paid
                paid = 0.0
        reward[lane] = paid
        if not over:
            observe(lane, observation, lane, settings, data, state)
