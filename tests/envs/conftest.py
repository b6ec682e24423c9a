"""What the tests of environments share: how each registered id is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random-weight model and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from sde_gym.models.corpus import END_OF_TEXT, train_tokenizer

    folder = tmp_path_factory.mktemp("registered") / "m"
    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n"] * 4, 300)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_arguments(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plain JSON: that model, and a file of prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    lines = [{"id": f"prompt {n}", "task": "code", "prompt": f"def f{n}(x):"} for n in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "model": str(model_folder),
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": 10,
        "threads": 1,
    }


@pytest.fixture(scope="session")
def arguments(toy_folder: Path, model_arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arguments of every id there is, on something small; a new id needs a row here."""
    rho = {"rho": 0.5}  # not measured, so that clocks do not matter
    return {
        "sde_gym/LEDE-v0": {"traces": str(toy_folder)},
        "sde_gym/LEDELive-v0": model_arguments,
        "sde_gym/LEDEWallClock-v0": {**model_arguments, **rho},
    }
