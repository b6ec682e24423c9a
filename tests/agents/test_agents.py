"""Every script runs as its documentation says: help, a tiny run that leaves a usable policy, errors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sde_gym.envs.run import run_controller
from sde_gym.offline import Transitions, collect, exploratory_schedule, save_minari, save_transitions
from sde_gym.offline.collect import trace_set_id
from sde_gym.policies.files import load_policy
from sde_gym.traces import TraceSet
from tests.builders import random_traces, store_traces

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


#: Decisions at the checkpoints of 180 decisions in 4 lanes; PPO plays whole rollouts.
CHECKPOINTS = {
    "sb3_dqn.py": [60, 120, 180],
    "sb3_ppo.py": [60, 120, 192],
}


@pytest.fixture(scope="module")
def other_traces() -> TraceSet:
    """Other texts of the toy model."""
    return random_traces(1, overrun=11)


@pytest.fixture(scope="module")
def other_folder(other_traces: TraceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_traces(tmp_path_factory.mktemp("traces") / "other", other_traces)


@pytest.fixture
def data(toy_traces: TraceSet) -> Transitions:
    return collect(
        toy_traces, exploratory_schedule((2, 6), 5), 8, 0, depths=(2, 6), max_draft=5, observation="paper"
    )


def leave_stale_policy(out: Path) -> None:
    """As an earlier run leaves it."""
    out.mkdir()
    for name in ("policy.safetensors", "policy.json"):
        (out / name).write_text("stale")


def run(script: str, *arguments: object, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    modules = os.pathsep.join((str(ROOT), str(path)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": modules}
    command = [sys.executable, f"agents/{script}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert "--seed" in result.stdout


@pytest.mark.parametrize("script", sorted(ONLINE))
def test_online_training_leaves_a_policy(
    script: str, toy_folder: Path, other_folder: Path, toy_traces: TraceSet, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run(
        script, "--out", out, "--traces", toy_folder, "--test", other_folder, "--lanes", 4, "--steps", 180,
        "--evaluate-every", 60, "--hidden", "8,8", "--depths", "2,6", *ONLINE[script],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "unmaintained" not in result.stderr
    policy = load_policy(out)
    assert policy.network.sizes == (11, 8, 8, 2)
    assert policy.meta["provenance"]["algorithm"] == script.removesuffix(".py")
    scalars = [json.loads(line) for line in (out / "scalars.jsonl").read_text().splitlines()]
    assert [row["step"] for row in scalars] == CHECKPOINTS[script]
    assert {"train/loss", "return", "acceptance_rate", "mean_exit_depth"} <= set(scalars[-1])
    best = max(row["return"] for row in scalars)
    played = run_controller(toy_traces, policy, depths=(2, 6))
    assert played.returns.mean() == pytest.approx(best)
    assert f"{best:.2f}" in result.stdout


@pytest.mark.parametrize("script", sorted(ONLINE))
def test_no_policy_of_an_earlier_run_stays(
    script: str, toy_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    leave_stale_policy(out)
    # Interrupted at its first decision: the reward cannot be computed.
    (tmp_path / "broken.py").write_text("def reward(tokens):\n    raise KeyboardInterrupt\n")
    result = run(
        script, "--out", out, "--traces", toy_folder, "--test", other_folder, "--lanes", 4, "--hidden", "8",
        "--reward", "broken:reward", *ONLINE[script], path=tmp_path,
    )  # fmt: skip
    assert result.returncode == 130, result.stderr
    assert json.loads((out / "settings.json").read_text())["reward"] == "broken:reward"
    assert not list(out.glob("policy.*"))


def test_offline_training_leaves_a_policy(
    toy_folder: Path, toy_traces: TraceSet, other_folder: Path, tmp_path: Path
) -> None:
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
        other_folder,
        *OFFLINE,
    )
    assert result.returncode == 0, result.stderr
    policy = load_policy(out)
    assert policy.meta["provenance"]["algorithm"] == "bcq"
    assert policy.meta["traces"] == trace_set_id(toy_traces)
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
    toy_folder: Path, other_folder: Path, data: Transitions, tmp_path: Path
) -> None:
    save_transitions(tmp_path / "data.npz", data)
    out = tmp_path / "run"
    leave_stale_policy(out)
    result = run(
        "offline_any.py", "--algo", "decision_transformer", "--data", tmp_path / "data.npz", "--out", out,
        "--traces", toy_folder, "--test", other_folder, *OFFLINE,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "no policy file" in result.stdout
    assert not list(out.glob("policy.*")), "nor that of an earlier run"
    saved = json.loads((out / "settings.json").read_text())
    assert (saved["depths"], saved["max_draft"], saved["observation"]) == (
        [2, 6], 5, "confidence,entropy,trace",
    )  # fmt: skip


def test_a_minari_data_set_is_trained_on(
    toy_folder: Path,
    other_traces: TraceSet,
    other_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    logged = collect(other_traces, exploratory_schedule((2, 6), 5), 8, 0, depths=(2, 6), max_draft=5)
    save_minari("sde_gym/toy/other-v0", logged, other_folder)
    out = tmp_path / "run"
    third = store_traces(tmp_path / "third", random_traces(2))
    result = run(
        "offline_any.py", "--algo", "dqn", "--data", "sde_gym/toy/other-v0", "--out", out, "--traces",
        toy_folder, "--test", third, *OFFLINE,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    policy = load_policy(out)
    assert (policy.depths, policy.max_draft, policy.observation) == ((2, 6), 5, logged.names)
    assert policy.meta["traces"] == trace_set_id(other_traces), "what it learned from, not what it played"


def test_data_of_test_texts_or_another_model_are_refused(
    data: Transitions, toy_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    save_transitions(tmp_path / "data.npz", data)
    model = {"name": "elsewhere", "weights_hash": "1" * 64}
    foreign = dataclasses.replace(data, settings={**data.settings, "model": model})
    save_transitions(tmp_path / "foreign.npz", foreign)
    for name, training, test, message in [
        ("data.npz", other_folder, toy_folder, "data.npz was collected on the texts of --test"),
        ("foreign.npz", toy_folder, other_folder, "foreign.npz was collected with elsewhere"),
    ]:
        result = run("offline_any.py", "--data", tmp_path / name, "--out", tmp_path / "out", "--traces",
                     training, "--test", test, *OFFLINE)  # fmt: skip
        assert result.returncode == 2, result.stderr
        assert message in " ".join(result.stderr.split())
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("offline_any.py", ("--algo", "fame", "--out", "x"), "'fame' is not registered"),
        ("offline_any.py", ("--data", "nothing.npz", "--out", "x"), "nothing.npz: no such file"),
        ("offline_any.py", ("--traces", "nowhere", "--out", "x"), "nowhere"),
        ("offline_any.py", ("--test", "TRACES", "--out", "x"), "holds the texts that are trained on"),
        ("sb3_dqn.py", ("--test", "TRACES", "--out", "x"), "holds the texts that are trained on"),
        ("sb3_ppo.py", ("--test", "TRACES", "--out", "x"), "holds the texts that are trained on"),
        ("sb3_dqn.py", ("--gamma", "1.5", "--out", "x"), "gamma is 1.5; it must be in (0, 1]"),
        ("sb3_ppo.py", ("--gamma", "0", "--out", "x"), "gamma is 0.0; it must be in (0, 1]"),
        ("sb3_dqn.py", ("--learning-rate", "inf", "--out", "x"), "learning_rate is inf"),
        ("sb3_ppo.py", ("--learning-rate", "-1", "--out", "x"), "learning_rate is -1.0"),
        ("sb3_ppo.py", ("--lanes", "1", "--rollout", "1", "--out", "x"), "--lanes 1 with --rollout 1"),
        ("sb3_dqn.py", ("--depths", "2,x", "--out", "x"), "--depths '2,x'"),
        ("sb3_ppo.py", ("--observation", "mood", "--out", "x"), "'mood' is not a feature"),
        ("evaluate.py", ("static:2",), "expected static:DEPTH,LENGTH"),
        ("evaluate.py", ("threshold:1.5",), "is not a probability"),
        ("evaluate.py", ("static:5,3",), "exit_depth: 5 is not one of the depths"),
        ("evaluate.py", ("plain", "static:2,3", "plain"), "policy 'plain' is named 2 times"),
        ("evaluate.py", ("nowhere/policy",), "no such file"),
    ],
)
def test_errors_are_sentences(
    script: str,
    arguments: tuple[str, ...],
    message: str,
    toy_folder: Path,
    other_folder: Path,
    tmp_path: Path,
) -> None:
    places = {"x": tmp_path / "out", "TRACES": toy_folder}
    given = [places.get(argument, argument) for argument in arguments]
    if "--traces" not in given:
        given += ["--traces", toy_folder]
    if script != "evaluate.py" and "--test" not in given:
        given += ["--test", other_folder]
    result = run(script, *given)
    assert result.returncode == 2, result.stderr
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
