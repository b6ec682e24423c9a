"""`generate(custom_generate=dex.huggingface(X))`: the tokens of `generate`, or a refusal by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from sde_gym.decoding.dex import DexResult, huggingface
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel

IDS = torch.tensor([[5, 35, 3]])
BATCH = torch.tensor([[5, 35, 3, 8], [0, 0, 9, 1], [0, 7, 7, 30]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])


@pytest.fixture
def hf(model: LayeredModel) -> Iterator[Any]:
    """The transformers model, with its generation config put back afterwards."""
    before = model.hf.generation_config
    model.hf.generation_config = GenerationConfig(pad_token_id=0)
    yield model.hf
    model.hf.generation_config = before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": [13, 21, 36]},
        {"repetition_penalty": 1.6},
        {"no_repeat_ngram_size": 2, "eos_token_id": 21, "min_new_tokens": 8},
        {"remove_invalid_values": True},
    ],
)
@pytest.mark.parametrize("given", [3, (1, 2, 4, 6)])
def test_one_prompt_as_generate(hf: Any, model: LayeredModel, given: Any, options: dict[str, Any]) -> None:
    method = huggingface(given, model=model)
    found = hf.generate(IDS, max_new_tokens=24, custom_generate=method, **options)
    assert found.tolist() == hf.generate(IDS, max_new_tokens=24, **options).tolist()
    (result,) = method.results
    assert isinstance(result, DexResult)
    assert result.tokens == found[0, 3:].tolist()
    assert result.ticks < len(result.exploration_set) * len(result.tokens)


def test_a_batch_padded_on_the_left_as_generate(hf: Any) -> None:
    method = huggingface((2, 4, 6), decs=False)  # the LayeredModel is made at the first call
    options: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 20, "eos_token_id": [13, 21]}
    found = hf.generate(BATCH, custom_generate=method, **options)
    assert found.tolist() == hf.generate(BATCH, **options).tolist()
    assert len(method.results) == 3


def test_sampling_follows_the_seed(hf: Any, model: LayeredModel) -> None:
    def text(seed: int | None, given: Any = (2, 6)) -> list[int]:
        method = huggingface(given, model=model, seed=seed)
        return hf.generate(IDS, do_sample=True, top_k=0, max_new_tokens=20, custom_generate=method).tolist()[
            0
        ]

    assert text(1) == text(1) == text(1, 6) != text(2)
    torch.manual_seed(5)
    first = text(None)
    torch.manual_seed(5)
    assert text(None) == first


def test_a_streamer_hears_every_token(hf: Any, model: LayeredModel) -> None:
    class Listener:
        heard: list[Any] = []  # noqa: RUF012
        ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.heard.append(value.tolist())

        def end(self) -> None:
            self.ended += 1

    listener = Listener()
    found = hf.generate(IDS, max_new_tokens=6, custom_generate=huggingface(2, model=model), streamer=listener)
    assert listener.heard == [[[5, 35, 3]], *([token] for token in found[0, 3:].tolist())]
    assert listener.ended == 1


def test_what_cannot_be_honoured_is_refused(hf: Any, model: LayeredModel) -> None:
    with pytest.raises(InputError, match="num_beams"):
        hf.generate(IDS, num_beams=2, max_new_tokens=4, custom_generate=huggingface(2, model=model))
    with pytest.raises(InputError, match="must end at the last layer, 6"):
        hf.generate(IDS, max_new_tokens=4, custom_generate=huggingface((2, 4), model=model))


def test_a_text_cut_by_the_context_is_told_of(hf: Any, model: LayeredModel) -> None:
    long = torch.randint(1, 40, (1, 250), generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="context of 256 tokens"):
        found = hf.generate(long, max_new_tokens=20, custom_generate=huggingface(2, model=model))
    assert found.shape[1] == 257
