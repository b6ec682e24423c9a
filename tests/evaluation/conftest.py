"""A tiny trained-looking model on disk with a tokenizer, for tests that run the whole path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sde_gym.models.lm_training import LMTrainingSettings, train_lm

WORDS = ("value", "total", "count", "index")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4 x 32 model trained for seconds on a made-up library: its early exits agree sometimes."""
    root = tmp_path_factory.mktemp("library")
    for name, count in (("one.py", 80), ("two.py", 80), ("bisect.py", 40)):
        lines = [
            f"def f_{i % 7}({WORDS[i % 4]}):\n    return {WORDS[i % 4]} + {i % 5}\n" for i in range(count)
        ]
        (root / name).write_text("\n".join(lines))
    out = tmp_path_factory.mktemp("model")
    settings = LMTrainingSettings(
        layers=4, width=32, heads=2, kv_heads=1, mlp_width=48, vocabulary=300, positions=128,
        tokens=512 * 120, batch_tokens=512, windows="0:64", shallow_exits="1", deep_exits="2",
        learning_rate=5e-3, checkpoint_every=120, compile=False,
    )  # fmt: skip
    train_lm(settings, out, threads=1, root=root)
    return out


@pytest.fixture(scope="session")
def prompt_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(training prompts, test prompts) as JSONL files."""
    folder = tmp_path_factory.mktemp("prompts")
    paths = []
    for split, numbers in (("train", range(12)), ("test", range(12, 16))):
        path = folder / f"{split}.jsonl"
        path.write_text(
            "".join(
                json.dumps(
                    {"id": f"{split}/{i}", "task": f"task{i % 2}", "prompt": f"def f_{i}({WORDS[i % 4]}):\n"}
                )
                + "\n"
                for i in numbers
            )
        )
        paths.append(path)
    return paths[0], paths[1]
