"""The results table: its plan, a tiny run that is resumed, and what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agents import reproduce
from sde_gym.offline.algorithms import algorithm_names
from tests.agents.test_agents import run
from tests.builders import random_traces, store_traces


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("traces")
    return [
        store_traces(root / name, random_traces(seed, 6, depths=(3, 4, 6), overrun=11))
        for seed, name in enumerate(("training", "test"))
    ]


def test_the_plan_is_what_the_page_says() -> None:
    jobs = reproduce.plan(reproduce.GROUPS, seeds=5, gradient_steps=10)
    assert len({job.name for job in jobs}) == len(jobs)
    assert not any(" " in job.name for job in jobs)
    algorithms = [job for job in jobs if job.group == "algorithms"]
    assert {job.algorithm for job in algorithms} <= set(algorithm_names())
    assert len({job.algorithm for job in algorithms}) >= 6
    assert len({job.data for job in algorithms}) == 2
    assert {job.seed for job in algorithms} == set(range(5))
    groups = [job.group for job in jobs]
    assert groups == sorted(groups, key=reproduce.GROUPS.index)


def test_a_run_goes_on_where_it_was_stopped(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = (
        "--out", out, "--groups", "ablations", "--seeds", 1, "--gradient-steps", 3, "--workers", 1,
        "--traces", folders[0], "--test", folders[1],
    )  # fmt: skip
    first = run("reproduce.py", *arguments)
    assert first.returncode == 0, first.stderr
    jobs = sorted((out / "jobs").iterdir())
    assert len(jobs) == 3
    before = {path.name: path.stat().st_mtime_ns for path in jobs[1:]}
    os.remove(jobs[0])
    again = run("reproduce.py", *arguments)
    assert again.returncode == 0, again.stderr
    assert jobs[0].is_file()
    assert {path.name: path.stat().st_mtime_ns for path in jobs[1:]} == before

    results = json.loads((out / "results.json").read_text())
    assert [row["label"] for row in results["rules"]][:2] == ["best static", "best threshold"]
    assert [row["group"] for row in results["rows"]] == ["ablations"] * 3
    static = results["rules"][0]["speedup"]
    for row in results["rows"]:
        assert row["over_static"] == pytest.approx(row["speedups"][0] / static - 1)
    assert "| ablations | depths 3,4,6, no depth |" in (out / "results.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--groups", "everything"), "groups: everything; there are references"),
        (("--cost", "nowhere.json"), "nowhere.json"),
    ],
)
def test_bad_input_is_refused(
    wrong: tuple[str, str], message: str, folders: list[Path], tmp_path: Path
) -> None:
    found = run("reproduce.py", "--out", tmp_path, "--traces", folders[0], "--test", folders[1], *wrong)
    assert found.returncode == 2
    assert message in found.stderr


def test_training_texts_are_no_test(folders: list[Path], tmp_path: Path) -> None:
    found = run("reproduce.py", "--out", tmp_path, "--traces", folders[0], "--test", folders[0])
    assert found.returncode == 2
    assert "holds the training texts" in found.stderr
