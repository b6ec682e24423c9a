"""What every registered id promises to whoever uses it through gymnasium."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.env_match import check_environments_match

import sde_gym  # noqa: F401, registers the environments

IDS = sorted(name for name in gymnasium.registry if name.startswith("sde_gym/"))
DETERMINISTIC = [name for name in IDS if not gymnasium.spec(name).nondeterministic]
VECTOR = [name for name in DETERMINISTIC if gymnasium.spec(name).vector_entry_point is not None]
EPISODES = ("generation", "round", "token")

Arguments = dict[str, dict[str, Any]]


def played(env: gymnasium.Env[Any, Any], steps: int, actions: int = 0, **reset: Any) -> list[Any]:
    """This many random steps, episode after episode, and all that came back, as plain JSON."""
    rng = np.random.default_rng(actions)
    observation, info = env.reset(**reset)
    seen: list[Any] = [[observation.tolist(), info]]
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(int(rng.random() < 0.6))
        seen.append([observation.tolist(), reward, terminated, truncated, info])
        if terminated or truncated:
            observation, info = env.reset()
            seen.append([observation.tolist(), info])
    return seen


def played_elsewhere(name: str, arguments: dict[str, Any]) -> list[Any]:
    """The same in a process of its own, which has imported nothing."""
    return played(gymnasium.make(f"sde_gym:{name}", **arguments), 60, seed=7)


def test_something_is_registered() -> None:
    assert VECTOR
    assert set(VECTOR) < set(DETERMINISTIC) < set(IDS)


@pytest.mark.parametrize("name", IDS)
def test_it_passes_the_checkers(name: str, arguments: Arguments) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(name, **arguments[name]).unwrapped)


@pytest.mark.parametrize("name", IDS)
def test_it_passes_the_checker_of_stable_baselines3(name: str, arguments: Arguments) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(gymnasium.make(name, **arguments[name]))


@pytest.mark.parametrize("name", VECTOR)
@pytest.mark.parametrize("episode", EPISODES[1:])
def test_shorter_episodes_pass_too(name: str, episode: str, arguments: Arguments) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(name, **arguments[name], episode=episode)
        check_env(env.unwrapped)
        checker.check_env(env)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_same_seed_same_everything(name: str, arguments: Arguments) -> None:
    envs = [gymnasium.make(name, **arguments[name]) for _ in range(2)]
    check_environments_match(*envs, num_steps=100, seed=3, info_comparison="equivalence")
    first = played(envs[0], 60, seed=7)
    assert first == played(envs[1], 60, seed=7)
    assert any(first != played(envs[1], 60, seed=seed) for seed in range(8, 16))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_same_seed_same_everything_in_a_spawned_process(name: str, arguments: Arguments) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        elsewhere = pool.apply(played_elsewhere, (name, arguments[name]))
    here = played(gymnasium.make(name, **arguments[name]), 60, seed=7)
    assert json.dumps(elsewhere) == json.dumps(here)


@pytest.mark.parametrize("name", IDS)
def test_the_spec_survives_json(name: str, arguments: Arguments) -> None:
    env = gymnasium.make(name, **arguments[name], observation=["top1", "chain"], depths=[2, 3])
    assert env.spec is not None
    again = gymnasium.make(EnvSpec.from_json(env.spec.to_json()))
    assert again.spec == env.spec
    assert again.observation_space == env.observation_space
    if name in DETERMINISTIC:
        assert played(again, 30, seed=1) == played(env, 30, seed=1)


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])  # noqa: S301
def test_a_copy_from_the_middle_goes_on_the_same(name: str, clone: Any, arguments: Arguments) -> None:
    env = gymnasium.make(name, **arguments[name])
    env.reset(seed=5)
    for action in (1, 1, 0):
        env.step(action)
    twin = clone(env)
    for action in (1, 0, 1, 0, 0):
        results = [each.step(action) for each in (env, twin)]
        np.testing.assert_array_equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:]
        if results[0][2]:
            break
    assert played(env, 60) == played(twin, 60)  # and the texts that follow


@pytest.mark.parametrize("name", IDS)
def test_types_and_keys_never_change(name: str, arguments: Arguments) -> None:
    env = gymnasium.make(name, **arguments[name], observation="extended")
    observation, first = env.reset(seed=0)
    types = {key: type(value) for key, value in first.items()}
    rng, ends = np.random.default_rng(0), 0
    while ends < 3:
        assert observation.dtype == np.float32
        assert env.observation_space.contains(observation)
        observation, reward, terminated, truncated, info = env.step(int(rng.integers(2)))
        assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
        assert {key: type(value) for key, value in info.items()} == types
        json.dumps(info)
        if terminated:
            assert not observation.any()
            ends += 1
            observation, info = env.reset()
            assert {key: type(value) for key, value in info.items()} == types


@pytest.mark.parametrize("name", IDS)
def test_a_text_can_be_asked_for(name: str, arguments: Arguments) -> None:
    env = gymnasium.make(name, **arguments[name], order="sequential")
    _, info = env.reset(seed=0, options={"text": 3})
    assert info["text"] == 3
    by_id = env.reset(options={"text": info["text_id"]})[1]
    assert by_id["text"] == 3
    assert [env.reset()[1]["text"] for _ in range(2)] == [0, 1]
    for wrong in ({"text": 99}, {"text": "nothing"}, {"txt": 0}, {"text": 0.5}, ["text"]):
        with pytest.raises(ValueError, match="options: "):
            env.unwrapped.reset(options=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", IDS)
def test_every_render_mode_draws(name: str, arguments: Arguments) -> None:
    modes = gymnasium.make(name, **arguments[name]).metadata["render_modes"]
    assert set(modes) >= {"ansi", "human", "rgb_array"}
    for mode in ("ansi", "rgb_array"):
        env = gymnasium.make(name, **arguments[name], render_mode=mode)
        env.reset(seed=0)
        for action in (1, 1, 0):
            frame = env.render()
            if mode == "ansi":
                assert isinstance(frame, str)
                assert frame
            else:
                assert isinstance(frame, np.ndarray)
                assert (frame.dtype, frame.ndim, frame.shape[2]) == (np.uint8, 3, 3)
            env.step(action)
        env.close()


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_wrappers_of_gymnasium_work(name: str, arguments: Arguments) -> None:
    from gymnasium import wrappers

    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(name, **arguments[name])

    plain, stacked = make(), wrappers.FrameStackObservation(make(), 3)
    rows = [plain.reset(seed=0)[0]]
    stack = stacked.reset(seed=0)[0]
    for action in (0, 1, 1, 0):
        np.testing.assert_array_equal(stack[-1], rows[-1])
        np.testing.assert_array_equal(stack, [rows[max(len(rows) - 3 + n, 0)] for n in range(3)])
        rows.append(plain.step(action)[0])
        stack = stacked.step(action)[0]
    normal = wrappers.NormalizeReward(wrappers.NormalizeObservation(make()))
    normal.reset(seed=0)
    means, rewards = [], []
    for _ in range(400):
        observation, reward, terminated, _, _ = normal.step(normal.action_space.sample())
        means.append(observation)
        rewards.append(float(reward))
        if terminated:
            normal.reset()
    assert np.isfinite(means).all()
    assert np.isfinite(rewards).all()
    assert np.abs(np.mean(means, axis=0)).max() < 1.0
    assert np.std(rewards) > 0
    limited = gymnasium.make(name, **arguments[name], max_episode_steps=2)
    limited.reset(seed=0)
    assert [limited.step(0)[3] for _ in range(2)] == [False, True]


@pytest.mark.parametrize("name", VECTOR)
@pytest.mark.parametrize("episode", EPISODES)
def test_a_vector_is_its_single_environments(name: str, episode: str, arguments: Arguments) -> None:
    """Lane i of seed s is the environment of seed s + i, bit for bit, over many episodes."""
    lanes, settings = 5, {**arguments[name], "episode": episode, "observation": "extended"}
    vector = gymnasium.make_vec(name, num_envs=lanes, **settings)
    singles = [gymnasium.make(name, **settings) for _ in range(lanes)]
    observations, infos = vector.reset(seed=11)
    done = np.zeros(lanes, dtype=bool)
    rng, ends = np.random.default_rng(0), 0
    for lane, env in enumerate(singles):
        row, info = env.reset(seed=11 + lane)
        np.testing.assert_array_equal(observations[lane], row)
        assert {key: infos[key].tolist()[lane] for key in info} == info
    for _ in range(250):
        actions = (rng.random(lanes) < 0.6).astype(np.int64)
        observations, rewards, terminated, truncated, infos = vector.step(actions)
        for lane, env in enumerate(singles):
            if done[lane]:  # the next step starts again, whatever the action
                row, info = env.reset()
                reward, end, cut = 0.0, False, False
            else:
                row, reward, end, cut, info = env.step(actions[lane])  # type: ignore[assignment]
            np.testing.assert_array_equal(observations[lane], row)
            assert (rewards[lane], terminated[lane], truncated[lane]) == (reward, end, cut)
            assert {key: infos[key].tolist()[lane] for key in info} == info
        done = terminated | truncated
        ends += int(done.sum())
    assert ends > 12


@pytest.mark.parametrize("name", VECTOR)
def test_a_vector_can_be_stored(name: str, arguments: Arguments) -> None:
    """As a spec, and in the middle of its episodes."""
    vector = gymnasium.make_vec(name, num_envs=3, **arguments[name], episode="round", max_episode_steps=9)
    assert vector.spec is not None
    again = gymnasium.make_vec(EnvSpec.from_json(vector.spec.to_json()))
    assert again.num_envs == 3
    for env in (vector, again):
        env.reset(seed=2)
    rng = np.random.default_rng(1)
    for step in range(40):
        if step == 20:
            again = pickle.loads(pickle.dumps(again))  # noqa: S301
        actions = rng.integers(0, 2, 3)
        results = [env.step(actions) for env in (vector, again)]
        for one, other in zip(results[0][:4], results[1][:4], strict=True):
            np.testing.assert_array_equal(one, other)
        assert {key: value.tolist() for key, value in results[0][4].items()} == {
            key: value.tolist() for key, value in results[1][4].items()
        }
