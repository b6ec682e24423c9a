"""Training: it learns, resumes exactly, refuses what cannot be trained, and saves what loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sde_gym.errors import InputError
from sde_gym.models import load_model, own_text
from sde_gym.models.lm_training import LMTrainingSettings, jsonl_logger, train_lm
from sde_gym.models.own_text import own_windows

TINY = LMTrainingSettings(
    layers=3, width=32, heads=2, kv_heads=1, mlp_width=48, vocabulary=300, positions=128,
    tokens=256 * 12, batch_tokens=256, windows="0:32,0.5:64", shallow_exits="1", deep_exits="2",
    checkpoint_every=4, compile=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two modules to train on and a held-out one, all easily learnt."""
    root = tmp_path_factory.mktemp("library")
    for name, count in (("one.py", 60), ("two.py", 60), ("bisect.py", 30)):
        lines = [f"def function_{i % 7}(value):\n    return value + {i % 5}\n" for i in range(count)]
        (root / name).write_text("\n".join(lines))
    return root


def run(
    library: Path, out: Path, settings: LMTrainingSettings, stop_after: int = 10**9
) -> list[dict[str, float]]:
    """Train; an interrupt comes after `stop_after` steps."""
    records: list[dict[str, float]] = []

    def progress(record: dict[str, float]) -> None:
        records.append(record)
        if len(records) == stop_after:
            raise KeyboardInterrupt

    train_lm(settings, out, threads=1, progress=progress, root=library)
    return records


def test_it_learns_and_what_it_saves_can_be_loaded(library: Path, tmp_path: Path) -> None:
    settings = replace(TINY, tokens=256 * 80)
    records = run(library, tmp_path, settings)
    assert len(records) == 80
    assert records[-1]["loss"] < 0.6 * records[0]["loss"]
    assert records[-1]["shallow_exit_loss"] < 0.7 * records[0]["shallow_exit_loss"]
    model = load_model(tmp_path)
    assert model.num_layers == 3
    card = (tmp_path / "README.md").read_text()
    assert "bits per byte" in card
    assert "class Stack:" in card
    assert model.eos_token_ids == (0,)
    assert model.decode(model.encode("def function_1(value):\n")) == "def function_1(value):\n"


def test_an_interrupted_run_resumes_to_the_same_weights(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path / "whole", TINY)
    with pytest.raises(KeyboardInterrupt):
        run(library, tmp_path / "parts", TINY, stop_after=7)
    rest = run(library, tmp_path / "parts", TINY)
    assert [r["step"] for r in rest] == [5, 6, 7, 8, 9, 10, 11, 12]  # the checkpoint was at 4
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name


def test_a_trained_model_is_continued_on_text_of_its_own(library: Path, tmp_path: Path) -> None:
    first = replace(TINY, tokens=256 * 80, windows="0:32")
    run(library, tmp_path / "first", first)
    second = replace(
        first, init=str(tmp_path / "first"), own_tokens=3000, tokens=256 * 30, learning_rate=5e-4
    )
    records = run(library, tmp_path / "second", second)
    writing = [r for r in records if "own_windows" in r]
    assert writing == [{"own_windows": 188, "own_windows_wanted": 188}]  # 3000 / 16, rounded up
    trained = records[len(writing) :]
    assert trained[0]["loss"] < 1.2 * run(library, tmp_path / "again", first)[-1]["loss"], "not from scratch"
    own = load_file(tmp_path / "second" / "own-text.safetensors")["windows"].long()
    hf = load_model(tmp_path / "first").hf.to(torch.bfloat16)
    with torch.no_grad():
        predicted = hf(own[:20, :-1]).logits.argmax(-1)
    agreed = (predicted[:, 15:] == own[:20, 16:]).float().mean()
    assert agreed > 0.97, "the second half is the model's own greedy text"
    told = json.loads((tmp_path / "second" / "training.json").read_text())
    assert told["init"]["weights_hash"] == load_model(tmp_path / "first").weights_hash()
    assert told["init"]["training"]["settings"]["tokens"] == 256 * 80
    card = (tmp_path / "second" / "README.md").read_text()
    assert "half of every batch" in card
    assert "--own-tokens 3000" in card


def test_own_text_is_written_on_where_it_stopped(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path / "first", replace(TINY, windows="0:32"))
    hf = load_model(tmp_path / "first").hf
    stream = torch.arange(40) % 7
    whole = own_windows(hf, stream, 600, 8, 0, tmp_path / "whole")
    own_windows(hf, stream, 512, 8, 0, tmp_path / "parts")
    assert torch.equal(own_windows(hf, stream, 600, 8, 0, tmp_path / "parts"), whole)
    assert torch.equal(own_windows(hf, stream, 5, 8, 0, tmp_path / "parts"), whole[:5])
    with pytest.raises(InputError, match="holds windows of 8 tokens, not 9"):
        own_windows(hf, stream, 600, 9, 0, tmp_path / "parts")
    path = tmp_path / "parts" / "own-text.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="truncated or damaged"):
        own_windows(hf, stream, 600, 8, 0, tmp_path / "parts")


def test_own_text_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("stdlib-20m")
    monkeypatch.setattr(own_text.corpus, "split_library", lambda: (["x = 1\n"], []))
    monkeypatch.setattr(own_text, "own_windows", lambda *_: torch.tensor([[9] * 128 + [1] * 100 + [2] * 29]))
    counts = own_text.count_own_tokens(model, 100, tmp_path)
    assert counts.shape == (4096,)
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {1: 100, 2: 29}
    with pytest.raises(InputError, match="tokens must be at least 1, not 0"):
        own_text.count_own_tokens(model, 0, tmp_path)


def test_a_model_of_another_architecture_is_not_continued(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path / "first", TINY)
    with pytest.raises(InputError, match="has num_hidden_layers=3, the settings say 4"):
        run(library, tmp_path / "second", replace(TINY, layers=4, init=str(tmp_path / "first")))
    with pytest.raises(InputError, match="no model 'nowhere'"):
        run(library, tmp_path / "second", replace(TINY, init="nowhere"))


def test_a_checkpoint_of_other_settings_is_refused(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path, TINY)
    with pytest.raises(InputError, match="exit_weight"):
        run(library, tmp_path, replace(TINY, exit_weight=0.5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"width": 33}, "multiple of heads"),
        ({"width": 30}, "even multiple of heads"),
        ({"windows": "0.5:32"}, "begin at fraction 0"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"deep_exits": "3"}, "exit depth 3 must lie in 1..2"),
        ({"shallow_exits": "0"}, "exit depth 0"),
        ({"shallow_exits": "one"}, "depths like"),
        ({"windows": "256"}, "windows must look like"),
        ({"windows": "0:1"}, "window length 1"),
        ({"windows": "0:256"}, "window length 256"),
        ({"windows": "0:33"}, "multiple of the window 33"),
        ({"vocabulary": 100}, "at least 257"),
        ({"layer_dropout": 1.5}, "layer_dropout"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"own_tokens": -1}, "own_tokens must be at least 0"),
        ({"own_tokens": 9, "windows": "0:32"}, "own_tokens needs init"),
        ({"own_tokens": 9, "init": "stdlib-20m"}, "windows of a single length"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(TINY, **change)


def test_damaged_leftovers_are_refused(library: Path, tmp_path: Path) -> None:
    run(library, tmp_path, TINY)
    state = tmp_path / "checkpoint" / "state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-100])
    with pytest.raises(InputError, match="truncated or damaged"):
        run(library, tmp_path, TINY)
    state.write_bytes(whole)
    with pytest.raises(InputError, match="trained with vocabulary=300, not 310"):
        run(library, tmp_path, replace(TINY, vocabulary=310))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="not a tokenizer"):
        run(library, tmp_path, TINY)


def test_a_log_and_its_folder_are_made_by_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "out" / "log.jsonl"
    log = jsonl_logger(path)
    assert not path.parent.exists()
    for step in (1, 2):
        log({"step": step, "loss": 0.5})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]


def test_a_library_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no module to train on"):
        train_lm(TINY, tmp_path / "out", root=tmp_path)
