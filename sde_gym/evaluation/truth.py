"""What a policy is really worth from where a log starts: the answer that estimators are judged by.

The starts are those of the log, each as often as it was logged. Whole texts start at their beginning.
A round starts where the log had come to: with the tokens, the acceptance and the window that the
behaviour policy left behind. To get there the logged actions are replayed; at every start a copy is
made in which the target plays one episode. So the truth for rounds is

    V = mean over logged rounds of E[sum over the round of gamma^t r_t | logged start, target acts]

which is what estimators estimate from those rounds: their first states have no weight to correct.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.evaluation.logged import engine_settings
from sde_gym.evaluation.player import Player, Policy, is_stochastic, reseeded
from sde_gym.evaluation.targets import check_memoryless
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import Controller
from sde_gym.traces import TraceSet

FloatArray = NDArray[np.float64]

#: Logged rounds held at a time, roughly: bounds the memory.
_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False)
class TrueValue:
    """Mean discounted return of an episode from the logged starts.

    Attributes:
        policy: its name.
        gammas: the G discounts per decision.
        value: float64 (G,).
        standard_error: float64 (G,), of `value`; 0 for a policy that draws nothing, as one replay is exact.
        repeats: replays of every start.
    """

    policy: str
    gammas: tuple[float, ...]
    value: FloatArray
    standard_error: FloatArray
    repeats: int


def true_value(
    policy: Policy,
    transitions: Transitions,
    traces: TraceSet,
    gammas: Sequence[float],
    *,
    repeats: int = 32,
    seed: int = 0,
) -> TrueValue:
    """Play a policy from every logged start.

    Args:
        policy: without memory; one that draws its actions is played `repeats` times.
        transitions: the log.
        traces: the trace set that it was collected from.
        gammas: discounts per decision, each in (0, 1].
        repeats: replays of a policy that draws, at least 2.
        seed: of its draws.

    Raises:
        InputError: a policy that keeps state or does not fit, another trace set, transitions restricted to
            one phase, or repeats < 2.
    """
    check_memoryless(policy)
    if repeats < 2:
        raise InputError(f"repeats is {repeats}; at least 2 are needed for a standard error")
    for gamma in gammas:
        if not 0 < gamma <= 1:
            raise InputError(f"gamma is {gamma}; it must be in (0, 1]")
    drawn = is_stochastic(policy)
    seeds = range(seed, seed + repeats) if drawn else range(seed, seed + 1)
    settings = engine_settings(transitions, traces)
    whole = settings.get("episode", "generation") == "generation"
    play = _whole_texts if whole else _from_logged_rounds
    lanes = len(np.unique(transitions.text))
    if not whole:  # runs, their starts, and copies of these
        lanes = max(len(bounds) - 1 + 2 * int(bounds[-1] - bounds[0]) for bounds in _blocks(transitions))
    player = Player(traces, _player_of(policy, seed, drawn), lanes, settings)
    players = [_player_of(policy, number, drawn) for number in seeds] if drawn else [player.controller]
    for controller in players:  # copies of the policy, which itself is not bound
        controller.bind(player.engine.depths, player.engine.num_layers, player.engine.max_draft)
    means = play(player, players, transitions, np.asarray(gammas, dtype=np.float64))
    error = means.std(axis=0, ddof=1) / np.sqrt(repeats) if drawn else np.zeros(len(gammas))
    return TrueValue(policy.name, tuple(gammas), means.mean(axis=0), error, len(players))


def _player_of(policy: Policy, seed: int, drawn: bool) -> Controller:
    """A copy that a `Player` takes for what `check_memoryless` found it to be: without memory."""
    controller: Any = reseeded(policy, seed) if drawn else copy.copy(policy)
    controller.stateful = False
    played: Controller = controller
    return played


def _whole_texts(
    player: Player, controllers: Sequence[Controller], transitions: Transitions, gammas: FloatArray
) -> FloatArray:
    """Mean return of each controller over the logged texts, float64 (controllers, G)."""
    texts, counts = np.unique(transitions.text[transitions.start[:-1]], return_counts=True)
    lanes = np.arange(len(texts), dtype=np.int64)
    means = []
    for controller in controllers:
        player.controller = controller
        player.begin(lanes, texts)
        means.append(counts @ _rolled_out(player, lanes, gammas) / counts.sum())
    return np.array(means)


def _from_logged_rounds(
    player: Player, controllers: Sequence[Controller], transitions: Transitions, gammas: FloatArray
) -> FloatArray:
    """Mean return of each controller over the logged rounds (or walks), float64 (controllers, G).

    Block by block the log is replayed once, leaving a copy behind at every start; in copies of these
    each controller plays.
    """
    total = np.zeros((len(controllers), len(gammas)))
    for bounds in _blocks(transitions):
        runs, count = len(bounds) - 1, int(bounds[-1] - bounds[0])
        _keep_starts(player, transitions, bounds)
        kept = np.arange(runs, runs + count)
        for number, controller in enumerate(controllers):
            player.controller = controller
            player.copy(kept, kept + count)
            total[number] += _rolled_out(player, kept + count, gammas).sum(axis=0)
    return total / transitions.num_episodes


def _keep_starts(player: Player, transitions: Transitions, bounds: NDArray[np.int64]) -> None:
    """Replay runs of logged rounds side by side; afterwards lane runs + i stands at the block's i-th start.

    Args:
        player: whose first lanes replay.
        transitions: the log.
        bounds: int64 (runs + 1,), first episode of each run and, last, the end of the block.
    """
    first, end = bounds[:-1], bounds[1:]
    text = transitions.text[transitions.start[:-1]]
    replaying, episode = np.arange(len(first), dtype=np.int64), first.copy()
    while replaying.size:
        resumed = player.engine.resumable(replaying) & (episode > first[replaying])
        player.begin(replaying, np.where(resumed, -1, text[episode]))
        player.copy(replaying, len(first) + episode - bounds[0])
        _replay_episode(player, replaying, transitions, transitions.start[episode])
        goes_on = episode + 1 < end[replaying]
        replaying, episode = replaying[goes_on], episode[goes_on] + 1


def _rolled_out(player: Player, lanes: NDArray[np.int64], gammas: FloatArray) -> FloatArray:
    """Discounted returns of the episodes in progress in these lanes, float64 (n, G)."""
    total = np.zeros((len(lanes), len(gammas)))
    discount = np.ones(len(gammas))
    running = np.arange(len(lanes))
    while running.size:
        reward, over = player.step(lanes[running], player.act(lanes[running]))
        total[running] += reward[:, None] * discount
        discount = discount * gammas
        running = running[~over]
    return total


def _replay_episode(
    player: Player, lanes: NDArray[np.int64], transitions: Transitions, first: NDArray[np.int64]
) -> None:
    """Take the logged actions from these rows on, until each lane's episode is over."""
    row = first
    while lanes.size:
        over = player.engine.step(transitions.action[row], lanes)[2]
        if not np.array_equal(over, transitions.terminal[row]):
            raise InputError(
                "transitions: episodes do not end where the trace set ends them; collect them again"
            )
        lanes, row = lanes[~over], row[~over] + 1


def _blocks(transitions: Transitions) -> list[NDArray[np.int64]]:
    """The log in blocks of whole runs, a run being episodes of one text that follow each other.

    Each is given by the first episodes of its runs and, last, the end of the block: int64 (runs + 1,).
    """
    text = transitions.text[transitions.start[:-1]]
    first = np.flatnonzero(np.append(True, text[1:] != text[:-1]))
    bounds = np.append(first, len(text)).astype(np.int64)
    opening = np.flatnonzero(np.append(True, np.diff(first // _BLOCK) > 0))
    closing = np.append(opening[1:], len(first))
    return [bounds[low : high + 1] for low, high in zip(opening, closing, strict=True)]
