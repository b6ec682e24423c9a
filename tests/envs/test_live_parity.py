"""Replay against the real decoder on a tiny random model that never ends a text.

Adaptive controllers are compared through one that, in live decoding, stops as soon as a proposal is
wrong: that is what replay does by itself as long as nothing off the true text is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sde_gym.decoding.speculative import speculative
from sde_gym.envs.run import run_controller
from sde_gym.envs.static import run_static
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import BaseController, RoundOutcome, View
from sde_gym.policies.observation import EXTENDED, Action, Phase
from sde_gym.policies.rules import StaticController, ThresholdController, counter_uniform
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet
from sde_gym.traces.recorder import record

DEPTHS, TOKENS = (1, 2, 4), 16

Rule = Callable[[int, int, np.ndarray], int]  # (text, free decisions so far, observation row) to action


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """A tiny model gains nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    """Six layers over twelve tokens: shallow depths are right every second or third time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LayeredModel(LlamaForCausalLM(config).eval(), None, "tiny")


@pytest.fixture(scope="module")
def traces(model: LayeredModel, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    rng = np.random.default_rng(0)
    ids = {f"prompt {n}": rng.integers(1, 12, 4 + n).tolist() for n in range(4)}
    prompts = [Prompt(id=text, task="toy", text=text) for text in ids]
    with pytest.MonkeyPatch.context() as patch:  # the model has no tokenizer
        patch.setattr(model, "encode", ids.__getitem__)
        return record(model, prompts, tmp_path_factory.mktemp("live") / "set", DEPTHS, max_new_tokens=TOKENS)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [1, 3, 12])
def test_static_settings_cost_what_they_cost_live(
    depth: int, length: int, model: LayeredModel, traces: TraceSet
) -> None:
    counted = run_static(traces, depth, length)
    for text in range(len(traces)):
        live = speculative(
            model, traces.prompt_tokens[text].tolist(), StaticController(depth, length), DEPTHS, TOKENS
        )
        assert live.tokens == traces.tokens_of(text).tolist()
        assert len(live.rounds) == counted.rounds[text]
        names = ("drafted", "accepted", "decisions", "layer_passes", "sequential_layers", "head_calls")
        for name in names:
            assert getattr(live, name) == getattr(counted, name)[text], name


class Follower(BaseController):
    """Applies a rule, logs what it saw, and stops where the trace says that the draft went wrong."""

    observation = EXTENDED
    name = "follower"

    def __init__(self, traces: TraceSet, rule: Rule) -> None:
        self.traces, self.rule = traces, rule

    def reset(self, lanes: np.ndarray) -> None:
        self.opening = 1
        self.log: list[tuple[int, int, np.ndarray, int]] = []
        self.forced = 0

    def act(self, view: View) -> np.ndarray:
        phase, index, length = int(view.phase[0]), int(view.depth_index[0]), int(view.draft_length[0])
        if phase == Phase.DRAFT:
            newest = int(self.traces.start[view.text[0]]) + self.opening + length - 1
            if not self.traces.match[newest, index]:
                self.forced += 1
                return np.array([Action.CONTINUE])
        action = self.rule(int(view.text[0]), len(self.log), view.observation[0])
        self.log.append((phase, index, view.observation[0].copy(), action))
        return np.array([action])

    def feedback(self, outcome: RoundOutcome) -> None:
        self.opening += int(outcome.accepted[0]) + 1


def by_chance(text: int, number: int, row: np.ndarray) -> int:
    p_exit = 0.8 if row[EXTENDED.index("phase")] else 0.5
    return int(counter_uniform(5, text, number)[0] < p_exit)


def by_threshold(text: int, number: int, row: np.ndarray) -> int:
    return int(row[EXTENDED.index("top1")] >= 0.25)


@pytest.mark.parametrize("rule", [by_chance, by_threshold])
def test_adaptive_controllers_see_and_cost_the_same(
    rule: Rule, model: LayeredModel, traces: TraceSet
) -> None:
    drafted = 0
    for text in range(len(traces)):
        replayed = Follower(traces, rule)
        result = run_controller(traces, replayed, [text])
        assert replayed.forced == 0
        follower = Follower(traces, rule)
        live = speculative(model, traces.prompt_tokens[text].tolist(), follower, DEPTHS, TOKENS, text=text)
        assert live.tokens == traces.tokens_of(text).tolist()
        assert [entry[:2] for entry in follower.log] == [entry[:2] for entry in replayed.log]
        np.testing.assert_allclose(
            [entry[2] for entry in follower.log], [entry[2] for entry in replayed.log], atol=1e-4
        )
        assert [entry[3] for entry in follower.log] == [entry[3] for entry in replayed.log]
        assert len(live.rounds) == result.rounds[0]
        for name in ("drafted", "accepted", "layer_passes", "sequential_layers"):
            assert getattr(live, name) == getattr(result, name)[0], name
        # Each stop on the trace's word took a decision, and a look at the head, that replay skips.
        assert live.decisions == result.decisions[0] + follower.forced
        assert live.head_calls == result.head_calls[0] + follower.forced
        drafted += live.drafted
    assert drafted > 20


def test_threshold_controller_is_the_rule_by_threshold(traces: TraceSet) -> None:
    rule = run_controller(traces, ThresholdController(0.25)).totals()
    parts = [run_controller(traces, Follower(traces, by_threshold), [n]) for n in range(len(traces))]
    assert rule["sequential_layers"] == sum(int(part.sequential_layers[0]) for part in parts)
