"""The same policies through every face of the decision problem: single, vector, SB3, live, the decoder.

All play the same texts of a tiny random model, and all have to agree: actions, tokens, rewards, counters,
and observations to 1e-4. Two things are excused and counted: near-ties, where the two best tokens of some
depth lie so close that rounding may swap them, and decision ties, where the policy takes another action on
an observation that is the same to 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import pytest

import sde_gym  # noqa: F401, registers the environments
from sde_gym.decoding.speculative import speculative
from sde_gym.envs import sb3_vec_env
from sde_gym.envs.state import COUNTERS
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Controller, View
from sde_gym.policies.observation import FEATURES
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet
from tests.envs.test_live_parity import DEPTHS, TOKENS, Watched, model, random_network, traces

__all__ = ["model", "traces"]  # fixtures

POLICIES: dict[str, Callable[[], Controller]] = {
    "random": lambda: RandomController(0.6, 3),
    "static": lambda: StaticController(2, 5),
    "threshold": lambda: ThresholdController(0.25),
    "network": lambda: random_network(12),
}
NEAR_TIE, SAME = 1e-3, 1e-4
EXCUSED = 0.05
"""Of all texts and faces, at most so many may part for a tie."""


@dataclass
class Play:
    """One text under a policy: an entry a decision, and what stood in the last info."""

    actions: list[int] = field(default_factory=list)
    observations: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)


class Driver:
    """A controller that is shown what an environment shows: an observation and its info."""

    def __init__(self, controller: Controller, num_layers: int) -> None:
        self.controller = controller
        controller.bind(DEPTHS, num_layers, 12)
        controller.reset(np.zeros(1, np.int64))
        self.columns = [FEATURES.index(name) for name in controller.observation]

    def act(self, observation: np.ndarray, info: dict[str, Any]) -> int:
        """The action of one lane."""
        view = View(
            phase=np.array([info["phase"]]),
            depth_index=np.array([DEPTHS.index(info["depth"])]),
            draft_length=np.array([info["draft_length"]]),
            observation=observation[None, self.columns],
            lanes=np.zeros(1, np.int64),
            text=np.array([info["text"]]),
            decision=np.array([info["decisions"]]),
        )
        return int(self.controller.act(view)[0])


def note(play: Play, observation: np.ndarray, action: int, reward: float, info: dict[str, Any]) -> None:
    play.observations.append(observation.copy())
    play.actions.append(action)
    play.rewards.append(float(reward))
    play.counters = {name: info[name] for name in (*COUNTERS, "cost", "speedup")}


def one_by_one(env: gymnasium.Env[Any, Any], driver: Driver, texts: int) -> list[Play]:
    plays = []
    for text in range(texts):
        play, over = Play(), False
        observation, info = env.reset(options={"text": text})
        while not over:
            action = driver.act(observation, info)
            following, reward, over, _, info = env.step(action)
            note(play, observation, action, float(reward), info)
            observation = following
        plays.append(play)
    return plays


def vector(envs: Any, driver: Driver, texts: int) -> list[Play]:
    plays, over = [Play() for _ in range(texts)], np.zeros(texts, dtype=bool)
    observations, infos = envs.reset(options={"text": list(range(texts))})
    while not over.all():
        before = [{name: infos[name][lane] for name in infos if name[0] != "_"} for lane in range(texts)]
        actions = np.array([
            0 if over[lane] else driver.act(observations[lane], before[lane]) for lane in range(texts)
        ])  # fmt: skip
        following, rewards, ended, _, infos = envs.step(actions)
        for lane in np.flatnonzero(~over):
            info = {name: infos[name][lane] for name in infos if name[0] != "_"}
            note(plays[lane], observations[lane], int(actions[lane]), rewards[lane], info)
        over |= ended
        observations = following
    return plays


def sb3(envs: Any, driver: Driver, texts: int) -> list[Play]:
    plays, over = [Play() for _ in range(texts)], np.zeros(texts, dtype=bool)
    envs.set_options([{"text": text} for text in range(texts)])
    observations, infos = envs.reset(), envs.reset_infos
    while not over.all():
        actions = np.array([
            0 if over[lane] else driver.act(observations[lane], infos[lane]) for lane in range(texts)
        ])  # fmt: skip
        following, rewards, ended, infos = envs.step(actions)
        for lane in np.flatnonzero(~over):
            note(plays[lane], observations[lane], int(actions[lane]), rewards[lane], infos[lane])
        over |= ended
        observations = following
    return plays


def decoder(model: LayeredModel, traces: TraceSet, controller: Controller) -> list[Play]:
    plays = []
    for text in range(len(traces)):
        watched = Watched(controller)
        ids = traces.prompt_tokens[text].tolist()
        result = speculative(model, ids, watched, DEPTHS, TOKENS, text=text)
        assert result.tokens == traces.tokens_of(text).tolist()
        counters = {
            **{name: getattr(result, name) for name in COUNTERS if name not in ("rounds", "tokens")},
            "rounds": len(result.rounds),
            "tokens": len(result.tokens) - 1,
        }
        plays.append(Play([action for *_, action in watched.log], watched.rows, [], counters))
    return plays


def tied(traces: TraceSet, text: int) -> bool:
    """Whether some depth's two best tokens are nearly as probable anywhere along this text."""
    rows = slice(int(traces.start[text]), int(traces.start[text + 1]))
    shallow = traces.top_logprobs[rows, :, 0] - traces.top_logprobs[rows, :, 1]
    return bool((traces.final_gap[rows] < NEAR_TIE).any() or (shallow < NEAR_TIE).any())


def same(one: Play, other: Play, near_tie: bool) -> bool:
    """Assert that two plays are one, and say so; False where they part for an excused tie."""
    for mine, theirs, left, right in zip(
        one.observations, other.observations, one.actions, other.actions, strict=False
    ):
        if np.abs(mine - theirs).max() > SAME:
            assert near_tie
            return False
        if left != right:  # on what is the same to 1e-4: a decision tie
            return False
    assert len(one.actions) == len(other.actions)
    if other.rewards:
        np.testing.assert_allclose(one.rewards, other.rewards, rtol=1e-6, atol=1e-6)
    for name, value in other.counters.items():
        assert one.counters[name] == pytest.approx(value, rel=1e-9), name
    return True


@pytest.mark.parametrize("policy", POLICIES)
def test_every_face_is_the_same_problem(policy: str, model: LayeredModel, traces: TraceSet) -> None:
    pytest.importorskip("stable_baselines3")
    options: dict[str, Any] = {"observation": list(FEATURES), "depths": list(DEPTHS)}
    texts = len(traces)
    prompts = [Prompt(id=name, task="toy", text=name) for name in traces.text_ids]
    ids = {name: tokens.tolist() for name, tokens in zip(traces.text_ids, traces.prompt_tokens, strict=True)}

    def driver() -> Driver:
        return Driver(POLICIES[policy](), model.num_layers)

    single = one_by_one(gymnasium.make("sde_gym/LEDE-v0", traces=traces, **options), driver(), texts)
    with pytest.MonkeyPatch.context() as patch:  # the model has no tokenizer
        patch.setattr(model, "encode", ids.__getitem__)
        live = gymnasium.make(
            "sde_gym/LEDELive-v0", model=model, prompts=prompts, max_new_tokens=TOKENS, **options
        )
        others = {
            "live": one_by_one(live, driver(), texts),
            "vector": vector(
                gymnasium.make_vec("sde_gym/LEDE-v0", num_envs=texts, traces=traces, **options),
                driver(),
                texts,
            ),
            "sb3": sb3(sb3_vec_env(texts, traces, **options), driver(), texts),
            "decoder": decoder(model, traces, POLICIES[policy]()),
        }
    excused = 0
    for name, plays in others.items():
        for text, (one, other) in enumerate(zip(single, plays, strict=True)):
            agree = same(one, other, tied(traces, text))
            assert agree or name in ("live", "decoder"), (
                f"{name} replays, so it has nothing to be excused for"
            )
            excused += not agree
    assert excused <= EXCUSED * len(others) * texts
    assert sum(len(play.actions) for play in single) > 5 * texts
