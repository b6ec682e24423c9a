"""Every way of stepping gives the same, bit for bit: numpy, plain Python, compiled; and the reference."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.accelerate import MANY_LANES
from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.rewards import StepOutcome
from sde_gym.envs.vector import LEDEVectorEnv
from sde_gym.errors import InputError
from sde_gym.policies.observation import EXTENDED
from sde_gym.traces import TraceSet
from tests.builders import random_traces
from tests.envs.reference import NAMES, ReferenceEpisode

NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not NUMBA, reason="numba is not installed")
WAYS = ["python", pytest.param("numba", marks=needs_numba)]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"window": 1, "k": 1, "max_draft": 1},
    {"window": 3, "k": 8, "max_draft": 3, "max_new_tokens": 11, "credit": "round"},
    {"window": 8, "max_draft": 5, "depths": [3], "final_token_reward": 0.0},
    {"window": 50, "max_draft": 40, "depths": [2, 6], "credit": "round"},
    {"window": 2, "max_draft": 2, "max_new_tokens": 2},
    {"reward": "speed", "rho": 0.3},
    {"reward": "speed", "credit": "round", "depths": [2, 3]},
]
FEATURES: list[tuple[str, ...]] = [
    EXTENDED,
    ("confidence", "entropy", "trace"),
    ("chain", "stable", "margin"),
    ("stable",),
    ("depth",),
    ("acceptance", "draft_length", "trace", "phase"),
    ("probe",),
    ("trace", "probe", "stable", "chain"),
]


def count_tokens(outcome: StepOutcome) -> np.ndarray:
    """A reward of one's own, which sees everything that happened."""
    return (
        outcome.emitted + 0.1 * outcome.layers + 0.01 * outcome.verified + 0.001 * outcome.fed
        + 3.0 * outcome.phase + 5.0 * outcome.action + 7.0 * outcome.terminated + 11.0 * outcome.drafted
        + 13.0 * outcome.round_accepted + 17.0 * outcome.ended + 19.0 * outcome.depth_index
    )  # fmt: skip


def same_state(one: ReplayEngine, other: ReplayEngine) -> None:
    """Counters and everything that a policy may look at."""
    lanes = np.arange(one.lanes)
    nothing = np.zeros((one.lanes, 0), dtype=np.float32)
    for name, values in one.counters().items():
        np.testing.assert_array_equal(values, other.counters()[name], err_msg=name)
    for name, values in vars(one.view(lanes, nothing)).items():
        np.testing.assert_array_equal(values, getattr(other.view(lanes, nothing), name), err_msg=name)
    for name, values in one.columns().items():
        np.testing.assert_array_equal(values, other.columns()[name], err_msg=name)
        np.testing.assert_array_equal(values, other.columns(lanes)[name], err_msg=name)
    np.testing.assert_array_equal(one.resumable(lanes), other.resumable(lanes))


@needs_numba
def test_columns_are_numbered_alike() -> None:
    """The kernel's numbers are written out there; they have to follow the names."""
    from sde_gym.envs import kernel
    from sde_gym.envs.state import COUNTERS, ROUND

    numbers = {"all " + name: getattr(kernel, f"_{name.upper()}") for name in COUNTERS}
    numbers |= {name: getattr(kernel, f"_{name.upper()}") for name in ROUND}
    assert list(dict(sorted(numbers.items(), key=lambda item: item[1]))) == [
        *ROUND, *("all " + name for name in COUNTERS)
    ]  # fmt: skip
    assert sorted(numbers.values()) == list(range(16))


def same_result(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    for left, right in zip(one, other, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def play(traces: TraceSet, way: str, seed: int, steps: int, **settings: Any) -> int:
    """Random steps with some lanes left out, against numpy; how many texts were completed."""
    lanes = 1 if way == "python" else 12
    fast, numpy = (ReplayEngine(traces, lanes=lanes, accelerator=a, **settings) for a in (way, "numpy"))
    assert (fast.accelerator, numpy.accelerator) == (way, "numpy")
    rng = np.random.default_rng(seed)
    p_exit = rng.uniform(0.3, 0.95, lanes)
    every = np.arange(lanes)
    texts = rng.integers(0, len(traces), lanes)
    same_result((fast.begin(every, texts),), (numpy.begin(every, texts),))
    idle, completed = np.zeros(lanes, dtype=bool), 0
    for _ in range(steps):
        if idle.any():
            start = np.flatnonzero(idle & (rng.random(lanes) < 0.7))
            drawn = rng.integers(0, len(traces), lanes)
            texts = np.where(numpy.resumable(start), -1, drawn[start])
            completed += int((texts >= 0).sum())
            same_result((fast.begin(start, texts),), (numpy.begin(start, texts),))
            idle[start] = False
        skip = idle | (rng.random(lanes) < 0.1) if lanes > 1 else None
        if lanes == 1 and idle.any():
            continue
        actions = (rng.random(lanes) < p_exit).astype(np.int64)
        results = [engine.advance(actions, skip) for engine in (fast, numpy)]
        same_result(*results)
        idle |= results[0][2]
        same_state(fast, numpy)
    return completed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overrun", [0, 39])
@pytest.mark.parametrize("episode", ["generation", "round", "token"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_numpy(settings: dict[str, Any], episode: str, overrun: int, way: str) -> None:
    """Everything that comes back, and the state after, of some hundred random steps."""
    traces = random_traces(3, 12, p_match=0.8, p_eos=0.2, overrun=overrun)
    completed = play(traces, way, 3, 250, observation=EXTENDED, episode=episode, **settings)
    assert completed > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("names", FEATURES, ids=str)
def test_equals_numpy_in_every_observation(names: tuple[str, ...], way: str) -> None:
    play(random_traces(5, 12, overrun=11, probe=True), way, 5, 150, observation=names)


@pytest.mark.parametrize("credit", ["immediate", "round"])
def test_a_reward_of_ones_own_equals_numpy(credit: str) -> None:
    traces = random_traces(6, 12, overrun=11)
    for episode in ("generation", "token"):
        assert play(traces, "python", 6, 250, reward=count_tokens, credit=credit, episode=episode) > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overrun", [0, 39])
@pytest.mark.parametrize("episode", ["generation", "round", "token"])
@pytest.mark.parametrize("credit", ["immediate", "round"])
@pytest.mark.parametrize("max_draft", [2, 12])
def test_equals_the_reference(way: str, overrun: int, episode: str, credit: str, max_draft: int) -> None:
    """Whole texts against the slow implementation that shares nothing with the engine."""
    traces = random_traces(8, 12, p_match=0.8, p_eos=0.2, overrun=overrun)
    lanes = 1 if way == "python" else 12
    engine = ReplayEngine(
        traces, observation=NAMES, lanes=lanes, accelerator=way, episode=episode, credit=credit,
        max_draft=max_draft, max_new_tokens=17,
    )  # fmt: skip
    rng = np.random.default_rng(8)
    for first in range(0, 12, lanes):
        texts = np.arange(first, first + lanes)
        episodes = [
            ReferenceEpisode(
                traces, int(text), depths=engine.depths, k=5, window=8, max_draft=max_draft,
                max_new_tokens=17, credit=credit, episode=episode,
            )
            for text in texts
        ]  # fmt: skip
        observation = engine.begin(np.arange(lanes), texts)
        done = np.zeros(lanes, dtype=bool)
        while not done.all():
            running = np.flatnonzero(~done)
            expected = [list(episodes[lane].observe().values()) for lane in running]
            np.testing.assert_allclose(observation[running], expected, rtol=2e-6, atol=2e-6)
            actions = rng.integers(0, 2, lanes)
            observation, reward, terminated = engine.advance(actions, done if done.any() else None)
            paid = [episodes[lane].step(int(actions[lane])) for lane in running]
            np.testing.assert_allclose(reward[running], paid, rtol=0, atol=1e-9)
            for name, values in engine.counters().items():
                assert values[running].tolist() == [episodes[lane].counters[name] for lane in running], name
            again = np.array([n for n in running if episodes[n].over and not episodes[n].complete], dtype=int)
            assert terminated.tolist() == [not done[n] and each.over for n, each in enumerate(episodes)]
            for lane in again:
                episodes[lane].go_on()
            if again.size:
                observation[again] = engine.begin(again, np.full(again.size, -1))
            done |= np.array([each.complete for each in episodes])
        for text, each in zip(texts, episodes, strict=True):
            assert each.emitted == traces.tokens_of(int(text))[:17].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_both_kinds_mix(way: str, toy_traces: TraceSet) -> None:
    """State is shared: `step`, which is numpy's, and `advance` may take turns; a copy goes on alike."""
    lanes = 1 if way == "python" else 6
    fast, numpy = (ReplayEngine(toy_traces, lanes=lanes, accelerator=a) for a in (way, "numpy"))
    every = np.arange(lanes)
    for engine in (fast, numpy):
        engine.begin(every, every)
    rng, over = np.random.default_rng(1), np.zeros(lanes, dtype=bool)
    for number in range(60):
        actions = (rng.random(lanes) < 0.7).astype(int)
        going = np.flatnonzero(~over)
        if number % 2 and going.size == lanes:
            results = [fast.advance(actions), numpy.step(actions)[:3]]
        else:
            results = [engine.step(actions[going], going)[:3] for engine in (fast, numpy)]
        same_result(*results)
        over[going] = results[0][2] if len(results[0][2]) == len(going) else over[going]
        if over.any():
            ended = np.flatnonzero(over)
            same_result((fast.begin(ended, ended),), (numpy.begin(ended, ended),))
            over[:] = False
        if number % 7 == 0:
            fast = pickle.loads(pickle.dumps(fast))  # noqa: S301
        same_state(fast, numpy)


@needs_numba
@pytest.mark.parametrize("threads", [2, 3, 64])
def test_threads_share_the_lanes(threads: int) -> None:
    """Whoever steps a lane, the results are the same."""
    traces = random_traces(2, 12, overrun=11)
    settings = {"num_envs": 50, "traces": traces, "max_episode_steps": 9, "accelerator": "numba"}
    envs = [LEDEVectorEnv(threads=count, **settings) for count in (1, threads)]
    rows = [env.reset(seed=4)[0] for env in envs]
    np.testing.assert_array_equal(*rows)
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = rng.integers(0, 2, 50)
        results = [env.step(actions) for env in envs]
        same_result(results[0][:4], results[1][:4])
    same_state(envs[0].engine, envs[1].engine)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_calls_change_nothing(way: str, toy_traces: TraceSet) -> None:
    lanes = 1 if way == "python" else 3
    engine = ReplayEngine(toy_traces, lanes=lanes, accelerator=way)
    every = np.arange(lanes)
    with pytest.raises(RuntimeError, match="lane 0 has no text in progress; reset it first"):
        engine.advance(np.zeros(lanes, dtype=int))
    with pytest.raises(RuntimeError, match="lane 0 has no text to go on with"):
        engine.begin(every, np.full(lanes, -1))
    with pytest.raises(InputError, match=r"texts: .* goes outside 0\.\.5"):
        engine.begin(every, np.full(lanes, 6))
    engine.begin(every, every)
    before = pickle.dumps(engine.state)
    for wrong in ([2] * lanes, [-1] * lanes, [0.5] * lanes, [0] * (lanes + 1), [[0]] * lanes, 0, [0, 7, 0]):
        with pytest.raises(InputError, match="actions: "):
            engine.advance(wrong)
    assert pickle.dumps(engine.state) == before
    for kind in (np.int8, np.uint16, bool, float):  # and all that equals 0 or 1 is an action
        engine.advance(np.ones(2 * lanes, dtype=kind)[::2])


def test_the_way_is_chosen_by_lanes_and_reward(toy_traces: TraceSet) -> None:
    def way(**settings: Any) -> str:
        return ReplayEngine(toy_traces, **settings).accelerator

    many = "numba" if NUMBA else "numpy"
    assert way() == way(reward=count_tokens) == "python"
    assert way(lanes=2) == way(lanes=MANY_LANES - 1) == "numpy"
    assert way(lanes=MANY_LANES) == way(lanes=MANY_LANES, reward="speed") == many
    assert way(lanes=MANY_LANES, reward=count_tokens) == "numpy"
    assert way(accelerator="numpy") == "numpy"


def test_ways_that_there_are_not_are_named(toy_traces: TraceSet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="accelerator: 'cuda' is not one of auto, numpy, python, numba"):
        ReplayEngine(toy_traces, accelerator="cuda")
    with pytest.raises(InputError, match="accelerator: 'python' steps one lane, not 2"):
        ReplayEngine(toy_traces, accelerator="python", lanes=2)
    with pytest.raises(InputError, match="accelerator: 'numba' knows the rewards 'lede' and 'speed'"):
        ReplayEngine(toy_traces, accelerator="numba", reward=count_tokens)
    with pytest.raises(InputError, match=r"threads: 0 is out of range \(at least 1\)"):
        ReplayEngine(toy_traces, threads=0)
    monkeypatch.setattr("sde_gym.envs.accelerate.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'numba is not installed; pip install "sde-gym\[fast\]"'):
        ReplayEngine(toy_traces, accelerator="numba")
    assert ReplayEngine(toy_traces, lanes=MANY_LANES).accelerator == "numpy"
