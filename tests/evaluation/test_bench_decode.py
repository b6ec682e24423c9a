"""`bench decode` on a tiny model: every method for real, what is kept, what is taken up, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sde_gym.cli import app
from sde_gym.errors import InputError
from sde_gym.evaluation.bench_decode import DEFAULT_OUT, bench_decode, command_line
from sde_gym.evaluation.decode_methods import DEX_NOTE, GREEDY_ONLY, METHODS, Oracle, chosen_methods
from sde_gym.evaluation.decode_preparation import Preparation
from sde_gym.evaluation.decode_settings import DecodeSettings
from sde_gym.evaluation.measured_prompts import load_references
from sde_gym.evaluation.report import write_report
from sde_gym.models.loading import load_model
from sde_gym.policies.controller import View
from sde_gym.policies.observation import Action, Phase
from sde_gym.prompts import load_prompts

pytest.importorskip("d3rlpy")
pytest.importorskip("rouge_score")

NAMES = (
    "ar", "generate", "prompt_lookup", "assistant_early_exit", "static", "draft_verify", "lite", "calm",
    "del", "adadecode", "dex", "lede", "lede_no_depth", "lede_no_length", "lede_speed", "oracle",
)  # fmt: skip


@pytest.fixture(scope="module")
def measured_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts of two tasks, one of them with a reference."""
    path = tmp_path_factory.mktemp("measured") / "test.jsonl"
    prompts: list[dict[str, str]] = [
        {"id": "one", "task": "even", "prompt": "def f_12(value):\n", "reference": "    return value + 2"},
        {"id": "two", "task": "odd", "prompt": "def f_13(total):\n"},
        {"id": "three", "task": "even", "prompt": "def f_14(count):\n"},
    ]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


@pytest.fixture(scope="module")
def settings(tiny_model_folder: Path, prompt_files: tuple[Path, Path], measured_file: Path) -> DecodeSettings:
    return DecodeSettings(
        model=str(tiny_model_folder),
        prompts=str(measured_file),
        train_prompts=str(prompt_files[0]),
        limit=3,
        train_limit=8,
        max_new_tokens=16,
        max_draft=4,
        repeats=2,
        threads=1,
        episodes=20,
        gradient_steps=50,
    )


@pytest.fixture(scope="module")
def finished(
    settings: DecodeSettings, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A run with all methods: its folder, not to be changed, and what it returned."""
    out = tmp_path_factory.mktemp("runs") / "bench"
    return out, bench_decode(settings, out)


def test_every_method_is_measured(finished: tuple[Path, dict[str, Any]]) -> None:
    out, results = finished
    assert tuple(METHODS) == NAMES
    assert tuple(row["method"] for row in results["rows"]) == NAMES
    rows = {row["method"]: row for row in results["rows"]}
    for name, row in rows.items():
        assert row["identical_to_ar"], name
        assert (row["identical_prompts"], row["prompts"], row["near_ties"]) == (3, 3, 0), name
        assert row["tokens_per_second"] > 0, name
        assert row["prefill_seconds"] > 0, name
        assert row["rouge_l_ar"] == 1.0, name
        assert row["speedup_over_generate"] > 0, name
        assert 0 <= row["controller_share"] + row["idle_head_share"] < 1, name
    assert results["differences"] == []
    assert rows["ar"]["speedup"] == rows["generate"]["speedup_over_generate"] == 1.0
    assert len({row["rouge_l_reference"] for row in results["rows"]}) == 1
    assert 0 < rows["ar"]["rouge_l_reference"] < 1  # of the one prompt that has a reference
    raw = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert len(raw) == len({(r["method"], r["prompt"], r["repeat"]) for r in raw}) == len(NAMES) * 3 * 2


def test_simulated_beside_measured(finished: tuple[Path, dict[str, Any]]) -> None:
    _, results = finished
    simulated = {row["method"]: row["simulated_speedup"] for row in results["rows"]}
    for name in ("ar", "generate", "prompt_lookup", "assistant_early_exit", "adadecode", "dex"):
        assert simulated[name] is None
    assert any("`adadecode` was not simulated" in note for note in results["notes"])
    served = {name: value for name, value in simulated.items() if value is not None}
    assert {"static", "draft_verify", "lite", "calm", "lede", "lede_no_depth", "lede_speed"} <= set(served)
    assert max(served.values()) == served["oracle"]  # it bounds them all
    for rows in results["tasks"].values():
        for row in rows:
            assert (row["simulated_speedup"] is None) == (simulated[row["method"]] is None)


def test_the_even_exploration_set_where_its_depths_were_not_recorded() -> None:
    """Nothing is recorded for it: a set that could not be found is no reason to choose another."""
    prepared: Any = SimpleNamespace(
        model=SimpleNamespace(num_layers=24), depths=(1, 2, 3, 4, 6, 8, 12),
        settings=DecodeSettings(),
    )  # fmt: skip
    assert METHODS["dex"](prepared).columns == {"explorers": 4, "exploration_set": [6, 12, 18, 24]}


def test_tasks_have_tables_of_their_own(finished: tuple[Path, dict[str, Any]]) -> None:
    _, results = finished
    assert {task: rows[0]["prompts"] for task, rows in results["tasks"].items()} == {"even": 2, "odd": 1}
    assert results["tasks"]["odd"][0]["rouge_l_reference"] is None


def test_the_files_to_read(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, results = finished
    assert json.loads((out / "results.json").read_text()) == results
    page = (out / "table.md").read_text()
    for name in NAMES:
        assert f"| `{name}`" in page
    assert "## Task: odd" in page
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")
    write_report(tmp_path / "report.html", results)  # the demo's report takes these rows, too
    static = next(row for row in results["rows"] if row["method"] == "static")
    assert results["static_candidates"][0].keys() >= {"exit_depth", "draft_length", "measured_speedup"}
    assert f"`static` ({static['exit_depth']}, {static['draft_length']})" in page
    explored = next(row for row in results["rows"] if row["method"] == "dex")
    assert (explored["explorers"], explored["exploration_set"]) == (4, [1, 2, 3, 4])
    assert "`dex` (1, 2, 3, 4)" in page
    assert DEX_NOTE in page


def test_a_second_start_measures_nothing_and_trains_nothing(
    settings: DecodeSettings, finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, results = finished

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("made before")

    for name in ("train_policy", "best_static"):
        monkeypatch.setattr(f"sde_gym.evaluation.decode_preparation.{name}", forbidden)
    stages: list[str] = []
    again = bench_decode(settings, out, lambda stage, done, total, note="": stages.append(stage))
    assert again["rows"] == results["rows"]
    assert again["rows_taken_up"] == len(NAMES) * 6
    assert "train lede" not in stages


CHEAP = ("ar", "static", "lite")


def test_a_stopped_run_goes_on_and_another_is_refused(settings: DecodeSettings, tmp_path: Path) -> None:
    few = replace(settings, methods=CHEAP)

    def stop(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "measure" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_decode(few, tmp_path, stop)
    rows = tmp_path / "rows.jsonl"
    before = rows.read_text()
    assert before.count("\n") == 6
    assert not (tmp_path / "results.json").exists()
    rows.write_text(before + '{"method": "a')  # what a killed process leaves
    with pytest.raises(InputError, match=r"settings\.seed 0, now 1.*choose another --out"):
        bench_decode(replace(few, seed=1), tmp_path)
    results = bench_decode(few, tmp_path)
    assert results["rows_taken_up"] == 6
    assert rows.read_text().startswith(before)
    assert rows.read_text().count("\n") == 3 * 3 * 2
    rows.unlink()
    assert bench_decode(replace(few, seed=1), tmp_path)["rows_taken_up"] == 0


def test_a_damaged_row_is_named(settings: DecodeSettings, tmp_path: Path) -> None:
    plain = replace(settings, methods=("ar",))
    bench_decode(plain, tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"method": "ar"}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl: a row cannot be read"):
        bench_decode(plain, tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match=r"rows\.jsonl: not UTF-8 text \(byte 3\); remove the file"):
        bench_decode(plain, tmp_path)


@pytest.mark.parametrize(("name", "value"), [("decode_seconds", "x"), ("output", ["x"]), ("rounds", 1.5)])
def test_a_row_of_other_types_is_named(
    settings: DecodeSettings, tmp_path: Path, name: str, value: Any
) -> None:
    plain = replace(settings, methods=("ar",), limit=1)
    bench_decode(plain, tmp_path)
    rows = tmp_path / "rows.jsonl"
    row = json.loads(rows.read_text().splitlines()[0])
    rows.write_text(json.dumps({**row, name: value}) + "\n")
    with pytest.raises(InputError, match=rf"a row cannot be read \({name} of another type\)"):
        bench_decode(plain, tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_rows_without_their_run_are_refused_with_the_remedy(
    settings: DecodeSettings, tmp_path: Path, text: str | None
) -> None:
    plain = replace(settings, methods=("ar",), limit=1)
    bench_decode(plain, tmp_path)
    (tmp_path / "run.json").unlink() if text is None else (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json: .*remove that to measure anew"):
        bench_decode(plain, tmp_path)


def test_a_run_of_an_earlier_version_is_taken_up(settings: DecodeSettings, tmp_path: Path) -> None:
    plain = replace(settings, methods=("ar",), limit=1)
    bench_decode(plain, tmp_path)
    stored = json.loads((tmp_path / "run.json").read_text())
    del stored["settings"]["device"]
    (tmp_path / "run.json").write_text(json.dumps(stored))
    assert bench_decode(plain, tmp_path)["rows_taken_up"] == 2


@pytest.mark.parametrize("damaged", [7, {"exit_depth": "x"}, None])
def test_a_damaged_choice_is_made_anew(settings: DecodeSettings, tmp_path: Path, damaged: Any) -> None:
    def choices() -> dict[str, Any]:
        model = load_model(settings.model)
        prompts = load_prompts(settings.train_prompts)
        made = Preparation(model, settings, prompts[:4], prompts[4:6], tmp_path, lambda *_: None)
        assert made.static.exit_depth in made.depths
        return {**made.static_choice, "adadecode": METHODS["adadecode"](made).identity}

    choices()
    for name in ("static", "adadecode"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chosen": damaged}))
    assert choices().keys() == {"request", "chosen", "candidates", "adadecode"}
    assert json.loads((tmp_path / "static.json").read_text())["chosen"] != damaged


def test_drafts_are_capped_at_the_budget(settings: DecodeSettings, tmp_path: Path) -> None:
    long = replace(settings, methods=("static",), limit=1, train_limit=4, max_draft=100_000)
    results = bench_decode(long, tmp_path)
    assert results["settings"]["max_draft"] == 100_000
    assert max(row["draft_length"] for row in results["static_candidates"]) <= settings.max_new_tokens


def test_differences_are_told_and_near_ties_counted(
    settings: DecodeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method with a bug: where plain decoding would go on, it says something else."""
    build = METHODS["generate"]

    def wrong(prepared: Any) -> Any:
        contender = build(prepared)

        def decode(prompt: list[int], number: int) -> Any:
            result = contender.decode(prompt, number)
            if number == 1:
                result.tokens[3] = (result.tokens[3] + 1) % 300
            return result

        return replace(contender, decode=decode)

    monkeypatch.setitem(METHODS, "generate", wrong)
    chosen = replace(settings, methods=("generate",))
    results = bench_decode(chosen, tmp_path / "a")
    row = results["rows"][1]
    assert (row["identical_to_ar"], row["identical_prompts"], row["near_ties"]) == (False, 2, 0)
    (difference,) = results["differences"]
    assert (difference["method"], difference["prompt"], difference["position"]) == ("generate", "two", 3)
    assert difference["gap"] >= 1e-3
    assert "2 of 3, 0 near-ties" in (tmp_path / "a" / "table.md").read_text()
    assert row["rouge_l_ar"] <= 1.0
    monkeypatch.setattr("sde_gym.evaluation.decode_tables.NEAR_TIE", 100.0)
    assert bench_decode(chosen, tmp_path / "a")["rows"][1]["near_ties"] == 1


def test_sampling(settings: DecodeSettings, tmp_path: Path) -> None:
    hot = replace(
        settings, temperature=0.8, limit=2, repeats=1,
        methods=("generate", "prompt_lookup", "assistant_early_exit", "static", "del", "adadecode"),
    )  # fmt: skip
    results = bench_decode(hot, tmp_path)
    for row in results["rows"]:
        assert row["identical_to_ar"] is None
        assert row["near_ties"] is None
        assert row["simulated_speedup"] is None
        assert row["tokens_per_second"] > 0
    assert results["rows"][0]["rouge_l_ar"] == 1.0
    assert not (tmp_path / "measured-traces").exists()


def test_methods_are_chosen_by_name() -> None:
    assert chosen_methods(DecodeSettings()) == NAMES
    assert chosen_methods(DecodeSettings(methods=("lede", "generate"))) == ("ar", "generate", "lede")
    assert set(NAMES) - set(chosen_methods(DecodeSettings(temperature=1.0))) == GREEDY_ONLY
    with pytest.raises(InputError, match="there is no 'medusa'; the methods are ar, generate"):
        chosen_methods(DecodeSettings(methods=("medusa",)))
    with pytest.raises(InputError, match="'lede' is named twice"):
        chosen_methods(DecodeSettings(methods=("lede", "lede")))
    with pytest.raises(InputError, match="'oracle' decodes greedily only"):
        chosen_methods(DecodeSettings(methods=("oracle",), temperature=0.5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "none"}, "the tasks are even, odd"),
        ({"methods": ("nope",)}, "there is no 'nope'"),
        ({"depths": (1, 4)}, r"1\.\.3"),
        ({"policy_depths": (3,), "depths": (1, 2)}, "policy_depths: 3"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"prompts": "none.jsonl"}, "none.jsonl"),
        ({"policy": "no-such-policy"}, "no-such-policy"),
        ({"cost": "no-such-cost.json"}, r"no-such-cost\.json: no such file"),
        ({"device": "tpu"}, "'tpu'"),
    ],
)
def test_a_refused_run_writes_nothing(
    settings: DecodeSettings, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        bench_decode(replace(settings, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"policy": "p", "methods": ("lede", "ar"), "policy_depths": (2,)}, "policy_depths: no method"),
        ({"policy": "p", "speed_policy": "p", "policy_depths": (2,)}, "policy_depths: no method"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        DecodeSettings(**change)


def test_prompts_also_trained_on_are_left_out(
    settings: DecodeSettings, prompt_files: tuple[Path, Path], measured_file: Path, tmp_path: Path
) -> None:
    plain = replace(settings, methods=("ar",), repeats=1)
    with pytest.raises(InputError, match="also trained on"):
        bench_decode(replace(plain, prompts=settings.train_prompts, train_limit=12), tmp_path / "out")
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(prompt_files[0].read_text().splitlines()[0] + "\n" + measured_file.read_text())
    results = bench_decode(replace(plain, prompts=str(mixed)), tmp_path / "out")
    assert results["prompts"]["measured"] == 3
    assert results["notes"][0].startswith("1 prompts were left out")


def test_given_policies_are_used(
    settings: DecodeSettings, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = str(finished[0] / "lede")
    given = replace(settings, methods=("lede",), policy=folder, repeats=1, limit=1)
    results = bench_decode(given, tmp_path)
    assert results["methods"]["lede"] == finished[1]["methods"]["lede"]
    assert not (tmp_path / "lede").exists()
    assert not (tmp_path / "traces").exists()  # nothing had to be trained
    assert "static_candidates" not in results


def test_references_of_known_shapes(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    path.write_text(
        json.dumps(
            [
                {"task_id": "h", "prompt": "def f():", "canonical_solution": "return 1"},
                {"question": "q?", "answer": "42"},
                {"question_id": 7, "category": "c", "turns": ["a", "b"], "reference": ["r1", "r2"]},
                {"instruction": "do", "output": "done"},
                {"prompt": "no reference"},
            ]
        )
    )
    assert load_references(str(path)) == {"h": "return 1", "mixed/2": "42", "7": "r1", "mixed/4": "done"}
    assert load_references("stdlib") == {}


def test_the_oracle_drafts_no_more_behind_its_plan() -> None:
    oracle = Oracle({0: np.array([1, 0])})
    lanes = np.zeros(1, np.int64)

    def act(text: int, decision: int) -> int:
        view = View(lanes + Phase.SELECT, lanes, lanes, np.zeros((1, 0), np.float32), lanes, lanes + text,
                    lanes + decision)  # fmt: skip
        return int(oracle.act(view)[0])

    assert [act(0, n) for n in range(3)] == [Action.EXIT, Action.CONTINUE, Action.CONTINUE]
    assert act(5, 0) == Action.CONTINUE


def test_the_command(settings: DecodeSettings, finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    assert command_line(settings, DEFAULT_OUT) + f" --out {finished[0]}" == finished[1]["command"]
    words = command_line(settings, DEFAULT_OUT).split()[1:]
    files = ["--json", str(tmp_path / "all.json"), "--plot", str(tmp_path / "all.png")]
    result = CliRunner().invoke(app, [*words, "--out", str(finished[0]), *files])
    assert result.exit_code == 0, result.output
    assert "| `lede_no_length` |" in result.stdout
    assert json.loads((tmp_path / "all.json").read_text())["rows"] == finished[1]["rows"]
    assert (tmp_path / "all.png").stat().st_size > 0
    refused = CliRunner().invoke(app, ["bench", "decode", "--methods", "ar,none"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: methods: there is no 'none'")
