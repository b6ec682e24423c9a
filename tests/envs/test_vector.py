"""The vector environment: autoreset as gymnasium's own, options for each lane, copies, memory, wrappers.

That its lanes are the single environments is in `test_conformance.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs.vector import LEDEVectorEnv
from sde_gym.errors import InputError
from sde_gym.traces import TraceSet
from tests.builders import random_traces

MODES = getattr(gymnasium.vector, "AutoresetMode", None)


def same(one: Any, other: Any) -> None:
    """Two infos are equal: keys, types and values, and those within."""
    assert set(one) == set(other)
    for key, value in one.items():
        if isinstance(value, dict):
            same(value, other[key])
        elif key == "final_obs":
            assert value.dtype == other[key].dtype
            for left, right in zip(value, other[key], strict=True):
                np.testing.assert_array_equal(left, right)
                assert getattr(left, "dtype", None) == getattr(right, "dtype", None)
        else:
            assert value.dtype == other[key].dtype, key
            assert value.tolist() == other[key].tolist(), key


def compare(folder: Path, autoreset: dict[str, Any], steps: int = 200, **settings: Any) -> int:
    """Ours and gymnasium's `SyncVectorEnv` around single ones return the same; how many episodes ended."""
    settings = {"traces": str(folder), **settings}
    native = gymnasium.make_vec("sde_gym/LEDE-v0", num_envs=4, **settings, **autoreset)
    sync = gymnasium.make_vec(
        "sde_gym/LEDE-v0", num_envs=4, vectorization_mode="sync", vector_kwargs=autoreset, **settings
    )
    assert isinstance(native.unwrapped, LEDEVectorEnv)
    assert isinstance(sync.unwrapped, SyncVectorEnv)
    for space in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
        assert getattr(native, space) == getattr(sync, space)
    results = [env.reset(seed=3) for env in (native, sync)]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    same(results[0][1], results[1][1])
    rng, ends = np.random.default_rng(0), 0
    for _ in range(steps):
        actions = (rng.random(4) < 0.6).astype(np.int64)
        one, other = (env.step(actions) for env in (native, sync))
        for left, right in zip(one[:4], other[:4], strict=True):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype
        same(one[4], other[4])
        ends += int((one[2] | one[3]).sum())
    return ends


@pytest.mark.parametrize("settings", [{}, {"max_episode_steps": 7}, {"episode": "token", "k": 3}])
def test_next_step_is_gymnasiums(settings: dict[str, Any], toy_folder: Path) -> None:
    assert compare(toy_folder, {}, **settings) > 10


@pytest.mark.skipif(MODES is None, reason="this gymnasium starts again in the next step only")
@pytest.mark.parametrize("settings", [{}, {"max_episode_steps": 7}, {"episode": "round", "credit": "round"}])
def test_same_step_is_gymnasiums(settings: dict[str, Any], toy_folder: Path) -> None:
    assert compare(toy_folder, {"autoreset_mode": "SameStep"}, **settings) > 10


def test_the_autoreset_mode_is_declared(toy_traces: TraceSet) -> None:
    if MODES is None:
        assert "autoreset_mode" not in LEDEVectorEnv(2, toy_traces).metadata
        assert LEDEVectorEnv(2, toy_traces, autoreset_mode="NextStep").num_envs == 2
        with pytest.raises(InputError, match=r"autoreset_mode: .SameStep. needs gymnasium 1\.1 or newer"):
            LEDEVectorEnv(2, toy_traces, autoreset_mode="SameStep")
        return
    for mode in (MODES.NEXT_STEP, MODES.SAME_STEP):
        for given in (mode, mode.value):
            env = LEDEVectorEnv(2, toy_traces, autoreset_mode=given)
            assert env.metadata["autoreset_mode"] is mode
    assert "autoreset_mode" not in LEDEVectorEnv.metadata


def test_one_lane_alone_starts_again(toy_traces: TraceSet) -> None:
    env = LEDEVectorEnv(1, toy_traces, episode="token")
    first, _ = env.reset(seed=0)
    observation, _, terminated, _, info = env.step(np.array([1]))
    assert terminated[0]
    assert not observation.any()
    observation, reward, terminated, truncated, again = env.step(np.array([1]))
    assert not terminated[0]
    assert not truncated[0]
    assert reward[0] == 0.0
    assert again["decisions"] == info["decisions"]
    assert observation.any()
    assert not np.array_equal(observation, first)


def test_what_is_returned_is_a_copy(toy_traces: TraceSet) -> None:
    """Whatever is done to it, the environment goes on as its twin does."""
    env, twin = (LEDEVectorEnv(3, toy_traces, max_episode_steps=5) for _ in range(2))
    kept = [list(each.reset(seed=1)) for each in (env, twin)]
    rng = np.random.default_rng(0)
    for _ in range(40):
        mine, other = kept
        for array in (*mine[:-1], *mine[-1].values()):
            array[:] = "spoilt" if array.dtype == object else 1
        actions = rng.integers(0, 2, 3)
        before = [array.copy() for array in other[:-1]]
        kept = [list(each.step(actions)) for each in (env, twin)]
        actions[:] = 1
        for array, copied in zip(other[:-1], before, strict=True):
            np.testing.assert_array_equal(array, copied)
        for left, right in zip(kept[0][:-1], kept[1][:-1], strict=True):
            np.testing.assert_array_equal(left, right)
        same(kept[0][-1], kept[1][-1])


def test_lanes_share_the_traces() -> None:
    """A lane costs a few hundred bytes, whatever the set's size."""
    traces = random_traces(0, 40, max_new_tokens=60, overrun=11)
    few, many = (LEDEVectorEnv(n, traces) for n in (1, 1000))
    assert many.traces is traces

    def size(env: LEDEVectorEnv) -> int:
        holders = (
            vars(env._lanes),
            vars(env._lanes._order),
            vars(env.engine),
            vars(env.engine.state),
            env.engine.state.counters,
        )
        return sum(v.nbytes for held in holders for v in held.values() if isinstance(v, np.ndarray))

    assert (size(many) - size(few)) / 999 < 1000
    tables = sum(v.nbytes for v in vars(many.engine.tables).values() if isinstance(v, np.ndarray))
    assert tables == sum(v.nbytes for v in vars(few.engine.tables).values() if isinstance(v, np.ndarray))


def test_texts_can_be_chosen_for_each_lane(toy_traces: TraceSet) -> None:
    env = LEDEVectorEnv(3, toy_traces, order="sequential")
    assert env.reset(options={"text": "toy/4"})[1]["text"].tolist() == [4, 4, 4]
    assert env.reset(options={"text": [5, "toy/2", None]})[1]["text"].tolist() == [5, 2, 0]
    assert env.reset(options={"text": np.array([1, 2, 3])})[1]["text_id"].tolist() == [
        "toy/1", "toy/2", "toy/3",
    ]  # fmt: skip
    assert env.reset()[1]["text"].tolist() == [0, 0, 1]  # the orders went on where they were
    assert env.reset(options={})[1]["text"].tolist() == [1, 1, 2]


def test_seeds_for_each_lane(toy_traces: TraceSet) -> None:
    """One for all counts on; a list has one each, and None leaves a lane where it is."""
    env = LEDEVectorEnv(3, toy_traces)

    def texts(**reset: Any) -> list[list[int]]:
        return [env.reset(**reset)[1]["text"].tolist(), *(env.reset()[1]["text"].tolist() for _ in range(5))]

    assert texts(seed=5) == texts(seed=[5, 6, 7])
    shifted = np.array(texts(seed=[6, 7, 5]))
    np.testing.assert_array_equal(np.array(texts(seed=5))[:, [1, 2, 0]], shifted)
    env.reset(seed=5)
    assert env.reset(seed=[None, 6, None])[1]["text"].tolist()[1] == texts(seed=5)[0][1]
    free = [LEDEVectorEnv(3, random_traces(0, 60)) for _ in range(2)]
    assert len({str(env.reset()[1]["text"]) for env in free}) == 2  # no seed: another order each time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, r"num_envs: 0 is out of range \(at least 1\)"),
        ({"num_envs": 2.0}, "num_envs: 2.0 is not a whole number"),
        ({"max_episode_steps": 0}, r"max_episode_steps: 0 is out of range \(at least 1\)"),
        ({"autoreset_mode": "Never"}, "autoreset_mode: 'Never' is not one of NextStep, SameStep"),
        ({"autoreset_mode": None}, "autoreset_mode: None is not one of NextStep, SameStep"),
        ({"render_mode": "ansi"}, "render_mode: 'ansi' is not supported here"),
        ({"k": 99}, r"k: 99 is out of range \(1..8\)"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str, toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match=message):
        LEDEVectorEnv(**{"num_envs": 2, "traces": toy_traces, **arguments})


def test_wrong_calls_are_named(toy_traces: TraceSet) -> None:
    env = LEDEVectorEnv(2, toy_traces)
    with pytest.raises(RuntimeError, match="lane 0 has no text in progress; reset it first"):
        env.step(np.array([0, 0]))
    for seed, message in (
        (-1, r"seed: -1 is out of range \(at least 0\)"),
        ("1", "seed: '1' is not a whole number"),
        ([1, -2], "seed: -2 is out of range"),
        ([1], "seed: 1 seeds for 2 lanes"),
    ):
        with pytest.raises(InputError, match=message):
            env.reset(seed=seed)  # type: ignore[arg-type]
    for options, message in (
        ({"text": [0]}, "options: 1 texts for 2 lanes"),
        ({"text": [0, 6]}, r"options: text 6 is not among the 6 texts of this environment \(0..5"),
        ({"text": [0, [1]]}, r"options: text \[1\] is neither an index nor an id"),
        ({"text": "toy/9"}, "options: no text has the id 'toy/9'"),
        ({"seed": 1}, r"options: \['seed'\] given, only 'text' is known"),
        ([1, 2], r"options: \[1, 2\] is not a dict"),
    ):
        with pytest.raises(InputError, match=message):
            env.reset(options=options)  # type: ignore[arg-type]
    env.reset(seed=0)
    for wrong in ([0], [0, 1, 0], [[0, 1]], 0):
        with pytest.raises(InputError, match="is not one action for each of 2 lanes"):
            env.step(np.array(wrong))
    with pytest.raises(InputError, match=r"actions: .* is not one action out of 0 and 1"):
        env.step(np.array([0, 2]))


def test_wrappers_for_vectors_work(toy_folder: Path) -> None:
    from gymnasium.wrappers import vector as wrappers

    env = gymnasium.make_vec("sde_gym/LEDE-v0", num_envs=4, traces=str(toy_folder))
    env = wrappers.RecordEpisodeStatistics(env)
    watched = wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.ClipReward(env, -1, 1)))
    watched.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(200):
        observation, reward, _, _, _ = watched.step(rng.integers(0, 2, 4))
        assert np.isfinite(observation).all()
        assert np.isfinite(reward).all()
    assert env.episode_count > 3
    assert len(env.return_queue) == len(env.length_queue) == env.episode_count
    listed = wrappers.DictInfoToList(gymnasium.make_vec("sde_gym/LEDE-v0", 2, traces=str(toy_folder)))
    _, infos = listed.reset(seed=0)
    assert [info["text_id"][:4] for info in infos] == ["toy/", "toy/"]
