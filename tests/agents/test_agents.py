"""Every script runs as its documentation says: help, a tiny run that leaves a usable policy, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sde_gym.envs.run import run_controller
from sde_gym.offline import collect, exploratory_schedule, save_transitions
from sde_gym.policies.files import load_policy
from sde_gym.traces import TraceSet

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "agents").glob("*.py"))
OFFLINE = (
    "--episodes",
    8,
    "--gradient-steps",
    10,
    "--evaluate-every",
    5,
    "--hidden",
    "8,8",
    "--batch-size",
    40,
)
ONLINE = {
    "sb3_dqn.py": ("--learning-starts", 20),
    "sb3_ppo.py": ("--rollout", 16),
}


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"agents/{script}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert "--seed" in result.stdout


@pytest.mark.parametrize("script", sorted(ONLINE))
def test_online_training_leaves_a_policy(
    script: str, toy_folder: Path, toy_traces: TraceSet, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run(
        script, "--out", out, "--traces", toy_folder, "--test", toy_folder, "--lanes", 4, "--steps", 130,
        "--evaluate-every", 60, "--hidden", "8,8", "--depths", "2,6", *ONLINE[script],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    policy = load_policy(out)
    assert policy.network.sizes == (11, 8, 8, 2)
    scalars = [json.loads(line) for line in (out / "scalars.jsonl").read_text().splitlines()]
    assert len(scalars) >= 3
    assert {"train/loss", "return", "acceptance_rate", "mean_exit_depth"} <= set(scalars[-1])
    best = max(row["return"] for row in scalars)
    played = run_controller(toy_traces, policy, depths=(2, 6))
    assert played.returns.mean() == pytest.approx(best)
    assert f"{best:.2f}" in result.stdout


def test_offline_training_leaves_a_policy(toy_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(
        "offline_any.py",
        "--algo",
        "bcq",
        "--out",
        out,
        "--traces",
        toy_folder,
        "--test",
        toy_folder,
        *OFFLINE,
    )
    assert result.returncode == 0, result.stderr
    policy = load_policy(out)
    assert policy.meta["training"]["algorithm"] == "bcq"
    assert [json.loads(line)["step"] for line in (out / "scalars.jsonl").read_text().splitlines()] == [5, 10]
    assert "of 10" in result.stdout
    rows = run("evaluate.py", out, "static:2,3", "threshold:0.5,0.4", "random:0.3", "plain",
               "--traces", toy_folder, "--json", tmp_path / "values.json")  # fmt: skip
    assert rows.returncode == 0, rows.stderr
    totals = json.loads((tmp_path / "values.json").read_text())
    assert list(totals) == [str(out), "static:2,3", "threshold:0.5,0.4", "random:0.3", "plain"]
    assert totals["plain"]["speedup"] == 1.0
    assert f"{totals[str(out)]['speedup']:.2f}x" in rows.stdout


def test_decision_transformer_is_compared_but_not_written(
    toy_folder: Path, toy_traces: TraceSet, tmp_path: Path
) -> None:
    data = collect(
        toy_traces, exploratory_schedule((2, 6), 5), 8, 0, depths=(2, 6), max_draft=5, observation="paper"
    )
    save_transitions(tmp_path / "data.npz", data)
    out = tmp_path / "run"
    result = run(
        "offline_any.py", "--algo", "decision_transformer", "--data", tmp_path / "data.npz", "--out", out,
        "--traces", toy_folder, "--test", toy_folder, *OFFLINE,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "no policy file" in result.stdout
    assert not (out / "policy.safetensors").exists()
    saved = json.loads((out / "settings.json").read_text())
    assert (saved["depths"], saved["max_draft"], saved["observation"]) == (
        [2, 6], 5, "confidence,entropy,trace",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("offline_any.py", ("--algo", "fame", "--out", "x"), "'fame' is not registered"),
        ("offline_any.py", ("--data", "nothing.npz", "--out", "x"), "nothing.npz: no such file"),
        ("offline_any.py", ("--traces", "nowhere", "--out", "x"), "nowhere"),
        ("sb3_dqn.py", ("--depths", "2,x", "--out", "x"), "--depths '2,x'"),
        ("sb3_ppo.py", ("--observation", "mood", "--out", "x"), "'mood' is not a feature"),
        ("evaluate.py", ("static:2",), "expected static:DEPTH,LENGTH"),
        ("evaluate.py", ("threshold:1.5",), "is not a probability"),
        ("evaluate.py", ("static:5,3",), "exit_depth: 5 is not one of the depths"),
        ("evaluate.py", ("nowhere/policy",), "no such file"),
    ],
)
def test_errors_are_sentences(
    script: str, arguments: tuple[str, ...], message: str, toy_folder: Path, tmp_path: Path
) -> None:
    given = [tmp_path / "out" if argument == "x" else argument for argument in arguments]
    if "--traces" not in given:
        given += ["--traces", toy_folder]
    if script != "evaluate.py":
        given += ["--test", toy_folder]
    result = run(script, *given)
    assert result.returncode == 2, result.stderr
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
