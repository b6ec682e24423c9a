"""A stack without some sublayers: equal to a model whose sublayers add nothing, and gone without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.skipping import SkippedStack, SkipSet, load_skip_set, tree_rows

L = tiny_models.LAYERS
PROMPT = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(2)).tolist()
SKIP = SkipSet(attention=(1, 2), mlp=(0, 2))  # one layer with neither, two with half, one whole

every_variant = pytest.mark.parametrize("variant", list(tiny_models.VARIANTS))


def silenced(variant: str, skip: SkipSet) -> Any:
    """The transformers model of a variant, the skipped sublayers' last maps set to zero."""
    hf = tiny_models.VARIANTS[variant]()
    layers = hf.model.layers
    for projection in [layers[i].self_attn.o_proj for i in skip.attention] + [
        layers[i].mlp.down_proj for i in skip.mlp
    ]:
        projection.weight.data.zero_()
        if projection.bias is not None:
            projection.bias.data.zero_()
    return hf


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal but for float32 rounding."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@every_variant
def test_without_exact_tokens_before_it_is_the_silenced_model(variant: str) -> None:
    model = LayeredModel(tiny_models.VARIANTS[variant]())
    stack = SkippedStack(model, SKIP)
    sequence = model.sequence(capacity=4)
    found = []
    for token in PROMPT:
        sequence.append([token])
        found.append(stack.logits(stack.newest(sequence))[0])
    expected = silenced(variant, SKIP)(torch.tensor([PROMPT])).logits[0]
    assert_same(torch.stack(found), expected)
    assert set(sequence.depths) == {0}


@every_variant
def test_exact_keys_and_values_are_read(variant: str) -> None:
    """As the silenced model says after a text whose cache the whole model filled."""
    model = LayeredModel(tiny_models.VARIANTS[variant]())
    sequence = model.sequence()
    sequence.append(PROMPT[:-1])
    sequence.advance(L)
    sequence.append(PROMPT[-1:])
    stack = SkippedStack(model, SKIP)
    found = stack.logits(stack.newest(sequence))
    cache = tiny_models.VARIANTS[variant]()(torch.tensor([PROMPT[:-1]]), use_cache=True).past_key_values
    hf = silenced(variant, SKIP)
    assert_same(found, hf(torch.tensor([PROMPT[-1:]]), cache=cache).logits[0])
    assert (found - hf(torch.tensor([PROMPT])).logits[0, -1:]).abs().max() > 1e-3  # inexact ones would matter


@every_variant
def test_skipping_nothing_is_the_model(variant: str) -> None:
    model = LayeredModel(tiny_models.VARIANTS[variant]())
    sequence = model.sequence()
    sequence.append(PROMPT[:-1])
    sequence.advance(L)
    sequence.append(PROMPT[-1:])
    stack = SkippedStack(model, SkipSet())
    found = stack.logits(stack.newest(sequence))
    sequence.advance(L)
    assert_same(found, sequence.score(L))


@every_variant
def test_a_pass_through_all_layers_overwrites_what_a_draft_left(variant: str) -> None:
    model = LayeredModel(tiny_models.VARIANTS[variant]())
    drafted, plain = model.sequence(), model.sequence()
    for sequence in (drafted, plain):
        sequence.append(PROMPT[:20])
        sequence.advance(L)
    stack = SkippedStack(model, SKIP)
    for token in PROMPT[20:]:
        drafted.append([token])
        stack.newest(drafted)
    plain.append(PROMPT[20:])
    for sequence in (drafted, plain):
        sequence.advance(L)
    assert_same(drafted.hidden(L, 10), plain.hidden(L, 10))
    for layer in range(L):
        assert_same(drafted._cache.keys[layer][:, :30], plain._cache.keys[layer][:, :30])
        assert_same(drafted._cache.values[layer][:, :30], plain._cache.values[layer][:, :30])


@every_variant
def test_side_by_side_is_one_by_one(variant: str) -> None:
    model = LayeredModel(tiny_models.VARIANTS[variant]())
    stack = SkippedStack(model, SKIP)
    expected = []
    for position in range(20, 30):
        sequence = model.sequence()
        sequence.append(PROMPT[:position])
        sequence.advance(L)
        sequence.append([PROMPT[position]])
        expected.append(stack.newest(sequence)[0].clone())
    tree = model.sequence()
    tree.append(PROMPT)
    tree.advance(L)
    slots = [tree.append([PROMPT[p]], parent=p - 1)[0] for p in range(20, 30)]
    assert slots == list(range(30, 40))
    rows = tree_rows(tree, range(30, 40))
    SkippedStack(model, SkipSet(mlp=(3,))).side_by_side(tree, range(30, 40), rows)  # leaves nothing behind
    assert_same(stack.side_by_side(tree, range(30, 40), rows), torch.stack(expected))


def test_a_stack_that_skips_leaves_the_model_alone() -> None:
    hf = tiny_models.VARIANTS["gemma2"]()
    before = hf(torch.tensor([PROMPT])).logits
    model = LayeredModel(hf)
    stack = SkippedStack(model, SkipSet(tuple(range(L)), tuple(range(L))))
    sequence = model.sequence()
    sequence.append(PROMPT[:1])
    # nothing but the embedding is left
    assert_same(stack.newest(sequence), model.stack.embed(PROMPT[:1]))
    torch.testing.assert_close(hf(torch.tensor([PROMPT])).logits, before, rtol=0, atol=0)


def test_the_depth_that_costs_as_much() -> None:
    assert [SkipSet((0,) * n, ()).depth(4) for n in (0,)] == [3]
    assert SkipSet((0, 1), (0, 1)).depth(4) == 2
    assert SkipSet((0, 1), (0,)).depth(4) == 3  # five sublayers: two and a half
    assert SkipSet((0, 1, 2, 3), (0, 1, 2, 3)).depth(4) == 1


@pytest.mark.parametrize(
    ("attention", "mlp", "words"),
    [
        ((0, 0), (), "twice"),
        ((-1,), (), "from 0"),
        ((), (1.0,), "from 0"),
        ((True,), (), "from 0"),
        ([1], (), "tuple"),
    ],
)
def test_what_is_no_skip_set_is_refused(attention: Any, mlp: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        SkipSet(attention, mlp)


def test_layers_that_a_model_lacks_are_refused() -> None:
    model = LayeredModel(tiny_models.VARIANTS["llama-tied"]())
    with pytest.raises(InputError, match=r"\[4\].*0\.\.3"):
        SkippedStack(model, SkipSet((0,), (1, 4)))


def test_a_stack_that_cannot_skip_is_refused_by_name() -> None:
    class Plain:
        pass

    model = LayeredModel(tiny_models.VARIANTS["llama-tied"]())
    model.stack = Plain()  # type: ignore[assignment]
    with pytest.raises(InputError, match="Plain"):
        SkippedStack(model, SkipSet())


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "skips.json"
    SkipSet((2, 1), (0,)).save(path, 4, {"trials": 7})
    assert load_skip_set(path, 4) == SkipSet((1, 2), (0,))
    assert json.loads(path.read_text())["facts"] == {"trials": 7}
    with pytest.raises(InputError, match=r"skips\.json.*4 layers, not 5"):
        load_skip_set(path, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sde_gym_skip_set": 2}, "version 2"),
        ({"attention": None}, "attention"),
        ({"mlp": [9]}, "9"),
        ({"mlp": [0, 0]}, "twice"),
        ({"mlp": ["0"]}, "from 0"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "skips.json"
    SkipSet((1,), (0,)).save(path, 4)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=words) as raised:
        load_skip_set(path, 4)
    assert str(path) in str(raised.value)
    path.write_text("[]")
    with pytest.raises(InputError, match="not a skip set"):
        load_skip_set(path, 4)
