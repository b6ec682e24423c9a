"""Find a language model by name, folder or hub id, and load it.

What is accepted as a model's folder is decided in `sde_gym.models.checkpoint`.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sde_gym.errors import InputError
from sde_gym.models.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    load_hf_model,
    load_tokenizer,
    one_line,
)

if TYPE_CHECKING:
    import torch

    from sde_gym.models.layered import LayeredModel

#: Folder of what ships with the package: one subfolder per named model.
DATA = Path(__file__).parent / "data"

COMPACT_VOCABULARY_FILE = "compact_vocabulary.json"
PROBE_FILE = "probe.safetensors"
ADAPTERS_FILE = "adapters.safetensors"

#: What is fetched of a hub repository; foreign code and pickled weights stay there.
HUB_FILES = (
    "config.json", "generation_config.json", "model*.safetensors", WEIGHTS_INDEX_FILE,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template*", COMPACT_VOCABULARY_FILE, PROBE_FILE, ADAPTERS_FILE,
)  # fmt: skip

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class NamedModel:
    """A model that `load_model` knows by name."""

    name: str
    description: str
    folder: Path  # where its weights are, or will be
    remedy: str  # what to do when they are not there

    @property
    def present(self) -> bool:
        """Whether the configuration, the weights and the tokenizer are there."""
        return all((self.folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json"))


def cache_folder() -> Path:
    """The user's folder for fetched models; not created here.

    `$SDE_GYM_CACHE` if set; else `sde_gym` below `%LOCALAPPDATA%` on Windows and below
    `$XDG_CACHE_HOME`, or `~/.cache` without it, elsewhere.
    """
    chosen = os.environ.get("SDE_GYM_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).expanduser() / "sde_gym"


def available_models() -> list[NamedModel]:
    """The models known by name, with what they are and whether they are there."""
    return [
        NamedModel(
            "stdlib-20m",
            "embedded: 24 layers, trained with early exits on Python's standard library",
            DATA / "stdlib-20m",
            "it ships with the package, so reinstall sde_gym",
        ),
        NamedModel(
            "smollm2-135m",
            "SmolLM2-135M-Instruct: 30 layers, a real chat model (Apache-2.0)",
            cache_folder() / "models" / "smollm2-135m",
            "run `sde-gym models pull smollm2-135m` once",
        ),
        NamedModel(
            "smollm2-135m-adapters",
            "the same model, with adapters that ship with the package",
            cache_folder() / "models" / "smollm2-135m",
            "run `sde-gym models pull smollm2-135m` once",
        ),
    ]


@dataclass(frozen=True)
class _Place:
    """Where a model and what belongs to it are."""

    name: str
    folder: Path  # with the weights
    vocabulary: Path  # of the compact heads; need not be there
    adapters: Path  # need not be there

    @property
    def probe(self) -> Path:
        """Beside the compact vocabulary; need not be there."""
        return self.vocabulary.with_name(PROBE_FILE)


def load_model(name_or_path: str | Path, dtype: str = "float32", device: str = "cpu") -> LayeredModel:
    """Load a decoder-only language model, ready to be run layer by layer.

    Args:
        name_or_path: a name listed by `available_models`, a folder with `config.json` and
            safetensors weights, or a hub id like `owner/model` (fetched into the hub's cache);
            `MODEL+FOLDER` takes the adapters of that folder (`sde-gym train-adapters`) as well.
        dtype: "float32", "bfloat16", or on CUDA "float16".
        device: "cpu", "cuda" or "cuda:N".

    Returns:
        The model in evaluation mode, without gradients. Its tokenizer is None if the folder
        holds none; its compact vocabulary, its adapters and its exit probe are those that lie beside
        the model, if any. A probe that was trained for the weights in another dtype is left out.

    Raises:
        InputError: unknown name, missing or damaged files, weights that do not fit their
            configuration, unsupported architecture, dtype or device, or adapters or an exit probe that
            were trained for another model.
    """
    from sde_gym.models.layered import LayeredModel
    from sde_gym.models.vocabulary import load_compact_vocabulary

    torch_dtype = _checked_dtype(dtype, device)
    place = _locate(name_or_path)
    hf_model = load_hf_model(place.folder, torch_dtype, device)
    vocabulary_size = hf_model.config.get_text_config().vocab_size
    tokenizer = load_tokenizer(place.folder, vocabulary_size)
    compact = None
    if place.vocabulary.is_file():
        compact = load_compact_vocabulary(place.vocabulary, vocabulary_size)
    model = LayeredModel(hf_model, tokenizer=tokenizer, name=place.name, compact_vocabulary=compact)
    if place.adapters.is_file():
        from sde_gym.models.adapters import load_adapters

        model.heads.adapters.update(load_adapters(place.adapters, model))
    if place.probe.is_file():
        _attach_probe(model, place.probe, dtype)
    return model


def _attach_probe(model: LayeredModel, path: Path, dtype: str) -> None:
    """Give the model its exit probe; one of another model is refused."""
    from sde_gym.models.probe import load_probe

    probe = load_probe(path)
    if dtype != probe.dtype and probe.model_hash != model.weights_hash():
        return  # rounded to another dtype they may be the same weights, but nothing tells
    try:
        model.attach_probe(probe)
    except InputError as error:
        raise InputError(f"{path}: {error}; or remove the file") from None


def model_folder(name_or_path: str | Path) -> Path:
    """The folder that `load_model` reads a model's weights from.

    Raises:
        InputError: unknown name, or a model that is not on this machine.
    """
    return _locate(name_or_path).folder


def _locate(name_or_path: str | Path) -> _Place:
    """Where a model is, and what belongs to it."""
    given = str(name_or_path)
    if not given:
        raise InputError(f"the model's name is empty; {_known_names()}")
    for named in available_models():
        if given == named.name:
            if not named.present:
                raise InputError(f"the model {given} is not on this machine; {named.remedy}")
            return _place(given, named.folder, DATA / given)
    path = Path(given).expanduser()
    if path.is_dir():
        return _place(path.resolve().name, path, path)
    if path.exists():
        raise InputError(f"{given} is a file; a model is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    base, plus, folder = given.partition("+")
    if plus:
        return _with_adapters(_locate(base), Path(folder).expanduser())
    if not isinstance(name_or_path, Path) and _HUB_ID.fullmatch(given):
        fetched = _fetch_from_hub(given)
        return _place(given, fetched, fetched)
    raise InputError(f"no model {given!r}; {_known_names()}")


def _place(name: str, folder: Path, beside: Path) -> _Place:
    """A model whose compact vocabulary, adapters and probe lie in the folder `beside`."""
    return _Place(name, folder, beside / COMPACT_VOCABULARY_FILE, beside / ADAPTERS_FILE)


def _with_adapters(base: _Place, folder: Path) -> _Place:
    """The same model with the adapters of a folder, and the compact vocabulary that is beside them."""
    if not (folder / ADAPTERS_FILE).is_file():
        raise InputError(
            f"{folder} holds no {ADAPTERS_FILE}; in MODEL+FOLDER the folder is one that "
            "`sde-gym train-adapters` wrote"
        )
    vocabulary = folder / COMPACT_VOCABULARY_FILE
    if not vocabulary.is_file():
        vocabulary = base.vocabulary
    return _Place(f"{base.name}+{folder}", base.folder, vocabulary, folder / ADAPTERS_FILE)


def _known_names() -> str:
    names = ", ".join(named.name for named in available_models())
    return f"expected one of {names}, or an existing folder with {CONFIG_FILE}, or a hub id like owner/model"


def _fetch_from_hub(hub_id: str) -> Path:
    """Folder of a hub repository's files, fetched unless they are in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except GatedRepoError:
        reason = "its owner grants access on request: ask for it on its page and run `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the hub knows no such model, or it is private"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and the model was not fetched before"
    except Exception as error:  # the hub's client raises errors of the http library beneath it
        reason = one_line(error)
    raise InputError(f"{hub_id} is neither a folder here nor could it be fetched: {reason}; {_known_names()}")


def _checked_dtype(dtype: str, device: str) -> torch.dtype:
    """The torch dtype, if `device` exists and supports it."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InputError(f"device must be cpu, cuda or cuda:N, not {device!r}")
    on_cuda = device != "cpu"
    if on_cuda:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InputError(f"device {device} needs CUDA, which this PyTorch or machine lacks; use cpu")
        index = int(device.partition(":")[2] or 0)
        if index >= count:
            raise InputError(f"device {device} does not exist: this machine has cuda:0..cuda:{count - 1}")
    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if on_cuda:
        allowed["float16"] = torch.float16
    if dtype not in allowed:
        raise InputError(f"dtype on {device} must be one of {', '.join(allowed)}, not {dtype!r}")
    return allowed[dtype]
