"""A controller that keeps one decision is that controller under the wrapper, and loses no token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

import sde_gym  # noqa: F401, registers the environments
from sde_gym.decoding import autoregressive, speculative
from sde_gym.envs import DepthOnly, LengthOnly
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import exact_q
from sde_gym.evaluation.player import is_stochastic, reseeded
from sde_gym.evaluation.value import policy_value
from sde_gym.offline import collect
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.policies.ablation import DepthChoiceOnly, LengthChoiceOnly, keeps_state
from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View
from sde_gym.policies.observation import EXTENDED, Phase
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet
from sde_gym.traces.recorder import record
from tests.builders import random_traces
from tests.decoding.conftest import agreeing_model

COUNTED = ("decisions", "rounds", "tokens", "drafted", "accepted", "layer_passes", "sequential_layers")


def network(depths: tuple[int, ...] = (2, 3, 6), num_layers: int = 8, max_draft: int = 12) -> QController:
    rng = np.random.default_rng(2)
    layers = [
        (rng.normal(size=(a, b)).astype(np.float32), rng.normal(size=b).astype(np.float32))
        for a, b in ((len(EXTENDED), 16), (16, 2))
    ]
    return QController(QNetwork(layers), EXTENDED, depths, num_layers, max_draft)


INNER: dict[str, Callable[[], Controller]] = {
    "network": network,
    "threshold": lambda: ThresholdController(0.5, 0.3),
    "random": lambda: RandomController(0.4, seed=3, p_draft=0.7),
}

COMPOSED: dict[str, Callable[[Controller], Any]] = {
    "depth only, 1": lambda inner: DepthChoiceOnly(inner, 1),
    "depth only, 4": lambda inner: DepthChoiceOnly(inner, 4),
    "depth only, 12": lambda inner: DepthChoiceOnly(inner, 12),
    "length only, 2": lambda inner: LengthChoiceOnly(inner, 2),
    "length only, 6": lambda inner: LengthChoiceOnly(inner, 6),
}


class Watched(BaseController):
    """Passes everything on and keeps the (phase, depth index, draft length) and actions of its decisions."""

    def __init__(self, inner: Controller) -> None:
        self.inner, self.name, self.observation = inner, inner.name, inner.observation
        self.k, self.window = inner.k, inner.window
        self.log: list[tuple[int, ...]] = []
        self.asked = np.zeros(1000, dtype=np.int64)  # by lane
        self.told: list[tuple[int, int, int]] = []
        self.started: list[int] = []

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        self.inner.bind(depths, num_layers, max_draft)

    def reset(self, lanes: np.ndarray) -> None:
        self.started.extend(lanes.tolist())

    def act(self, view: View) -> np.ndarray:
        actions = np.asarray(self.inner.act(view))
        self.asked += np.bincount(view.lanes, minlength=1000)
        columns = (view.phase, view.depth_index, view.draft_length, actions)
        self.log.extend(zip(*(column.tolist() for column in columns), strict=True))
        return actions

    def feedback(self, outcome: RoundOutcome) -> None:
        columns = (outcome.lanes, outcome.drafted, outcome.accepted)
        self.told.extend(zip(*(column.tolist() for column in columns), strict=True))

    def reads(self, phase: int, depth_index: int) -> bool:
        return self.inner.reads(phase, depth_index)


def played(env: gymnasium.Env[Any, Any], inner: Controller, text: int) -> tuple[float, int, dict[str, Any]]:
    """(return, decisions of the agent, last info) of a text under a wrapper, decided by a controller."""
    depths = env.unwrapped.engine.depths  # type: ignore[attr-defined]
    row, info = env.reset(options={"text": text})
    total, decisions, over = 0.0, 0, False
    while not over:
        view = View(
            phase=np.array([info["phase"]]),
            depth_index=np.array([depths.index(info["depth"])]),
            draft_length=np.array([info["draft_length"]]),
            observation=row[None, [EXTENDED.index(name) for name in inner.observation]],
            lanes=np.zeros(1, dtype=np.int64),
            text=np.array([info["text"]]),
            decision=np.array([info["decisions"]]),
        )
        row, reward, over, _, info = env.step(int(inner.act(view)[0]))
        total, decisions = total + float(reward), decisions + 1
    return total, decisions, info


@pytest.mark.parametrize("overrun", [11, 0])
@pytest.mark.parametrize("rule", COMPOSED)
@pytest.mark.parametrize("inner", INNER)
def test_the_wrapper_does_to_an_environment_what_this_does_to_a_controller(
    inner: str, rule: str, overrun: int
) -> None:
    traces = random_traces(3, 12, overrun=overrun)
    watched = Watched(INNER[inner]())
    composed = COMPOSED[rule](watched)
    result = run_controller(traces, composed)
    env: Any = gymnasium.make("sde_gym/LEDE-v0", traces=traces, observation=EXTENDED)
    if isinstance(composed, DepthChoiceOnly):
        env = DepthOnly(env, composed.draft_length)
    else:
        env = LengthOnly(env, composed.exit_depth)
    assert np.count_nonzero(watched.asked) >= 6
    for text in range(len(traces)):
        if not watched.asked[text]:
            with pytest.raises(InputError, match="leaves nothing to decide"):
                env.reset(options={"text": text})
            continue
        total, decisions, info = played(env, watched.inner, text)
        assert total == pytest.approx(result.returns[text])
        assert decisions == watched.asked[text]
        for name in COUNTED:
            assert info[name] == getattr(result, name)[text], name
    phases = {phase for phase, *_ in watched.log}
    assert phases == {composed.decides}
    # Whoever keeps state is told everything, as if it had acted alone.
    assert sorted(watched.started) == list(range(12))
    assert len(watched.told) == result.rounds.sum()
    assert sum(drafted for _, drafted, _ in watched.told) == result.drafted.sum()


@pytest.mark.parametrize("overrun", [11, 0])
def test_of_a_static_controller_the_rule_takes_the_other_half(overrun: int) -> None:
    traces = random_traces(5, 12, overrun=overrun)
    whole = run_controller(traces, StaticController(3, 4))
    for composed in (
        DepthChoiceOnly(StaticController(3, 9), 4),
        LengthChoiceOnly(StaticController(6, 4), 3),
        DepthChoiceOnly(LengthChoiceOnly(RandomController(), 3), 4),
    ):
        half = run_controller(traces, composed)
        assert half.totals() == {**whole.totals(), "controller": composed.name}


def test_nobody_pays_for_a_head_that_is_not_looked_at() -> None:
    """Heads are those read in the phase of the choice, those proposed from, and the last one a round."""
    traces = random_traces(3, 12, overrun=11)
    for inner in (ThresholdController(0.5), network()):
        watched = Watched(inner)
        depth = run_controller(traces, DepthChoiceOnly(watched, 4))
        drafting = depth.rounds.sum() - depth.exits[:, -1].sum()
        assert (
            depth.head_calls.sum()
            == watched.asked.sum() + depth.drafted.sum() - drafting + depth.rounds.sum()
        )

        watched = Watched(inner)
        length = run_controller(traces, LengthChoiceOnly(watched, 3))
        assert length.head_calls.sum() == watched.asked.sum() + 2 * length.rounds.sum()
        assert length.exits[:, 1].sum() == length.rounds.sum()
    bare = LengthChoiceOnly(StaticController(3, 4), 3)
    assert not any(bare.reads(phase, index) for phase in Phase for index in range(3))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TraceSet]:
    """A tiny model that ends some texts, and what it says to eight prompts."""
    model = agreeing_model(eos_token_id=5)
    ids = {f"prompt {n}": [n, (7 * n) % 40, 3] for n in range(8)}
    prompts = [Prompt(id=text, task="toy", text=text) for text in ids]
    with pytest.MonkeyPatch.context() as patch:  # the model has no tokenizer
        patch.setattr(model, "encode", ids.__getitem__)
        folder = tmp_path_factory.mktemp("ablation") / "set"
        return model, record(model, prompts, folder, (1, 2, 4), max_new_tokens=24)


@pytest.mark.parametrize("rule", ["depth only, 4", "depth only, 12", "length only, 2"])
@pytest.mark.parametrize("inner", INNER)
def test_the_decoder_gives_the_plain_text_by_the_actions_of_replay(
    inner: str, rule: str, recorded: tuple[Any, TraceSet]
) -> None:
    model, traces = recorded
    make = (lambda: network((1, 2, 4), 6)) if inner == "network" else INNER[inner]
    for text in range(len(traces)):
        replayed, live = (Watched(COMPOSED[rule](make())) for _ in range(2))
        result = run_controller(traces, replayed, [text])
        prompt = traces.prompt_tokens[text].tolist()  # type: ignore[union-attr]
        decoded = speculative(model, prompt, live, (1, 2, 4), 24, text=text)
        assert decoded.tokens == autoregressive(model, prompt, 24).tokens == traces.tokens_of(text).tolist()
        assert live.log == replayed.log
        assert len(decoded.rounds) == result.rounds[0]
        for name in (*COUNTED[3:], "decisions", "head_calls"):
            assert getattr(decoded, name) == getattr(result, name)[0], name


class Alternating(BaseController):
    """Exits at every other of its own decisions in a lane: memory that can be copied."""

    name = "alternating"

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        super().bind(depths, num_layers, max_draft)
        self.exits = np.zeros(10_000, dtype=np.int64)

    def reset(self, lanes: np.ndarray) -> None:
        self.exits[lanes] = 0

    def act(self, view: View) -> np.ndarray:
        self.exits[view.lanes] = 1 - self.exits[view.lanes]
        return self.exits[view.lanes]


class Copied(Alternating):
    def copy_lanes(self, source: np.ndarray, target: np.ndarray) -> None:
        self.exits[target] = self.exits[source]


@pytest.mark.parametrize("inner", ["network", "threshold"])
@pytest.mark.parametrize("rule", ["depth only, 4", "length only, 2"])
def test_exact_values_of_what_has_no_memory(inner: str, rule: str, toy_traces: TraceSet) -> None:
    composed = COMPOSED[rule](INNER[inner]())
    assert not keeps_state(composed)
    data = collect(toy_traces, UniformRandom(), 12, seed=0)
    value = exact_q(composed, data, toy_traces).value[data.start[:-1]]
    returns = run_controller(toy_traces, composed).returns
    np.testing.assert_allclose(value, returns[data.text[data.start[:-1]]])


def test_memory_stays_memory(toy_traces: TraceSet) -> None:
    data = collect(toy_traces, UniformRandom(), 3, seed=0)
    forgetful = DepthChoiceOnly(Alternating(), 4)
    assert keeps_state(forgetful)
    with pytest.raises(InputError, match=r"'depth only\(alternating, 4\)' keeps state.*copy_lanes"):
        exact_q(forgetful, data, toy_traces)
    exact_q(DepthChoiceOnly(Copied(), 4), data, toy_traces)
    declared = Alternating()
    declared.stateful = False  # type: ignore[attr-defined]
    assert not keeps_state(LengthChoiceOnly(declared, 2))


def test_draws_follow_the_seed_and_only_where_there_is_a_choice(toy_traces: TraceSet) -> None:
    drawn = DepthChoiceOnly(RandomController(0.5, seed=1), 4)
    assert is_stochastic(drawn)
    assert not is_stochastic(DepthChoiceOnly(RandomController(1.0, p_draft=0.5), 4))
    assert is_stochastic(LengthChoiceOnly(RandomController(1.0, p_draft=0.5), 3))
    assert not is_stochastic(DepthChoiceOnly(ThresholdController(0.5), 4))
    other = reseeded(drawn, 2)
    assert (drawn.seed, drawn.controller.seed, other.seed) == (1, 1, 2)  # type: ignore[attr-defined]
    expected = DepthChoiceOnly(RandomController(0.5, seed=2), 4)
    for left, right, same in ((other, expected, True), (other, drawn, False)):
        returns = run_controller(toy_traces, left).returns
        assert np.array_equal(returns, run_controller(toy_traces, right).returns) == same
    value = policy_value(drawn, toy_traces, repeats=3)
    assert (value.stochastic, value.seeds) == (True, (0, 1, 2))
    assert not hasattr(DepthChoiceOnly(ThresholdController(0.5), 4), "seed")
    assert copy.deepcopy(drawn).seed == 1


def test_names_and_what_is_passed_on() -> None:
    inner = network()
    composed = DepthChoiceOnly(inner, np.int64(6))  # type: ignore[arg-type]
    assert isinstance(composed, Controller)
    assert composed.name == "depth only(lede, 6)"
    assert (composed.observation, composed.k, composed.window) == (EXTENDED, 5, 8)
    assert LengthChoiceOnly(ThresholdController(0.5), 3).name == "length only(threshold(0.5, 0.5), 3)"
    assert LengthChoiceOnly(ThresholdController(0.5), 3).k is None
    with pytest.raises(InputError, match="was trained with depths"):
        composed.bind((2, 4), 8, 12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DepthChoiceOnly(network(), 0), "draft_length: 0 is out of range"),
        (lambda: DepthChoiceOnly(network(), 1.0), "draft_length: 1.0 is not a whole number"),  # type: ignore[arg-type]
        (lambda: DepthChoiceOnly(ThresholdController(0.5), 5), r"draft_length: 5 is out of range \(1\.\.4\)"),
        (lambda: LengthChoiceOnly(network(), True), "exit_depth: True is not a whole number"),
        (lambda: LengthChoiceOnly(network(), 4), r"exit_depth: 4 is not one of the depths \[2, 3, 6\]"),
        (lambda: LengthChoiceOnly(UniformRandom(), 2), "'uniform' is no controller"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_named(make: Callable[[], Controller], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make().bind((2, 3, 6), 8, 4)


def test_a_cap_of_one_leaves_no_length_to_choose() -> None:
    with pytest.raises(InputError, match="max_draft: 1 leaves nothing to decide"):
        LengthChoiceOnly(ThresholdController(0.5), 2).bind((2, 3, 6), 8, 1)
