"""The benchmark of environments: that it measures what it says, not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sde_gym.cli import app
from sde_gym.evaluation.bench_env import SYNC_ENVS, EnvBenchmark, Row, bench_env
from tests.builders import random_traces


@pytest.fixture(scope="module")
def found() -> EnvBenchmark:
    return bench_env(random_traces(0, 40, overrun=11), lanes=100, threads=2, repeats=2, seconds=0.0)


def test_all_are_measured_as_often(found: EnvBenchmark) -> None:
    assert {row.name: row.envs for row in found.rows} == {
        "sde_gym/LEDE-v0, vector": 100,
        "sde_gym/LEDE-v0, vector, numpy": 100,
        "CartPole-v1, vector": 100,
        "sde_gym/LEDE-v0, SyncVectorEnv": SYNC_ENVS,
        "CartPole-v1, SyncVectorEnv": SYNC_ENVS,
        "sde_gym/LEDE-v0": 1,
        "CartPole-v1": 1,
    }
    for row in found.rows:
        assert len(row.rates) == 2
        assert min(row.rates) > 0


def test_memory_grows_with_the_traces_only_once() -> None:
    """The tables grow with the set; what a lane keeps hardly does (a byte a text, for their order)."""
    small, large = (
        bench_env(random_traces(0, texts, max_new_tokens=40), lanes=300, repeats=1, seconds=0.0)
        for texts in (20, 200)
    )
    assert large.bytes_shared > 5 * small.bytes_shared
    assert large.bytes_a_lane - small.bytes_a_lane < 0.01 * (large.bytes_shared - small.bytes_shared)
    assert large.peak_bytes_a_lane > large.bytes_a_lane > 0


def test_mean_and_spread() -> None:
    row = Row("one", 1, (1.0, 2.0, 3.0))
    assert (row.mean, row.spread) == (2.0, 1.0)
    assert Row("one", 1, (4.0,)).spread == 0.0


def test_the_command_prints_and_writes_it(toy_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ["--lanes", "8", "--threads", "1", "--repeats", "1", "--seconds", "0", "--json", str(path)]
    result = CliRunner().invoke(app, ["bench", "env", "--traces", str(toy_folder), *options])
    assert result.exit_code == 0, result.output
    assert "CartPole-v1, vector" in result.stdout
    written = json.loads(path.read_text())
    assert written["settings"]["lanes"] == 8
    assert [row["mean"] for row in written["rows"]] == [row["rates"][0] for row in written["rows"]]
    assert written["machine"]["gymnasium"]
    assert written["bytes_shared"] > 0


def test_a_trace_set_that_there_is_not(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "env", "--traces", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "none" in result.stderr
