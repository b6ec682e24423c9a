"""One step of all lanes, compiled by numba: the engine's twin for very many lanes.

The twin reads and writes the engine's own arrays, lane by lane in one pass, so that either may take
any step; the arithmetic is the same operation by operation, and so are the results, bit for bit. What
each quantity means is said in `ReplayEngine.step`. Only `sde_gym.envs.accelerate` imports this module;
compiled code is kept on disk where numba finds a place for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sde_gym.compiling import compiled
from sde_gym.policies.observation import Action, Phase

TRACE, DEPTH, PHASE, DRAFT_LENGTH, ACCEPTANCE, CHAIN = -1, -2, -3, -4, -5, -6
"""Columns of the observation that are computed; those from 0 on are columns of the tables."""

# Columns of `LaneState.rows`; written out since compiled code on disk follows changes of this file only.
(
    _TEXT, _POSITION, _OPENING, _INDEX, _PHASE, _PROPOSALS, _RIGHT, _BRANCH,
    _LAYER_PASSES, _SEQUENTIAL_LAYERS, _HEAD_CALLS, _DECISIONS, _DRAFTED, _ACCEPTED, _ROUNDS, _TOKENS,
) = range(16)  # fmt: skip

_NEAR = 64
"""Lanes that are stepped before they are told of."""

_CONTINUE, _EXIT = int(Action.CONTINUE), int(Action.EXIT)
_SELECT, _DRAFT = int(Phase.SELECT), int(Phase.DRAFT)

# Compiled code on disk names the classes below: numba cannot read what an earlier version left there
# once one of them is gone, so they keep their names.


class Settings(NamedTuple):
    """What does not change from step to step; `accelerate.Kernel` fills it."""

    num_layers: int
    plain_token: float  # of the cost model
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

    lanes: Any  # int64 (n,), all of them
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


_compiled = compiled(nogil=True, error_model="numpy")  # without the interpreter's lock


@_compiled
def first_wrong(actions: Any, active: Any, skip: Any) -> int:
    """The first lane, of those not to skip, that has a wrong action or no episode; -1 if none."""
    for lane in range(len(actions)):
        if not skip[lane] and not (active[lane] and (actions[lane] == _CONTINUE or actions[lane] == _EXIT)):
            return lane
    return -1


@_compiled
def observe(
    first: int,
    end: int,
    lanes: Any,
    skip: Any,
    observation: Any,
    settings: Settings,
    data: Data,
    state: Lanes,
) -> None:
    """Write the observations of the lanes first..end-1 of a list, but those to skip and those at their end.

    Args:
        first, end: places in the list.
        lanes: int64 (n,).
        skip: bool (n,).
        observation: float32 (n, f), written to.
        settings, data, state: of the engine.
    """
    # Taken out of their tuples before the loop: in it, numba would count references to all of them each time.
    rows, active, sums, chain, sources = state.rows, state.active, state.sums, state.chain, data.sources
    depth, start, features, low, high = data.depth, data.start, data.features, data.low, data.high
    wrap, reach, stable = settings.wrap, settings.reach, data.stable
    num_layers, max_draft = settings.num_layers, settings.max_draft
    for at in range(first, end):
        lane = lanes[at]
        if skip[at] or not active[lane]:
            continue
        position, index, entry = rows[lane, _POSITION], rows[lane, _INDEX], rows[lane, _BRANCH]
        if entry < 0:
            entry = (start[rows[lane, _TEXT]] + position) * len(depth) + index
        for column in range(len(sources)):
            source = sources[column]
            if source >= 0:
                # Behind a proposal the depth before was not read.
                unknown = source == stable and rows[lane, _PHASE] == _DRAFT
                observation[at, column] = np.float32(0.0) if unknown else features[entry, source]
                continue
            value = 0.0
            if source == TRACE:
                oldest = max(position - reach, 0)
                value = (sums[lane, position & wrap] - sums[lane, oldest & wrap]) / (position - oldest)
            elif source == DEPTH:
                value = depth[index] / num_layers
            elif source == PHASE:
                value = float(rows[lane, _PHASE])
            elif source == DRAFT_LENGTH:
                value = rows[lane, _PROPOSALS] / max_draft
            elif source == ACCEPTANCE:
                value = 1.0
                if rows[lane, _DRAFTED] > 0:
                    value = rows[lane, _ACCEPTED] / rows[lane, _DRAFTED]
            elif source == CHAIN:
                value = chain[lane]
            observation[at, column] = min(max(np.float32(value), low[column]), high[column])


@_compiled
def tell(
    first: int, end: int, lanes: Any, told: Any, simulated: Any, settings: Settings, data: Data, state: Lanes
) -> None:
    """Write down what an environment tells of the lanes first..end-1 of a list.

    Args:
        first, end: places in the list.
        lanes: int64 (n,).
        told: int64 (12, N), what `state.TOLD` names, by lane; written to.
        simulated: float64 (2, N), cost and speed-up, by lane; written to.
        settings, data, state: of the engine.
    """
    rows, depth, all_spent, plain_token = state.rows, data.depth, state.spent, settings.plain_token
    for at in range(first, end):
        lane = lanes[at]
        told[0, lane], told[1, lane] = rows[lane, _TEXT], depth[rows[lane, _INDEX]]
        told[2, lane], told[3, lane] = rows[lane, _PHASE], rows[lane, _PROPOSALS]
        for counter in range(_LAYER_PASSES, _TOKENS + 1):
            told[4 + counter - _LAYER_PASSES, lane] = rows[lane, counter]
        spent = all_spent[lane]
        simulated[0, lane] = spent
        simulated[1, lane] = plain_token * rows[lane, _TOKENS] / spent if spent > 0 else 1.0


@_compiled
def unfit(lanes: Any, texts: Any, playable: Any, resumable: Any) -> bool:
    """Whether a lane cannot begin as it is asked to: its text is none, or there is none to go on with."""
    for at in range(len(lanes)):
        text = texts[at]
        if text >= len(playable) or not (resumable[lanes[at]] if text < 0 else playable[text]):
            return True
    return False


@_compiled
def open_lanes(
    lanes: Any,
    texts: Any,
    observation: Any,
    told: Any,
    simulated: Any,
    settings: Settings,
    data: Data,
    state: Lanes,
) -> None:
    """Begin episodes in these lanes, of a new text or, where it is negative, of the old one.

    Args:
        lanes: int64 (n,), distinct.
        texts: int64 (n,).
        observation: float32 (n, f), written to.
        told, simulated: see `tell`; written to.
        settings, data, state: of the engine.
    """
    rows, active, resumable, sums = state.rows, state.active, state.resumable, state.sums
    chain, held, spent = state.chain, state.held, state.spent
    start, final_surprise, first_depth = data.start, data.final_surprise, data.depth[0]
    for at in range(len(lanes)):
        lane, text = lanes[at], texts[at]
        if text >= 0:
            rows[lane, _TEXT] = text
            rows[lane, _POSITION] = rows[lane, _OPENING] = 1
            rows[lane, _INDEX] = rows[lane, _PROPOSALS] = rows[lane, _RIGHT] = 0
            rows[lane, _PHASE] = _SELECT
            rows[lane, _BRANCH] = -1
            chain[lane] = held[lane] = spent[lane] = 0.0
            rows[lane, _LAYER_PASSES] = rows[lane, _SEQUENTIAL_LAYERS] = rows[lane, _HEAD_CALLS] = 0
            rows[lane, _DECISIONS] = rows[lane, _DRAFTED] = rows[lane, _ACCEPTED] = 0
            rows[lane, _ROUNDS] = rows[lane, _TOKENS] = 0
            sums[lane, 0] = 0.0
            sums[lane, 1] = final_surprise[start[text]]
        active[lane] = True
        resumable[lane] = False
        rows[lane, _LAYER_PASSES] += first_depth
        rows[lane, _SEQUENTIAL_LAYERS] += first_depth
        rows[lane, _HEAD_CALLS] += 1
    observe(0, len(lanes), lanes, np.zeros(len(lanes), np.bool_), observation, settings, data, state)
    tell(0, len(lanes), lanes, told, simulated, settings, data, state)


@_compiled
def step_some(
    first: int,
    end: int,
    actions: Any,
    skip: Any,
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
        reward: float64 (n,), zeros, written to.
        terminated: bool (n,), False, written to.
        settings, data, state: of the engine.
    """
    rows, active, resumable, sums = state.rows, state.active, state.resumable, state.sums
    chain, held, spent = state.chain, state.held, state.spent
    depths, gap, proposals, final_surprise = data.depth, data.gap, data.proposals, data.final_surprise
    start, limit, budget = data.start, data.limit, data.budget
    action_cost, feed_cost, verify_cost = data.action_cost, data.feed_cost, data.verify_cost
    num_layers, max_draft, overrun = settings.num_layers, settings.max_draft, settings.overrun
    walks, wrap, last = settings.walks, settings.wrap, len(depths) - 1
    for lane in range(first, end):
        if skip[lane]:
            continue
        text, position, index = rows[lane, _TEXT], rows[lane, _POSITION], rows[lane, _INDEX]
        phase, drafted, so_far = rows[lane, _PHASE], rows[lane, _PROPOSALS], rows[lane, _RIGHT]
        branch, depth, first_row = rows[lane, _BRANCH], depths[index], start[text]
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
            right = proposals[entry].match
            so_far += right
            surprise = proposals[entry].surprise
            if walks:
                unfed = ended = True
            else:
                unfed = proposals[entry].ends_text or position == budget[text] - 1
                verified = unfed or drafted == max_draft or not (overrun or right)
                ended = verified
                final = ended and not (unfed and right)
            if not unfed:
                walked = depth
        elif phase == _SELECT:
            ended = final = index == last
            walked = gap[index]
        else:
            verified = ended = final = True
        pending = 1 + drafted - unfed

        # What it costs, and the state after.
        passes = layers = walked
        if verified:
            passes += (num_layers - depth) * pending
            layers += num_layers - depth
        over = False
        if proposed:
            before = sums[lane, position & wrap]
            sums[lane, (position + 1) & wrap] = before + surprise
        if ended:
            emitted = 1 if walks else so_far + final
            after = rows[lane, _OPENING] + emitted
            complete = after == limit[text]
            over = complete or not settings.whole
            if final or walks:
                at = after - 1
                before = sums[lane, at & wrap]
                own = final_surprise[first_row + at]
                sums[lane, (at + 1) & wrap] = before + own
            rows[lane, _DRAFTED] += drafted
            rows[lane, _ACCEPTED] += so_far
            rows[lane, _ROUNDS] += 1
            rows[lane, _TOKENS] += emitted
            if over:
                active[lane] = False
                resumable[lane] = not complete
                terminated[lane] = True
            else:
                passes += depths[0]
                layers += depths[0]
            rows[lane, _HEAD_CALLS] += (not proposed or verified) + (not over)
            rows[lane, _POSITION] = rows[lane, _OPENING] = after
            rows[lane, _INDEX] = rows[lane, _PROPOSALS] = rows[lane, _RIGHT] = 0
            rows[lane, _PHASE] = _SELECT
            rows[lane, _BRANCH] = -1
            chain[lane] = 0.0
        else:
            rows[lane, _HEAD_CALLS] += 1
            if proposed:
                rows[lane, _POSITION] = position + 1
                rows[lane, _PHASE] = _DRAFT
                rows[lane, _PROPOSALS], rows[lane, _RIGHT] = drafted, so_far
                chain[lane] += surprise
                if overrun and not right:
                    rows[lane, _BRANCH] = proposals[entry].branch if branch < 0 else branch + 1
            else:
                rows[lane, _INDEX] = index + 1
        rows[lane, _LAYER_PASSES] += passes
        rows[lane, _SEQUENTIAL_LAYERS] += layers
        rows[lane, _DECISIONS] += 1
        cost = action_cost[phase, actions[lane], index]
        cost += feed_cost[index] * (proposed and not unfed)
        cost += verify_cost[index, pending if verified else 0]
        spent[lane] += cost

        # What it pays.
        if settings.lede:
            paid = settings.continued
            if proposed:
                paid = settings.accepted if right else settings.rejected
                paid += (num_layers - depth) / num_layers
            paid += settings.final_token_reward * final
        else:
            paid = right + final - settings.rho * cost
        if settings.by_round:
            if ended:
                paid += held[lane]
                held[lane] = 0.0
            elif proposed:
                held[lane] += paid
                paid = 0.0
        reward[lane] = paid


@_compiled
def step_lanes(
    first: int,
    end: int,
    actions: Any,
    skip: Any,
    observation: Any,
    reward: Any,
    terminated: Any,
    told: Any,
    simulated: Any,
    settings: Settings,
    data: Data,
    state: Lanes,
) -> None:
    """`step_some`, `observe` and `tell` of the lanes first..end-1, a few at a time while their rows are near.

    Args:
        observation: float32 (n, f), zeros, written to where an episode goes on.
        told, simulated: see `tell`; written to, of lanes that are skipped, too.
        others: see `step_some`.
    """
    for at in range(first, end, _NEAR):
        until = min(at + _NEAR, end)
        step_some(at, until, actions, skip, reward, terminated, settings, data, state)
        observe(at, until, data.lanes, skip, observation, settings, data, state)
        tell(at, until, data.lanes, told, simulated, settings, data, state)
