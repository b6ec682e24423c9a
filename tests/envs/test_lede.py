"""The environment as gymnasium sees it."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs.engine import COUNTERS
from sde_gym.envs.lede import LEDEEnv
from sde_gym.envs.rewards import StepOutcome
from sde_gym.errors import InputError
from sde_gym.policies.observation import BOUNDS, EXTENDED, PAPER
from sde_gym.traces import TraceSet

VARIANTS: list[dict[str, Any]] = [
    {},
    {"observation": "extended", "credit": "round"},
    {"observation": ["top1", "chain"], "reward": "speed", "order": "sequential", "depths": [2, 6]},
    {"tasks": ["test"], "max_new_tokens": 9, "max_draft": 3, "k": 8, "window": 2, "final_token_reward": 0.0},
    {"reward": "tests.envs.test_lede:tokens_reward"},
]


def tokens_reward(outcome: StepOutcome) -> np.ndarray:
    """A reward to be named as "module:function"."""
    return outcome.emitted.astype(np.float64)


def make(folder: Path, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("sde_gym/LEDE-v0", traces=str(folder), **kwargs)


def episode(env: gymnasium.Env[Any, Any], actions: int, **reset: Any) -> list[tuple[Any, ...]]:
    """An episode of random actions as a list of what came back."""
    rng = np.random.default_rng(actions)
    observation, info = env.reset(**reset)
    steps: list[tuple[Any, ...]] = [(observation.tolist(), info)]
    terminated = False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(int(rng.integers(2)))
        assert not truncated
        steps.append((observation.tolist(), reward, terminated, info))
    return steps


@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
def test_gymnasium_checker(kwargs: dict[str, Any], toy_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make(toy_folder, **kwargs)
        check_env(env.unwrapped)


@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
def test_stable_baselines3_checker(kwargs: dict[str, Any], toy_folder: Path) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(make(toy_folder, **kwargs))


@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
def test_the_spec_survives_json(kwargs: dict[str, Any], toy_folder: Path) -> None:
    env = make(toy_folder, **kwargs)
    assert env.spec is not None
    spec = EnvSpec.from_json(env.spec.to_json())
    assert episode(gymnasium.make(spec), 3, seed=1) == episode(env, 3, seed=1)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])  # noqa: S301
@pytest.mark.parametrize("kwargs", VARIANTS, ids=str)
def test_it_can_be_copied_in_the_middle(kwargs: dict[str, Any], clone: Any, toy_folder: Path) -> None:
    env = make(toy_folder, **kwargs)
    env.reset(seed=5)
    env.step(1)
    twin = clone(env)
    for action in (1, 0, 1):
        results = [each.step(action) for each in (env, twin)]
        np.testing.assert_array_equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:]
        if results[0][2]:
            break
    assert episode(env, 0) == episode(twin, 0)  # and the order of the texts that follow


def test_types_and_info_keys(toy_folder: Path) -> None:
    env = make(toy_folder, observation="extended")
    assert env.observation_space.dtype == np.float32
    assert env.observation_space.low.tolist() == [BOUNDS[name][0] for name in EXTENDED]
    assert env.observation_space.high.tolist() == [BOUNDS[name][1] for name in EXTENDED]
    observation, first = env.reset(seed=0)
    assert observation.dtype == np.float32
    assert set(COUNTERS) < set(first)
    terminated = False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(1)
        assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
        assert env.observation_space.contains(observation)
        assert {name: type(value) for name, value in info.items()} == {
            name: type(value) for name, value in first.items()
        }
        json.dumps(info)
    assert not observation.any()
    assert info["overrun"] is True
    with pytest.raises(RuntimeError, match="no text in progress"):
        env.unwrapped.step(1)


def test_observations_are_not_reused(toy_folder: Path) -> None:
    env = make(toy_folder)
    first, _ = env.reset(seed=0)
    kept = first.copy()
    env.step(0)
    np.testing.assert_array_equal(first, kept)


def test_same_seed_same_episodes(toy_folder: Path) -> None:
    """Over several texts, and in another process."""
    one, other = make(toy_folder), make(toy_folder)
    first = [episode(one, 1, seed=11), *(episode(one, n) for n in range(8))]
    assert first == [episode(other, 1, seed=11), *(episode(other, n) for n in range(8))]
    program = (
        "import json, sys; from tests.envs.test_lede import episode, make; env = make(sys.argv[1]);"
        "print(json.dumps([episode(env, 1, seed=11), *(episode(env, n) for n in range(8))]))"
    )
    repository = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", program, str(toy_folder)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == json.loads(json.dumps(first))


def texts_played(env: gymnasium.Env[Any, Any], count: int, **reset: Any) -> list[int]:
    first = [env.reset(**reset)[1]["text"]]
    return first + [env.reset()[1]["text"] for _ in range(count - 1)]


def test_order_of_the_texts(toy_folder: Path) -> None:
    sequential = make(toy_folder, order="sequential")
    assert texts_played(sequential, 8) == [0, 1, 2, 3, 4, 5, 0, 1]
    assert texts_played(sequential, 2, seed=3) == [0, 1]  # a seed starts over
    shuffled = make(toy_folder)
    played = texts_played(shuffled, 12, seed=0)
    assert sorted(played[:6]) == sorted(played[6:]) == list(range(6))
    assert played[:6] != played[6:]
    assert played == texts_played(shuffled, 12, seed=0)
    assert {tuple(texts_played(shuffled, 6, seed=seed)) for seed in range(5)} > {tuple(played[:6])}
    assert set(texts_played(make(toy_folder, tasks=["test"]), 4)) == {2, 5}


def test_a_text_can_be_chosen(toy_folder: Path) -> None:
    env = make(toy_folder, order="sequential")
    assert env.reset()[1]["text"] == 0
    assert env.reset(options={"text": 4})[1]["text_id"] == "toy/4"
    assert env.reset(options={"text": "toy/2"})[1]["text"] == 2
    assert env.reset(options={"text": np.int64(3)})[1]["text"] == 3
    assert env.reset()[1]["text"] == 1  # the order went on where it was


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": 6}, r"text 6 is not among the 4 texts of this environment \(0..5"),
        ({"text": -1}, "text -1 is not among"),
        ({"text": 1}, "text 1 is not among"),  # of another task
        ({"text": "toy/9"}, "no text has the id 'toy/9'"),
        ({"text": 1.0}, "text 1.0 is neither an index nor an id"),
        ({"text": True}, "text True is neither an index nor an id"),
        ({"txt": 1}, r"options: \['txt'\] given, only 'text' is known"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, toy_folder: Path) -> None:
    env = make(toy_folder, tasks=["test", "function"])
    with pytest.raises(InputError, match=message):
        env.reset(options=options)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"traces": "no-such-set"}, "traces: 'no-such-set' is neither a folder nor a shipped"),
        ({"traces": 3}, "traces: 3 is neither a name nor a path"),
        ({"order": "random"}, "order: 'random' is not one of shuffled, sequential"),
        ({"tasks": ["poem"]}, "tasks: no text has task 'poem'"),
        ({"tasks": "test"}, "tasks: 'test' is not a list"),
        ({"observation": []}, "observation: an environment needs at least one feature"),
        ({"observation": 3}, "observation: 3 is neither a set's name nor a list"),
        ({"render_mode": "video"}, "render_mode: 'video' is not one of ansi, human, rgb_array or None"),
        ({"max_draft": 0}, "max_draft: 0 is out of range"),
        ({"depths": [1]}, "depths: 1 was not recorded"),
        ({"max_new_tokens": 21}, r"max_new_tokens: 21 is out of range \(2..20\)"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], message: str, toy_folder: Path) -> None:
    with pytest.raises(InputError, match=message):
        LEDEEnv(**{"traces": str(toy_folder), **kwargs})


def test_wrong_actions_are_named(toy_folder: Path) -> None:
    env = make(toy_folder).unwrapped
    env.reset(seed=0)
    for action in (2, -1, 0.5):
        with pytest.raises(InputError, match="actions: "):
            env.step(action)


def test_a_raw_callable_works_with_a_warning(toy_traces: TraceSet) -> None:
    with pytest.warns(UserWarning, match="cannot be stored in the environment's spec"):
        env = LEDEEnv(toy_traces, reward=tokens_reward)
    steps = episode(env, 0, seed=0)
    assert sum(step[1] for step in steps[1:]) == steps[-1][3]["tokens"]


def test_wrappers_and_vectors_of_gymnasium_work(toy_folder: Path) -> None:
    stacked = gymnasium.wrappers.FrameStackObservation(make(toy_folder), 4)
    assert stacked.reset(seed=0)[0].shape == (4, len(PAPER))
    vector = gymnasium.make_vec(
        "sde_gym/LEDE-v0", num_envs=3, vectorization_mode="sync", traces=str(toy_folder)
    )
    observation, info = vector.reset(seed=0)
    assert observation.shape == (3, len(PAPER))
    for _ in range(60):
        observation, _, terminated, _, info = vector.step(np.array([0, 1, 1]))
        assert not observation[terminated].any()
    assert info["decisions"].dtype == int


def test_importing_is_light_and_idempotent() -> None:
    """No learning library, no torch; a second import registers nothing again."""
    program = (
        "import warnings; warnings.simplefilter('error'); import importlib, sys, sde_gym, gymnasium;"
        "importlib.reload(sde_gym);"
        "heavy = {'torch', 'transformers', 'pyarrow', 'matplotlib'};"
        "heavy |= {'d3rlpy', 'minari', 'stable_baselines3', 'ray'};"
        "assert 'sde_gym/LEDE-v0' in gymnasium.registry;"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"
