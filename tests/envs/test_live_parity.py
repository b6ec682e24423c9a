"""Replay against the real decoder on tiny random models: every policy, every text, everything equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sde_gym.decoding.speculative import speculative
from sde_gym.envs.run import run_controller
from sde_gym.models.layered import LayeredModel
from sde_gym.models.probe import HEAD_INPUTS, ExitProbe
from sde_gym.policies.controller import BaseController, Controller, View
from sde_gym.policies.observation import FEATURES
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController, counter_uniform
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet
from sde_gym.traces.recorder import record

DEPTHS, TOKENS = (1, 2, 4), 16

COUNTED = ("drafted", "accepted", "decisions", "layer_passes", "sequential_layers", "head_calls")


def tiny_model(eos: int | None) -> LayeredModel:
    """Six layers over twelve tokens: shallow depths are right every second or third time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=22,  # the longer prompts run into it
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
    )
    model = LayeredModel(LlamaForCausalLM(config).eval(), None, "tiny")
    attach_random_probe(model)
    return model


def attach_random_probe(model: LayeredModel) -> None:
    """An exit probe that says something else at every depth and of every state."""
    rng = np.random.default_rng(1)
    weight = 0.2 * rng.normal(size=(len(DEPTHS), model.hidden_size + len(HEAD_INPUTS)))
    model.attach_probe(
        ExitProbe(
            DEPTHS, weight, rng.normal(size=len(DEPTHS)),
            model_hash=model.weights_hash(), head=model.head_hash(),
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=[None, 3], ids=["endless", "ending"])
def model(request: pytest.FixtureRequest) -> LayeredModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def traces(model: LayeredModel, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    rng = np.random.default_rng(0)
    ids = {f"prompt {n}": rng.integers(4, 12, 3 + n).tolist() for n in range(10)}
    prompts = [Prompt(id=text, task="toy", text=text) for text in ids]
    with pytest.MonkeyPatch.context() as patch:  # the model has no tokenizer
        patch.setattr(model, "encode", ids.__getitem__)
        return record(model, prompts, tmp_path_factory.mktemp("live") / "set", DEPTHS, max_new_tokens=TOKENS)


class Watched(BaseController):
    """Applies another controller and keeps what it saw and did."""

    observation = FEATURES

    def __init__(self, inner: Controller | Callable[[View], np.ndarray]) -> None:
        self.inner = inner
        self.log: list[tuple[int, int, int]] = []
        self.rows: list[np.ndarray] = []
        self.name = "watched"

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        if hasattr(self.inner, "bind"):
            self.inner.bind(depths, num_layers, max_draft)

    def reset(self, lanes: np.ndarray) -> None:
        if hasattr(self.inner, "bind"):
            self.inner.reset(lanes)

    def act(self, view: View) -> np.ndarray:
        if not hasattr(self.inner, "bind"):
            actions = self.inner(view)
        else:
            columns = [FEATURES.index(name) for name in self.inner.observation]
            narrowed = View(**{**vars(view), "observation": view.observation[:, columns]})
            actions = np.asarray(self.inner.act(narrowed))
        self.log.append((int(view.phase[0]), int(view.depth_index[0]), int(actions[0])))
        self.rows.append(view.observation[0].copy())
        return actions


def eager(view: View) -> np.ndarray:
    """Drafts on and on, so that most proposals lie behind a wrong one."""
    return (counter_uniform(5, view.text, view.decision) < 0.9).astype(np.int64)


def random_network(max_draft: int) -> QController:
    rng = np.random.default_rng(4)
    layers = [(rng.normal(size=(a, b)), rng.normal(size=b)) for a, b in ((len(FEATURES), 16), (16, 2))]
    return QController(QNetwork(layers), FEATURES, DEPTHS, 6, max_draft)


POLICIES: dict[str, Callable[[int], Controller | Callable[[View], np.ndarray]]] = {
    "random": lambda _: RandomController(0.6, 3),
    "threshold": lambda _: ThresholdController(0.25),
    "static": lambda max_draft: StaticController(2, min(5, max_draft)),
    "eager": lambda _: eager,
    "network": random_network,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_draft", [12, 3])
def test_replay_is_the_decoder(policy: str, max_draft: int, model: LayeredModel, traces: TraceSet) -> None:
    """Actions, tokens, rounds, counters, and every observation to 1e-4."""
    behind, said = 0, []
    for text in range(len(traces)):
        replayed, followed = (Watched(POLICIES[policy](max_draft)) for _ in range(2))
        result = run_controller(traces, replayed, [text], max_draft=max_draft)
        live = speculative(
            model,
            traces.prompt_tokens[text].tolist(),
            followed,
            DEPTHS,
            TOKENS,
            max_draft=max_draft,
            text=text,
        )
        assert live.tokens == traces.tokens_of(text).tolist()
        assert followed.log == replayed.log
        np.testing.assert_allclose(followed.rows, replayed.rows, atol=1e-4)
        said.extend(np.array(followed.rows)[:, FEATURES.index("probe")])
        assert len(live.rounds) == result.rounds[0]
        for name in COUNTED:
            assert getattr(live, name) == getattr(result, name)[0], name
        behind += sum(round_.drafted - round_.accepted > 1 for round_ in live.rounds)
    assert behind > (3 if policy != "threshold" else 0)
    assert np.std(said) > 0.05  # the probe says something


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [1, 3, 12])
def test_a_bare_static_controller_costs_the_same(
    depth: int, length: int, model: LayeredModel, traces: TraceSet
) -> None:
    """It reads no head, so heads are counted otherwise than above."""
    replayed = run_controller(traces, StaticController(depth, length))
    for text in range(len(traces)):
        live = speculative(
            model, traces.prompt_tokens[text].tolist(), StaticController(depth, length), DEPTHS, TOKENS
        )
        assert live.tokens == traces.tokens_of(text).tolist()
        assert len(live.rounds) == replayed.rounds[text]
        for name in COUNTED:
            assert getattr(live, name) == getattr(replayed, name)[text], name
