"""`LayeredModel` computes what transformers computes, however its layers are walked."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from sde_gym.decoding import autoregressive
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel

L = tiny_models.LAYERS
NEW_TOKENS = 60
PROMPT = torch.randint(0, 300, (12,), generator=torch.Generator().manual_seed(1)).tolist()
LONG_PROMPT = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(2)).tolist()

every_variant = pytest.mark.parametrize("variant", list(tiny_models.VARIANTS))


@cache
def layered(variant: str) -> LayeredModel:
    return LayeredModel(tiny_models.VARIANTS[variant]())


@cache
def reference(variant: str) -> Any:
    """The same weights, in a model that `LayeredModel` never touched."""
    return tiny_models.VARIANTS[variant]()


def generate(hf: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own `generate`."""
    ids = torch.tensor([prompt])
    output = hf.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@cache
def generated(variant: str) -> tuple[int, ...]:
    return tuple(generate(reference(variant), PROMPT, NEW_TOKENS))


def states(model: LayeredModel, tokens: list[int]) -> Tensor:
    """(tokens, hidden) final states, all tokens run through all layers in one pass."""
    sequence = model.sequence()
    sequence.append(tokens)
    sequence.advance(L)
    return sequence.hidden(L, len(tokens)).clone()


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal but for float32 rounding, which differs with the number of rows in a product."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


# ------------------------------------------------------------------ against transformers


@every_variant
def test_greedy_equals_generate(variant: str) -> None:
    assert autoregressive(layered(variant), PROMPT, NEW_TOKENS).tokens == list(generated(variant))


@every_variant
def test_greedy_equals_generate_when_the_prompt_overfills_the_window(variant: str) -> None:
    expected = generate(reference(variant), LONG_PROMPT, 12)
    assert autoregressive(layered(variant), LONG_PROMPT, 12).tokens == expected


@every_variant
def test_every_depth_scores_as_transformers_does(variant: str) -> None:
    hf = reference(variant)
    output = hf(torch.tensor([LONG_PROMPT]), output_hidden_states=True)
    sequence = layered(variant).sequence()
    sequence.append(LONG_PROMPT)
    for depth in range(1, L + 1):
        sequence.advance(depth)
        found = sequence.score(depth, rows=len(LONG_PROMPT))
        if depth < L:
            logits = hf.get_output_embeddings()(hf.model.norm(output.hidden_states[depth][0]))
            cap = getattr(hf.config, "final_logit_softcapping", None)
            expected = logits if cap is None else torch.tanh(logits / cap) * cap
        else:
            expected = output.logits[0]
        assert found.dtype == torch.float32
        assert_same(found, expected)


@every_variant
def test_bfloat16_follows_transformers(variant: str) -> None:
    """Both round at the same places, so that they differ by little; float32 is where they are equal."""
    hf = tiny_models.VARIANTS[variant]().to(torch.bfloat16)
    exact = reference(variant)(torch.tensor([LONG_PROMPT])).logits[0]
    theirs = hf(torch.tensor([LONG_PROMPT])).logits[0].float()
    model = LayeredModel(hf)
    sequence = model.sequence()
    sequence.append(LONG_PROMPT)
    sequence.advance(L)
    found = sequence.score(L, rows=len(LONG_PROMPT))
    their_error = (theirs - exact).abs().mean()
    assert (found - exact).abs().mean() < 1.5 * their_error


@pytest.mark.parametrize("variant", list(tiny_models.UNLIMITED))
def test_the_windows_of_these_models_matter(variant: str) -> None:
    """Otherwise the tests above would pass with the window ignored."""
    unlimited = generate(tiny_models.UNLIMITED[variant](), PROMPT, NEW_TOKENS)
    assert unlimited != list(generated(variant))
    shown = tiny_models.WINDOW - len(PROMPT)
    assert unlimited[: shown + 1] == list(generated(variant))[: shown + 1]


@every_variant
def test_these_texts_vary_and_their_best_tokens_never_nearly_tie(variant: str) -> None:
    """A text of one token could be right by accident, and one with ties wrong without a fault."""
    tokens = list(generated(variant))
    assert len(set(tokens)) > 20
    logits = reference(variant)(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    best, second = logits.topk(2, -1).values.unbind(-1)
    assert (best - second).min() > 5e-4 * logits.abs().max()


@every_variant
def test_end_of_text_stops(variant: str) -> None:
    hf = tiny_models.VARIANTS[variant]()
    tokens = list(generated(variant))
    stop = tokens[25]
    unused = next(i for i in range(300) if i not in tokens)
    hf.generation_config.eos_token_id = [unused, stop]
    expected = tokens[: tokens.index(stop) + 1]
    assert generate(hf, PROMPT, NEW_TOKENS) == expected
    model = LayeredModel(hf)
    assert model.eos_token_ids == (unused, stop)
    assert autoregressive(model, PROMPT, NEW_TOKENS).tokens == expected


def test_the_context_limit_ends_the_text() -> None:
    model = layered("llama-tied")
    result = autoregressive(model, PROMPT, 10_000)
    assert len(PROMPT) + len(result.tokens) == model.context_limit + 1  # the last one is never fed
    assert result.tokens[:NEW_TOKENS] == list(generated("llama-tied"))


# ------------------------------------------------------------------ against itself


@every_variant
def test_stopping_on_the_way_changes_nothing(variant: str) -> None:
    model = layered(variant)
    expected = states(model, LONG_PROMPT)
    for depth in range(1, L):
        sequence = model.sequence()
        sequence.append(LONG_PROMPT)
        sequence.advance(depth)
        sequence.advance(L)
        assert_same(sequence.hidden(L, len(LONG_PROMPT)), expected)


@every_variant
def test_a_staggered_frontier_reaches_the_same_states(variant: str) -> None:
    """Tokens wait at depths L, 3, 2, 2, 1, 0 and go on together."""
    model = layered(variant)
    tokens = LONG_PROMPT
    sequence = model.sequence(capacity=8)  # grows on the way
    sequence.append(tokens[:-5])
    sequence.advance(L)
    for depth, token in zip((3, 2, 2, 1), tokens[-5:-1], strict=True):
        sequence.append([token])
        sequence.advance(depth)
    sequence.append(tokens[-1:])
    assert sequence.depths[-6:] == [L, 3, 2, 2, 1, 0]
    sequence.advance(2)
    assert sequence.depths[-6:] == [L, 3, 2, 2, 2, 2]
    sequence.advance(L)
    assert_same(sequence.hidden(L, len(tokens)), states(model, tokens))


@every_variant
@pytest.mark.parametrize("depth", [1, 3])
def test_rollback_leaves_no_trace_of_a_draft(variant: str, depth: int) -> None:
    model = layered(variant)
    tokens = LONG_PROMPT
    sequence = model.sequence()
    sequence.append(tokens[:30])
    sequence.advance(L)
    for draft in ([7, 8, 9, 10, 11, 12], [13]):  # twice, of different lengths
        for token in draft:
            sequence.append([token])
            sequence.advance(depth)
        sequence.advance(L)
        sequence.rollback(30)
        assert sequence.length == 30
    for token in tokens[30:]:
        sequence.append([token])
        sequence.advance(depth)
    sequence.advance(L)
    assert_same(sequence.hidden(L, len(tokens)), states(model, tokens))


@every_variant
def test_rollback_keeps_part_of_a_draft_that_was_not_verified(variant: str) -> None:
    model = layered(variant)
    tokens = LONG_PROMPT
    sequence = model.sequence()
    sequence.append(tokens[:30])
    sequence.advance(L)
    sequence.append([*tokens[30:33], 5, 6])
    sequence.advance(2)
    sequence.rollback(33)
    assert sequence.depths[29:] == [L, 2, 2, 2]
    sequence.append(tokens[33:])
    sequence.advance(L)
    assert_same(sequence.hidden(L, len(tokens)), states(model, tokens))


@every_variant
def test_branches_and_roots_equal_separate_sequences(variant: str) -> None:
    """A forest: a trunk with two branches, one of which forks again, and two more roots."""
    model = layered(variant)
    trunk, other_root, short_root = LONG_PROMPT[:24], LONG_PROMPT[5:35], [3]
    left, right, twig = [1, 2, 3, 4, 5], [9, 8, 7], [6, 6, 6]
    sequence = model.sequence(capacity=16)
    where: dict[str, range] = {}
    where["trunk"] = sequence.append(trunk)
    where["left"] = sequence.append(left)
    where["root"] = sequence.append(other_root, parent=-1)
    where["right"] = sequence.append(right, parent=where["trunk"][-1])
    where["short"] = sequence.append(short_root, parent=-1)
    where["twig"] = sequence.append(twig, parent=where["left"][1])
    assert not sequence.is_chain
    sequence.advance(2, slots=[*where["trunk"], *where["root"], *where["right"]])
    sequence.advance(3, slots=[*where["trunk"], *where["left"]])
    sequence.advance(L)
    assert set(sequence.depths) == {L}
    expected = {
        "trunk": states(model, trunk),
        "left": states(model, trunk + left)[-len(left) :],
        "root": states(model, other_root),
        "right": states(model, trunk + right)[-len(right) :],
        "short": states(model, short_root),
        "twig": states(model, trunk + left[:2] + twig)[-len(twig) :],
    }
    for name, slots in where.items():
        assert_same(sequence.hidden(L, slots=list(slots)), expected[name])


@every_variant
def test_a_tree_cut_back_to_a_chain_goes_on_as_one(variant: str) -> None:
    model = layered(variant)
    tokens = LONG_PROMPT
    sequence = model.sequence()
    trunk = sequence.append(tokens[:30])
    sequence.advance(L)
    for start in (1, 100):
        sequence.append([start, start + 1, start + 2], parent=trunk[-1])
    sequence.append([4, 5], parent=trunk[10])
    sequence.advance(L)
    sequence.rollback(30)
    assert sequence.is_chain
    sequence.append(tokens[30:])
    sequence.advance(1)
    sequence.advance(L)
    assert_same(sequence.hidden(L, len(tokens)), states(model, tokens))


def test_a_branch_token_cannot_overtake_its_parent() -> None:
    sequence = layered("llama-tied").sequence()
    sequence.append([1, 2, 3])
    child = sequence.append([4], parent=0)
    with pytest.raises(InputError, match=r"slot 3 cannot reach depth 2: its parent, slot 0, is at depth 0"):
        sequence.advance(2, slots=list(child))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("factory", "missing"),
    [
        (tiny_models.gpt2, "'gpt2' is not supported: it has no `model` body"),
        (tiny_models.t5, "'t5' is not supported: it is an encoder-decoder"),
        (tiny_models.mixtral, "'mixtral' is not supported: it has no gated MLP .* mixture of experts"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(factory: Any, missing: str) -> None:
    with pytest.raises(InputError, match=missing):
        LayeredModel(factory())


def test_positions_that_depend_on_the_length_of_the_text_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(InputError, match="'dynamic' are not supported"):
        LayeredModel(tiny_models.llama(rope_parameters=rope))


def test_a_llama_with_a_window_is_refused_because_transformers_contradicts_itself() -> None:
    with pytest.raises(InputError, match="sliding_window=8 is ambiguous"):
        LayeredModel(tiny_models.llama(sliding_window=8))
