"""Train a small decoder so that its shallow layers already predict well.

The recipe is LayerSkip's (Elhoushi et al. 2024): layer dropout that grows with depth, and
a loss at early exits through the shared final norm and head. Numbered departures:

1. A dropped layer is dropped for the whole batch, which saves its time on a CPU.
2. Two exits a step, each on half of the batch, one drawn from the shallow ones and one
   from the deeper ones, with equal weight: the shallow exits are what speculation uses.
3. Half of an early exit's target is the final layer's own distribution (self-distillation):
   a draft is accepted when it agrees with the final layer, not when it is true.
4. Hidden matrices are trained with Muon, the rest with AdamW.
5. A second run may continue from a trained model (`init`), with half of every batch written by that
   model itself (`own_tokens`). On such text only the early exits are trained: what they say is used
   along the model's own text.

Reads the running interpreter's standard library; writes a folder that `load_model` reads.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, read_json, write_json
from sde_gym.models import corpus
from sde_gym.models.card import STUBS, write_card
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel
from sde_gym.models.lm_network import configuration, new_model
from sde_gym.models.lm_settings import LMTrainingSettings
from sde_gym.models.lm_trainer import Trainer
from sde_gym.models.loading import load_model, model_folder
from sde_gym.models.own_text import own_windows
from sde_gym.models.threads import torch_threads
from sde_gym.prompts.reference import library_root

TRAINING_FILE = "training.json"

Progress = Callable[[dict[str, float]], None]

#: Entries of a model's configuration that the settings determine.
_ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
    "eos_token_id", "rms_norm_eps",
)  # fmt: skip


def train_lm(
    settings: LMTrainingSettings,
    out: Path,
    threads: int = 2,
    progress: Progress | None = None,
    root: Path | None = None,
) -> dict[str, Any]:
    """Train, resuming from `out/checkpoint` if it holds one, and save the model in `out`.

    Args:
        settings: the recipe; must equal the checkpoint's, except for `tokens`, `decay`, `windows`,
            `checkpoint_every` and `compile`.
        out: folder for `model.safetensors` (bfloat16), `config.json`, the tokenizer,
            `training.json` and `checkpoint/`.
        threads: torch threads.
        progress: called after every step with step, steps, tokens, loss, exit losses, tokens/s; while
            the model writes text of its own, with own_windows and own_windows_wanted.
        root: folder of the library to train on; the running interpreter's if None.

    Returns:
        The held-out measurements of `measure_lm`, also written to `training.json`.
    """
    with torch_threads(threads):
        return _train(settings, out, progress, root)


def _train(
    settings: LMTrainingSettings, out: Path, progress: Progress | None, root: Path | None
) -> dict[str, Any]:
    train_texts, test_texts = corpus.split_library(root)
    if not train_texts or not test_texts:
        raise InputError(f"{root or library_root()} holds no module to train on, or none that is held out")
    initial = _initial_model(settings) if settings.init else None
    out.mkdir(parents=True, exist_ok=True)  # not before what may be refused
    tokenizer = _tokenizer(settings, out, train_texts, initial)
    stream = torch.from_numpy(corpus.tokenize(tokenizer, train_texts))
    test_stream = torch.from_numpy(corpus.tokenize(tokenizer, test_texts))

    torch.manual_seed(settings.seed)
    model = new_model(settings)
    own, initial_hash = None, ""
    if initial is not None:
        initial_hash = initial.weights_hash()
        model.load_state_dict(initial.hf.state_dict())
    if initial is not None and settings.own_tokens:
        length = settings.window_schedule()[0][1]
        count = math.ceil(settings.own_tokens / (length - length // 2))
        own = own_windows(initial.hf, stream, count, length, settings.seed, out, _own_progress(progress))
    trainer = Trainer(settings, model, stream, own)
    trainer.resume(out / "checkpoint")
    steps = max(1, settings.tokens // settings.batch_tokens)
    while trainer.step_number < steps:
        record = trainer.step(trainer.step_number / steps)
        if not math.isfinite(record["loss"]):
            raise RuntimeError(f"loss is {record['loss']} at step {trainer.step_number}")
        if progress is not None:
            progress({**record, "step": trainer.step_number, "steps": steps})
        if trainer.step_number % settings.checkpoint_every == 0 or trainer.step_number == steps:
            trainer.save(out / "checkpoint")
            save_lm(model, out)
    save_lm(model, out)
    with torch.no_grad():  # what is measured and sampled are the weights as stored
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    measured = measure_lm(model, tokenizer, test_stream, settings.exit_depths())
    before = None if initial is None else _training_of(settings.init)
    measured |= {
        "trained_tokens": trainer.step_number * settings.batch_tokens,
        "init": None if initial is None else {"weights_hash": initial_hash, "training": before},
        "corpus_tokens": len(stream),
        "interpreter": f"{platform.python_implementation()} {platform.python_version()}",
        "settings": asdict(settings),
    }
    write_json(out / TRAINING_FILE, measured)
    write_card(out, out.name, measured, _samples(model, tokenizer))
    return measured


def _own_progress(progress: Progress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress({"own_windows": done, "own_windows_wanted": total})


def _training_of(name: str) -> dict[str, Any] | None:
    """What is known of a model's training, None if its folder does not say."""
    path = model_folder(name) / TRAINING_FILE
    if not path.is_file():
        return None
    training: dict[str, Any] = read_json(path)
    return training


def _samples(model: Any, tokenizer: Any) -> dict[str, str]:
    """What the model makes of the card's beginnings, greedily."""
    layered = LayeredModel(model.eval())
    prompts = [tokenizer.encode(stub).ids for stub in STUBS]
    budget = min(80, layered.context_limit - max(map(len, prompts)))
    texts = generate_greedy(layered, prompts, max(1, budget))
    return {stub: tokenizer.decode(text) for stub, text in zip(STUBS, texts, strict=True)}


def save_lm(model: Any, out: Path) -> None:
    """Save weights as bfloat16 safetensors plus the configuration, each atomically."""
    from safetensors.torch import save_file

    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    with atomic_path(out / "model.safetensors") as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
    configuration = model.config.to_dict()
    configuration["architectures"] = ["LlamaForCausalLM"]
    configuration["dtype"] = "float32"
    write_json(out / "config.json", configuration)


@torch.no_grad()
def measure_lm(
    model: Any, tokenizer: Any, stream: Tensor, depths: tuple[int, ...], windows: int = 64
) -> dict[str, Any]:
    """Held-out quality, teacher-forced, over `windows` windows of 256 tokens spread evenly.

    Returns:
        loss (nats per token), bits_per_byte, and agreement: share of positions at which the
        argmax at a depth equals the final layer's, by depth.
    """
    length = 256
    windows = min(windows, (len(stream) - 1) // length)
    if windows < 1:
        raise InputError(f"the held-out text has {len(stream)} tokens; at least {length + 1} are needed")
    starts = np.linspace(0, len(stream) - length - 1, windows).astype(int)
    batch = torch.stack([stream[s : s + length + 1] for s in starts]).long()
    byte_length = torch.tensor([len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())])
    byte_length[corpus.END_OF_TEXT_ID] = 1
    model.eval()
    loss, matches, count = 0.0, dict.fromkeys(depths, 0), 0
    for ids in batch.split(8):
        hidden = model.model(ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states
        logits = model.lm_head(hidden[-1])  # the last entry is already normalised
        loss += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        final = logits.argmax(-1)
        for depth in depths:
            early = model.lm_head(model.model.norm(hidden[depth])).argmax(-1)
            matches[depth] += int((early == final).sum())
        count += final.numel()
    total_bytes = int(byte_length[batch[:, 1:]].sum())
    model.train()
    return {
        "loss": loss / count,
        "bits_per_byte": loss / math.log(2) / total_bytes,
        "agreement": {str(depth): matches[depth] / count for depth in depths},
    }


def _initial_model(settings: LMTrainingSettings) -> LayeredModel:
    """The model to continue from; its architecture must be the one of the settings."""
    model = load_model(settings.init)
    expected = configuration(settings).to_dict()
    given = model.hf.config.to_dict()
    for key in _ARCHITECTURE:
        if given.get(key) != expected[key]:
            raise InputError(
                f"{settings.init} has {key}={given.get(key)}, the settings say {expected[key]}; "
                "give the settings of the model to continue from"
            )
    if model.tokenizer is None:
        raise InputError(f"{settings.init} has no tokenizer; a model to continue from needs its own")
    return model


def _tokenizer(
    settings: LMTrainingSettings, out: Path, texts: list[str], initial: LayeredModel | None
) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    path = out / "tokenizer.json"
    if path.exists() and (out / "checkpoint" / "state.safetensors").exists():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InputError(f"{path}: not a tokenizer ({error}); remove the file or the folder") from error
        return tokenizer
    if initial is not None:
        for file in model_folder(settings.init).glob("tokenizer*.json"):
            shutil.copyfile(file, out / file.name)
        return Tokenizer.from_file(str(path))
    tokenizer = corpus.train_tokenizer(texts, settings.vocabulary)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=corpus.END_OF_TEXT,
        model_max_length=settings.positions,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    return tokenizer


def jsonl_logger(path: Path) -> Progress:
    """A progress callback that appends every record to a JSONL file, whose folder the first one makes."""

    def log(record: dict[str, float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    return log
