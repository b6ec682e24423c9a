"""Inductor adapters: small maps that let a standard model's shallow states speak through its own head.

DEX (arXiv 2606.29223) proposes them for models that were not trained for early exits. An adapter is a
residual map of one token's state, placed before the final norm and head at its depth; it has no KV cache, so
a depth can be scored at any time. The model itself is untouched.

A file, `adapters.safetensors`, holds the weights of all depths in float16; its description is JSON in the
file's metadata and names the language model by the hash of its weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel

FORMAT = "sde_gym-adapters"
FORMAT_VERSION = 1

#: Key of the description in the metadata of the safetensors file.
METADATA_KEY = "sde_gym_adapters"

_EPSILON = 1e-5


class ResidualAdapter(torch.nn.Module):
    """x + change(x), where x is the state scaled to a root mean square of 1.

    The final norm follows, so the scale of a state does not matter to the head; scaled states make one
    learning rate do for all depths. A new adapter changes nothing.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype, (..., width)."""
        x = F.rms_norm(hidden, hidden.shape[-1:], None, _EPSILON)
        return x + self.change(x)

    def change(self, x: Tensor) -> Tensor:
        """What is added."""
        raise NotImplementedError


class LinearAdapter(ResidualAdapter):
    """W x, W of full rank: width^2 parameters.

    Args:
        width: of the states.
        size: has no meaning here.
    """

    def __init__(self, width: int, size: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, width))

    def change(self, x: Tensor) -> Tensor:
        """(..., width)."""
        return F.linear(x, self.weight)


class LowRankAdapter(ResidualAdapter):
    """B A x: 2 rank width parameters.

    Args:
        width: of the states.
        size: the rank.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(size, width) * width**-0.5)
        self.up = torch.nn.Parameter(torch.zeros(width, size))

    def change(self, x: Tensor) -> Tensor:
        """(..., width)."""
        return F.linear(F.linear(x, self.down), self.up)


class GatedAdapter(ResidualAdapter):
    """U (silu(G x) * (V x)), as the MLP of a layer: 3 size width parameters.

    Args:
        width: of the states.
        size: of the hidden layer.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.randn(size, width) * width**-0.5)
        self.value = torch.nn.Parameter(torch.randn(size, width) * width**-0.5)
        self.up = torch.nn.Parameter(torch.zeros(width, size))

    def change(self, x: Tensor) -> Tensor:
        """(..., width)."""
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.value), self.up)


class LinearGatedAdapter(GatedAdapter):
    """W x + U (silu(G x) * (V x)): width^2 + 3 size width parameters.

    Behind most of the layers what is left to do is nearly linear, which a gate alone is slow to learn.

    Args:
        width: of the states.
        size: of the hidden layer.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, size)
        self.weight = torch.nn.Parameter(torch.zeros(width, width))

    def change(self, x: Tensor) -> Tensor:
        """(..., width)."""
        return F.linear(x, self.weight) + super().change(x)


Kind = type[LinearAdapter] | type[LowRankAdapter] | type[GatedAdapter] | type[LinearGatedAdapter]

KINDS: dict[str, Kind] = {
    "linear": LinearAdapter,
    "low_rank": LowRankAdapter,
    "gated": GatedAdapter,
    "linear_gated": LinearGatedAdapter,
}


def new_adapter(kind: str, width: int, size: int) -> ResidualAdapter:
    """An adapter that changes nothing yet; its inner weights are drawn from torch's generator.

    Raises:
        InputError: an unknown kind, or a size below 1.
    """
    if kind not in KINDS:
        raise InputError(f"kind: there is no {kind!r}; expected one of {', '.join(KINDS)}")
    if size < 1:
        raise InputError(f"size must be at least 1, not {size}")
    return KINDS[kind](width, size)


def save_adapters(
    path: Path, adapters: Mapping[int, ResidualAdapter], description: Mapping[str, Any]
) -> None:
    """Write the adapters of all depths, replacing the file as a whole.

    Args:
        path: of the file.
        adapters: by depth, at least one, all of one kind and shape.
        description: plain JSON: `model`, `model_hash` (of the weights in float32), and what else is worth
            keeping.
    """
    from safetensors.torch import save_file

    kinds = {name for name, kind in KINDS.items() for adapter in adapters.values() if type(adapter) is kind}
    if len(kinds) != 1:
        raise InputError(f"adapters of one file must be of one kind, not {sorted(kinds) or 'none'}")
    tensors = {
        f"{depth}.{name}": tensor.detach().half().contiguous()
        for depth, adapter in sorted(adapters.items())
        for name, tensor in adapter.state_dict().items()
    }
    meta = {
        "format": FORMAT, "format_version": FORMAT_VERSION, "kind": kinds.pop(), "depths": sorted(adapters),
        **description,
    }  # fmt: skip
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(meta, allow_nan=False)})


def load_adapters(path: Path, model: LayeredModel) -> dict[int, ResidualAdapter]:
    """The adapters of a file, in a model's dtype and on its device, without gradients.

    Args:
        path: of the file.
        model: that they are for.

    Raises:
        InputError: no such file, one that is cut or no adapter file of this version, or adapters of another
            model: other width, too deep, or trained for other weights. Weights that were rounded to a
            shorter dtype cannot be compared, and pass.
    """
    meta, tensors = _read(path)
    depths = meta["depths"]
    if depths[-1] >= model.num_layers:
        raise InputError(f"{path}: adapters at {depths}, but {model.name!r} has {model.num_layers} layers")
    if model.dtype == torch.float32 and meta["model_hash"] != model.weights_hash():
        raise InputError(
            f"{path}: trained for the weights {meta['model_hash']} of {meta['model']!r}, but those of "
            f"{model.name!r} are {model.weights_hash()}; train adapters for this model "
            "(`sde-gym train-adapters`)"
        )
    found: dict[int, ResidualAdapter] = {}
    for depth in depths:
        state = {
            name.partition(".")[2]: tensor.float()
            for name, tensor in tensors.items()
            if name.partition(".")[0] == str(depth)
        }
        adapter = new_adapter(meta["kind"], model.hidden_size, max(1, _size(state)))
        try:
            adapter.load_state_dict(state)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise InputError(f"{path}: the adapter at depth {depth} does not fit ({reason})") from None
        found[depth] = adapter.to(model.device, model.dtype).requires_grad_(False).eval()
    return found


def describe_adapters(path: Path) -> dict[str, Any]:
    """The description in a file: `kind`, `depths`, `model`, `model_hash`, and how they were trained.

    Raises:
        InputError: as `load_adapters`.
    """
    return _read(path, with_tensors=False)[0]


def _read(path: Path, with_tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description of a file, checked, and its tensors by name."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as stored:  # type: ignore[no-untyped-call]
            meta = _described(stored.metadata() or {}, path)
            names = stored.keys() if with_tensors else ()
            return meta, {name: stored.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise InputError(f"{path}: truncated or no safetensors file ({error})") from None


def _size(state: Mapping[str, Tensor]) -> int:
    """The inner size, from the shapes."""
    return next((len(tensor) for name, tensor in state.items() if name in ("down", "gate")), 1)


def _described(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The description, checked."""
    try:
        meta = json.loads(metadata[METADATA_KEY])
    except (KeyError, json.JSONDecodeError):
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f"{path}: not an adapter file, its metadata does not say so")
    if meta.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {meta.get('format_version')!r}; this package reads version "
            f"{FORMAT_VERSION}; install the sde_gym that wrote it, or train the adapters again"
        )
    depths: Any = meta.get("depths")
    whole = isinstance(depths, list) and bool(depths) and all(type(depth) is int for depth in depths)
    if not whole or sorted({0, *depths}) != [0, *depths] or meta.get("kind") not in KINDS:
        raise InputError(
            f"{path}: kind {meta.get('kind')!r} or depths {depths!r} cannot be; train them again"
        )
    for key in ("model", "model_hash"):
        if not isinstance(meta.get(key), str):
            raise InputError(f"{path}: {key} is {meta.get(key)!r}, expected a string")
    return meta
