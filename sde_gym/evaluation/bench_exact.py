"""`sde-gym bench exact`: whether every method's text is plain decoding's, over many prompts.

Plain decoding goes one token at a time; the methods decode several texts in shared passes
(`speculative_batch`), `dex` several branches of one text, so rounding differs as much as it ever will.
transformers' own methods decode text by text; its `generate` is what plain decoding is held against.

A text that parts from plain decoding's is held against the gap between the two best final logits where it
does: below `NEAR_TIE` another order of summation may turn them, above it the decoder is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sde_gym.decoding import DecodeResult, speculative_batch
from sde_gym.decoding.result import NEAR_TIE
from sde_gym.errors import InputError
from sde_gym.evaluation.decode_contender import Contender
from sde_gym.evaluation.decode_methods import METHODS, chosen_methods
from sde_gym.evaluation.decode_preparation import Preparation
from sde_gym.evaluation.decode_settings import DecodeSettings, completed
from sde_gym.evaluation.decode_tables import Texts, parting
from sde_gym.evaluation.demo import Progress, hardware, silent
from sde_gym.evaluation.measured_prompts import digest, encoded, of_task, unseen
from sde_gym.files import read_json, write_json
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.models.threads import torch_threads
from sde_gym.prompts import load_prompts
from sde_gym.settings import is_whole

#: What has been compared so far, and the result, in the output folder.
EXACT_FILE = "exact.json"

#: Methods that are transformers' own.
TRANSFORMERS = frozenset({"generate", "prompt_lookup", "assistant_early_exit"})

#: Methods that decode one text at a time: those, and ours that share no passes. The oracle's plans are known
#: to what is timed only.
ALONE = TRANSFORMERS | {"ar", "dex", "oracle"}


def bench_exact(
    settings: DecodeSettings, out: Path, batch: int = 8, progress: Progress = silent
) -> dict[str, Any]:
    """Compare all methods' greedy texts with plain decoding's.

    Args:
        settings: as for `bench_decode`, whose output folder may be used again. `repeats` has no meaning
            here: every text is decoded once, and a run may be taken up with another number.
        out: folder for traces, policies and `exact.json`. A run that was stopped goes on behind the last
            method that was finished.
        batch: texts decoded at once, at least 1.
        progress: told of every stage.

    Returns:
        `rows`, one for each method: `method`, `decoder` (ours or transformers'), `together` (texts decoded
        at once), `prompts`, `tokens`, `different` (texts that are not plain decoding's), `at_near_ties`
        (those of them that part at a near-tie), `near_ties` (tokens with one; None where transformers
        decodes, which does not count them); `differences`, one for each such text; and the facts of the
        run.

    Raises:
        InputError: as `bench_decode`; a temperature; or an `out` that holds another comparison, or a
            damaged one.
    """
    if settings.samples:
        raise InputError("temperature: texts that are drawn cannot be compared token by token; leave it at 0")
    if batch < 1:
        raise InputError(f"batch must be at least 1, not {batch}")
    with torch_threads(settings.threads):
        return _run(settings, out, batch, progress)


def _run(settings: DecodeSettings, out: Path, batch: int, progress: Progress) -> dict[str, Any]:
    names = chosen_methods(settings)
    model = load_model(settings.model, settings.dtype, settings.device)
    train = load_prompts(settings.train_prompts)[: settings.train_limit]
    measured = unseen(of_task(load_prompts(settings.prompts), settings.task), train)[: settings.limit]
    prompts = encoded(model, measured, settings.max_new_tokens)
    prepared = Preparation(model, settings, train, measured, out, progress)
    out.mkdir(parents=True, exist_ok=True)
    identity = {
        "settings": asdict(settings),
        "model": {"name": model.name, "weights": model.weights_hash()},
        "prompts_sha256": digest(measured),
        "batch": batch,
        "hardware": hardware(model, settings.threads),
    }
    results = _taken_up(out / EXACT_FILE, json.loads(json.dumps(identity)), len(measured))
    ids = [tokens for _, _, tokens in prompts]
    contenders = {name: METHODS[name](prepared) for name in names if name not in results["texts"]}
    for name, contender in contenders.items():
        progress(f"decode: {name}", 0, len(ids))
        decoded: list[DecodeResult] = []
        step = _together(name, batch)
        for first in range(0, len(ids), step):
            decoded += _decode(model, settings, name, contender, ids[first : first + step], first)
            progress(f"decode: {name}", len(decoded), len(ids))
        results["texts"][name] = [result.tokens for result in decoded]
        counted = None if name in TRANSFORMERS else sum(result.near_ties for result in decoded)
        results["near_ties"][name] = counted
        write_json(out / EXACT_FILE, results)
    texts = Texts(model, {}, {}, None)
    rows, differences = [], []
    plain = results["texts"]["ar"]
    for name in (name for name in METHODS if name in results["texts"]):
        found = results["texts"][name]
        parted = [
            {"method": name, **_parting(texts, prompt, mine, other)}
            for prompt, mine, other in zip(prompts, found, plain, strict=True)
            if mine != other
        ]
        rows.append(
            {
                "method": name,
                "decoder": "transformers" if name in TRANSFORMERS else "ours",
                "together": _together(name, batch),
                "prompts": len(found),
                "tokens": sum(map(len, found)),
                "different": len(parted),
                "at_near_ties": sum(each["gap"] < NEAR_TIE for each in parted),
                "near_ties": results["near_ties"][name],
            }
        )
        differences += parted
    results |= {"rows": rows, "differences": differences}
    write_json(out / EXACT_FILE, results)
    return results


def _decode(
    model: LayeredModel, settings: DecodeSettings, name: str, contender: Contender,
    prompts: Sequence[list[int]], first: int,
) -> list[DecodeResult]:  # fmt: skip
    """Some texts of one method, the first of which has this number."""
    budget = settings.max_new_tokens
    if name in ALONE:
        alone = contender.counted or contender.decode
        return [alone(ids, first + number) for number, ids in enumerate(prompts)]
    assert contender.controller is not None
    return speculative_batch(
        model, prompts, contender.controller, contender.depths, budget, max_draft=contender.max_draft,
        texts=range(first, first + len(prompts)), count_near_ties=True,
    )  # fmt: skip


def _parting(
    texts: Texts, prompt: tuple[str, str, list[int]], mine: list[int], other: list[int]
) -> dict[str, Any]:
    """Where a text parts from plain decoding's, and how far the final layer's best logits are apart there."""
    position = parting(mine, other)
    gap = texts.gap((*prompt[2], *other[:position]))
    return {"prompt": prompt[0], "task": prompt[1], "position": position, "gap": gap}


def _together(name: str, batch: int) -> int:
    """How many texts a method decodes at once."""
    return 1 if name in ALONE else batch


def _taken_up(path: Path, identity: dict[str, Any], prompts: int) -> dict[str, Any]:
    """What an earlier run has left in the folder, or an empty start.

    Raises:
        InputError: the file is another run's, or damaged.
    """
    if not path.exists():
        return {"identity": identity, "texts": {}, "near_ties": {}}
    remedy = "remove it to compare anew, or choose another --out"
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from None
    if not isinstance(found, dict) or not isinstance(found.get("identity"), dict):
        raise InputError(f"{path}: not a comparison; {remedy}")
    if _compared(found["identity"]) != _compared(identity):
        raise InputError(f"{path}: holds the comparison of another run; {remedy}")
    texts, near_ties = found.get("texts"), found.get("near_ties")
    if not isinstance(texts, dict) or not isinstance(near_ties, dict):
        raise InputError(f"{path}: texts or near_ties are missing; {remedy}")
    for name, decoded in texts.items():
        whole = isinstance(decoded, list) and len(decoded) == prompts and all(map(_is_text, decoded))
        if not whole or name not in METHODS or not _is_count(near_ties.get(name, "")):
            raise InputError(f"{path}: what it holds of {name!r} is damaged; {remedy}")
    return {"identity": identity, "texts": texts, "near_ties": near_ties}


def _compared(identity: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be one: all but `repeats`, which nothing is made of."""
    settings = completed(identity.get("settings"))
    if isinstance(settings, dict):
        settings.pop("repeats", None)
    return {**identity, "settings": settings}


def _is_text(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_whole, value))


def _is_count(value: Any) -> bool:
    return value is None or is_whole(value)


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown."""
    headings = {
        "method": "method",
        "decoder": "decoder",
        "together": "texts at once",
        "prompts": "prompts",
        "tokens": "tokens",
        "different": "texts unlike plain decoding's",
        "at_near_ties": "of these at near-ties",
        "near_ties": "near-ties",
    }
    lines = ["| " + " | ".join(headings.values()) + " |", "|" + "---|" * len(headings)]
    for row in results["rows"]:
        lines.append("| " + " | ".join("–" if row[key] is None else str(row[key]) for key in headings) + " |")
    return "\n".join(lines) + "\n"
