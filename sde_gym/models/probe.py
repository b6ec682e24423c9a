"""The exit probe: how probable it is that a depth's proposal is the last layer's token.

A logistic regression a depth, on what the exit head sees (the state at that depth, adapted and
normalised) and on four numbers that the head says. The state knows more than the head's own
confidence does: LEDE's confidence is about the shallow distribution, the probe about agreement. It costs
one inner product of the width of the model, next to a head of thousands of them.

A file, `probe.safetensors`, holds the weights; its description is JSON in the file's metadata and names
the language model and the exit heads that it belongs to, by their hashes. `probe.json` beside it is a
copy for people and is never read back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, write_json
from sde_gym.models.loading import PROBE_FILE

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel

FORMAT = "sde_gym-probe"
FORMAT_VERSION = 1

#: Key of the description in the metadata of the safetensors file.
METADATA_KEY = "sde_gym_probe"

HEAD_INPUTS = ("logprob1", "logprob2", "entropy", "margin")
"""What it reads of the head, behind the state: log p of the two best tokens, the entropy, p(1) - p(2)."""

#: Entries of the description that have to be there, and their types.
_KEYS: dict[str, type] = {
    "format": str,
    "format_version": int,
    "model": str,
    "model_hash": str,
    "head": str,
    "dtype": str,
    "depths": list,
    "inputs": list,
}


def head_inputs(
    logprobs: NDArray[np.floating[Any]], entropy: NDArray[np.floating[Any]]
) -> NDArray[np.float32]:
    """`HEAD_INPUTS` of n rows, float32 (n, 4).

    Args:
        logprobs: float (n, >= 2), of the most probable tokens, best first, nats.
        entropy: float (n,), nats.
    """
    best, second = logprobs[:, 0], logprobs[:, 1]
    rows = np.empty((len(best), len(HEAD_INPUTS)), dtype=np.float32)
    rows[:, 0], rows[:, 1], rows[:, 2] = best, second, entropy
    rows[:, 3] = np.exp(best) - np.exp(second)
    return rows


class ExitProbe:
    """P(the proposal is the last layer's token) for any state at some depths.

    Args:
        depths: the m depths that it knows, rising.
        weight: float (m, width + 4): of the state, then of `HEAD_INPUTS`.
        bias: float (m,).
        model: name of the language model.
        model_hash: of its weights.
        head: hash of its exit heads, as `LayeredModel.head_hash`.
        dtype: of the model when the probe was trained.
        report: how it was trained and what was measured, plain JSON values.

    Attributes:
        identity: 16 hex digits that identify depths and weights.

    Raises:
        InputError: shapes that do not fit, depths that do not rise, or a weight that is not finite.
    """

    def __init__(
        self,
        depths: Sequence[int],
        weight: ArrayLike,
        bias: ArrayLike,
        *,
        model: str = "",
        model_hash: str = "",
        head: str = "full",
        dtype: str = "float32",
        report: Mapping[str, Any] | None = None,
    ) -> None:
        self.depths = tuple(int(depth) for depth in depths)
        self.weight = np.array(weight, dtype=np.float32)
        self.bias = np.array(bias, dtype=np.float32)
        self.model, self.model_hash, self.head, self.dtype = model, model_hash, head, dtype
        self.report: Mapping[str, Any] = report or {}
        m = len(self.depths)
        if not m or list(self.depths) != sorted(set(self.depths)) or self.depths[0] < 1:
            raise InputError(f"probe: its depths {list(self.depths)} do not rise from 1 or more")
        if self.weight.ndim != 2 or len(self.weight) != m or self.bias.shape != (m,) or self.width < 1:
            raise InputError(
                f"probe: weight {self.weight.shape} and bias {self.bias.shape} do not fit {m} depths; "
                f"expected ({m}, width + {len(HEAD_INPUTS)}) and ({m},)"
            )
        if not (np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise InputError("probe: a weight is not finite")
        self.weight.setflags(write=False)
        self.bias.setflags(write=False)
        digest = hashlib.sha256(repr((self.depths, self.weight.shape)).encode())
        digest.update(self.weight.tobytes() + self.bias.tobytes())
        self.identity = digest.hexdigest()[:16]
        self._index = {depth: index for index, depth in enumerate(self.depths)}

    @property
    def width(self) -> int:
        """Of the states that it reads."""
        return self.weight.shape[-1] - len(HEAD_INPUTS)

    def __call__(
        self,
        depth: int,
        states: NDArray[np.floating[Any]],
        logprobs: NDArray[np.floating[Any]],
        entropy: NDArray[np.floating[Any]],
    ) -> NDArray[np.float32]:
        """The probability for each of n states, float32 (n,).

        Args:
            depth: one of `depths`.
            states: float (n, width), what the head saw (`ExitHeads.states`).
            logprobs: float (n, >= 2), of the head's most probable tokens, best first, nats.
            entropy: float (n,), of the head's distribution, nats.

        Raises:
            InputError: a depth that it does not know.
        """
        index = self._index.get(depth)
        if index is None:
            raise InputError(f"probe: depth {depth} is none of {list(self.depths)}, which it was trained for")
        weight, width = self.weight[index], self.width
        logit = states @ weight[:width] + head_inputs(logprobs, entropy) @ weight[width:] + self.bias[index]
        probability: NDArray[np.float32] = 1.0 / (1.0 + np.exp(-np.clip(logit, -60.0, 60.0)))
        return probability

    def check(self, model: LayeredModel) -> None:
        """Raise InputError unless it was trained for this model's weights, exit heads and width."""
        if self.width != model.hidden_size or self.depths[-1] >= model.num_layers:
            raise InputError(
                f"probe: made for states of {self.width} numbers at depths {list(self.depths)}, but "
                f"{model.name!r} has {model.hidden_size} and {model.num_layers} layers"
            )
        for what, mine, other in (
            ("weights", self.model_hash, model.weights_hash()),
            ("exit heads", self.head, model.head_hash()),
        ):
            if mine != other:
                raise InputError(
                    f"probe: trained for the {what} {mine}, but those of {model.name!r} are {other}; train a "
                    "probe for this model (`sde-gym train-probe`)"
                )


def save_probe(path: str | Path, probe: ExitProbe) -> Path:
    """Write a probe, replacing the file as a whole, then the readable copy of its description.

    Args:
        path: a file PATH.safetensors, or a folder, which gets `probe.safetensors`.
        probe: what to write.

    Returns:
        The path of the safetensors file.
    """
    from safetensors.numpy import save

    target = Path(path)
    if target.suffix != ".safetensors":
        target = target / PROBE_FILE
    meta = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": probe.model,
        "model_hash": probe.model_hash,
        "head": probe.head,
        "dtype": probe.dtype,
        "depths": list(probe.depths),
        "inputs": ["state", *HEAD_INPUTS],
        "identity": probe.identity,
        "report": dict(probe.report),
    }
    tensors = {"weight": np.array(probe.weight), "bias": np.array(probe.bias)}
    content = save(tensors, {METADATA_KEY: json.dumps(meta, allow_nan=False)})
    with atomic_path(target) as temporary:
        temporary.write_bytes(content)
    write_json(target.with_suffix(".json"), meta)
    return target


def load_probe(path: str | Path) -> ExitProbe:
    """Read a probe back.

    Args:
        path: as for `save_probe`.

    Raises:
        InputError: no such file, no probe file of this version, or one that is cut or altered; the
            message names the file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    source = Path(path)
    if source.is_dir():
        source = source / PROBE_FILE
    if not source.is_file():
        raise InputError(f"{source}: no such file")
    content = source.read_bytes()
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{source}: not a safetensors file, or a cut one ({error})") from None
    meta = _description(content, source)
    if set(tensors) != {"weight", "bias"} or any(array.dtype != np.float32 for array in tensors.values()):
        raise InputError(f"{source}: expected float32 tensors weight and bias, found {', '.join(tensors)}")
    try:
        probe = ExitProbe(
            meta["depths"],
            tensors["weight"],
            tensors["bias"],
            model=meta["model"],
            model_hash=meta["model_hash"],
            head=meta["head"],
            dtype=meta["dtype"],
            report=meta.get("report"),
        )
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{source}: {error}") from None
    if meta.get("identity") != probe.identity:
        raise InputError(f"{source}: its weights are not those it names, the file is altered; train it again")
    return probe


def _description(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON in the metadata of a safetensors file that is known to be one, checked."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    try:
        meta = json.loads(metadata[METADATA_KEY])
    except (KeyError, json.JSONDecodeError):
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f"{path}: not a probe file, its metadata does not say so; train the probe again")
    if meta.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {meta.get('format_version')!r}; this package reads version "
            f"{FORMAT_VERSION}; install the sde_gym that wrote it, or train the probe again"
        )
    for key, kind in _KEYS.items():
        if not isinstance(meta.get(key), kind) or isinstance(meta.get(key), bool):
            raise InputError(f"{path}: {key} is {meta.get(key)!r}, expected a value of type {kind.__name__}")
    if meta["inputs"] != ["state", *HEAD_INPUTS]:
        raise InputError(
            f"{path}: reads {', '.join(map(str, meta['inputs']))}; this package gives state, "
            f"{', '.join(HEAD_INPUTS)}"
        )
    return meta
