"""The face for stable-baselines3: its conventions, and that its algorithms train on it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs import sb3_vec_env
from sde_gym.errors import InputError
from sde_gym.traces import TraceSet

pytest.importorskip("stable_baselines3")


def test_it_is_a_vec_env(toy_traces: TraceSet) -> None:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv

    env = sb3_vec_env(3, toy_traces)
    assert isinstance(env, VecEnv)
    assert (env.num_envs, env.observation_space.shape, env.action_space.n) == (3, (3,), 2)  # type: ignore[attr-defined]
    assert env.unwrapped is env
    assert env.env_is_wrapped(Monitor) == [False] * 3
    assert env.env_is_wrapped(Monitor, indices=[0, 2]) == [False] * 2
    env.close()


@pytest.mark.parametrize("settings", [{}, {"max_episode_steps": 6}, {"episode": "round"}])
def test_lanes_are_single_environments(settings: dict[str, Any], toy_folder: Path) -> None:
    """Compared with stable-baselines3's own way to run several, seed by seed, number by number."""
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    settings = {"traces": str(toy_folder), "observation": "extended", **settings}
    native = sb3_vec_env(4, **settings)
    dummy = DummyVecEnv([lambda: Monitor(gymnasium.make("sde_gym/LEDE-v0", **settings)) for _ in range(4)])
    for env in (native, dummy):
        assert env.seed(5) == [5, 6, 7, 8]
    np.testing.assert_array_equal(native.reset(), dummy.reset())
    assert native.reset_infos == dummy.reset_infos
    rng, ends = np.random.default_rng(0), 0
    for _ in range(150):
        actions = (rng.random(4) < 0.6).astype(np.int64)
        (rows, pay, done, infos), (rows2, pay2, done2, infos2) = (e.step(actions) for e in (native, dummy))
        np.testing.assert_array_equal(rows, rows2)
        np.testing.assert_array_equal(pay, pay2)
        np.testing.assert_array_equal(done, done2)
        assert (rows.dtype, pay.dtype, done.dtype) == (rows2.dtype, pay2.dtype, done2.dtype)
        for one, other in zip(infos, infos2, strict=True):
            assert set(one) == set(other)
            for key, value in one.items():
                if key == "terminal_observation":
                    np.testing.assert_array_equal(value, other[key])
                elif key == "episode":
                    assert value["r"] == pytest.approx(other[key]["r"], abs=1e-6)
                    assert value["l"] == other[key]["l"]
                    assert {k: type(v) for k, v in value.items()} == {"r": float, "l": int, "t": float}
                else:
                    assert value == other[key]
                    assert type(value) is type(other[key])
        assert native.reset_infos == dummy.reset_infos
        ends += int(done.sum())
    assert ends > 10


def test_infos_may_be_left_out(toy_traces: TraceSet) -> None:
    full, short = (sb3_vec_env(3, toy_traces, step_infos=chosen) for chosen in (True, False))
    for env in (full, short):
        env.seed(0)
        env.reset()
    rng = np.random.default_rng(0)
    for _ in range(80):
        actions = rng.integers(0, 2, 3)
        (_, _, done, infos), (_, _, _, fewer) = (env.step(actions) for env in (full, short))
        for ended, info, small in zip(done, infos, fewer, strict=True):
            assert set(small) == (set(info) if ended else {"TimeLimit.truncated"})


def test_attributes_and_methods(toy_traces: TraceSet) -> None:
    env = sb3_vec_env(3, toy_traces, order="sequential")
    env.set_options({"text": "toy/3"})
    env.reset()
    assert env.get_attr("text") == [3, 3, 3]
    env.set_options([{"text": 1}, {}, {"text": 5}])
    env.reset()
    assert env.get_attr("text_id") == ["toy/1", "toy/0", "toy/5"]  # options hold for one reset
    assert env.get_attr("text_id", indices=[2, 0]) == ["toy/5", "toy/1"]
    assert env.get_attr("depth", indices=1) == [2]
    assert env.get_attr("traces") == [toy_traces] * 3
    assert env.has_attr("engine")
    assert not env.has_attr("nothing")
    env.set_attr("step_infos", False)
    _, _, _, infos = env.step(np.array([1, 1, 1]))
    assert infos[0] == {"TimeLimit.truncated": False}
    with pytest.raises(AttributeError, match="nothing"):
        env.set_attr("nothing", 1)
    with pytest.raises(InputError, match=r"indices: \[1\]; the lanes are one environment"):
        env.set_attr("step_infos", True, indices=[1])
    assert env.env_method("has_attr", "traces") == [True] * 3
    assert env.env_method("has_attr", "traces", indices=[0, 1, 2]) == [True] * 3
    with pytest.raises(InputError, match="leave them out of env_method"):
        env.env_method("has_attr", "traces", indices=0)
    with pytest.raises(AttributeError, match="nothing"):
        env.env_method("nothing")


def test_wrong_calls_are_named(toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match="num_envs: 0 is out of range"):
        sb3_vec_env(0, toy_traces)
    with pytest.raises(InputError, match="window: 0 is out of range"):
        sb3_vec_env(1, toy_traces, window=0)
    env = sb3_vec_env(2, toy_traces)
    with pytest.raises(RuntimeError, match="no actions to take"):
        env.step_wait()
    with pytest.raises(RuntimeError, match="lane 0 has no text in progress"):
        env.step(np.array([0, 0]))
    env.set_options({"txt": 3})
    with pytest.raises(InputError, match="only 'text' is known"):
        env.reset()
    env.set_options([{"text": 1}])
    with pytest.raises(InputError, match="options: 1 of them for 2 lanes"):
        env.reset()
    env.set_options()
    env.reset()
    with pytest.raises(InputError, match="actions: "):
        env.step(np.array([0]))


def test_it_can_be_stored_in_the_middle(toy_traces: TraceSet) -> None:
    env = sb3_vec_env(3, toy_traces)
    env.seed(2)
    env.reset()
    env.step(np.array([1, 0, 1]))
    twin = pickle.loads(pickle.dumps(env))  # noqa: S301
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = rng.integers(0, 2, 3)
        results = [each.step(actions) for each in (env, twin)]
        for one, other in zip(results[0][:3], results[1][:3], strict=True):
            np.testing.assert_array_equal(one, other)


def test_vec_monitor_and_evaluation(toy_traces: TraceSet) -> None:
    from stable_baselines3.common.vec_env import VecMonitor

    watched = VecMonitor(sb3_vec_env(3, toy_traces), info_keywords=("tokens",))
    watched.seed(0)
    watched.reset()
    total, ends = np.zeros(3), 0
    rng = np.random.default_rng(0)
    for _ in range(120):
        _, reward, done, infos = watched.step(rng.integers(0, 2, 3))
        total += reward
        for lane in np.flatnonzero(done):
            assert infos[lane]["episode"]["r"] == pytest.approx(total[lane], abs=1e-4)
            assert infos[lane]["episode"]["tokens"] == infos[lane]["tokens"]
            total[lane], ends = 0.0, ends + 1
    assert ends > 3


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_algorithms_train(algorithm: str, toy_traces: TraceSet) -> None:
    """Parameters move, episodes are logged without a monitor, and what is learnt can be applied."""
    import stable_baselines3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecMonitor

    env = sb3_vec_env(4, toy_traces, observation="extended")
    settings: dict[str, Any] = (
        {"n_steps": 32, "batch_size": 32, "n_epochs": 2}
        if algorithm == "PPO"
        else {"learning_starts": 64, "train_freq": 4, "target_update_interval": 64, "buffer_size": 1000}
    )
    model = getattr(stable_baselines3, algorithm)(
        "MlpPolicy", env, policy_kwargs={"net_arch": [16]}, seed=0, device="cpu", **settings
    )
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(400)
    assert any(
        not np.array_equal(old, new.detach())
        for old, new in zip(before, model.policy.parameters(), strict=True)
    )
    assert len(model.ep_info_buffer) > 3
    assert {"r", "l", "t"} <= set(model.ep_info_buffer[0])
    mean, _ = evaluate_policy(model, VecMonitor(sb3_vec_env(2, toy_traces, observation="extended")), 4)
    assert np.isfinite(mean)


def test_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['stable_baselines3'] = None\n"
        "from sde_gym.envs import sb3_vec_env\n"
        "from sde_gym.errors import InputError\n"
        "try: sb3_vec_env(2)\n"
        "except InputError as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "sde-gym[online]"' in found.stdout
