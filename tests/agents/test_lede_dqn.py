"""The script runs as its documentation says, and its errors are sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from sde_gym.policies.files import load_policy

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "agents/lede_dqn.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_help_lists_every_setting() -> None:
    result = run("--help")
    assert result.returncode == 0, result.stderr
    for option in (
        "--traces",
        "--out",
        "--episodes",
        "--gradient-steps",
        "--seed",
        "--n-steps",
        "--held-out",
    ):
        assert option in result.stdout


def test_it_trains_and_compares(toy_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = (
        "--episodes",
        12,
        "--gradient-steps",
        20,
        "--evaluate-every",
        7,
        "--hidden",
        "8,8",
        "--held-out",
        0.34,
    )
    result = run("--traces", toy_folder, "--out", out, *small)
    assert result.returncode == 0, result.stderr
    assert load_policy(out).network.sizes == (11, 8, 8, 2)
    scalars = [json.loads(line) for line in (out / "scalars.jsonl").read_text().splitlines()]
    assert [row["step"] for row in scalars] == [7, 14, 20], "also those between two calls of progress"
    assert "transitions collected; 20 gradient steps" in result.stdout
    assert "4 training and 2 held-out texts" in result.stdout
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    assert list(rows) == ["plain decoding", "random", "best static", "best threshold", "LEDE"]
    assert "1.00x" in rows["plain decoding"]
    assert "without overrun" not in result.stdout


def test_errors_are_sentences(toy_folder: Path, tmp_path: Path) -> None:
    for arguments, message in [
        (("--traces", tmp_path / "nowhere"), "nowhere"),
        (("--traces", toy_folder, "--held-out", 1.5), "held_out is 1.5"),
        (("--traces", toy_folder, "--seed", -1), "seed is -1; it must be at least 0"),
    ]:
        result = run(*arguments, "--out", tmp_path / "out")
        assert result.returncode == 2
        assert message in " ".join(result.stderr.split())
        assert "Traceback" not in result.stderr
