"""The model in the loop: the same decision problem as replay, step by step, and well behaved beside it."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

import sde_gym  # noqa: F401, registers the environments
from sde_gym.decoding import autoregressive
from sde_gym.envs import live
from sde_gym.envs.lede import LEDEEnv
from sde_gym.envs.live import LEDELiveEnv
from sde_gym.envs.wallclock import LEDEWallClockEnv
from sde_gym.errors import InputError
from sde_gym.models.cost import unit_cost
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Controller, View
from sde_gym.policies.observation import FEATURES
from sde_gym.policies.rules import RandomController
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet
from sde_gym.traces.recorder import record
from tests.envs.test_live_parity import DEPTHS, POLICIES, TOKENS, attach_random_probe, tiny_model

NEAR_TIE = 1e-3  # between the two best logits
CLOSE = 1e-4  # between observations
SAME = 1e-9  # between rewards, and relative between costs
EPISODES = ("generation", "round", "token")

Policy = Controller | Callable[[View], np.ndarray]


@dataclass(frozen=True)
class Bench:
    """A model, its prompts, and what was recorded of them."""

    model: LayeredModel
    prompts: list[Prompt]
    traces: TraceSet


def bench(model: LayeredModel, folder: Path) -> Bench:
    """The model has no tokenizer: each prompt names its ids. Prompts of one token's text are left out."""
    rng = np.random.default_rng(0)
    ids = {f"prompt {n}": rng.integers(4, 12, 3 + n).tolist() for n in range(10)}
    model.encode = ids.__getitem__  # type: ignore[method-assign]
    prompts = [Prompt(id=text, task=("even", "odd")[n % 2], text=text) for n, text in enumerate(ids)]
    traces = record(model, prompts, folder, DEPTHS, max_new_tokens=TOKENS)
    return Bench(model, [prompt for prompt in prompts if prompt.id in traces.text_ids], traces)


@pytest.fixture(scope="module", params=["endless", "ending", "compact"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    model = tiny_model(3 if request.param == "ending" else None)
    if request.param == "compact":
        model = LayeredModel(model.hf, None, "tiny", compact_vocabulary=[0, 1, 3, 4, 5, 7, 8, 9, 11])
        attach_random_probe(model)
    return bench(model, tmp_path_factory.mktemp("live") / "set")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tiny_model(None), tmp_path_factory.mktemp("live") / "set")


def live_env(tiny: Bench, **kwargs: Any) -> LEDELiveEnv:
    return LEDELiveEnv(tiny.model, tiny.prompts, **{"depths": DEPTHS, "max_new_tokens": TOKENS, **kwargs})


def clock_env(tiny: Bench, **kwargs: Any) -> LEDEWallClockEnv:
    return LEDEWallClockEnv(
        tiny.model, tiny.prompts, **{"depths": DEPTHS, "max_new_tokens": TOKENS, **kwargs}
    )


def decide(policy: Policy, observation: np.ndarray, info: dict[str, Any]) -> int:
    """What a policy does where an environment with all features stands."""
    one = {name: np.array([info[name]]) for name in ("phase", "draft_length", "text")}
    index = np.array([DEPTHS.index(info["depth"])])
    view = View(
        observation=observation[None],
        depth_index=index,
        lanes=np.zeros(1, np.int64),
        decision=np.array([info["decisions"]]),
        **one,
    )
    if not hasattr(policy, "act"):
        return int(policy(view)[0])
    columns = [FEATURES.index(name) for name in policy.observation]
    return int(policy.act(replace(view, observation=view.observation[:, columns]))[0])


def near_ties(traces: TraceSet, text: int) -> bool:
    """Whether two best tokens of this text are within rounding at some depth, on the text or behind it."""
    rows = slice(traces.start[text], traces.start[text + 1])
    branches = traces.branch_start[[traces.start[text] * len(DEPTHS), traces.start[text + 1] * len(DEPTHS)]]
    best = [
        traces.final_logprobs[rows],
        traces.top_logprobs[rows].reshape(-1, traces.k),
        traces.overrun_logprobs[slice(*branches)],
    ]
    return any((each[:, 0] - each[:, 1] < NEAR_TIE).any() for each in best)


class Tally:
    """Texts compared, and texts excused."""

    def __init__(self) -> None:
        self.texts = self.near_ties = self.decision_ties = 0

    def check(self) -> None:
        """Excuses are rare."""
        assert self.texts > 0
        assert self.near_ties <= 0.05 * self.texts
        assert self.decision_ties <= 0.05 * self.texts


def agree(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two infos say the same; costs are sums that may be taken in different orders."""
    exact = [
        [(key, value) for key, value in info.items() if key not in ("cost", "speedup")]
        for info in (found, expected)
    ]
    return (
        list(found) == list(expected)
        and exact[0] == exact[1]
        and all(found[key] == pytest.approx(expected[key], rel=SAME) for key in ("cost", "speedup"))
    )


def compare(tally: Tally, replay: LEDEEnv, other: LEDELiveEnv, policies: list[Policy], text: str) -> int:
    """One text, episode after episode, in both environments; how many steps agreed to the end."""
    tally.texts += 1
    envs = (replay, other)
    for policy in policies:
        if hasattr(policy, "act"):
            policy.bind(DEPTHS, 6, replay.engine.max_draft)
            policy.reset(np.zeros(1, np.int64))
    states: list[Any] = [env.reset(options={"text": text}) for env in envs]
    steps, over = 0, False
    last = int(replay.engine.tables.limit[replay.traces.index_of(text)]) - 1
    while True:
        if over:
            if states[0][-1]["tokens"] == last:
                return steps
            states = [env.reset() for env in envs]
        assert agree(states[0][-1], states[1][-1]), states
        np.testing.assert_allclose(states[0][0], states[1][0], atol=CLOSE)
        actions = [
            decide(policy, state[0], state[-1]) for policy, state in zip(policies, states, strict=True)
        ]
        if actions[0] != actions[1]:  # the observations are as good as equal
            tally.decision_ties += 1
            return steps
        states = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        same = states[0][2:4] == states[1][2:4] and abs(states[0][1] - states[1][1]) < SAME
        if not (same and agree(states[0][-1], states[1][-1])):
            assert near_ties(replay.traces, replay.traces.index_of(text)), states
            tally.near_ties += 1
            return steps
        steps, over = steps + 1, states[0][2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("episode", "max_draft"), [("generation", 12), ("generation", 3), ("round", 12), ("token", 12)]
)
def test_live_is_replay(policy: str, episode: str, max_draft: int, tiny: Bench) -> None:
    """Every policy: same actions, observations, rewards, ends, counters and info, and the true text."""
    tally, steps = Tally(), 0
    settings: dict[str, Any] = {"observation": list(FEATURES), "max_draft": max_draft, "episode": episode}
    replay, other = LEDEEnv(tiny.traces, **settings), live_env(tiny, **settings)
    for number in range(0, len(tiny.traces), 1 if episode == "generation" else 2):
        text = tiny.traces.text_ids[number]
        steps += compare(tally, replay, other, [POLICIES[policy](max_draft) for _ in range(2)], text)
        assert other.decoder is not None
        if other.decoder.finished:
            tokens = tiny.traces.tokens_of(number).tolist()
            assert other.decoder.result.tokens == tokens
            assert tokens == autoregressive(tiny.model, tiny.model.encode(text), TOKENS).tokens
    assert steps > 10 * tally.texts / 2
    tally.check()


@pytest.mark.parametrize("episode", EPISODES)
@pytest.mark.parametrize(
    "settings",
    [
        {"credit": "round"},
        {"reward": "speed", "credit": "round"},
        {"reward": "speed", "rho": 0.3},
        {"final_token_reward": 0.0},
        {"reward": "tests.envs.test_live:everything"},
        {"max_new_tokens": 5, "window": 2, "k": 3},
        {"max_draft": 1},
    ],
    ids=str,
)
def test_live_is_replay_with_every_setting(settings: dict[str, Any], episode: str, tiny: Bench) -> None:
    tally = Tally()
    settings = {"observation": list(FEATURES), "episode": episode, **settings}
    replay, other = LEDEEnv(tiny.traces, **settings), live_env(tiny, **settings)
    for seed, text in enumerate(tiny.traces.text_ids[:: 1 if episode == "generation" else 3]):
        compare(tally, replay, other, [RandomController(0.7, seed) for _ in range(2)], text)
    tally.check()


def everything(outcome: live.StepOutcome) -> np.ndarray:
    """A reward that every field of an outcome has its own share in."""
    weights = np.random.default_rng(1).normal(size=len(vars(outcome)))
    parts = [
        weight * np.asarray(value) for weight, value in zip(weights, vars(outcome).values(), strict=True)
    ]
    return sum(parts, np.zeros(len(outcome.phase)))


@pytest.mark.parametrize("names", ["paper", ["depth", "draft_length"], ["trace"], ["chain", "stable"]])
def test_any_observation(names: Any, endless: Bench) -> None:
    """Heads are counted for each decision, as in replay, whatever is shown."""
    replay, other = LEDEEnv(endless.traces, observation=names), live_env(endless, observation=names)
    rng = np.random.default_rng(0)
    for text in endless.traces.text_ids[:4]:
        states: list[Any] = [env.reset(options={"text": text}) for env in (replay, other)]
        over = False
        while not over:
            action = int(rng.random() < 0.7)
            states = [env.step(action) for env in (replay, other)]
            np.testing.assert_allclose(states[0][0], states[1][0], atol=CLOSE)
            assert states[0][2:4] == states[1][2:4]
            assert agree(states[0][-1], states[1][-1])
            over = states[0][2]


@pytest.mark.parametrize("episode", EPISODES)
def test_reset_starts_and_resumes_as_in_replay(episode: str, endless: Bench) -> None:
    """Any resets between any steps: the same text, tokens and counters stand behind each of them."""
    settings: dict[str, Any] = {"episode": episode, "observation": list(FEATURES)}
    envs = LEDEEnv(endless.traces, **settings), live_env(endless, **settings)
    for env in envs:
        env.reset(seed=1)
    rng, resumed = np.random.default_rng(2), 0
    choices: list[dict[str, Any]] = [{}, {}, {}, {}, {"seed": 3}, {"options": {"text": 2}}]
    for _ in range(60):
        reset = choices[int(rng.integers(len(choices)))]
        states: list[Any] = [env.reset(**reset) for env in envs]
        resumed += states[0][1]["tokens"] > 0
        for action in (rng.random(int(rng.integers(1, 9))) < 0.6).astype(int).tolist():
            assert agree(states[0][-1], states[1][-1]), states
            np.testing.assert_allclose(states[0][0], states[1][0], atol=CLOSE)
            states = [env.step(action) for env in envs]
            if states[0][2]:
                break
        assert agree(states[0][-1], states[1][-1]), states
    assert (resumed > 10) == (episode != "generation")


def test_a_walk_goes_on_with_the_true_token_at_the_cost_of_the_walk(endless: Bench) -> None:
    """Left at depth 1 all the time: one layer and one head a token, however many proposals are wrong."""
    env = live_env(endless, episode="token", observation=["trace"])
    _, info = env.reset(options={"text": 0})
    assert (info["cost"], info["speedup"]) == (0.0, 1.0)
    assert env.decoder is not None
    result, walks = env.decoder.result, 0
    tokens = endless.traces.tokens_of(0).tolist()
    while not env.decoder.finished:
        if walks:
            env.reset()
        assert env.step(1)[2]
        walks += 1
        assert result.tokens == tokens[: walks + 1]
    assert walks == len(tokens) - 1
    assert (result.layer_passes, result.sequential_layers, result.head_calls) == (walks, walks, walks)
    assert 0 < env.decoder.accepted < env.decoder.drafted == walks
    assert [depth for depth, fate in zip(result.depths, result.fates, strict=True) if fate == "final"] == [
        6
    ] * (walks - env.decoder.accepted)


def test_the_order_of_texts_is_that_of_replay(endless: Bench) -> None:
    for order in ("shuffled", "sequential"):
        for tasks in (None, ["odd"]):
            envs = [
                LEDEEnv(replace_tasks(endless), order=order, tasks=tasks),
                live_env(endless, order=order, tasks=tasks),
            ]
            played = [
                [env.reset(seed=4)[1]["text"], *(env.reset()[1]["text"] for _ in range(11))] for env in envs
            ]
            assert played[0] == played[1]


def replace_tasks(tiny: Bench) -> TraceSet:
    return replace(tiny.traces, tasks=[prompt.task for prompt in tiny.prompts])


def test_a_text_of_one_token_is_passed_over(tmp_path: Path) -> None:
    first = autoregressive(tiny_model(None), [5, 6, 7], 1).tokens[0]
    model = tiny_model(first)
    ids = {"short": [5, 6, 7], "long": [9, 4]}
    model.encode = ids.__getitem__  # type: ignore[method-assign]
    assert len(autoregressive(model, ids["long"], 8).tokens) > 1
    prompts = [Prompt(id=text, task="", text=text) for text in ids]
    env = LEDELiveEnv(model, prompts, depths=(2,), max_new_tokens=8, order="sequential")
    assert [env.reset()[1]["text_id"] for _ in range(3)] == ["long"] * 3
    with pytest.raises(InputError, match="text 0 is no episode: it has fewer than two tokens"):
        env.reset(options={"text": "short"})
    with pytest.raises(InputError, match="none of 1 gives a text of at least two tokens"):
        LEDELiveEnv(model, prompts[:1], depths=(2,)).reset()


def test_an_exception_ends_the_episode_and_nothing_else(
    endless: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = live_env(endless)
    expected = episode(env, 0, options={"text": 2})
    env.reset(options={"text": 2})
    env.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(endless.model.stack, "run", failing)
        with pytest.raises(KeyboardInterrupt):
            env.step(1)
        with pytest.raises(KeyboardInterrupt):
            env.reset()
    with pytest.raises(RuntimeError, match="no text in progress"):
        env.step(1)
    assert episode(env, 0, options={"text": 2}) == expected


def failing(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_wrong_reset_leaves_the_episode_alone(endless: Bench) -> None:
    env, twin = live_env(endless), live_env(endless)
    for each in (env, twin):
        each.reset(seed=0)
    for wrong in ({"text": 99}, {"txt": 0}):
        with pytest.raises(InputError, match="options: "):
            env.reset(options=wrong)
    for wrong_action in (2, -1, 0.5, np.array([1])):
        with pytest.raises(InputError, match="actions: "):
            env.step(wrong_action)  # type: ignore[arg-type]
    np.testing.assert_array_equal(env.step(1)[0], twin.step(1)[0])


def test_the_side_text_follows_the_verified_one(endless: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding made verification leave the text computed on the side, rewards recover."""
    expected = episode(live_env(endless), 3, p=0.8, options={"text": 1})
    greedy, calls = live.generate_greedy, []

    def wrong_at_first(model: LayeredModel, prompts: Any, tokens: int) -> list[list[int]]:
        text = greedy(model, prompts, tokens)[0]
        calls.append(tokens)
        return [[*text[:4], *((token + 1) % 12 for token in text[4:])] if len(calls) == 1 else text]

    monkeypatch.setattr(live, "generate_greedy", wrong_at_first)
    found = episode(live_env(endless), 3, p=0.8, options={"text": 1})
    assert len(calls) == 2
    steps = zip(expected[:-1], expected[1:], found[1:], strict=True)
    rounds = {before[-1]["rounds"] for before, clean, wrong in steps if clean[1] != wrong[1]}
    assert len(rounds) == 1  # that in which the two texts parted


# ---------------------------------------------------------------------- as gymnasium sees it


@pytest.fixture(scope="module")
def made(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments in plain JSON: the folder of a tiny model, and a file of prompts."""
    folder = tmp_path_factory.mktemp("model")
    lines = [
        {"id": "one", "task": "code", "prompt": "def f(x):"},
        {"id": "two", "task": "prose", "prompt": "x + 1"},
        {"id": "three", "task": "code", "prompt": "return"},
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "model": str(model_folder),
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": 12,
        "threads": 1,
    }


IDS = ("sde_gym/LEDELive-v0", "sde_gym/LEDEWallClock-v0")


@pytest.fixture(params=IDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def episode(
    env: gymnasium.Env[Any, Any], actions: int, p: float = 0.5, **reset: Any
) -> list[tuple[Any, ...]]:
    """An episode of random actions as a list of what came back."""
    rng = np.random.default_rng(actions)
    observation, info = env.reset(**reset)
    steps: list[tuple[Any, ...]] = [(observation.tolist(), info)]
    terminated = False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(int(rng.random() < p))
        assert not truncated
        steps.append((observation.tolist(), reward, terminated, info))
    return steps


def timeless(steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """An episode without what was measured."""
    return [
        (step[0], *step[2:-1], {key: value for key, value in step[-1].items() if key != "seconds"})
        for step in steps
    ]


def test_gymnasium_checker(name: str, made: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(name, **made).unwrapped)
        other: dict[str, Any] = {"observation": "extended", "episode": "round", "render_mode": "ansi"}
        check_env(gymnasium.make(name, **made, **other).unwrapped)


def test_stable_baselines3_checker(name: str, made: dict[str, Any]) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(gymnasium.make(name, **made))


def test_the_spec_survives_json(name: str, made: dict[str, Any]) -> None:
    env = gymnasium.make(name, **made, depths=[1, 3], tasks=["code"])
    assert env.spec is not None
    spec = EnvSpec.from_json(env.spec.to_json())
    assert spec.nondeterministic == (name == IDS[1])
    again = gymnasium.make(spec)
    assert timeless(episode(again, 3, seed=1)) == timeless(episode(env, 3, seed=1))


@pytest.mark.parametrize(("kind", "episode"), [(IDS[0], "round"), (IDS[0], "token"), (IDS[1], "round")])
def test_a_shorter_episode_can_be_copied_in_the_middle_and_at_its_end(
    kind: str, episode: str, made: dict[str, Any]
) -> None:
    env = gymnasium.make(kind, **{**made, "max_new_tokens": 5}, observation="extended", episode=episode)
    env.reset(seed=5)
    rng, over, texts = np.random.default_rng(0), False, set()
    for _ in range(30):
        twin = pickle.loads(pickle.dumps(env))  # noqa: S301
        action = int(rng.random() < 0.6)
        results: list[Any] = [each.reset() if over else each.step(action) for each in (env, twin)]
        rows = [(observation.tolist(), *rest) for observation, *rest in results]
        assert timeless(rows[:1]) == timeless(rows[1:])
        over = not over and results[0][2]
        texts.add(results[0][-1]["text"])
    assert len(texts) > 1


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])  # noqa: S301
def test_it_can_be_copied_in_the_middle(name: str, clone: Any, made: dict[str, Any]) -> None:
    env = gymnasium.make(name, **made, observation="extended")
    env.reset(seed=5)
    for action in (1, 1, 0, 0, 1):
        env.step(action)
    twin = clone(env)
    for action in (1, 0, 1):
        results = [each.step(action) for each in (env, twin)]
        assert timeless([(results[0][0].tolist(), *results[0][1:])]) == timeless(
            [(results[1][0].tolist(), *results[1][1:])]
        )
    assert timeless(episode(env, 0)) == timeless(episode(twin, 0))  # and the order of the texts that follow
    assert len(pickle.dumps(env)) < 50_000  # a model that was named is loaded, not stored


def test_types_and_info_keys(name: str, made: dict[str, Any], toy_traces: TraceSet) -> None:
    env = gymnasium.make(name, **made)
    _, first = env.reset(seed=0)
    _, replayed = LEDEEnv(toy_traces).reset(seed=0)
    expected = {key: type(value) for key, value in replayed.items()}
    if name == IDS[1]:  # it has measured time instead
        del expected["cost"], expected["speedup"]
        expected["seconds"] = float
    assert list({key: type(value) for key, value in first.items()}.items()) == list(expected.items())
    terminated = False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(1)
        assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
        assert observation.dtype == np.float32
        assert env.observation_space.contains(observation)
        assert {key: type(value) for key, value in info.items()} == {
            key: type(value) for key, value in first.items()
        }
        json.dumps(info)
    assert not observation.any()


@pytest.mark.parametrize("kind", EPISODES)
def test_rendering_shows_what_replay_shows(kind: str, endless: Bench) -> None:
    replay = LEDEEnv(endless.traces, render_mode="ansi", episode=kind)
    other = live_env(endless, render_mode="ansi", episode=kind)
    rng = np.random.default_rng(0)
    for text in endless.traces.text_ids[:3]:
        for env in (replay, other):
            env.reset(options={"text": text})
        assert other.decoder is not None
        decoder, over = other.decoder, False
        while not decoder.finished:
            if over:
                replay.reset()
                other.reset()
            snapshots = [env._renderer.scene.snapshot() for env in (replay, other)]  # type: ignore[union-attr]
            chances = [[rung.probability for rung in snapshot.rungs] for snapshot in snapshots]
            np.testing.assert_allclose(*chances, atol=CLOSE)
            plain = [
                replace(
                    snapshot,
                    total=round(snapshot.total, 6),
                    rungs=tuple(replace(rung, probability=0.0) for rung in snapshot.rungs),
                )
                for snapshot in snapshots
            ]
            assert plain[0] == plain[1]
            action = int(rng.random() < 0.7)
            over = [env.step(action) for env in (replay, other)][1][2]
        assert isinstance(other.render(), str)


@pytest.mark.parametrize("mode", ["sync", None])
@pytest.mark.parametrize("episode_kind", EPISODES)
def test_a_vector_shares_a_model(
    mode: str | None, episode_kind: str, endless: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lane i of seed s is the environment of seed s + i, and no lane has a model of its own."""
    monkeypatch.setattr(LayeredModel, "__deepcopy__", failing, raising=False)
    settings: dict[str, Any] = {
        "model": endless.model, "prompts": endless.prompts, "depths": DEPTHS, "max_new_tokens": TOKENS,
        "episode": episode_kind,
    }  # fmt: skip
    envs = gymnasium.make_vec(IDS[0], num_envs=2, vectorization_mode=mode, **settings)
    assert isinstance(envs, gymnasium.vector.SyncVectorEnv)
    singles = [LEDELiveEnv(**settings) for _ in range(2)]
    observations, infos = envs.reset(seed=5)
    states: list[Any] = [env.reset(seed=5 + lane) for lane, env in enumerate(singles)]
    over, rng, ends = [False, False], np.random.default_rng(0), 0
    for _ in range(60):
        for lane, state in enumerate(states):
            np.testing.assert_array_equal(observations[lane], state[0])
            assert {key: infos[key][lane] for key in state[-1]} == state[-1]
        actions = (rng.random(2) < 0.6).astype(np.int64)
        observations, rewards, ended, _, infos = envs.step(actions)
        for lane, env in enumerate(singles):
            if over[lane]:
                observation, info = env.reset()
                states[lane] = (observation, 0.0, False, False, info)
            else:
                states[lane] = env.step(actions[lane])
            assert (rewards[lane], ended[lane]) == states[lane][1:3]
        over = ended.tolist()
        ends += sum(over)
    assert ends > 2
    envs.close()


@pytest.mark.parametrize("threads", [None, 2])
def test_threads_are_those_asked_for(
    threads: int | None, endless: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = endless.model.stack.run, set()

    def watched(*arguments: Any) -> Any:
        seen.add(torch.get_num_threads())
        return run(*arguments)

    monkeypatch.setattr(endless.model.stack, "run", watched)
    before = torch.get_num_threads()
    episode(live_env(endless, threads=threads), 0, seed=0)
    assert seen == {threads or before}
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------- the clock


def test_the_clock_pays_tokens_less_time(endless: Bench) -> None:
    env = clock_env(endless, rho=120.0)
    for seed in range(3):
        steps = episode(env, seed, p=0.7)[1:]
        seconds = sum(step[-1]["seconds"] for step in steps)
        tokens = steps[-1][-1]["tokens"]
        assert sum(step[1] for step in steps) == pytest.approx(tokens - 120.0 * seconds)
        assert all(step[-1]["seconds"] > 0 for step in steps)
        assert any(step[1] == 0.0 for step in steps)  # proposals wait for their round's end


@pytest.mark.parametrize("kind", EPISODES[:2])
def test_a_clock_that_counts_layers_is_replay(
    kind: str, endless: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time where the unit cost model has it: at the steps that cause it, held back alike."""
    run, clock = endless.model.stack.run, [0.0]

    def counted(hidden: Any, first: int, stop: int, rows: Any, cache: Any) -> Any:
        clock[0] += stop - first
        return run(hidden, first, stop, rows, cache)

    monkeypatch.setattr(endless.model.stack, "run", counted)
    monkeypatch.setattr("sde_gym.envs.model_env.perf_counter", lambda: clock[0])
    layers = unit_cost(endless.model.num_layers)  # heads are free, as this clock has it
    replay = LEDEEnv(endless.traces, reward="speed", rho=0.3, cost=layers, credit="round", episode=kind)
    env = clock_env(endless, rho=0.3, episode=kind)
    for number, text in enumerate(endless.traces.text_ids):
        reset: dict[str, Any] = {"options": {"text": text}}
        while reset or (env.decoder is not None and not env.decoder.finished):
            expected = episode(replay, number, p=0.7, **reset)
            found = episode(env, number, p=0.7, **reset)
            np.testing.assert_allclose([s[1] for s in found[1:]], [s[1] for s in expected[1:]], atol=SAME)
            for ours, theirs in zip(found, expected, strict=True):
                assert {**theirs[-1], **ours[-1]} == {**theirs[-1], "seconds": ours[-1]["seconds"]}
                assert not {"cost", "speedup"} & set(ours[-1])
            assert found[0][-1]["seconds"] == 0.0
            reset = {}


def test_rho_is_measured_once_if_not_given(endless: Bench) -> None:
    env = clock_env(endless)
    assert env.rho is None
    env.reset(seed=0)
    measured = env.rho
    assert measured is not None
    assert measured > 0
    env.reset()
    assert env.rho == measured


def test_the_clock_pays_no_head_that_nobody_reads(endless: Bench) -> None:
    """With features that need none, heads are those of proposals and of the last layer."""
    bare, full = clock_env(endless, observation=["depth", "trace"], rho=1.0), clock_env(endless, rho=1.0)
    found = [episode(env, 1, p=0.6, options={"text": 3})[-1][-1] for env in (bare, full)]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["head_calls"] < found[1]["head_calls"]
    assert found[0]["layer_passes"] == found[1]["layer_passes"]


# ---------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": 3}, "model: 3 is neither a name, nor a path, nor a LayeredModel"),
        ({"model": "no-such-model"}, "no model 'no-such-model'"),
        ({"dtype": "float32"}, "dtype and device: leave them out"),
        ({"prompts": []}, "prompts: give at least one"),
        ({"prompts": ["text"]}, "prompts: 'text' is no Prompt"),
        ({"prompts": 3}, "prompts: 3 is neither a set's name"),
        ({"prompts": "no-such-file"}, "'no-such-file': neither a prompt set nor an existing file"),
        ({"tasks": ["poem"]}, "tasks: no text has task 'poem'"),
        ({"episode": "text"}, "episode: 'text' is not one of generation, round"),
        ({"order": "random"}, "order: 'random' is not one of shuffled, sequential"),
        ({"depths": [6]}, r"depths: 6 is out of range \(1..5\)"),
        ({"depths": [3, 2]}, "depths must be increasing"),
        ({"depths": 2}, "depths: 2 is not a list"),
        ({"observation": []}, "observation: an environment needs at least one feature"),
        ({"k": 13}, r"k: 13 is out of range \(1..12\)"),
        ({"window": 0}, "window: 0 is out of range"),
        ({"max_draft": 0}, "max_draft: 0 is out of range"),
        ({"max_new_tokens": 1}, "max_new_tokens: 1 is out of range"),
        ({"threads": 0}, "threads: 0 is out of range"),
        ({"render_mode": "3d"}, "render_mode: '3d' is not"),
    ],
)
@pytest.mark.parametrize("kind", [LEDELiveEnv, LEDEWallClockEnv])
def test_wrong_arguments_are_named(kind: Any, kwargs: dict[str, Any], message: str, endless: Bench) -> None:
    with pytest.raises(InputError, match=message):
        kind(**{"model": endless.model, "prompts": endless.prompts, **kwargs})


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        (LEDELiveEnv, {"credit": "later"}, "credit: 'later' is not one of immediate, round"),
        (LEDELiveEnv, {"rho": 1.0}, "rho: 1.0 only means something for reward 'speed'"),
        (LEDEWallClockEnv, {"credit": "immediate"}, "credit: 'immediate' cannot be given here"),
        (LEDEWallClockEnv, {"episode": "token"}, "episode: 'token' is not one of generation, round"),
        (LEDEWallClockEnv, {"rho": -1.0}, "rho: -1.0 is not a finite number of at least 0"),
        (LEDEWallClockEnv, {"rho": "fast"}, "rho: 'fast' is not a finite number"),
    ],
)
def test_wrong_rewards_are_named(kind: Any, kwargs: dict[str, Any], message: str, endless: Bench) -> None:
    with pytest.raises(InputError, match=message):
        kind(endless.model, endless.prompts, **kwargs)


@pytest.fixture(autouse=True)
def no_inference_mode_is_left_on() -> Iterator[None]:
    """Nor anything else that an environment turns on for its own work."""
    yield
    assert not torch.is_inference_mode_enabled()
