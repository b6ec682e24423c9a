"""Exact action values of a policy at every logged state: force an action in replay, then roll on.

Greedy lossless decoding makes replay deterministic, so Q^pi(s, a) of a deterministic policy is one
number that can be played out, not an expectation to be estimated:

    Q(s, a) = r(s, a) + gamma V(s'),    V(s) = Q(s, pi(s))

At a logged state s_t the logged action leads to the next logged state s_{t+1}, so its value needs no
rollout of its own. Every logged state needs exactly one: of the action that was not taken. The
logged episodes are therefore played once, side by side; at each step every one of them leaves a copy
of itself behind that takes the other action and then obeys the policy to the end of the episode.
What the logged actions are worth follows backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.hindsight import PlannedController
from sde_gym.errors import InputError
from sde_gym.evaluation.player import Player, Policy, is_stochastic
from sde_gym.offline.buffer import check_returns
from sde_gym.offline.collect import Progress, trace_set_id
from sde_gym.offline.transitions import Transitions, refuse_restricted
from sde_gym.policies.ablation import keeps_state
from sde_gym.policies.controller import Controller, feature_settings
from sde_gym.policies.observation import HEAD_FEATURES
from sde_gym.traces import TraceSet

ROLLOUTS = 8192
"""Rollouts played side by side."""

_ROLLOUTS_PER_EPISODE = 16
"""Rollout lanes for each lane that replays logged episodes; one of those leaves a rollout at each step,
and a rollout lasts half an episode on average, so that the rollout lanes are always busy."""

_REQUIRED = ("depths", "reward", "final_token_reward", "credit", "max_draft", "max_new_tokens", "traces")
_OPTIONAL = ("k", "window", "episode", "rho", "cost", "reads")


@dataclass(frozen=True, eq=False)
class ExactQ:
    """Exact values of a policy at the n states of logged transitions, in their order.

    Attributes:
        q: float64 (n, 2), Q^pi(s, a) by `Action`.
        action: int64 (n,), what the policy does there.
        value: float64 (n,), V^pi(s), that is q at `action`.
        advantage: float64 (n,), of the logged action: its q less `value`.
        gamma: discount per decision.
        policy: its name.
    """

    q: NDArray[np.float64]
    action: NDArray[np.int64]
    value: NDArray[np.float64]
    advantage: NDArray[np.float64]
    gamma: float
    policy: str


def exact_q(
    policy: Policy,
    transitions: Transitions,
    traces: TraceSet,
    *,
    gamma: float = 1.0,
    progress: Progress | None = None,
    rollouts: int = ROLLOUTS,
) -> ExactQ:
    """Q^pi(s, a) of both actions at every logged state.

    The environment is the one that the data were logged in, as their `settings` say; the policy
    reads its own features, with its own `k` and `window` if it declares them, else the data's. With
    an episode other than "generation" a value reaches to the end of that round or walk, and episodes
    of the same text that follow each other are taken to be the rounds of that text in order.

    A controller that keeps state is asked for an action at each logged state, whatever was done
    there, and its `feedback` gets the rounds of the logged prefix, as if it had acted. It has to
    define `copy_lanes(source, target)`: make what it knows of the target lanes, int64 (n,), a copy of
    what it knows of the source lanes.

    Args:
        policy: a deterministic controller; bound and reset here.
        transitions: logged decisions.
        traces: what they were collected on.
        gamma: discount per decision, in (0, 1].
        progress: called with (states done, states in all).
        rollouts: played side by side; bounds the memory and changes speed only.

    Raises:
        InputError: a policy that draws its actions, or plays a plan, or keeps state that cannot be
            copied; data of another trace set, or restricted to one phase, or whose rewards are not those
            of their settings; gamma out of range.
    """
    check_returns(1, gamma)
    whole_number("rollouts", rollouts, 1)
    refuse_restricted(
        transitions,
        "so their decisions cannot be replayed; give the transitions that they were made from",
    )
    controller = _deterministic(policy)
    settings = _settings(transitions, traces, controller)
    rollouts = min(rollouts, len(transitions))
    replays = min(-(-rollouts // _ROLLOUTS_PER_EPISODE), transitions.num_episodes)
    player = Player(traces, controller, replays + rollouts, settings)
    action, reward, other = _play(player, transitions, replays, gamma, progress)

    rows = np.arange(len(transitions))
    logged = transitions.action
    q = np.empty((len(transitions), 2))
    q[rows, 1 - logged] = other
    lengths = np.diff(transitions.start)
    for step in range(int(lengths.max()) - 1, -1, -1):
        here = transitions.start[:-1][lengths > step] + step
        goes_on = ~transitions.terminal[here]
        following = here[goes_on] + 1
        q[here, logged[here]] = reward[here]
        q[here[goes_on], logged[here[goes_on]]] += gamma * q[following, action[following]]
    value = q[rows, action]
    return ExactQ(q, action, value, q[rows, logged] - value, gamma, controller.name)


def _play(
    player: Player, transitions: Transitions, replays: int, gamma: float, progress: Progress | None
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Replay the logged episodes and roll out the other action of every state.

    Lanes 0..replays - 1 replay; the others roll out.

    Returns:
        by row of the transitions: the policy's action int64 (n,), the reward of the logged action
        float64 (n,), and the return from the other action on, float64 (n,).
    """
    n, lanes = len(transitions), player.engine.lanes
    action, reward, other = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros(n)
    blocks = _blocks(transitions, whole=player.engine.episode == "generation")
    last_of_block = np.zeros(n, dtype=bool)
    last_of_block[np.append(blocks[1:], n) - 1] = True

    row = np.full(lanes, -1, dtype=np.int64)  # the next to replay, or the one rolled out from; -1: idle
    row[:replays] = np.append(blocks, np.full(replays, -1))[:replays]
    opened, done = replays, 0
    free = np.arange(replays, lanes, dtype=np.int64)
    rolling = np.zeros(0, dtype=np.int64)
    total, weight = np.zeros(lanes), np.ones(lanes)
    seated = np.flatnonzero(row >= 0)
    player.begin(seated, transitions.text[row[seated]])
    while done < n:
        # Lanes that replay wait where no lane is free for the rollout that they leave behind.
        moving = np.flatnonzero(row[:replays] >= 0)[: len(free)]
        rows = row[moving]
        branch, free = free[: len(moving)], free[len(moving) :]
        chosen = player.act(np.concatenate([moving, rolling]))
        action[rows] = chosen[: len(moving)]
        player.copy(moving, branch)
        row[branch], total[branch], weight[branch] = rows, 0.0, 1.0

        logged = transitions.action[rows]
        forced = np.concatenate([logged, 1 - logged, chosen[len(moving) :]])
        paid, over = player.step(np.concatenate([moving, branch, rolling]), forced)

        rolling, over_rolling = np.concatenate([branch, rolling]), over[len(moving) :]
        total[rolling] += weight[rolling] * paid[len(moving) :]
        weight[rolling] *= gamma
        arrived = rolling[over_rolling]
        other[row[arrived]] = total[arrived]
        rolling, free = rolling[~over_rolling], np.concatenate([free, arrived])
        done += len(arrived)

        reward[rows] = paid[: len(moving)]
        _check_logged(transitions, rows, reward[rows], over[: len(moving)])
        row[moving] += 1
        closing, ended = moving[last_of_block[rows]], moving[transitions.terminal[rows]]
        fresh = blocks[opened : opened + len(closing)]
        opened += len(fresh)
        row[closing] = np.append(fresh, np.full(len(closing), -1))[: len(closing)]
        starting = ended[row[ended] >= 0]
        texts = transitions.text[row[starting]]
        resumes = player.engine.resumable(starting) & ~np.isin(starting, closing)
        player.begin(starting, np.where(resumes, -1, texts))
        if progress is not None and len(arrived):
            progress(done, n)
    return action, reward, other


def _blocks(transitions: Transitions, *, whole: bool) -> NDArray[np.int64]:
    """First rows of the blocks that have to be replayed in one go, int64 (b,).

    A block is an episode where that is a `whole` text, else all episodes of one text that follow each
    other.
    """
    first = transitions.start[:-1]
    if whole:
        return first
    text = transitions.text[first]
    return first[np.append(True, text[1:] != text[:-1])]


def _check_logged(
    transitions: Transitions, rows: NDArray[np.int64], reward: NDArray[np.float64], over: NDArray[np.bool_]
) -> None:
    """InputError unless these rows hold what replay says."""
    same = np.isclose(reward, transitions.reward[rows], rtol=1e-5, atol=1e-5)
    same &= over == transitions.terminal[rows]
    if not same.all():
        at = int(np.argmin(same))
        row = int(rows[at])
        raise InputError(
            f"transitions: row {row} has reward {float(transitions.reward[row]):g} and terminal "
            f"{bool(transitions.terminal[row])}, but in the environment of their settings it is "
            f"{reward[at]:g} and {bool(over[at])}; collect them again"
        )


def _deterministic(policy: Policy) -> Controller:
    """The policy, if it has exact action values that can be played out; else InputError."""
    name = getattr(policy, "name", policy)
    if is_stochastic(policy) or not isinstance(policy, Controller):
        raise InputError(
            f"policy {name!r} draws its actions, so one rollout is no exact value; give a deterministic "
            "controller, or estimate the value of this one by `policy_value` with repeats"
        )
    if isinstance(policy, PlannedController):
        raise InputError(
            f"policy {name!r} plays a plan, which says nothing about the states behind another action; "
            "give a controller that decides by what it sees"
        )
    if keeps_state(policy) and not hasattr(policy, "copy_lanes"):
        raise InputError(
            f"policy {name!r} keeps state (it has a `reset` or `feedback` of its own) that cannot be copied "
            "to the lanes that roll out; define `copy_lanes(source, target)` on it, or set `stateful = "
            "False` if it keeps none"
        )
    return policy


def _settings(transitions: Transitions, traces: TraceSet, controller: Controller) -> dict[str, Any]:
    """Settings of the engine that the data were logged in, with the features of the controller."""
    logged = transitions.settings
    missing = [name for name in _REQUIRED if name not in logged]
    if missing:
        raise InputError(
            f"transitions: their settings lack {', '.join(missing)}, so the environment that they were "
            "logged in is unknown; collect them with sde_gym.offline.collect"
        )
    identity = trace_set_id(traces)
    if logged["traces"] != identity:
        raise InputError(
            f"traces: {identity} is not the trace set of these transitions, which is {logged['traces']}; "
            "give the one they were collected on"
        )
    settings = {name: logged[name] for name in (*_REQUIRED, *_OPTIONAL) if name in logged}
    del settings["traces"]
    # Costs of heads belong to the logged environment: it charged what was observed there.
    settings.setdefault("reads", not HEAD_FEATURES.isdisjoint(transitions.names))
    for name in ("k", "window"):
        if getattr(controller, name, None) is not None:
            settings.pop(name, None)
    settings["k"], settings["window"] = feature_settings(
        controller, settings.get("k"), settings.get("window")
    )
    return settings
