"""One process a stage: what one process decodes, and an end for all if one of them dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer

from sde_gym.decoding.dex import dex
from sde_gym.decoding.dex.__main__ import main
from sde_gym.decoding.dex.distributed import explore
from sde_gym.errors import InputError
from sde_gym.models import LayeredModel
from tests.decoding.dex.worker import CASES, PROMPT, run, summary

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")

PROCESSES = 3
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three explorers wrote; the last one died in the end."""
    folder = tmp_path_factory.mktemp("explorers")
    command = [sys.executable, "-m", "tests.decoding.dex.worker"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(PROCESSES), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(PROCESSES)
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0, 9], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", CASES)
def test_they_decode_what_one_process_does(reports: list[dict[str, Any]], name: str) -> None:
    def here(model: Any, prompt: Any, depths: Any, budget: int, **options: Any) -> Any:
        return dex(model, prompt, PROCESSES if depths is None else depths, budget, **options)

    alone = run(here, name)
    for report in reports:
        found = report[name]
        for key, value in summary(alone).items():
            assert found[key] == value, key


def test_a_death_ends_all_of_them_with_a_sentence(reports: list[dict[str, Any]]) -> None:
    for stage, report in enumerate(reports[:-1]):
        assert report["told"] == 3
        assert f"ExplorerLostError: the explorer of stage {stage} lost another one in tick" in report["death"]
        assert "start all of them anew" in report["death"]


def test_a_wrong_number_of_processes_is_refused(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert "(3, 6) is for 2 explorers, but there are 3 processes" in report["wrong count"]
        assert "--nproc-per-node 2" in report["wrong count"]


def test_different_arguments_are_refused(reports: list[dict[str, Any]]) -> None:
    assert all("InputError: explorers: the processes were given different" in r["different"] for r in reports)


def test_without_a_group_nothing_is_explored(model: LayeredModel) -> None:
    with pytest.raises(InputError, match="no process group"):
        explore(model, PROMPT, 2, 5)


def test_the_command_by_torchrun() -> None:
    arguments = (
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sde_gym.decoding.dex",
        "--prompt", "def read_json(path):\n", "--max-new-tokens", "12", "--temperature", "0.7", "--compare",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "12 tokens, " in done.stdout
    assert "2 explorers (12, 24)" in done.stdout
    assert "the same tokens" in done.stdout


def test_the_command_alone_says_how_it_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(typer.Exit) as ended:
        main("x")
    assert ended.value.exit_code == 2
    assert "torch.distributed.run --nproc-per-node N" in capsys.readouterr().err
