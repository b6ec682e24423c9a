"""Policy files: `NAME.safetensors` holds a policy, `NAME.json` a copy of its description to read.

The description names the observation, its normalisation and the setting (depths, layers, cap) that
the policy was trained in, and the SHA-256 of the weights. It is JSON in the metadata of the
safetensors file, which is replaced as a whole: weights and description cannot come apart. The copy
is for people and is never read back. Neither file can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from sde_gym.checks import is_whole, shown
from sde_gym.errors import InputError
from sde_gym.files import atomic_path, write_json
from sde_gym.policies.observation import resolve_observation
from sde_gym.policies.qnetwork import QController, QNetwork

FORMAT = "sde_gym-policy"
FORMAT_VERSION = 2

#: Key of the description in the metadata of the safetensors file.
METADATA_KEY = "sde_gym_policy"

#: Name of the pair inside a folder, for a path that is a folder.
DEFAULT_NAME = "policy"

#: Every key that this version of the description has, and the type of its value.
_KEYS: dict[str, type] = {
    "format": str,
    "format_version": int,
    "name": str,
    "architecture": dict,  # kind, sizes, activation
    "observation": list,  # names, in the order of the network's inputs
    "normalisation": dict,  # mean and std, one number per input
    "k": int,  # tokens behind the feature "confidence"
    "window": int,  # tokens behind the feature "trace"
    "depths": list,
    "num_layers": int,
    "max_draft": int,
    "model": dict,  # name and weights hash of the language model
    "traces": str,  # identity of the trace set it was trained on
    "training": dict,  # the training settings
    "provenance": dict,  # package versions, seed, value reached, date: whatever the maker knows
    "weights_sha256": str,
}


def policy_paths(path: str | Path) -> tuple[Path, Path]:
    """The pair of files behind a path.

    Args:
        path: `NAME`, `NAME.safetensors`, `NAME.json`, or a folder that holds `policy.*`.

    Returns:
        The path of the policy and that of its readable copy; neither needs to exist.

    Raises:
        InputError: no path.
    """
    if not isinstance(path, (str, PathLike)):
        raise InputError(f"policy: {shown(path)} is no path; give that of a policy file, or of its folder")
    base = Path(path)
    if base.is_dir():
        base = base / DEFAULT_NAME
    elif base.suffix in (".safetensors", ".json"):
        base = base.with_suffix("")
    return base.with_name(base.name + ".safetensors"), base.with_name(base.name + ".json")


def save_policy(
    path: str | Path,
    controller: QController,
    *,
    model: Mapping[str, Any] | None = None,
    traces: str = "",
    training: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Write a policy, replacing the file as a whole, then the readable copy of its description.

    Args:
        path: see `policy_paths`.
        controller: the policy.
        model: name and weights hash of the language model that it steers.
        traces: identity of the trace set that it was trained on.
        training: the training settings, plain JSON values.
        provenance: anything else worth keeping, plain JSON values.

    Returns:
        The paths of the policy and of the copy.
    """
    weights_path, json_path = policy_paths(path)
    tensors = {}
    for number, (weight, bias) in enumerate(controller.network.layers):
        tensors[f"layers.{number}.weight"] = weight
        tensors[f"layers.{number}.bias"] = bias
    meta = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": controller.name,
        "architecture": {"kind": "mlp", "sizes": list(controller.network.sizes), "activation": "relu"},
        "observation": list(controller.observation),
        "normalisation": {
            "mean": controller.network.mean.tolist(),
            "std": controller.network.std.tolist(),
        },
        "k": controller.k,
        "window": controller.window,
        "depths": list(controller.depths),
        "num_layers": controller.num_layers,
        "max_draft": controller.max_draft,
        "model": dict(model or {}),
        "traces": traces,
        "training": dict(training or {}),
        "provenance": dict(provenance or {}),
        "weights_sha256": weights_hash(tensors),
    }
    content = save_tensors(tensors, {METADATA_KEY: json.dumps(meta, allow_nan=False)})
    with atomic_path(weights_path) as temporary:
        temporary.write_bytes(content)
    write_json(json_path, meta)
    return weights_path, json_path


def weights_hash(tensors: Mapping[str, np.ndarray]) -> str:
    """Hex SHA-256 over the tensors, by name: of each its name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def load_policy(path: str | Path) -> QController:
    """Read a policy back.

    Args:
        path: see `policy_paths`.

    Returns:
        A controller whose `meta` is the whole description.

    Raises:
        InputError: no such file, a format or version that this package does not know, weights
            that are cut, altered, not float32 or not finite, unknown observation names, or shapes
            that do not fit; the message names the file.
    """
    weights_path, json_path = policy_paths(path)
    if not weights_path.is_file():
        other = f", though {json_path.name} is there" if json_path.is_file() else ""
        raise InputError(f"{weights_path}: no such file{other}; the .safetensors file is the policy")
    content = weights_path.read_bytes()
    try:
        tensors = load_tensors(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{weights_path}: not a safetensors file, or a cut one ({error})") from None
    meta = _description(content, weights_path)
    _check_json(meta, weights_path)
    if weights_hash(tensors) != meta["weights_sha256"]:
        raise InputError(
            f"{weights_path}: the SHA-256 of its weights is not the one it names; the file is altered; "
            "copy or train it again"
        )
    try:
        network = QNetwork(
            _layers(tensors, meta["architecture"]),
            np.asarray(meta["normalisation"]["mean"], dtype=np.float32),
            np.asarray(meta["normalisation"]["std"], dtype=np.float32),
        )
        return QController(
            network,
            resolve_observation(tuple(meta["observation"])),
            meta["depths"],
            meta["num_layers"],
            meta["max_draft"],
            k=meta["k"],
            window=meta["window"],
            name=meta["name"],
            meta=meta,
        )
    except InputError as error:
        raise InputError(f"{weights_path}: {error}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"{weights_path}: a value has the wrong type or is missing ({error})") from None


def _description(content: bytes, path: Path) -> Any:
    """The JSON in the metadata of a safetensors file that is known to be one."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    try:
        return json.loads(metadata[METADATA_KEY])
    except (KeyError, json.JSONDecodeError):
        raise InputError(
            f"{path}: not a policy file, its metadata holds no description; train the policy again"
        ) from None


def _check_json(meta: Any, path: Path) -> None:
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f'{path}: not a policy file; expected a JSON object with "format": "{FORMAT}"')
    if meta.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {meta.get('format_version')!r}; this package reads version "
            f"{FORMAT_VERSION}; install the sde_gym that wrote it, or train the policy again"
        )
    for key, kind in _KEYS.items():
        value = meta.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{path}: {key} is {value!r}, expected a value of type {kind.__name__}")
    wrong = [depth for depth in meta["depths"] if not is_whole(depth)]
    if wrong:
        raise InputError(f"{path}: depths holds {shown(wrong[0])}, expected numbers; train the policy again")
    unknown = sorted(set(meta) - set(_KEYS))
    if unknown:
        raise InputError(f"{path}: unknown entries {', '.join(unknown)} for format version {FORMAT_VERSION}")


def _layers(
    tensors: Mapping[str, np.ndarray], architecture: Mapping[str, Any]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weight and bias of every layer, checked against the architecture in the JSON."""
    if architecture.get("kind") != "mlp" or architecture.get("activation") != "relu":
        raise InputError(f"architecture {dict(architecture)} is unknown; expected an mlp with relu")
    sizes = list(architecture["sizes"])
    expected: dict[str, tuple[int, ...]] = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        expected[f"layers.{number}.weight"] = (inputs, outputs)
        expected[f"layers.{number}.bias"] = (outputs,)
    if set(tensors) != set(expected):
        raise InputError(
            f"the weights hold {', '.join(sorted(tensors)) or 'nothing'}; expected "
            f"{', '.join(sorted(expected))} for sizes {sizes}"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape or tensors[name].dtype != np.float32:
            raise InputError(
                f"{name} is {tensors[name].dtype} {tensors[name].shape}; expected float32 {shape}"
            )
    return [
        (tensors[f"layers.{number}.weight"], tensors[f"layers.{number}.bias"])
        for number in range(len(sizes) - 1)
    ]
