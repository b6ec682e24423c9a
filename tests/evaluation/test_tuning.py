"""`sde-gym tune` on a tiny model: all stages for real, what it leaves, taking up again, its estimate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sde_gym.cli import app
from sde_gym.decoding import autoregressive, speculative
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.tuning import STAGES, StaticSetting, offered_depths, rank_static, tune, usage
from sde_gym.evaluation.tuning_settings import Prepared, TuneSettings, divide, prepare, spread_depths
from sde_gym.evaluation.tuning_time import Estimate, duration, estimate
from sde_gym.models.cost import load_cost
from sde_gym.policies.files import load_policy
from sde_gym.policies.rules import StaticController
from sde_gym.prompts import Prompt
from sde_gym.settings import describe
from sde_gym.traces import load_traces
from tests.pages import first_column, marked, read_page, table

pytest.importorskip("d3rlpy")


@pytest.fixture(scope="module")
def settings(tiny_model_folder: Path, prompt_files: tuple[Path, Path]) -> TuneSettings:
    return TuneSettings(
        model=str(tiny_model_folder),
        prompts=str(prompt_files[0]),
        limit=12,
        max_new_tokens=24,
        gradient_steps=200,
        episodes=40,
        max_draft=6,
        threads=1,
    )


@pytest.fixture(scope="module")
def prepared(settings: TuneSettings) -> Prepared:
    return prepare(settings)


def test_the_whole_command(settings: TuneSettings, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    options = ["--limit", "12", "--max-new-tokens", "24", "--gradient-steps", "200", "--episodes", "40"]
    options += ["--max-draft", "6", "--threads", "1"]
    command = ["tune", "--model", settings.model, "--prompts", settings.prompts, "--out", str(out), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    printed = result.stdout.splitlines()
    assert printed[0].startswith("this will take about ")
    assert all(stage in printed[0] for stage in ("record", "choose", "train"))
    used = [line for line in printed if line.startswith("sde-gym generate ")]
    assert any("--policy" in line for line in used)
    for line in used:
        words = line.replace("...", "def f_1(total):").replace("'", "").split(" ")
        at = words.index("--prompt") + 1
        again = CliRunner().invoke(app, [*words[1:at], " ".join(words[at:]), "--max-new-tokens", "8"])
        assert again.exit_code == 0, again.output
    stored = json.loads((out / "tune.json").read_text())
    assert set(stored["estimate"]) == set(stored["seconds"]) == {"record", "choose", "train"}
    assert stored["settings"]["max_draft"] == 6


def test_what_it_leaves(prepared: Prepared, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    results = tune(
        prepared, tmp_path, lambda stage, done, total, note="": stages.append((stage, done, total))
    )
    assert results == json.loads((tmp_path / "tune.json").read_text())
    assert {stage for stage, done, total in stages if done == total} == set(STAGES) - {"calibrate"}
    static = StaticController(results["static"]["exit_depth"], results["static"]["draft_length"])
    policy = load_policy(tmp_path / results["policy"]["path"])
    assert policy.depths == (static.exit_depth,)
    assert policy.meta["model"]["weights_hash"] == prepared.model.weights_hash()
    # The figures are those of the texts that nothing was chosen or trained on.
    traces = load_traces(tmp_path / "traces")
    held_out = {prompt.id for prompt in prepared.held_out}
    assert set(results["prompts"]["held_out"]) == held_out
    assert not held_out & set(results["prompts"]["training"])
    texts = [n for n, text_id in enumerate(traces.text_ids) if text_id in held_out]
    rows = {row["method"]: row for row in results["rows"] if row["part"] == "held-out"}
    for name, controller in (("static", static), ("policy", policy)):
        found = run_controller(traces.subset(texts), controller, depths=policy.depths, max_draft=6)
        assert rows[name]["simulated_speedup"] == pytest.approx(found.speedup)
    speeds = {name: row["simulated_speedup"] for name, row in rows.items()} | {"plain": 1.0}
    assert speeds[results["fastest"]] == max(speeds.values())
    # And the policy decodes.
    model = prepared.model
    ids = model.encode(prepared.held_out[0].text)
    decoded = speculative(model, ids, policy, policy.depths, 20, max_draft=policy.max_draft)
    assert decoded.tokens == autoregressive(model, ids, 20).tokens


def test_a_stopped_recording_goes_on_and_a_repeated_run_agrees(prepared: Prepared, tmp_path: Path) -> None:
    first = tune(prepared, tmp_path / "whole")

    def stop(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "record" and done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(prepared, tmp_path / "stopped", stop)
    before = estimate(prepared, tmp_path / "other").seconds["record"]
    shard = tmp_path / "stopped" / "traces" / "positions-00000.parquet"
    written = shard.stat().st_mtime_ns
    assert len(load_traces(tmp_path / "stopped" / "traces")) == 8
    assert estimate(prepared, tmp_path / "stopped").seconds["record"] < before
    second = tune(prepared, tmp_path / "stopped")
    assert shard.stat().st_mtime_ns == written
    for name in ("rows", "static", "policy", "static_ranking", "prompts", "fastest"):
        assert second[name] == first[name]


def test_costs_are_measured_if_asked_for(settings: TuneSettings, tmp_path: Path) -> None:
    prepared = prepare(replace(settings, cost=True, limit=6, depths=(1, 2), offered_depths=2))
    expected = estimate(prepared, tmp_path)
    assert set(expected.seconds) == set(STAGES)
    results = tune(prepared, tmp_path, estimate=expected)
    cost = load_cost(tmp_path / "cost.json")
    assert results["cost_model"] == "cost.json"
    assert results["policy"]["depths"] == [1, 2]
    traces = load_traces(tmp_path / "traces")
    training = [n for n, i in enumerate(traces.text_ids) if i in results["prompts"]["training"]]
    best = rank_static(traces.subset(training), settings.max_draft, cost)[0]
    assert {"exit_depth": best.exit_depth, "draft_length": best.draft_length} == results["static"]


def test_an_estimate_writes_nothing(prepared: Prepared, tmp_path: Path) -> None:
    found = estimate(prepared, tmp_path)
    assert not list(tmp_path.iterdir())
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.total == pytest.approx(sum(found.seconds.values()))


def test_times_as_words() -> None:
    assert [duration(s) for s in (0, 40.4, 130, 5990, 7200)] == ["1 s", "40 s", "2 min", "100 min", "2.0 h"]
    line = Estimate({"record": 30.0, "train": 150.0}).lines()[0]
    assert "about 3 min" in line
    assert "record 30 s" in line


def test_prompts_are_divided_by_the_seed() -> None:
    prompts = [Prompt(id=f"{n}", task="t", source="s", text=f"text {n % 10}") for n in range(12)]
    training, held_out = divide(prompts, 0.25, 0)
    assert (len(training), len(held_out)) == (8, 2)  # two texts came twice
    assert not {p.text for p in training} & {p.text for p in held_out}
    assert divide(prompts, 0.25, 0) == (training, held_out)
    assert any(divide(prompts, 0.25, seed) != (training, held_out) for seed in range(1, 5))
    assert [len(part) for part in divide(prompts[:2], 0.01, 0)] == [1, 1]
    assert [len(part) for part in divide(prompts[:2], 0.99, 0)] == [1, 1]
    with pytest.raises(InputError, match="1 different prompt of 1: at least two"):
        divide(prompts[:1], 0.5, 0)


def test_depths_spread_over_any_model() -> None:
    assert spread_depths(24) == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert spread_depths(2) == (1,)
    for layers in range(2, 90):
        depths = spread_depths(layers)
        assert 1 <= depths[0] <= depths[-1] < layers


def test_the_depths_of_the_fastest_settings_are_offered() -> None:
    ranking = [
        StaticSetting(6, 3, 1.8),
        StaticSetting(6, 4, 1.7),
        StaticSetting(2, 4, 1.6),
        StaticSetting(4, 1, 1.1),
    ]
    assert offered_depths(ranking, 1) == (6,)
    assert offered_depths(ranking, 2) == (2, 6)
    assert offered_depths(ranking, 9) == (2, 4, 6)


def test_how_to_use_the_result_depends_on_what_is_fastest(settings: TuneSettings) -> None:
    results = {
        "static": {"exit_depth": 2, "draft_length": 5},
        "policy": {"path": "policy/policy"},
    }
    on_gpu = replace(settings, device="cuda", dtype="bfloat16")
    for fastest, option in (
        ("static", "--exit-depth 2 --draft-length 5"),
        ("plain", ""),
        ("policy", "--policy"),
    ):
        lines = usage(on_gpu, {**results, "fastest": fastest}, Path("out"))
        commands = [line for line in lines if line.startswith("sde-gym")]
        assert option in commands[0]
        assert "--policy out/policy/policy" in commands[-1]
        assert all("--dtype bfloat16 --device cuda" in command for command in commands)
        assert len(commands) == (1 if fastest == "policy" else 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"held_out": 1.0}, "held_out"),
        ({"held_out": 0.0}, "held_out"),
        ({"limit": 1}, "limit"),
        ({"max_draft": 0}, "max_draft"),
        ({"gamma": 2.0}, "gamma"),
        ({"seed": -1}, "seed"),
        ({"depths": (1, 4)}, r"1\.\.3"),
        ({"depths": (2,), "offered_depths": 2}, r"offered_depths is 2, but only 1 depths are recorded \(2\)"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"prompts": "none.jsonl"}, "none.jsonl"),
    ],
)
def test_what_does_not_fit_is_refused(settings: TuneSettings, change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        prepare(replace(settings, **change))  # type: ignore[arg-type]


def test_drafts_are_capped_at_the_budget(settings: TuneSettings) -> None:
    assert prepare(replace(settings, max_draft=100_000)).settings.max_draft == settings.max_new_tokens


def test_the_page_tells_all_settings_and_entries(prepared: Prepared, tmp_path: Path) -> None:
    page = read_page("tune")
    rows = [(f"`{field.name}`", f"`{field.default!r}`", field.help) for field in describe(TuneSettings)]
    assert marked(page, "settings") == table(("setting", "default", "what it is"), rows)
    assert first_column(marked(page, "results")) == list(tune(prepared, tmp_path))
