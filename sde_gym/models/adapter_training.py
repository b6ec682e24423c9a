"""Train adapters on a model's own text: shallow states learn to say what the last layer says there.

1. The model writes text, and its states are kept (`own_states`); the model itself is frozen.
2. One adapter a depth is trained, each for itself (`adapter_trainer`): cross-entropy against the last
   layer's distribution over its k most probable tokens (the KL divergence but for a constant), and in part
   against the best of them alone, through the model's own norm and its compact head. Matrix products run
   in bfloat16. Muon (Jordan et al. 2024) moves all matrices, RMS-matched.
3. Every twentieth text is held out; agreement on these is told while training runs.

Files of the output folder:

    settings.json               what was asked
    own-text/                   see `own_states`; may be removed when all is done
    compact_vocabulary.json     the tokens that the heads offer, if they are not all
    training-DEPTH.safetensors  weights and optimiser of the depth in training, to go on from
    trained-DEPTH.safetensors   a depth that is finished
    log.jsonl                   losses and held-out agreement
    adapters.safetensors        all depths, float16
    README.md                   the card

`load_model("MODEL+FOLDER")` is the model with the adapters of such a folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sde_gym
from sde_gym.errors import InputError
from sde_gym.files import read_json, write_json, write_text
from sde_gym.models.adapter_settings import AdapterSettings
from sde_gym.models.adapter_trainer import DepthTrainer, examples
from sde_gym.models.adapters import ResidualAdapter, save_adapters
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import ADAPTERS_FILE, COMPACT_VOCABULARY_FILE, load_model
from sde_gym.models.own_states import load_count, load_own_states, write_own_states
from sde_gym.models.threads import torch_threads
from sde_gym.models.vocabulary import compact_vocabulary, load_compact_vocabulary, save_compact_vocabulary
from sde_gym.prompts import load_prompts

#: Told of progress: the stage, done, total, a note.
Progress = Callable[[str, int, int, str], None]

SETTINGS_FILE = "settings.json"
LOG_FILE = "log.jsonl"
OWN_TEXT = "own-text"

#: Steps between two looks at held-out text.
_LOOK_EVERY = 100


def train_adapters(
    model: str | Path, settings: AdapterSettings, out: Path, threads: int = 2,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write text, train all depths, write the adapters; what is there already is not made again.

    Args:
        model: a name, folder or hub id, without adapters of its own.
        settings: how. A later call may name fewer depths than the text was kept for.
        out: the folder.
        threads: of torch.
        progress: told of every stage.

    Returns:
        The description in the file: among others `report`, held-out figures of each depth.

    Raises:
        InputError: depths out of range, a model that cannot write many texts at once, or a folder that holds
            the adapters of another model or of other settings.
    """
    tell = progress or (lambda *_: None)
    with torch_threads(threads):
        exact = load_model(model)  # in float32: what the adapters are tied to
        if exact.heads.adapters:
            raise InputError(f"{model} has adapters already; name the model without them")
        depths = exact.check_depths(settings.depths or _even(exact.num_layers))
        identity = {"model": exact.name, "model_hash": exact.weights_hash()}
        own_vocabulary = exact.compact_vocabulary
        prompts = _prompts(exact, settings, tell)
        del exact
        out.mkdir(parents=True, exist_ok=True)
        _check_request(out / SETTINGS_FILE, settings, identity)
        writer = load_model(model, "bfloat16")
        files = write_own_states(
            writer, depths, settings, out / OWN_TEXT,
            lambda done, total: tell("write text", done, total, f"{done} tokens"), prompts,
        )  # fmt: skip
        ids = _vocabulary(writer, files, settings, own_vocabulary, out / COMPACT_VOCABULARY_FILE)
        speaker = LayeredModel(writer.hf, writer.tokenizer, writer.name, ids)
        trained, report = {}, {}
        for depth in depths:
            trained[depth], report[depth] = _train_depth(speaker, depth, files, settings, out, tell)
        positions = sum(map(load_count, files))
    description = {
        **identity,
        "settings": {**asdict(settings), "depths": list(depths)},
        "positions": positions,
        "report": {str(depth): figures for depth, figures in report.items()},
        "version": sde_gym.__version__,
    }
    save_adapters(out / ADAPTERS_FILE, trained, description)
    write_text(out / "README.md", card(description, len(ids) if ids is not None else None))
    return description


def _even(layers: int, steps: int = 5) -> tuple[int, ...]:
    """Depths that cut L layers into even steps."""
    return tuple(sorted({round(layers * step / steps) for step in range(1, steps)} - {0, layers}))


def _prompts(model: LayeredModel, settings: AdapterSettings, tell: Progress) -> list[list[int]]:
    """Token ids of the given prompts that are short enough."""
    if settings.prompts is None:
        return []
    most = min(settings.longest_prompt, model.context_limit - settings.answer - 1)
    found = [model.encode(prompt.text, any_length=True) for prompt in load_prompts(settings.prompts)]
    kept = [ids for ids in found if len(ids) <= most]
    if not kept:
        raise InputError(
            f"{settings.prompts}: every prompt has more than {most} tokens; raise --longest-prompt or "
            "lower --answer"
        )
    tell("prompts", len(kept), len(found), f"{len(kept)} of {len(found)} have at most {most} tokens")
    return kept


def _check_request(path: Path, settings: AdapterSettings, identity: dict[str, str]) -> None:
    """Refuse a folder that was begun otherwise; depths may differ."""
    request = json.loads(json.dumps({**identity, "settings": asdict(replace(settings, depths=None))}))
    if path.exists():
        if read_json(path) != request:
            raise InputError(f"{path}: the folder was begun with other settings; choose another --out")
    else:
        write_json(path, request)


def _vocabulary(
    model: LayeredModel, files: list[Path], settings: AdapterSettings, own: Tensor | None, path: Path
) -> list[int] | None:
    """The tokens that the heads offer: those most often best in the text, the model's own list, or all."""
    if not settings.vocabulary:
        return None if own is None else own.tolist()
    if not path.exists():
        counts = np.zeros(model.vocab_size, np.int64)
        for file in files:
            block = load_own_states(file, ())
            np.add.at(counts, block.ids[:, 0].numpy(), 1)
        save_compact_vocabulary(path, compact_vocabulary(counts, settings.vocabulary, model.eos_token_ids))
    return load_compact_vocabulary(path, model.vocab_size)


def _train_depth(
    model: LayeredModel, depth: int, files: list[Path], settings: AdapterSettings, out: Path, tell: Progress
) -> tuple[ResidualAdapter, dict[str, Any]]:
    """The adapter of a depth, and its figures on held-out text: without it, and with it."""
    column_of = torch.full((model.vocab_size,), -1)
    ids = model.compact_vocabulary
    offered = torch.arange(model.vocab_size) if ids is None else ids
    column_of[offered] = torch.arange(len(offered))
    train, held = examples(files, depth, column_of, settings)
    trainer = DepthTrainer(model, depth, train, held, settings)
    before = trainer.agreement()  # a new adapter changes nothing
    running, finished = out / f"training-{depth}.safetensors", out / f"trained-{depth}.safetensors"
    trainer.resume(finished if finished.exists() else running)
    stage, losses, started, begun = f"depth {depth}", [], time.perf_counter(), trainer.step_number
    while trainer.step_number < trainer.steps:
        losses.append(trainer.step())
        done = trainer.step_number
        if done % _LOOK_EVERY == 0 or done == trainer.steps:
            found = trainer.agreement(4096)
            speed = (done - begun) * settings.batch_tokens / (time.perf_counter() - started)
            record = {"depth": depth, "step": done, "loss": float(np.mean(losses)), **found}
            with (out / LOG_FILE).open("a", encoding="utf-8") as log:
                print(json.dumps(record), file=log, flush=True)
            note = f"loss {record['loss']:.3f}, agreement {found['agreement']:.1%}, {speed:.0f} tokens/s"
            tell(stage, done, trainer.steps, note)
            losses = []
        if done % settings.checkpoint_every == 0:
            trainer.save(running)
    if not finished.exists():
        trainer.save(finished)
        running.unlink(missing_ok=True)
    after = trainer.agreement()
    figures = {"without": before["agreement"], **after, "positions": len(train), "steps": trainer.steps}
    return trainer.adapter, {
        key: value if value == value else None
        for key, value in figures.items()  # no NaN in JSON
    }


def card(description: dict[str, Any], columns: int | None) -> str:
    """`README.md` of a folder of adapters."""
    settings, report = description["settings"], description["report"]
    size = "" if settings["kind"] == "linear" else f" of inner width {settings['size']}"
    offered = "all tokens" if columns is None else f"the {columns} tokens of its compact vocabulary"
    lines = [
        f"# Adapters of {description['model']}",
        "",
        f"Residual maps ({settings['kind']}{size}) of one token's state, before the final norm and head, "
        f"trained to say what the last layer says. Heads offer {offered}. The model itself is untouched "
        f"(weights {description['model_hash']}).",
        "",
        "## Data",
        "",
        _data(description["positions"], settings),
        "",
        "## Training",
        "",
        f"Muon, peak learning rate {settings['learning_rate']:g}, {settings['passes']:g} "
        f"pass{'' if settings['passes'] == 1 else 'es'}, "
        f"{settings['batch_tokens']} positions a step, weight {settings['hard']:g} on the best token beside "
        f"the last layer's distribution over its {settings['top_k']} best, seed {settings['seed']}.",
        "",
        "## Held-out agreement",
        "",
        'Greedy positions of texts that were not trained on, in bfloat16. "Sure": the head gives its token '
        "more than 0.9.",
        "",
        "| depth | without | with adapter | most that the vocabulary allows | sure | right where sure |",
        "|---|---|---|---|---|---|",
    ]
    for depth, row in report.items():
        right = "–" if row["sure_agreement"] is None else f"{row['sure_agreement']:.1%}"
        lines.append(
            f"| {depth} | {row['without']:.1%} | {row['agreement']:.1%} | {row['offered']:.1%} | "
            f"{row['sure']:.1%} | {right} |"
        )
    return "\n".join(lines) + "\n"


def _data(positions: int, settings: dict[str, Any]) -> str:
    """A card's words on what was learned from."""
    given = settings["prompts"]
    answers = "drawn as well, but for those that are held out" if settings["draw_answers"] else "greedy"
    if given is not None and not settings["draw_answers"]:
        answers += ", but for second answers to a given prompt"
    words = (
        f"{positions:,} positions of text that the model wrote itself: beginnings drawn at temperature 1 (at "
        f"least {settings['min_p']:g} of the best token's probability, among the 256 best; the first token "
        f"at temperature {settings['first_temperature']:g}), what follows {answers}."
    )
    if given is None:
        return words + " No other data."
    share = settings["prompt_share"]
    return words + f" {share:.0%} of the training texts answer the prompts of `{given}` instead."
