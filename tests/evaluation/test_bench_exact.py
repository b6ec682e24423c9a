"""`bench exact`: what it counts, that it goes on, and that a wrong decoder would show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sde_gym.decoding import DecodeResult
from sde_gym.errors import InputError
from sde_gym.evaluation import bench_exact as module
from sde_gym.evaluation.bench_exact import bench_exact, table
from sde_gym.evaluation.decode_settings import DecodeSettings


@pytest.fixture(scope="module")
def settings(tiny_model_folder: Path, prompt_files: tuple[Path, Path]) -> DecodeSettings:
    return DecodeSettings(
        model=str(tiny_model_folder), prompts=str(prompt_files[1]), train_prompts=str(prompt_files[0]),
        limit=3, train_limit=4, max_new_tokens=16, max_draft=4, threads=1,
        methods=("generate", "draft_verify", "del", "adadecode", "dex", "oracle"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(settings: DecodeSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exact")
    bench_exact(settings, out, batch=2)
    return out


def test_every_text_is_plain_decodings(settings: DecodeSettings, folder: Path) -> None:
    results = bench_exact(settings, folder, batch=2)
    names = ["ar", "draft_verify", "del", "adadecode", "dex", "oracle"]  # transformers' own are left out
    assert [row["method"] for row in results["rows"]] == names
    for row in results["rows"]:
        assert row["prompts"] == 3
        assert row["tokens"] == results["rows"][0]["tokens"] > 3
        assert row["different"] == row["at_near_ties"] == 0
    assert table(results).count("\n") == 8


def test_what_is_known_is_not_decoded_again(
    settings: DecodeSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_decode", lambda *_: pytest.fail("decoded again"))
    assert len(bench_exact(settings, folder, batch=2)["rows"]) == 6


def test_a_wrong_token_is_found(
    settings: DecodeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = module._decode

    def wrong(model: Any, given: Any, name: str, *rest: Any) -> list[DecodeResult]:
        results = decode(model, given, name, *rest)
        if name == "del":
            results[0].tokens[5] = (results[0].tokens[5] + 1) % model.vocab_size
        return results

    monkeypatch.setattr(module, "_decode", wrong)
    results = bench_exact(replace(settings, methods=("del",)), tmp_path, batch=3)
    (different,) = results["differences"]
    assert (different["method"], different["position"]) == ("del", 5)
    assert different["gap"] >= 0
    assert [row["different"] for row in results["rows"]] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "batch", "message"),
    [({"temperature": 0.5}, 2, "temperature"), ({}, 0, "batch must be at least 1")],
)
def test_bad_input(
    settings: DecodeSettings, tmp_path: Path, changes: dict[str, Any], batch: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bench_exact(replace(settings, **changes), tmp_path, batch)


def test_another_runs_folder_is_refused(settings: DecodeSettings, folder: Path) -> None:
    with pytest.raises(InputError, match="another run"):
        bench_exact(replace(settings, limit=2), folder, batch=2)
