"""The report on depth exploration: its rows, what is left out and why, pictures and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sde_gym.cli import app
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.dex_picture import ead_picture, speedup_picture
from sde_gym.evaluation.dex_rows import COLUMNS
from sde_gym.evaluation.dex_selection import best_replayed_static
from sde_gym.evaluation.dex_sweep import DexSettings, dex_report
from sde_gym.evaluation.dex_ticks import dex_ticks
from sde_gym.policies.files import save_policy
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet, load_traces
from tests.builders import store_traces
from tests.dex_sets import all_depths
from tests.pages import first_column, marked, read_page

PAGE = read_page("dex")


def renamed(traces: TraceSet, prefix: str) -> TraceSet:
    """The same with other ids, as other texts have."""
    return dataclasses.replace(traces, text_ids=[f"{prefix}/{n}" for n in range(len(traces))])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(texts to judge on, other texts), all depths of 8 layers, overrun 11."""
    root = tmp_path_factory.mktemp("sets")
    judged = store_traces(root / "judged", all_depths(1, overrun=11), texts_per_shard=8)
    other = renamed(all_depths(2, overrun=11), "other")
    return str(judged), str(store_traces(root / "other", other, texts_per_shard=8))


@pytest.fixture(scope="module")
def report(folders: tuple[str, str]) -> dict[str, Any]:
    return dex_report(DexSettings(traces=folders[0], chosen_on=folders[1], exploration_set=(1, 3, 8)))


def test_rows(report: dict[str, Any], folders: tuple[str, str]) -> None:
    methods = [row["method"] for row in report["rows"]]
    assert methods[0] == "dex_given"
    for method in ("dex", "dex_without_decs", "dex_single_exit", "dex_chosen"):
        assert methods.count(method) == 5
    assert methods[-3:] == ["layerskip", "del", "lite"]
    assert all(tuple(row) == COLUMNS for row in report["rows"])
    traces = load_traces(folders[0])
    by_hand = dex_ticks(traces, (2, 4, 6, 8))
    (row,) = (row for row in report["rows"] if (row["method"], row["explorers"]) == ("dex", 4))
    assert row["tick_speedup"] == row["simulated_speedup"] == by_hand.tick_speedup
    assert row["ticks_per_token"] == by_hand.ticks_per_token
    assert (row["lattice_bound"], row["lattice_tokens"], row["identical_to_ar"]) == (15, None, None)
    assert any("nothing was decoded, lattice columns are empty" in note for note in report["notes"])
    mean_ead = report["ead"][0]["mean"]
    for row in report["rows"]:
        lost = row["late_exit"] + row["fallback"] - row["early_match"]
        if row["explorers"]:
            assert 8 / row["depth_speedup"] - mean_ead == pytest.approx(lost)
            assert lost <= row["resolution"] - 1
    assert any("adadecode" in note for note in report["notes"])


def test_the_static_setting_is_the_best_of_the_other_texts(
    report: dict[str, Any], folders: tuple[str, str]
) -> None:
    other = load_traces(folders[1])
    found = best_replayed_static(other, (1, 4), 3)
    speedups = {
        (depth, length): run_controller(
            other, StaticController(depth, length), depths=(depth,), max_draft=3
        ).speedup
        for depth in (1, 4) for length in (1, 2, 3)
    }  # fmt: skip
    assert (found.exit_depth, found.draft_length) == max(speedups, key=speedups.__getitem__)


def test_without_other_texts_nothing_is_chosen(folders: tuple[str, str]) -> None:
    found = dex_report(DexSettings(traces=folders[0], explorers=(2, 3)))
    methods = [row["method"] for row in found["rows"]]
    assert {*methods} == {"dex", "dex_without_decs", "dex_single_exit", "del"}
    assert any("chosen on other texts" in note for note in found["notes"])
    assert found["chosen_on"] is None


def test_a_policy_is_compared_with(folders: tuple[str, str], tmp_path: Path) -> None:
    bias = np.zeros(2, dtype=np.float32)
    layers = [(np.array([[3.0, -3.0]], dtype=np.float32), bias), (np.eye(2, dtype=np.float32), bias)]
    policy = QController(QNetwork(layers), ("top1",), (2, 3), 8, 6)
    path, _ = save_policy(tmp_path / "policy", policy)
    found = dex_report(DexSettings(traces=folders[0], explorers=(2,), policy=(str(path), str(path))))
    row, again = found["rows"][-2:]
    assert row == again
    result = run_controller(load_traces(folders[0]), policy, depths=(2, 3), max_draft=6)
    assert (row["method"], row["tokens"]) == ("lede", result.tokens.sum())
    assert (row["simulated_speedup"], row["layer_speedup"]) == (result.speedup, result.layer_speedup)


def test_sets_without_overrun_have_no_selection_methods(tmp_path: Path) -> None:
    folder = store_traces(tmp_path / "plain", all_depths(1), texts_per_shard=8)
    found = dex_report(DexSettings(traces=str(folder)))
    assert {row["method"] for row in found["rows"]} == {"dex", "dex_without_decs", "dex_single_exit"}
    assert any("without overrun" in note for note in found["notes"])


def test_depths_that_were_not_recorded(toy_folder: Path) -> None:
    found = dex_report(DexSettings(traces=str(toy_folder)))  # depths 2, 3 and 6 of 8
    assert not any(row["method"] == "dex" for row in found["rows"])
    assert "dex with 2 explorers is left out: depths [4] were not recorded" in found["notes"]
    with pytest.raises(InputError, match=r"depths \[4\], which were not recorded"):
        dex_report(DexSettings(traces=str(toy_folder), explorers=(2,)))
    with pytest.raises(InputError, match=r"explorers: 9 is out of range \(1\.\.8\)"):
        dex_report(DexSettings(traces=str(toy_folder), explorers=(9,)))
    with pytest.raises(InputError, match="must end at the last layer"):
        dex_report(DexSettings(traces=str(toy_folder), exploration_set=(2, 3)), sweep=False)


def test_sets_that_do_not_go_together(folders: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="8 of its texts are judged on, too"):
        dex_report(DexSettings(traces=folders[0], chosen_on=folders[0]))
    another = renamed(all_depths(2, num_layers=6, overrun=11), "another")
    folder = store_traces(tmp_path / "another", another, texts_per_shard=8)
    with pytest.raises(InputError, match="another model"):
        dex_report(DexSettings(traces=folders[0], chosen_on=str(folder)))
    with pytest.raises(InputError, match="max_draft"):
        DexSettings(max_draft=0)
    with pytest.raises(InputError, match="lattice_texts must be at least 0"):
        DexSettings(lattice_texts=-1)
    with pytest.raises(InputError, match="is one policy; give a list"):
        DexSettings(policy="folder")  # type: ignore[arg-type]


def test_pictures(report: dict[str, Any], tmp_path: Path) -> None:
    for draw in (ead_picture, speedup_picture):
        path = tmp_path / f"{draw.__name__}.png"
        draw(report, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 20_000
    with pytest.raises(InputError, match="no row of DEX"):
        speedup_picture({**report, "rows": []}, tmp_path / "none.png")


def test_the_command(folders: tuple[str, str], tmp_path: Path) -> None:
    arguments = ["dex", "--sweep", "--traces", folders[0], "--chosen-on", folders[1], "--explorers", "2,4"]
    arguments += ["--json", str(tmp_path / "dex.json"), "--pictures", str(tmp_path / "pictures")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "2,4,6,8" in found.output
    rows = json.loads((tmp_path / "dex.json").read_text())["rows"]
    assert [row["explorers"] for row in rows if row["method"] == "dex"] == [2, 4]
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"ead.png", "speedup.png"}


def test_the_command_without_a_sweep(folders: tuple[str, str]) -> None:
    found = CliRunner().invoke(app, ["dex", "--traces", folders[0], "--exploration-set", "1,3,8"])
    assert found.exit_code == 0, found.output
    assert "1,3,8" in found.output
    assert "layerskip" not in found.output
    wrong = CliRunner().invoke(app, ["dex", "--traces", folders[0], "--exploration-set", "3,1,8"])
    assert wrong.exit_code == 2
    assert "does not rise" in wrong.output


def test_the_page_explains_every_entry(report: dict[str, Any]) -> None:
    assert first_column(marked(PAGE, "rows")) == list(report["rows"][0])
    assert first_column(marked(PAGE, "results")) == list(report)
    assert first_column(marked(PAGE, "ead")) == list(report["ead"][0])
