"""Shadow tokens in replay: against a look-up by hand, whoever drives; what they cost; what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.run import RunResult, run_controller
from sde_gym.envs.shadow import check_replayable, shadow_costs
from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import exact_q
from sde_gym.evaluation.player import Player
from sde_gym.evaluation.value import policy_value
from sde_gym.models.cost import unit_cost
from sde_gym.offline.behaviours import Behaviour, EpisodeMixture, EpsilonGreedy, StepMixture, UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.offline.restricted import OnePhase
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.controller import Controller, RoundOutcome, Shadow, View
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.observation import Phase
from sde_gym.policies.rules import RandomController, StaticController, counter_uniform
from sde_gym.traces import TraceSet
from tests.builders import random_traces
from tests.costs import uneven_cost

DEPTHS = (2, 6)
"""Not all that were recorded."""


class Listener(RandomController):
    """Exits at random and keeps, by lane, the rounds of each text."""

    stochastic = False

    def __init__(self, shadows: bool = True) -> None:
        super().__init__(0.5, seed=3, p_draft=0.7)
        self.name = "listener"
        self.shadows = shadows
        self.texts: dict[int, list[list[tuple[int, int, Shadow]]]] = {}
        self.silent = 0

    def reset(self, lanes: np.ndarray) -> None:
        for lane in lanes.tolist():
            self.texts.setdefault(lane, []).append([])

    def feedback(self, outcome: RoundOutcome) -> None:
        if outcome.shadow is None:
            self.silent += len(outcome.lanes)
            return
        assert len(outcome.shadow) == len(outcome.lanes)
        columns = (outcome.lanes.tolist(), outcome.drafted.tolist(), outcome.accepted.tolist())
        for lane, drafted, accepted, shadow in zip(*columns, outcome.shadow, strict=True):
            self.texts[lane][-1].append((drafted, accepted, shadow))

    def copy_lanes(self, source: np.ndarray, target: np.ndarray) -> None:
        for lane in target.tolist():
            self.texts[lane] = [[]]


def check(traces: TraceSet, text: int, rounds: list[tuple[int, int, Shadow]]) -> int:
    """Every round's shadow is what the trace holds at the tokens it emitted; returns how many these are."""
    position = 1
    columns = [traces.depths.index(depth) for depth in DEPTHS]
    for drafted, accepted, shadow in rounds:
        count = len(shadow.right)
        assert count in (accepted, accepted + 1)
        assert count > accepted or drafted == accepted
        for step in range(count):
            row = int(traces.start[text]) + position + step
            for number, column in enumerate(columns):
                proposal = int(traces.top_ids[row, column, 0])
                assert shadow.right[step, number] == (proposal == traces.token[row])
                best = float(np.exp(traces.top_logprobs[row, column, 0]))
                assert shadow.probability[step, number] == pytest.approx(best, rel=1e-6)
        assert shadow.right.dtype == np.bool_
        assert shadow.probability.dtype == np.float32
        position += count
    assert position == traces.lengths[text]
    return position - 1


@pytest.mark.parametrize("overrun", [0, 11])
def test_run_controller_tells_what_the_trace_holds(overrun: int) -> None:
    traces = random_traces(1, 9, overrun=overrun)
    listener = Listener()
    texts = [4, 0, 7, 8]
    result = run_controller(traces, listener, texts, depths=DEPTHS)
    for lane, text in enumerate(texts):
        (rounds,) = listener.texts[lane]
        assert check(traces, text, rounds) == result.tokens[lane]
        assert len(rounds) == result.rounds[lane]
    deaf = Listener(shadows=False)
    run_controller(traces, deaf, texts, depths=DEPTHS)
    assert deaf.silent == result.rounds.sum()


def test_the_player_tells_the_same(toy_traces: TraceSet) -> None:
    listener = Listener()
    player = Player(toy_traces, listener, 3, {"depths": DEPTHS})
    lanes = np.array([2, 0])
    player.begin(lanes, np.array([1, 5]))
    running = lanes
    while running.size:
        _, over = player.step(running, player.act(running))
        running = running[~over]
    for lane, text in ((2, 1), (0, 5)):
        (rounds,) = listener.texts[lane]
        check(toy_traces, text, rounds)


@pytest.mark.parametrize("wrap", ["alone", "step mixture", "episode mixture", "one phase"])
def test_collecting_tells_the_same(wrap: str, toy_traces: TraceSet) -> None:
    """Alone each text's rounds are complete; in a mixture over steps, too; over episodes, in its own."""
    listener = Listener()
    wrapped: dict[str, Callable[[], Behaviour | EpisodeMixture]] = {
        "alone": lambda: EpsilonGreedy(listener, 0.3),
        "step mixture": lambda: StepMixture([EpsilonGreedy(listener, 0.3), UniformRandom()]),
        "episode mixture": lambda: EpisodeMixture([UniformRandom(), EpsilonGreedy(listener, 0.3)]),
        "one phase": lambda: OnePhase(UniformRandom(), listener, Phase.SELECT),
    }
    data = collect(toy_traces, wrapped[wrap](), 10, seed=0, depths=DEPTHS, lanes=1)
    mine = np.arange(10) if wrap != "episode mixture" else np.unique(data.episode[data.component == 1])
    texts = data.text[data.start[:-1]][mine]
    assert len(listener.texts[0]) == len(texts) > 3
    for text, rounds in zip(texts, listener.texts[0], strict=True):
        check(toy_traces, int(text), rounds)


def test_a_behaviour_of_ones_own_may_ask(toy_traces: TraceSet) -> None:
    class Own(UniformRandom):
        shadows = True
        heard = 0

        def feedback(self, outcome: RoundOutcome) -> None:
            assert outcome.shadow is not None
            self.heard += sum(len(shadow.right) for shadow in outcome.shadow)

    own = Own()
    data = collect(toy_traces, own, 12, seed=0)
    assert own.heard == int((toy_traces.lengths[data.text[data.start[:-1]]] - 1).sum())
    heard, own.heard = own.heard, 0
    policy_value(own, toy_traces, repeats=2)
    assert own.heard == 2 * int((toy_traces.lengths - 1).sum()) == heard


def test_heads_for_shadow_tokens_are_paid() -> None:
    traces = random_traces(1, 9, overrun=11)
    cost = uneven_cost(traces.num_layers)

    def run(shadows: bool, **settings: Any) -> tuple[RunResult, Listener]:
        listener = Listener(shadows)
        return run_controller(traces, listener, depths=DEPTHS, **settings), listener

    paid, listener = run(True, cost=cost, reward="speed")
    free, _ = run(False, cost=cost, reward="speed")
    assert (paid.head_calls - free.head_calls).tolist() == (2 * paid.rounds).tolist()
    for lane in range(len(traces)):
        counts = [len(shadow.right) for *_, shadow in listener.texts[lane][0]]
        # m heads of 0.3, which grow with the tokens as the full head does: 0.80, 0.81, 0.82, ...
        extra = sum(2 * 0.3 * (0.8 + 0.01 * (count - 1)) / 0.8 for count in counts)
        assert paid.cost[lane] - free.cost[lane] == pytest.approx(extra)
    np.testing.assert_array_equal(paid.returns, free.returns)
    assert paid.speedup < free.speedup
    # In units of layers a head costs the same for any number of tokens.
    paid, free = (run(shadows, cost=unit_cost(8, exit_head=0.5))[0] for shadows in (True, False))
    np.testing.assert_allclose(paid.cost - free.cost, paid.rounds * 2 * 0.5)
    assert shadow_costs(dataclasses.replace(cost, final_head=(0.0,) * 13), 3) == pytest.approx(
        [0.0] + [0.9] * 13
    )


def test_del_learns_the_same_whoever_drives(toy_traces: TraceSet) -> None:
    """Its own actions, collected, are those of `run_controller`."""
    result = run_controller(toy_traces, DELController())
    data = collect(toy_traces, EpsilonGreedy(DELController(), 0.0), len(toy_traces), seed=0, lanes=4)
    returns = {int(data.text[first]): value for first, value in zip(data.start, data.returns(), strict=False)}
    np.testing.assert_allclose([returns[text] for text in result.texts.tolist()], result.returns, rtol=1e-5)


class EveryTokenBehaviour(UniformRandom):
    walks_every_token = True


@pytest.mark.parametrize(
    "call",
    [
        lambda t: run_controller(t, AdaDecodeController()),
        lambda t: Player(t, AdaDecodeController(), 2, {}),
        lambda t: exact_q(AdaDecodeController(), collect(t, UniformRandom(), 2, seed=0), t),
        lambda t: EpsilonGreedy(AdaDecodeController(), 0.1),
        lambda t: OnePhase(UniformRandom(), AdaDecodeController(), "draft"),
        lambda t: check_replayable(AdaDecodeController()),
    ],
)
def test_what_no_trace_holds_is_refused_by_name(
    call: Callable[[TraceSet], Any], toy_traces: TraceSet
) -> None:
    with pytest.raises(InputError, match=r"'adadecode\(0.75\)' walks every token .*decoding\.speculative"):
        call(toy_traces)


def test_behaviours_are_refused_likewise(toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match="'uniform' walks every token"):
        collect(toy_traces, EveryTokenBehaviour(), 2, seed=0)
    with pytest.raises(InputError, match="'uniform' walks every token"):
        StepMixture([UniformRandom(), EveryTokenBehaviour()])
    for served in (StaticController(2, 2), DELController(), UniformRandom(), object()):
        check_replayable(served)


def test_protocols_need_no_new_attributes(toy_traces: TraceSet) -> None:
    """A controller that derives from nothing has neither `shadows` nor `walks_every_token`."""

    class Bare:
        name, observation, k, window = "bare", (), None, None

        def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None: ...

        def reset(self, lanes: np.ndarray) -> None: ...

        def act(self, view: View) -> np.ndarray:
            return (counter_uniform(0, view.text, view.decision) < 0.5).astype(np.int64)

        def feedback(self, outcome: RoundOutcome) -> None:
            assert outcome.shadow is None

        def reads(self, phase: int, depth_index: int) -> bool:
            return False

    bare: Controller = Bare()
    assert run_controller(toy_traces, bare).rounds.all()
    Player(toy_traces, bare, 1, {})
    assert ReplayEngine(toy_traces).depths == toy_traces.depths
