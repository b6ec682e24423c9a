"""The demo on a tiny model: all stages for real, the files it leaves, taking up again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.demo import DemoSettings, run_demo
from sde_gym.evaluation.static import static_grid
from sde_gym.policies.files import load_policy
from sde_gym.traces import load_traces

pytest.importorskip("d3rlpy")


@pytest.fixture(scope="module")
def settings(tiny_model_folder: Path, prompt_files: tuple[Path, Path]) -> DemoSettings:
    return DemoSettings(
        model=str(tiny_model_folder),
        train_prompts=str(prompt_files[0]),
        test_prompts=str(prompt_files[1]),
        train_limit=12,
        test_limit=4,
        max_new_tokens=24,
        depths=(1, 2),
        gradient_steps=200,
        episodes=40,
        repeats=1,
        threads=1,
    )


def test_the_whole_path(settings: DemoSettings, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    out = tmp_path / "demo"
    results = run_demo(settings, out, lambda stage, done, total, note="": stages.append((stage, done, total)))
    assert [row["method"] for row in results["rows"]] == [
        "ar", "generate", "assistant_early_exit", "static", "lede",
    ]  # fmt: skip
    assert all(row["identical_to_ar"] for row in results["rows"])
    stored = json.loads((out / "results.json").read_text())
    assert stored["rows"] == results["rows"]
    assert stored["settings"]["depths"] == [1, 2]
    for name in ("traces/manifest.json", "policy/policy.safetensors", "policy/transitions.npz",
                 "measurements.jsonl", "report.png"):  # fmt: skip
        assert (out / name).stat().st_size > 0, name
    page = (out / "report.html").read_text()
    assert "test/12" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is fetched
    static = next(row for row in results["rows"] if row["method"] == "static")
    assert load_policy(out / "policy" / "policy").depths == (static["exit_depth"],)
    ended = {stage for stage, done, total in stages if done == total}
    assert ended == {"record traces", "train the policy", "tune the static setting", "measure"}
    # Taking up again: nothing is recorded a second time.
    shard = out / "traces" / "positions-00000.parquet"
    before = shard.stat().st_mtime_ns
    run_demo(replace(settings, test_limit=1), out)
    assert shard.stat().st_mtime_ns == before
    grid = static_grid(load_traces(out / "traces"), max_draft=4)
    assert len(grid) == 8
    assert [s.layer_speedup for s in grid] == sorted((s.layer_speedup for s in grid), reverse=True)


STAGES = ("record traces", "tune the static setting", "train the policy", "measure")


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_run_leaves_a_usable_folder(
    settings: DemoSettings, tmp_path: Path, stage: str
) -> None:
    def interrupt(now: str, done: int, total: int, note: str = "") -> None:
        if now == stage and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(settings, tmp_path, interrupt)
    assert not (tmp_path / "results.json").exists()
    if stage != "record traces":
        assert len(load_traces(tmp_path / "traces")) == 12
    if stage == "measure":
        assert len(load_policy(tmp_path / "policy" / "policy").depths) == 1
    assert run_demo(settings, tmp_path)["prompts"]["recorded"] == 12


def test_what_an_earlier_run_recorded_is_not_trained_on(settings: DemoSettings, tmp_path: Path) -> None:
    """A folder that holds more texts, the test prompts among them, gives what a fresh one gives."""
    both = replace(settings, train_limit=8, test_prompts=settings.train_prompts, policy_depths=(1,))
    run_demo(replace(settings, train_limit=12), tmp_path / "used")
    used, fresh = run_demo(both, tmp_path / "used"), run_demo(both, tmp_path / "fresh")
    assert used["prompts"] == fresh["prompts"]
    assert used["prompts"]["recorded"] == 8
    policies = [load_policy(tmp_path / n / "policy" / "policy") for n in ("used", "fresh")]
    np.testing.assert_array_equal(policies[0].network.layers[0][0], policies[1].network.layers[0][0])


def test_a_refused_run_changes_nothing(settings: DemoSettings, tmp_path: Path) -> None:
    run_demo(settings, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for change in ({"model": "nope"}, {"depths": (1, 9)}, {"seed": -1}, {"depths": (1,)}):
        with pytest.raises(InputError):
            run_demo(replace(settings, **change), tmp_path)  # type: ignore[arg-type]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_testing_on_training_prompts_is_refused(settings: DemoSettings, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="also trained on"):
        run_demo(replace(settings, test_prompts=settings.train_prompts), tmp_path / "demo")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depths": (1, 4)}, r"1\.\.3"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"train_prompts": "none.jsonl"}, "none.jsonl"),
    ],
)
def test_bad_settings_are_refused(
    settings: DemoSettings, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        run_demo(replace(settings, **change), tmp_path / "demo")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["train_limit", "test_limit", "repeats", "episodes", "threads"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least 1"):
        DemoSettings(**{name: 0})  # type: ignore[arg-type]
