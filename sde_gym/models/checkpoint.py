"""Read a model's folder: configuration, weights and tokenizer, each checked before use.

A checkpoint is loaded only if all its parts are readable and fit each other: transformers
alone would make up missing weights and drop surplus layers with a warning. Weights come
from safetensors files only, and no code from a model's folder is ever run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sde_gym.errors import InputError
from sde_gym.files import read_json

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

#: Any one of these means that a folder holds a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_LAYER_WEIGHT = re.compile(r"\blayers\.\d+\.")


def load_hf_model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The transformers model of a folder, every weight of it read from the folder's files.

    Raises:
        InputError: as `load_model`.
    """
    from transformers import AutoModelForCausalLM

    config = _read_config(folder)
    _check_weight_files(folder)
    auto: Any = AutoModelForCausalLM  # its annotations know nothing of the loading report
    with quiet_transformers():
        try:
            model, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=_attention_implementation(config),
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, and refused below
            )
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, ImportError) as error:
            raise InputError(f"{folder}: the weights cannot be loaded ({one_line(error)})") from error
    _check_report(folder, report)
    model = model.to(device).eval()
    model.requires_grad_(False)
    return model


def load_tokenizer(folder: Path, vocabulary_size: int) -> Any | None:
    """The tokenizer of a folder, or None if it holds none.

    Raises:
        InputError: the tokenizer is unreadable or knows ids that the model does not.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InputError(
                f"{folder}: the tokenizer cannot be read ({one_line(error)}); copy or fetch it again, or "
                "remove its files to load the model without one"
            ) from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocabulary_size:
        raise InputError(
            f"{folder}: the tokenizer's largest id is {largest}, but the model's vocabulary has only "
            f"{vocabulary_size} entries; use the tokenizer that belongs to the model"
        )
    return tokenizer


def _read_config(folder: Path) -> Any:
    """The transformers configuration, if it describes a decoder that can be loaded."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"{folder} holds no {CONFIG_FILE}, so it is not a model's folder")
    if not isinstance(read_json(path), dict):
        raise InputError(f"{path}: expected a JSON object")
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # validation errors of several libraries
            raise InputError(f"{path}: not a configuration of transformers ({one_line(error)})") from error
    kind = config.model_type
    if config.is_encoder_decoder:
        raise InputError(f"{folder}: {kind} is an encoder-decoder; only decoder-only models can be loaded")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{folder}: {kind} has no head that predicts the next token")
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = dict(quantised).get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise InputError(f"{folder}: quantised weights ({method}) are not supported; use the original ones")
    return config


def _attention_implementation(config: Any) -> str:
    """The fused kernel ("sdpa") where it can compute the model, else "eager" (soft-capped scores)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    fused = architecture._supports_sdpa
    return "sdpa" if fused and getattr(text, "attn_logit_softcapping", None) is None else "eager"


def _check_weight_files(folder: Path) -> None:
    """Every weight file is there and its header agrees with its length."""
    from safetensors import SafetensorError, safe_open

    index = folder / WEIGHTS_INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        names = [WEIGHTS_FILE]
    elif index.is_file():
        content = read_json(index)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not shards:
            raise InputError(f"{index}: expected an object with a `weight_map`")
        names = sorted({str(name) for name in shards.values()})
    else:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        hint = "; its pickled weights are not read, since they can run code" if pickled else ""
        raise InputError(f"{folder} holds no weights ({WEIGHTS_FILE}){hint}")
    for name in names:
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: no such file, though {index.name} names it; fetch the model again")
        try:
            with safe_open(path, "pt"):  # type: ignore[no-untyped-call]
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{path}: truncated or damaged weights ({one_line(error)}); fetch or copy the file again"
            ) from error


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    """Refuse weights that transformers would have made up, or layers that it would have dropped."""
    mismatched = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    dropped = sorted(
        name
        for name in report["unexpected_keys"]
        if _LAYER_WEIGHT.search(name) and not name.endswith("rotary_emb.inv_freq") and "vision" not in name
    )
    for what, names in (
        ("lacks", sorted(report["missing_keys"])),
        ("has another shape for", mismatched),
        ("has no place for", dropped),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            subject = CONFIG_FILE if what == "has no place for" else "the weights file"
            raise InputError(
                f"{folder}: weights and {CONFIG_FILE} do not fit: {subject} {what} {names[0]}{more}"
            )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings within the block, then restore them."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    """First line of an error's text, at most 200 characters, without a final full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text[:200].rstrip(".")
