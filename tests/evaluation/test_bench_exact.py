"""`bench exact`: what it counts, that it goes on, and that a wrong decoder would show."""

from __future__ import annotations

import json
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
        methods=(
            "generate", "prompt_lookup", "assistant_early_exit", "draft_verify", "del", "adadecode", "dex",
            "oracle",
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(settings: DecodeSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exact")
    bench_exact(settings, out, batch=2)
    return out


def test_every_text_is_plain_decodings(settings: DecodeSettings, folder: Path) -> None:
    results = bench_exact(settings, folder, batch=2)
    assert [row["method"] for row in results["rows"]] == ["ar", *(settings.methods or ())]
    theirs = {"generate", "prompt_lookup", "assistant_early_exit"}
    for row in results["rows"]:
        assert row["decoder"] == ("transformers" if row["method"] in theirs else "ours")
        assert (row["near_ties"] is None) == (row["method"] in theirs)
        assert row["together"] == (2 if row["method"] in {"draft_verify", "del", "adadecode"} else 1)
        assert row["prompts"] == 3
        assert row["tokens"] == results["rows"][0]["tokens"] > 3
        assert row["different"] == row["at_near_ties"] == 0
    assert table(results).count("\n") == 11
    assert "| `generate`" not in table(results)
    assert "| generate | transformers | 1 | 3 |" in table(results)


def test_what_is_known_is_not_decoded_again(
    settings: DecodeSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_decode", lambda *_: pytest.fail("decoded again"))
    again = replace(settings, repeats=7)  # of which nothing is made
    assert len(bench_exact(again, folder, batch=2)["rows"]) == 9


def test_a_run_of_an_earlier_version_is_taken_up(settings: DecodeSettings, tmp_path: Path) -> None:
    """It had left out transformers' methods, and knew no device."""
    bench_exact(replace(settings, methods=("generate", "del")), tmp_path, batch=2)
    path = tmp_path / "exact.json"
    stored = json.loads(path.read_text())
    texts = stored["texts"]
    del texts["generate"], stored["near_ties"]["generate"], stored["identity"]["settings"]["device"]
    path.write_text(json.dumps(stored))
    decoded: list[str] = []
    results = bench_exact(
        replace(settings, methods=("generate", "del")), tmp_path, 2, lambda stage, *_: decoded.append(stage)
    )
    assert [row["method"] for row in results["rows"]] == ["ar", "generate", "del"]
    assert {stage for stage in decoded if stage.startswith("decode")} == {"decode: generate"}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda found: [1], "not a comparison"),
        (lambda found: {**found, "texts": None}, "texts or near_ties are missing"),
        (lambda found: {"identity": found["identity"]}, "texts or near_ties are missing"),
        (lambda found: {**found, "near_ties": {}}, "'ar' is damaged"),
        (lambda found: {**found, "texts": {"ar": [[1]]}}, "'ar' is damaged"),
        (lambda found: {**found, "texts": {"ar": [["x"]] * 3}}, "'ar' is damaged"),
        (lambda found: {**found, "texts": {"other": []}}, "'other' is damaged"),
    ],
)
def test_a_damaged_file_is_named(
    settings: DecodeSettings, folder: Path, tmp_path: Path, damage: Any, words: str
) -> None:
    found = json.loads((folder / "exact.json").read_text())
    (tmp_path / "exact.json").write_text(json.dumps(damage(found)))
    with pytest.raises(InputError, match=rf"exact\.json: .*{words}.*remove it to compare anew"):
        bench_exact(settings, tmp_path, batch=2)
    (tmp_path / "exact.json").write_text("{")
    with pytest.raises(InputError, match=r"not a JSON file.*remove it to compare anew"):
        bench_exact(settings, tmp_path, batch=2)


def test_without_plain_decodings_text_it_is_decoded_again(
    settings: DecodeSettings, folder: Path, tmp_path: Path
) -> None:
    found = json.loads((folder / "exact.json").read_text())
    few = replace(settings, methods=("del",))
    found["identity"]["settings"]["methods"] = ["del"]
    found["texts"] = {"del": found["texts"]["del"]}
    (tmp_path / "exact.json").write_text(json.dumps(found))
    rows = bench_exact(few, tmp_path, batch=2)["rows"]
    assert [(row["method"], row["different"]) for row in rows] == [("ar", 0), ("del", 0)]


def falsify(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Give the first text of every pass of a method another token at place 5."""
    decode = module._decode

    def wrong(model: Any, given: Any, name: str, *rest: Any) -> list[DecodeResult]:
        results = decode(model, given, name, *rest)
        if name == method:
            results[0].tokens[5] = (results[0].tokens[5] + 1) % model.vocab_size
        return results

    monkeypatch.setattr(module, "_decode", wrong)


def test_plain_decoding_is_held_against_generate(
    settings: DecodeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falsify(monkeypatch, "ar")
    results = bench_exact(replace(settings, methods=("generate",)), tmp_path, batch=3)
    assert [(row["method"], row["different"]) for row in results["rows"]] == [("ar", 0), ("generate", 3)]


def test_a_wrong_token_is_found(
    settings: DecodeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falsify(monkeypatch, "del")
    results = bench_exact(replace(settings, methods=("del",)), tmp_path, batch=3)
    (different,) = results["differences"]
    assert (different["method"], different["position"]) == ("del", 5)
    assert different["gap"] >= 0
    assert [row["different"] for row in results["rows"]] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "batch", "message"),
    [
        ({"cost": "no-such-cost.json"}, 2, r"no-such-cost\.json: no such file"),
        ({"temperature": 0.5}, 2, "temperature"),
        ({}, 0, "batch must be at least 1"),
    ],
)
def test_bad_input(
    settings: DecodeSettings, tmp_path: Path, changes: dict[str, Any], batch: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bench_exact(replace(settings, **changes), tmp_path, batch)


def test_another_runs_folder_is_refused(settings: DecodeSettings, folder: Path) -> None:
    with pytest.raises(InputError, match="another run"):
        bench_exact(replace(settings, limit=2), folder, batch=2)
