"""Many texts at once: every lane's states are those of its text alone."""

from __future__ import annotations

import pytest
import tiny_models
import torch

from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.text_lanes import TextLanes

LEAN = ["llama-tied", "llama-biases", "llama-equal-heads", "llama-one-kv-head", "qwen2", "qwen3"]


@pytest.mark.parametrize("variant", LEAN)
def test_lanes_of_different_lengths_do_not_disturb_each_other(variant: str) -> None:
    model = LayeredModel(tiny_models.VARIANTS[variant]())
    top = model.num_layers
    rng = torch.Generator().manual_seed(1)
    texts = torch.randint(300, (3, 40), generator=rng)
    lanes = TextLanes(model, 3, 40)
    for place in range(10):
        lanes.step(texts[:, place], ())
    lanes.restart([1], 4)  # lane 1 goes back to its first four tokens
    feeds = [[*range(10, 40)], [*range(4, 34)], [*range(10, 40)]]
    for step in range(30):
        tokens = torch.stack([texts[lane, feeds[lane][step]] for lane in range(3)])
        states = lanes.step(tokens, (2, top))
    for lane, length in enumerate((40, 34, 40)):
        sequence = model.sequence()
        sequence.append(texts[lane, :length].tolist())
        for depth in (2, top):
            sequence.advance(depth)
            torch.testing.assert_close(
                states[depth][lane], sequence.hidden(depth, 1)[0], rtol=1e-4, atol=1e-4
            )
    lanes.keep([2, 1])
    assert lanes.lengths.tolist() == [40, 34]
    lanes.restart([0], 34)
    after = lanes.step(torch.tensor([7, 7]), (top,))[top]
    for lane, row in ((2, 0), (1, 1)):
        sequence = model.sequence()
        sequence.append([*texts[lane, :34].tolist(), 7])
        sequence.advance(top)
        torch.testing.assert_close(after[row], sequence.hidden(top, 1)[0], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="without a sliding window"):
        TextLanes(LayeredModel(tiny_models.VARIANTS["mistral-window"]()), 2, 10)
    with pytest.raises(InputError, match="Llama family"):
        TextLanes(LayeredModel(tiny_models.gemma()), 2, 10)
    model = LayeredModel(tiny_models.llama())
    with pytest.raises(InputError, match=r"1\.\.256"):
        TextLanes(model, 2, 257)
    with pytest.raises(InputError, match="lanes 0"):
        TextLanes(model, 0, 10)
    lanes = TextLanes(model, 1, 1)
    lanes.step(torch.tensor([1]), ())
    with pytest.raises(InputError, match="holds 1 tokens already"):
        lanes.step(torch.tensor([1]), ())
