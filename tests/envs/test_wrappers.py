"""Each ablation wrapper is the environment under a controller that takes the other decision by rule."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

import sde_gym  # noqa: F401, registers the environments
from sde_gym.envs.run import run_controller
from sde_gym.envs.wrappers import DepthOnly, LengthOnly
from sde_gym.errors import InputError
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.observation import Phase
from sde_gym.traces import TraceSet
from tests.builders import EOS, random_traces, written_traces

OBSERVATION = ["top1", "depth", "phase", "draft_length"]
THRESHOLD = 0.5
COUNTED = ("decisions", "rounds", "tokens", "drafted", "accepted", "layer_passes", "sequential_layers")

Wrap = Callable[[gymnasium.Env[Any, Any]], Any]
WRAPPERS: dict[str, Wrap] = {
    "depth only, 1": lambda env: DepthOnly(env, 1),
    "depth only, 4": lambda env: DepthOnly(env, draft_length=4),
    "depth only, 12": lambda env: DepthOnly(env, 12),
    "length only, 2": lambda env: LengthOnly(env, 2),
    "length only, 6": lambda env: LengthOnly(env, exit_depth=6),
}


def make(traces: Path | TraceSet, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("sde_gym/LEDE-v0", traces=traces, **{"observation": OBSERVATION, **kwargs})


def policy(row: np.ndarray) -> int:
    """Exit where the best token is probable, in either phase."""
    return int(row[0] >= THRESHOLD)


class WithRule(BaseController):
    """The same policy where the agent decides, the wrapper's rule elsewhere."""

    name = "with rule"
    observation = tuple(OBSERVATION)

    def __init__(self, draft_length: int | None = None, exit_depth: int | None = None) -> None:
        self.draft_length, self.exit_depth = draft_length, exit_depth
        self.asked: Counter[int] = Counter()  # by lane, decisions that are the agent's

    def act(self, view: View) -> np.ndarray:
        exits = view.observation[:, 0] >= THRESHOLD
        select = view.phase == Phase.SELECT
        if self.draft_length is not None:
            exits = np.where(select, exits, view.draft_length < self.draft_length)
        if self.exit_depth is not None:
            reached = view.depth_index >= self.depths.index(self.exit_depth)
            exits = np.where(select, reached, exits)
        self.asked.update(view.lanes[select == (self.exit_depth is None)].tolist())
        return exits.astype(np.int64)


def episode(env: gymnasium.Env[Any, Any], **reset: Any) -> tuple[float, int, dict[str, Any]]:
    """(return, the agent's decisions, last info) of an episode of the policy."""
    row, info = env.reset(**reset)
    keys = list(info)
    total, decisions, over = 0.0, 0, False
    while not over:
        row, reward, over, truncated, info = env.step(policy(row))
        assert not truncated
        assert type(reward) is float
        assert list(info) == keys
        total, decisions = total + reward, decisions + 1
    return total, decisions, info


@pytest.mark.parametrize("overrun", [11, 0])
@pytest.mark.parametrize("draft_length", [1, 2, 5, 12])
@pytest.mark.parametrize("credit", ["immediate", "round"])
def test_depth_only_is_a_controller_of_fixed_length(draft_length: int, credit: str, overrun: int) -> None:
    traces = random_traces(3, 12, overrun=overrun)
    controller = WithRule(draft_length=draft_length)
    result = run_controller(traces, controller, credit=credit)
    env = DepthOnly(make(traces, credit=credit), draft_length)
    for text in range(len(traces)):
        total, decisions, info = episode(env, options={"text": text})
        assert total == pytest.approx(result.returns[text])
        for name in COUNTED:
            assert info[name] == getattr(result, name)[text], name
        assert 0 < decisions == controller.asked[text] <= info["decisions"]


@pytest.mark.parametrize("exit_depth", [2, 3, 6])
@pytest.mark.parametrize("max_draft", [2, 12])
def test_length_only_is_a_controller_of_fixed_depth(exit_depth: int, max_draft: int) -> None:
    traces = random_traces(4, 12, overrun=11)
    controller = WithRule(exit_depth=exit_depth)
    result = run_controller(traces, controller, max_draft=max_draft)
    env = LengthOnly(make(traces, max_draft=max_draft), exit_depth)
    for text in range(len(traces)):
        if not controller.asked[text]:
            with pytest.raises(InputError, match=f"options: text {text} leaves nothing to decide"):
                env.reset(options={"text": text})
            continue
        total, decisions, info = episode(env, options={"text": text})
        assert total == pytest.approx(result.returns[text])
        for name in COUNTED:
            assert info[name] == getattr(result, name)[text], name
        assert decisions == controller.asked[text] < info["decisions"]
        exits = result.exits[text]
        assert exits[traces.depths.index(exit_depth)] == exits.sum()
    assert len(controller.asked) > 8


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_agent_is_asked_in_one_phase_only(wrap: Wrap, toy_folder: Path) -> None:
    env = wrap(make(toy_folder))
    phase = Phase.SELECT if isinstance(env, DepthOnly) else Phase.DRAFT
    for text in range(6):
        row, info = env.reset(seed=text)
        over = False
        while not over:
            assert info["phase"] == phase == row[2]
            if phase == Phase.DRAFT:
                assert info["depth"] == env.exit_depth
                assert row[1] == pytest.approx(env.exit_depth / 8)
            row, _, over, _, info = env.step(policy(row))
        assert not row.any()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_gymnasium_checker(wrap: Wrap, toy_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A wrapper cannot but differ from what it wraps; everything else is an error.
        warnings.filterwarnings("ignore", message=".*is different from the unwrapped version")
        check_env(wrap(make(toy_folder).unwrapped))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_same_seed_gives_the_same_episodes(wrap: Wrap, toy_folder: Path) -> None:
    runs = [
        [episode(env, seed=5), *(episode(env) for _ in range(7))]
        for env in (wrap(make(toy_folder)), wrap(make(toy_folder)))
    ]
    assert runs[0] == runs[1]
    assert len({info["text"] for _, _, info in runs[0]}) > 4


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_spec_survives_json(wrap: Wrap, toy_folder: Path) -> None:
    env = wrap(gymnasium.make("sde_gym/LEDE-v0", traces=str(toy_folder), observation=OBSERVATION))
    assert env.spec is not None
    twin = gymnasium.make(EnvSpec.from_json(env.spec.to_json()))
    assert type(twin) is type(env)
    assert episode(twin, seed=2) == episode(env, seed=2)


def test_numpy_numbers_are_stored_as_plain_ones(toy_folder: Path) -> None:
    env = DepthOnly(make(str(toy_folder)), np.int64(3))  # type: ignore[arg-type]
    assert env.spec is not None
    assert '"draft_length": 3' in env.spec.to_json()


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda env: DepthOnly(env, 0), r"draft_length: 0 is out of range \(1\.\.4\)"),
        (lambda env: DepthOnly(env, 5), r"draft_length: 5 is out of range \(1\.\.4\)"),
        (lambda env: DepthOnly(env, 1.0), "draft_length: 1.0 is not a whole number"),  # type: ignore[arg-type]
        (lambda env: LengthOnly(env, 4), r"exit_depth: 4 is not one of the depths \[2, 3, 6\]"),
        (lambda env: LengthOnly(env, True), "exit_depth: True is not a whole number"),
    ],
)
def test_wrong_arguments_are_named(wrap: Wrap, message: str, toy_folder: Path) -> None:
    with pytest.raises(InputError, match=message):
        wrap(make(toy_folder, max_draft=4))


def test_what_cannot_be_wrapped_is_refused(toy_folder: Path) -> None:
    with pytest.raises(InputError, match="max_draft: 1 leaves nothing to decide"):
        LengthOnly(make(toy_folder, max_draft=1), 2)
    for wrap in (lambda env: DepthOnly(env, 1), lambda env: LengthOnly(env, 1)):
        with pytest.raises(InputError, match=r"env: .*CartPole.* has no (max_draft|depths)"):
            wrap(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_many_lanes_are_refused_and_the_remedy_works(wrap: Wrap, toy_folder: Path) -> None:
    lanes = gymnasium.make_vec("sde_gym/LEDE-v0", num_envs=2, traces=str(toy_folder))
    with pytest.raises(InputError, match=r"env: LEDEVectorEnv is not a single environment; .*'sync'"):
        wrap(lanes)  # type: ignore[arg-type]
    envs = gymnasium.make_vec(
        "sde_gym/LEDE-v0", num_envs=2, vectorization_mode="sync", wrappers=[wrap], traces=str(toy_folder)
    )
    envs.reset(seed=0)
    observation, *_ = envs.step(np.array([1, 1]))
    assert observation.shape == (2, 3)


def test_a_reward_before_the_first_decision_is_paid_with_it() -> None:
    """L = 8, exit at the second depth, 4: a step deeper, the first proposal, then the agent's."""
    traces = written_traces(
        [1, 2, 3, 4], [[9, t] for t in (1, 2, 3, 4)], end="budget", depths=(2, 4), num_layers=8
    )
    env = LengthOnly(make(traces), 4)
    _, info = env.reset(seed=0)
    assert (info["decisions"], info["draft_length"], info["layer_passes"]) == (2, 1, 8)
    # -0.01 for the way to depth 4, 1.5 for the proposal there, 1.5 for the second one of the agent's.
    _, reward, over, _, info = env.step(1)
    assert reward == pytest.approx(-0.01 + 1.5 + 1.5)
    assert (info["decisions"], info["draft_length"], over) == (3, 2, False)
    # The third is the last that the budget allows: right, so the text is complete.
    _, reward, over, _, _ = env.step(1)
    assert (reward, over) == (1.5, True)


def test_texts_without_a_decision_are_passed_over() -> None:
    """A text of two tokens has one proposal, which ends it."""
    two = written_traces([1, EOS], [[1], [EOS]], end="eos", depths=(2,), num_layers=8, max_new_tokens=9)
    with pytest.raises(InputError, match="no text leaves anything to decide at depth 2"):
        LengthOnly(make(two), 2).reset(seed=0)
    with pytest.raises(InputError, match="options: text 0 leaves nothing to decide at depth 2"):
        LengthOnly(make(two), 2).reset(options={"text": 0})
    traces = random_traces(5, 30, overrun=11)
    controller = WithRule(exit_depth=2)
    run_controller(traces, controller)
    env = LengthOnly(make(traces, order="sequential"), 2)
    played = [env.reset(seed=0)[1]["text"]]
    played += [env.reset()[1]["text"] for _ in range(len(controller.asked) - 1)]
    assert played == sorted(controller.asked)
    assert len(played) < 30


def test_a_time_limit_ends_the_automatic_steps(toy_folder: Path) -> None:
    limited = gymnasium.wrappers.TimeLimit(make(toy_folder), 5)
    env = DepthOnly(limited, 12)
    env.reset(seed=1, options={"text": 1})
    over = truncated = False
    while not (over or truncated):
        _, _, over, truncated, info = env.step(1)
    assert info["decisions"] <= 5


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_they_render(wrap: Wrap, toy_folder: Path) -> None:
    env = wrap(make(toy_folder, render_mode="ansi"))
    _, info = env.reset(seed=0)
    assert f"decisions {info['decisions']} " in env.render()


def test_rounds_as_episodes_go_on_within_the_text() -> None:
    """A round without a decision is passed over; what is left of the text follows."""
    traces = random_traces(4, 12, overrun=11)
    env = LengthOnly(make(traces, episode="round", order="sequential"), 3)
    whole = LengthOnly(make(traces, order="sequential"), 3)
    decisions: Counter[int] = Counter()
    seen: list[tuple[int, int]] = []
    while len(decisions) < 8:
        _, asked, info = episode(env)
        decisions[info["text"]] += asked
        seen.append((info["text"], info["rounds"]))
    assert seen == sorted(set(seen))
    for text in sorted(decisions)[:-1]:
        assert decisions[text] == episode(whole, options={"text": text})[1]
    env.reset(options={"text": seen[0][0]})
    with pytest.raises(InputError, match="no text leaves anything to decide at depth 3"):
        LengthOnly(make(traces, episode="token"), 3).reset(seed=0)
    assert episode(DepthOnly(make(traces, episode="token"), 4), seed=0)[2]["drafted"] <= 1
