"""Every wrong argument is refused by name, in every face of the environment alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sde_gym.envs import LEDEEnv, LEDEVectorEnv, sb3_vec_env
from sde_gym.envs.lanes import lane_seeds
from sde_gym.errors import InputError
from sde_gym.traces import TraceSet

# Wrong values of each argument, and what the error says is right.
WRONG: dict[str, tuple[list[Any], str]] = {
    "traces": ([3, None, ["a"], "no-such-set", Path("/no/such/folder")], "name|folder"),
    "tasks": (["test", 3, [], ["poem"], [3], [["test"]]], "names|there are docstring, function, test"),
    "order": (["random", None, 3, ["shuffled"]], "shuffled, sequential"),
    "depths": (
        ["2", 2, [], [4], [3, 2], [2, 2], [2, 8], [0], [2.0], [True], [None], [[2]]],
        r"2, 3, 6|\(1\.\.7\)",
    ),
    "observation": (["papers", 3, None, [], ["probe"], ["trace", "trace"], [3], [["trace"]]], "feature"),
    "reward": (["speedy", None, 3, ["lede"], "no_such:f", "math:pi", "math:nothing", "a:b:c"], "reward"),
    "credit": (["later", None, 1, ["round"]], "immediate, round"),
    "episode": (["text", None, 1, ["round"], "Round"], "generation, round, token"),
    "k": ([0, 9, 2.0, "5", None, True, np.float32(3)], r"\(1\.\.8\)"),
    "window": ([0, -1, 2.5, "8", None, True], "at least 1"),
    "max_draft": ([0, 13, 1.0, "3", None, True], r"\(1\.\.12\)"),
    "max_new_tokens": ([1, 0, -5, 21, 2.0, "9", True], r"\(2\.\.20\)"),
    "final_token_reward": ([float("nan"), float("inf"), "1", None, [1.0]], "finite number"),
    "rho": ([1.0, float("nan"), "1"], "only means something for reward 'speed'"),
    "cost": ([3, None, "no-such-file.json", ["unit"]], "unit|file"),
    "accelerator": (["cuda", None, 3, ["numpy"]], "auto, numpy, python, numba"),
    "render_mode": (["video", 3, ["ansi"]], "None"),
}

FACES: dict[str, Callable[..., Any]] = {
    "single": LEDEEnv,
    "vector": lambda **arguments: LEDEVectorEnv(2, **arguments),
    "sb3": lambda **arguments: sb3_vec_env(2, **arguments),
}


def test_every_argument_is_tried() -> None:
    assert set(WRONG) == set(inspect.signature(LEDEEnv).parameters)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(face: str, name: str, toy_traces: TraceSet) -> None:
    if face == "sb3":
        pytest.importorskip("stable_baselines3")
        if name == "render_mode":
            pytest.skip("it has no such argument")
    values, right = WRONG[name]
    for value in values:
        with pytest.raises(InputError, match=right) as caught:
            FACES[face](**{"traces": toy_traces, name: value})
        assert name in str(caught.value) or str(value) in str(caught.value), value


@pytest.mark.parametrize("rho", [-1.0, float("inf"), "1", None])
def test_rho_of_the_speed_reward(rho: Any, toy_traces: TraceSet) -> None:
    if rho is None:  # plain decoding's rate
        assert LEDEEnv(toy_traces, reward="speed", rho=rho).engine.reward.rho == 1 / 8  # type: ignore[attr-defined]
        return
    with pytest.raises(InputError, match=r"rho: .* is not a finite number of at least 0"):
        LEDEEnv(toy_traces, reward="speed", rho=rho)


@pytest.mark.parametrize("face", FACES)
def test_an_argument_that_there_is_not(face: str, toy_traces: TraceSet) -> None:
    if face == "sb3":
        pytest.importorskip("stable_baselines3")
    # The single environment has a signature, which Python itself checks; the others pass arguments on.
    said = r"unknown argument 'windows'; .* takes .* k, "
    if face == "single":
        said = "unexpected keyword argument"
    with pytest.raises(TypeError, match=said):
        FACES[face](traces=toy_traces, windows=3)


@pytest.mark.parametrize("seed", [-1, 1.5, "3", True, [1, 2]])
def test_wrong_seeds_are_named(seed: Any, toy_traces: TraceSet) -> None:
    env = LEDEEnv(toy_traces)
    with pytest.raises(InputError, match="seed: "):
        env.reset(seed=seed)
    env.reset(seed=2**80)  # any size will do


def test_seeds_of_lanes() -> None:
    assert lane_seeds(4, 3) == [4, 5, 6]
    assert lane_seeds(np.int64(4), 1) == [4]  # type: ignore[arg-type]
    assert lane_seeds([4, None, 0], 3) == [4, None, 0]
    assert lane_seeds(None, 2) == [None, None]
