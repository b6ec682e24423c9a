"""Depth exploration emits what plain decoding emits, in the ticks that the candidates alone determine."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sde_gym.decoding import autoregressive
from sde_gym.decoding.dex import DexResult, dex, even_exploration_set
from sde_gym.models import LayeredModel, load_model
from tests.decoding.conftest import agreeing_model
from tests.models import tiny_models

LAYERS = 8
PROMPT = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(1)).tolist()

#: N -> tokens: the more explorers, the larger the lattice of a model whose depths hardly agree.
LENGTHS = {2: 14, 3: 10, 4: 8, 5: 6, 6: 5, 7: 3, 8: 3}


@cache
def deep(variant: str) -> LayeredModel:
    """Eight layers of an architecture, each later one weaker, so that depths agree now and then."""
    options: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if variant == "gemma3":
        options["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    hf = tiny_models.VARIANTS[variant](**options)
    for index, layer in enumerate(hf.model.layers):
        share = 0.6**index
        if hasattr(layer, "pre_feedforward_layernorm"):  # it normalises what its sublayers return
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.data.copy_((1 + norm.weight) * share - 1)
        else:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.data.mul_(share)
    return LayeredModel(hf)


@cache
def embedded() -> LayeredModel:
    return load_model("stdlib-20m")


@cache
def embedded_text(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(autoregressive(embedded(), prompt, 12).tokens)


def uncached_logits(model: LayeredModel, ids: list[int], depths: tuple[int, ...]) -> list[Tensor]:
    """By depth, logits (t, V) behind each of `ids`: all of them run by transformers at once, no cache."""
    with torch.inference_mode():
        output = model.hf(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        found = []
        for depth in depths[:-1]:
            logits = model.hf.get_output_embeddings()(model.hf.model.norm(output.hidden_states[depth][0]))
            if model.compact_vocabulary is not None:
                hidden = torch.full_like(logits, -torch.inf)
                hidden[:, model.compact_vocabulary] = logits[:, model.compact_vocabulary]
                logits = hidden
            found.append(logits)
        return [*found, output.logits[0]]


def selected_by_definition(
    model: LayeredModel,
    prompt: list[int],
    tokens: list[int],
    depths: tuple[int, ...],
    decs: bool,
    single: bool = False,
) -> list[int]:
    """i* of every token, one token and stage at a time, from uncached logits."""
    rows = uncached_logits(model, prompt + tokens[:-1], depths)
    found = []
    for place, token in enumerate(tokens, len(prompt) - 1):
        proposed: list[int | None] = []
        for logits in rows[: 1 if single else len(depths) - 1]:
            row = logits[place].clone()
            if decs:
                row[[known for known in proposed if known is not None]] = -torch.inf
            proposed.append(int(row.argmax()) if row.max() > -torch.inf else None)
        found.append(proposed.index(token) if token in proposed else len(depths) - 1)
    return found


def check(model: LayeredModel, prompt: list[int], expected: list[int], result: DexResult) -> None:
    """What holds for every run."""
    n = len(result.exploration_set)
    assert result.tokens == expected
    assert result.depths == [result.exploration_set[i] for i in result.selected]
    assert result.ticks == result.commit_ticks[-1] == n + sum(i + 1 for i in result.selected[:-1])
    gaps = [later - sooner for sooner, later in pairwise(result.commit_ticks)]
    assert [result.commit_ticks[0], *gaps] == [n, *(i + 1 for i in result.selected[:-1])]
    assert max(result.tick_tokens) <= 2 ** (n - 1)
    assert max(result.round_tokens) <= 2**n - 1
    assert sum(result.round_tokens) == result.lattice_tokens
    assert 0 < result.useful_share <= 1


@pytest.mark.parametrize("explorers", LENGTHS)
@pytest.mark.parametrize("variant", list(tiny_models.VARIANTS))
def test_every_architecture_emits_what_plain_decoding_emits(variant: str, explorers: int) -> None:
    model, length = deep(variant), LENGTHS[explorers]
    expected = autoregressive(model, PROMPT, length).tokens
    # Between them the variants see both.
    decs = (list(tiny_models.VARIANTS).index(variant) + explorers) % 2 == 0
    result = dex(model, PROMPT, explorers, length, decs=decs)
    check(model, PROMPT, expected, result)
    assert result.selected == selected_by_definition(model, PROMPT, expected, result.exploration_set, decs)


EMBEDDED_PROMPTS = (
    "def read_json(path):\n    with open(path) as file:\n",
    "class Stack:\n    def push(self",
    "import os\n\n",
)


@pytest.mark.parametrize("decs", [True, False])
@pytest.mark.parametrize("explorers", [2, 3, 4, 6, 8])
def test_so_does_the_embedded_model(explorers: int, decs: bool) -> None:
    model = embedded()
    prompt = model.encode(EMBEDDED_PROMPTS[(explorers + decs) % 3])
    expected = list(embedded_text(tuple(prompt)))
    result = dex(model, prompt, explorers, 12, decs=decs)
    check(model, prompt, expected, result)
    assert result.selected == selected_by_definition(model, prompt, expected, result.exploration_set, decs)
    assert result.ticks < explorers * len(expected)


SETS = [(6,), (1, 6), (5, 6), (2, 3, 6), (1, 2, 6), (1, 2, 3, 4, 5, 6), (1, 3, 4, 6)]


@pytest.mark.parametrize("compact", [None, list(range(0, 40, 3)), [1, 2]], ids=["full", "compact", "two"])
@pytest.mark.parametrize("depths", SETS)
def test_any_exploration_set_with_and_without_decs_and_single_exit(
    depths: tuple[int, ...], compact: list[int] | None
) -> None:
    """The compact heads of two columns run out of tokens behind the second stage."""
    model, prompt = agreeing_model(compact=compact), [5, 35, 3]
    expected = autoregressive(model, prompt, 14).tokens
    ticks = {}
    for decs, single in ((True, False), (False, False), (True, True), (False, True)):
        result = dex(model, prompt, depths, 14, decs=decs, single_exit=single)
        check(model, prompt, expected, result)
        wanted = selected_by_definition(model, prompt, expected, depths, decs, single)
        assert result.selected == wanted
        ticks[decs, single] = result.ticks
    assert ticks[True, False] <= ticks[False, False] <= ticks[False, True] == ticks[True, True]


def test_the_tests_above_would_see_a_difference() -> None:
    """Depths agree often but not always, DECS gains something, and so do branches behind the first."""

    def chosen(**options: bool) -> list[int]:
        return dex(deep("llama-biases"), PROMPT, (2, 4, 6, 8), 20, **options).selected

    assert len(set(chosen())) == 4
    assert sum(chosen()) < sum(chosen(decs=False)) < sum(chosen(single_exit=True))


def test_decs_opens_a_branch_for_every_stage_and_its_absence_only_for_new_tokens() -> None:
    model, prompt = agreeing_model(), [5, 35, 3]
    masked = dex(model, prompt, (1, 2, 4, 6), 20, record=True)
    plain = dex(model, prompt, (1, 2, 4, 6), 20, record=True, decs=False)
    for result in (masked, plain):
        for node in result.nodes:
            proposed = node.candidates[:3]
            distinct = len(set(proposed)) == len(proposed)
            assert distinct or result is plain
            if node.stage == 4:
                branches = [token for token in node.branches if node.branches[token].proposed_at < 3]
                assert sorted(branches) == sorted({token for token in proposed if token is not None})
    assert any(len(set(node.candidates[:3])) < 3 for node in plain.nodes if node.stage == 4)
    assert masked.lattice_tokens > plain.lattice_tokens


def test_the_bounds_are_reached() -> None:
    """With DECS and no match every stage opens a branch: a full binary tree."""
    result = dex(agreeing_model(), [5, 35, 3], (1, 2, 3, 4, 5, 6), 40)
    assert max(result.tick_tokens) == 2**5
    assert max(result.round_tokens) == 2**6 - 1


def test_one_explorer_is_plain_decoding() -> None:
    result = dex(agreeing_model(), [5, 35, 3], (6,), 12)
    assert (result.ticks, result.lattice_tokens, result.useful_share) == (12, 12, 1.0)
    assert result.selected == [0] * 12
    plain = autoregressive(agreeing_model(), [5, 35, 3], 12)
    assert result.layer_passes == result.sequential_layers == plain.layer_passes
    assert result.head_calls == plain.head_calls


def test_layer_passes_are_those_of_the_recorded_tokens() -> None:
    model, depths = agreeing_model(), (1, 2, 6)
    result = dex(model, [5, 35, 3], depths, 20, record=True)
    assert result.lattice_tokens == sum(node.stage for node in result.nodes)
    layers = (1, 1, 4)
    after_prefill = sum(
        width
        for node in result.nodes
        for stage, width in enumerate(layers[: node.stage])
        if node.born + stage >= result.commit_ticks[0]
    )
    assert result.layer_passes == after_prefill


def test_an_even_split_differs_by_one_layer_at_most() -> None:
    assert even_exploration_set(3, 24) == (8, 16, 24)
    for layers in range(1, 33):
        for explorers in range(1, layers + 1):
            depths = (0, *even_exploration_set(explorers, layers))
            gaps = {high - low for low, high in pairwise(depths)}
            assert depths[-1] == layers
            assert gaps <= {layers // explorers, -(-layers // explorers)}
            assert len(depths) == explorers + 1
