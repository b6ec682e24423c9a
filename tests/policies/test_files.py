"""Policy files come back as they were saved, and damaged or foreign ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from sde_gym.errors import InputError
from sde_gym.policies.files import METADATA_KEY, load_policy, policy_paths, save_policy, weights_hash
from sde_gym.policies.qnetwork import QController, QNetwork


def make_policy(seed: int = 0) -> QController:
    rng = np.random.default_rng(seed)
    sizes = (3, 16, 8, 2)
    layers = [(rng.normal(size=(a, b)), rng.normal(size=b)) for a, b in pairwise(sizes)]
    network = QNetwork(layers, rng.normal(size=3), rng.uniform(0.1, 3.0, size=3))
    return QController(
        network, ("top1", "trace", "depth"), (2, 4, 8), 24, 12, k=4, window=6, name="mine"
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_policy(
        tmp_path / "policy",
        make_policy(),
        model={"name": "toy", "weights_hash": "ab12"},
        traces="set-7",
        training={"gamma": 0.9},
        provenance={"seed": 3},
    )
    return tmp_path


def rewrite(
    folder: Path,
    change: Callable[[dict[str, Any]], object] = lambda meta: None,
    tensors: dict[str, np.ndarray] | None = None,
) -> None:
    """The policy with another description or other tensors and a hash that fits, as a careless tool would."""
    path = folder / "policy.safetensors"
    with safe_open(path, "np") as stored:
        meta = json.loads(stored.metadata()[METADATA_KEY])
    kept = tensors or load_tensors(path.read_bytes())
    meta["weights_sha256"] = weights_hash(kept)
    change(meta)
    path.write_bytes(save_tensors(kept, {METADATA_KEY: json.dumps(meta)}))


def test_round_trip_is_exact(saved: Path) -> None:
    policy, back = make_policy(), load_policy(saved)
    rows = np.random.default_rng(5).normal(size=(100, 3)).astype(np.float32)
    np.testing.assert_array_equal(back.network(rows), policy.network(rows))
    for attribute in ("observation", "depths", "num_layers", "max_draft", "k", "window", "name"):
        assert getattr(back, attribute) == getattr(policy, attribute), attribute
    assert back.meta["model"] == {"name": "toy", "weights_hash": "ab12"}
    assert (back.meta["traces"], back.meta["training"], back.meta["provenance"]) == (
        "set-7", {"gamma": 0.9}, {"seed": 3},
    )  # fmt: skip


def test_every_way_to_name_the_pair(tmp_path: Path) -> None:
    pair = (tmp_path / "v1.2.safetensors", tmp_path / "v1.2.json")
    assert policy_paths(tmp_path / "v1.2.safetensors") == pair
    assert policy_paths(tmp_path / "v1.2.json") == pair
    assert policy_paths(tmp_path / "name") == (tmp_path / "name.safetensors", tmp_path / "name.json")
    assert policy_paths(tmp_path) == (tmp_path / "policy.safetensors", tmp_path / "policy.json")
    assert save_policy(tmp_path / "v1.2.json", make_policy()) == pair
    assert load_policy(tmp_path / "v1.2.safetensors").name == "mine"


def test_saving_again_replaces_and_leaves_no_other_file(saved: Path) -> None:
    save_policy(saved, make_policy(seed=1))
    rows = np.zeros((1, 3), dtype=np.float32)
    np.testing.assert_array_equal(load_policy(saved).network(rows), make_policy(seed=1).network(rows))
    assert sorted(path.name for path in saved.iterdir()) == ["policy.json", "policy.safetensors"]


def test_a_missing_policy_is_named(saved: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.safetensors: no such file; the .safetensors file is"):
        load_policy(saved / "nowhere")
    (saved / "policy.safetensors").unlink()
    with pytest.raises(InputError, match=r"no such file, though policy.json is there"):
        load_policy(saved)


@pytest.mark.parametrize("copy", [None, "{", "[]", "other"])
def test_the_copy_is_not_needed_and_not_believed(saved: Path, tmp_path: Path, copy: str | None) -> None:
    """A kill between the two renames leaves the new policy beside the old copy, or beside none."""
    if copy is None:
        (saved / "policy.json").unlink()
    elif copy == "other":
        save_policy(tmp_path / "other", make_policy(seed=1), traces="set-8")
        (saved / "policy.json").write_bytes((tmp_path / "other.json").read_bytes())
    else:
        (saved / "policy.json").write_text(copy)
    back = load_policy(saved)
    assert back.meta["traces"] == "set-7"
    rows = np.zeros((1, 3), dtype=np.float32)
    np.testing.assert_array_equal(back.network(rows), make_policy().network(rows))


def test_the_copy_says_what_the_policy_says(saved: Path) -> None:
    assert json.loads((saved / "policy.json").read_text()) == load_policy(saved).meta


def test_cut_or_altered_weights_are_refused(saved: Path) -> None:
    path = saved / "policy.safetensors"
    content = path.read_bytes()
    for cut in (content[:-40], content[:200], content[:5], b""):
        path.write_bytes(cut)
        with pytest.raises(InputError, match=r"policy.safetensors: not a safetensors file, or a cut one"):
            load_policy(saved)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"policy.safetensors: the SHA-256 of its weights is not"):
        load_policy(saved)


def test_other_safetensors_files_are_refused(saved: Path) -> None:
    tensors = load_tensors((saved / "policy.safetensors").read_bytes())
    for metadata in (None, {"format": "pt"}, {METADATA_KEY: "{"}):
        (saved / "policy.safetensors").write_bytes(save_tensors(tensors, metadata))
        with pytest.raises(InputError, match=r"policy.safetensors: not a policy file"):
            load_policy(saved)
    for other in ("[]", "null", '"policy"'):
        (saved / "policy.safetensors").write_bytes(save_tensors(tensors, {METADATA_KEY: other}))
        with pytest.raises(InputError, match=r"policy.safetensors: not a policy file"):
            load_policy(saved)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("layers.1.weight", np.full((16, 8), np.nan, dtype=np.float32), "NaN"),
        ("layers.1.weight", np.ones((16, 8), dtype=np.float16), "float16"),
        ("layers.1.weight", np.ones((8, 16), dtype=np.float32), r"\(8, 16\); expected float32 \(16, 8\)"),
        ("layers.9.bias", np.ones(2, dtype=np.float32), "layers.9.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused(saved: Path, name: str, array: np.ndarray, message: str) -> None:
    tensors = load_tensors((saved / "policy.safetensors").read_bytes())
    rewrite(saved, tensors={**tensors, name: array})
    with pytest.raises(InputError, match=f"policy.safetensors: .*{message}"):
        load_policy(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "not a policy file"),
        (lambda m: m.update(format_version=3), "format version 3; this package reads version 2"),
        (lambda m: m.update(format_version="1"), "format version '1'"),
        (lambda m: m.pop("depths"), "depths is None, expected a value of type list"),
        (lambda m: m.update(max_draft="12"), "max_draft is '12'"),
        (lambda m: m.update(extra=1), "unknown entries extra"),
        (lambda m: m.update(observation=["top1", "trace", "mood"]), "mood"),
        (lambda m: m.update(observation=["top1", "trace"]), "3 inputs but the observation has 2"),
        (lambda m: m.update(depths=[8, 4]), "ascending"),
        (lambda m: m.update(depths=["2"]), "depths holds '2', expected numbers"),
        (lambda m: m.update(depths=[True]), "depths holds True"),
        (lambda m: m["normalisation"].update(mean=[0.0]), "mean has shape"),
        (lambda m: m["normalisation"].update(std=[1.0, 0.0, 1.0]), "positive"),
        (lambda m: m["normalisation"].pop("std"), "missing"),
        (lambda m: m["normalisation"].update(std=["x", 1, 1]), "wrong type"),
        (lambda m: m["architecture"].update(kind="transformer"), "unknown; expected an mlp"),
        (lambda m: m["architecture"].update(sizes=[3, 2]), "expected layers.0.bias"),
        (lambda m: m["architecture"].pop("sizes"), "sizes"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    saved: Path, change: Callable[[dict], None], message: str
) -> None:
    rewrite(saved, change)
    with pytest.raises(InputError, match=f"policy.safetensors: .*{message}"):
        load_policy(saved)


@pytest.mark.parametrize("path", [None, 5, ["a"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InputError, match=r"policy: .* is no path"):
        load_policy(path)
