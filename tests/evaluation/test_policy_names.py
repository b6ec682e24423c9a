"""Policies by name, and `sde-gym collect --q-true`, which stores their exact values with the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import exact_q
from sde_gym.evaluation.policy_names import FORMS, describe_policy, named_policy
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.files import save_policy
from sde_gym.policies.lite import CALMController, LITEController
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.traces import TraceSet

pytest.importorskip("minari")

ID = "toy/truth-v0"


@pytest.fixture(autouse=True)
def minari_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.fixture
def policy_file(toy_traces: TraceSet, tmp_path: Path) -> Path:
    bias = np.zeros(2, dtype=np.float32)
    layers = [(np.array([[3.0, -3.0]], dtype=np.float32), bias), (np.eye(2, dtype=np.float32), bias)]
    policy = QController(QNetwork(layers), ("top1",), toy_traces.depths, toy_traces.num_layers, 12)
    return save_policy(tmp_path / "net", policy)[0]


def collect(folder: Path, *options: object) -> Any:
    from sde_gym.cli import app

    arguments = ("collect", "--traces", folder, "--behaviour", "uniform", "--episodes", 5, *options)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_names_are_rules_or_files(policy_file: Path) -> None:
    static = named_policy("static:4,6")
    assert isinstance(static, StaticController)
    assert describe_policy(static) == {"kind": "static", "exit_depth": 4, "draft_length": 6}
    assert isinstance(named_policy("threshold:0.2"), ThresholdController)
    loaded = named_policy(str(policy_file))
    assert isinstance(loaded, QController)
    described = describe_policy(loaded, str(policy_file))
    assert described["path"] == str(policy_file)
    assert described["weights_sha256"] == loaded.meta["weights_sha256"]
    for name in ("uniform", "static:4", "static:a,b", "threshold:", "no/such/file"):
        with pytest.raises(InputError, match="is no policy file and none of the forms static:4,4"):
            named_policy(name)
    with pytest.raises(InputError, match="not a probability"):
        named_policy("threshold:2")


def test_the_selection_methods_have_names(toy_traces: TraceSet, toy_folder: Path) -> None:
    draft_verify = named_policy("draft_verify:4")
    assert isinstance(draft_verify, DraftVerifyController)
    assert (draft_verify.exit_depth, draft_verify.threshold) == (4, 0.8)
    calm = named_policy("calm:0.7,64")
    assert isinstance(calm, CALMController)
    assert (calm.threshold, calm.max_new_tokens) == (0.7, 64)
    assert isinstance(named_policy("del"), DELController)
    adadecode = named_policy("adadecode:0.8")
    assert isinstance(adadecode, AdaDecodeController)
    assert adadecode.gamma == 0.8
    lite = named_policy(f"lite:{toy_folder}@0.8")
    assert isinstance(lite, LITEController)
    assert lite.by_depth == LITEController.calibrated(toy_traces, 0.8).by_depth
    described = describe_policy(lite)
    assert (described["kind"], described["name"]) == ("other", "lite(0.8)")
    for name in ("draft_verify:", "draft_verify:4.5", "calm:0.7", "lite:0.8", "lite:@0.8", "del:", "del:3",
                 "lite:x@y", "adadecode", "adadecode:high"):  # fmt: skip
        with pytest.raises(InputError, match="is no policy file and none of the forms"):
            named_policy(name)
    for name, message in (
        ("calm:0.7,0", "max_new_tokens: 0 is not"),
        ("adadecode:7", "gamma: 7.0 is not a number in"),
        ("lite:no/such/set@0.8", "'no/such/set' is neither a folder nor a shipped trace set"),
        (f"lite:{toy_folder}@8", "target_acceptance: 8.0"),
    ):
        with pytest.raises(InputError, match=message):
            named_policy(name)


def test_every_form_is_a_name(toy_folder: Path, policy_file: Path) -> None:
    for form in FORMS:
        name = form.replace("TRACES", str(toy_folder)).replace("PATH", str(policy_file))
        assert named_policy(name).name


@pytest.mark.parametrize("gamma", [None, 0.9])
def test_exact_values_are_stored_with_the_data(
    toy_traces: TraceSet, toy_folder: Path, gamma: float | None
) -> None:
    from sde_gym.offline import dataset_to_transitions, read_info

    options = () if gamma is None else ("--gamma", gamma)
    result = collect(toy_folder, "--q-true", "static:3,4", *options, "--out", ID)
    assert result.exit_code == 0, result.output
    data = dataset_to_transitions(ID)
    discount = 1.0 if gamma is None else gamma
    truth = exact_q(StaticController(3, 4), data, toy_traces, gamma=discount)
    np.testing.assert_array_equal(read_info(ID, "q_true"), truth.q)
    policy = {"kind": "static", "exit_depth": 3, "draft_length": 4}
    assert data.settings["q_true"] == {"policy": policy, "gamma": discount}


def test_a_policy_file_will_do(toy_traces: TraceSet, toy_folder: Path, policy_file: Path) -> None:
    from sde_gym.offline import dataset_to_transitions, read_info

    assert collect(toy_folder, "--q-true", policy_file, "--out", ID).exit_code == 0
    data = dataset_to_transitions(ID)
    truth = exact_q(named_policy(str(policy_file)), data, toy_traces)
    np.testing.assert_array_equal(read_info(ID, "q_true"), truth.q)
    assert data.settings["q_true"]["policy"]["kind"] == "network"


def test_without_it_nothing_is_stored(toy_folder: Path) -> None:
    from sde_gym.offline import dataset_to_transitions, read_info

    assert collect(toy_folder, "--out", ID).exit_code == 0
    assert "q_true" not in dataset_to_transitions(ID).settings
    with pytest.raises(InputError, match="hold no q_true"):
        read_info(ID, "q_true")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--q-true", "static:3,4", "--out", "data.npz"), "data.npz: an .npz file has no place for --q-true"),
        (("--gamma", "0.9"), "--gamma is the discount of --q-true"),
        (("--q-true", "static:3,4", "--gamma", "0"), "gamma is 0.0; it must be in (0, 1]"),
        (("--q-true", "static:5,4"), "exit_depth: 5 is not one of the depths"),
        (("--q-true", "adadecode:0.8"), "'adadecode(0.8)' walks every token of a round"),
        (("--q-true", "uniform"), "'uniform' is no policy file and none of the forms"),
    ],
)
def test_nonsense_is_refused(toy_folder: Path, options: tuple[str, ...], message: str) -> None:
    result = collect(toy_folder, "--out", ID, *options)
    assert result.exit_code == 2
    assert message in result.stderr
