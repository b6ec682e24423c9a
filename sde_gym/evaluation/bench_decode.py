"""`sde-gym bench decode`: every method side by side, in one process, prompt by prompt in turns.

What the methods need is made first and kept (`decode_preparation`), then everything is timed
(`benchmark.measure`) and told in tables (`decode_tables`). Files of the output folder, besides those:

    run.json        what is measured: settings, model, prompts, methods, machine, versions
    rows.jsonl      one raw row per method, prompt and repeat, written as soon as it is measured
    results.json    the tables and the facts of the run
    table.md, speedup.png   the same to read

A measurement that was stopped goes on behind its last row, if `run.json` still says the same.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sde_gym.errors import InputError
from sde_gym.evaluation.benchmark import Measurement, measure
from sde_gym.evaluation.decode_contender import Contender, simulate
from sde_gym.evaluation.decode_methods import METHODS, chosen_methods
from sde_gym.evaluation.decode_picture import speedup_picture
from sde_gym.evaluation.decode_preparation import Preparation
from sde_gym.evaluation.decode_settings import DecodeSettings, completed
from sde_gym.evaluation.decode_tables import Similarity, Texts, markdown, method_rows, rouge_l
from sde_gym.evaluation.demo import Progress, hardware, silent, versions
from sde_gym.evaluation.measured_prompts import digest, encoded, load_references, of_task, unseen
from sde_gym.evaluation.summary import part_of
from sde_gym.files import read_json, write_json, write_text
from sde_gym.models.loading import load_model
from sde_gym.models.threads import torch_threads
from sde_gym.prompts import Prompt, load_prompts
from sde_gym.settings import command_of, is_number, is_whole

RUN_FILE = "run.json"
ROWS_FILE = "rows.jsonl"
RESULTS_FILE = "results.json"
TABLE_FILE = "table.md"
PICTURE_FILE = "speedup.png"

#: Output folder of the command unless another is given.
DEFAULT_OUT = Path("runs/bench-decode")


def bench_decode(settings: DecodeSettings, out: Path, progress: Progress = silent) -> dict[str, Any]:
    """Prepare, measure and compare all methods.

    Args:
        settings: see `DecodeSettings`.
        out: folder for all that the run makes; see the module and `decode_preparation`.
        progress: told of every stage.

    Returns:
        What `results.json` holds: `rows` (one a method), `tasks` (the same for each task), `differences`
        (texts that are not plain decoding's, and why), `notes`, and the facts of the run.

    Raises:
        InputError: a setting, prompt file, policy or model that does not fit, or an `out` that holds the
            rows of another run.
    """
    with torch_threads(settings.threads):
        return _run(settings, out, progress)


def _run(settings: DecodeSettings, out: Path, progress: Progress) -> dict[str, Any]:
    started = datetime.now(UTC)
    # Everything that can be refused is refused before anything is written.
    names = chosen_methods(settings)
    model = load_model(settings.model, settings.dtype, settings.device)
    train = load_prompts(settings.train_prompts)[: settings.train_limit]
    asked = of_task(load_prompts(settings.prompts), settings.task)
    left = unseen(asked, train)
    measured = left[: settings.limit]
    prompts = encoded(model, measured, settings.max_new_tokens)
    encoded(model, train, settings.max_new_tokens)
    references = load_references(settings.prompts)
    similarity, notes = _similarity()
    if len(left) < len(asked):
        notes.append(f"{len(asked) - len(left)} prompts were left out: they are among the training prompts.")
    prepared = Preparation(model, settings, train, measured, out, progress)

    out.mkdir(parents=True, exist_ok=True)
    contenders = {name: METHODS[name](prepared) for name in names}
    simulated, refused = _simulated(contenders, prepared, measured)
    identity = {
        "settings": asdict(settings),
        "model": {"name": model.name, "layers": model.num_layers, "weights": model.weights_hash()},
        "prompts": {"measured": len(measured), "measured_sha256": digest(measured),
                    "train": len(train), "train_sha256": digest(train)},
        "methods": {name: contender.identity for name, contender in contenders.items()},
        "hardware": hardware(model, settings.threads),
        "versions": versions("rouge-score"),
    }  # fmt: skip
    known = _take_up(out, json.loads(json.dumps(identity)))
    total = len(measured) * settings.repeats
    progress("measure", 0, total)
    with (out / ROWS_FILE).open("a", encoding="utf-8") as log:
        rows, _ = measure(
            {name: contender.decode for name, contender in contenders.items()},
            prompts,
            repeats=settings.repeats,
            seed=settings.seed,
            progress=lambda done, total: progress("measure", done, total),
            sink=lambda row: print(json.dumps(asdict(row)), file=log, flush=True),
            known=known,
        )
    texts = Texts(model, {prompt: ids for prompt, _, ids in prompts}, references, similarity)
    columns = {name: contender.columns for name, contender in contenders.items()}
    table, differences = method_rows(rows, texts, simulated, columns, sampled=settings.samples)
    tasks = {
        task: method_rows(rows, texts, simulated, columns, task, settings.samples)[0]
        for task in dict.fromkeys(prompt.task for prompt in measured)
    }
    results: dict[str, Any] = {
        "rows": table,
        "tasks": tasks,
        "differences": differences,
        "notes": notes + refused + [made.note for made in contenders.values() if made.note],
        **identity,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
        "rows_taken_up": len(known),
        "command": command_line(settings, out),
    }
    if "static" in contenders or "assistant_early_exit" in contenders:
        results["static_candidates"] = prepared.static_choice["candidates"]
    write_json(out / RESULTS_FILE, results)
    write_text(out / TABLE_FILE, markdown(results))
    speedup_picture(results, out / PICTURE_FILE)
    return results


def command_line(settings: DecodeSettings, out: Path) -> str:
    """The command that repeats a run: `sde-gym bench decode` and the options that are not defaults."""
    command = command_of("sde-gym bench decode", settings)
    return command if out == DEFAULT_OUT else f"{command} --out {shlex.quote(str(out))}"


def _similarity() -> tuple[Similarity | None, list[str]]:
    """ROUGE-L, or None and a note that says why."""
    try:
        return rouge_l(), []
    except ModuleNotFoundError as error:
        return None, [f"No ROUGE-L: the package {error.name} is missing (pip install 'sde_gym[bench]')."]


def _simulated(
    contenders: Mapping[str, Contender], prepared: Preparation, measured: Sequence[Prompt]
) -> tuple[dict[str | None, dict[str, float]], list[str]]:
    """Simulated speed-ups by task (None for all) and method, and a note for each that replay refuses."""
    found: dict[str | None, dict[str, float]] = {}
    refused: list[str] = []
    if prepared.settings.samples:  # what was recorded are the greedy texts
        return found, refused
    task_of = {prompt.id: prompt.task for prompt in measured}
    for name, contender in contenders.items():
        try:
            run = simulate(contender, prepared)
        except InputError as error:
            refused.append(f"`{name}` was not simulated: {error}.")
            continue
        if run is None:
            continue
        tasks = [task_of[prepared.measured_traces.text_ids[text]] for text in run.texts.tolist()]
        found.setdefault(None, {})[name] = run.speedup
        for task in dict.fromkeys(tasks):
            chosen = np.array([other == task for other in tasks])
            found.setdefault(task, {})[name] = part_of(run, chosen).speedup
    return found, refused


def _take_up(out: Path, identity: dict[str, Any]) -> list[Measurement]:
    """The rows that the folder holds of this very run; none if it holds no rows.

    What a killed run left of its last row is cut off.

    Raises:
        InputError: the rows are of another run.
    """
    path = out / ROWS_FILE
    lines = _lines(path)
    if lines:
        before = _identity(out / RUN_FILE)
        changed = _changes(before, identity)
        if changed:
            raise InputError(
                f"{path}: holds the rows of another run ({'; '.join(changed)}); choose another --out, or "
                f"remove {ROWS_FILE} to measure anew with what was prepared"
            )
    write_json(out / RUN_FILE, identity)
    write_text(path, "".join(line + "\n" for line in lines))
    for stale in (RESULTS_FILE, TABLE_FILE, PICTURE_FILE):
        (out / stale).unlink(missing_ok=True)
    return [_row(line, path) for line in lines]


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; none if there is no file."""
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text (byte {error.start}); remove the file to measure anew"
        ) from None


def _identity(path: Path) -> dict[str, Any]:
    """What `run.json` says of the rows beside it."""
    remedy = f"the rows of {ROWS_FILE} cannot be told from another run's; remove that to measure anew"
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: not the description of a run; {remedy}")
    return {**found, "settings": completed(found.get("settings"))}


def _row(line: str, path: Path) -> Measurement:
    try:
        values = json.loads(line)
        row = Measurement(**{**values, "output": tuple(values["output"])})
        wrong = [
            field.name
            for field in fields(row)
            if field.name != "output" and not _KINDS[str(field.type)](getattr(row, field.name))
        ]
        if wrong or not all(map(is_whole, row.output)):
            raise TypeError(f"{', '.join(wrong) or 'output'} of another type")
        return row
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise InputError(f"{path}: a row cannot be read ({error}); remove the file to measure anew") from None


#: By type of a `Measurement`'s field, whether a value of JSON is one.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": is_whole,
    "float": is_number,
}


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two values of JSON, as sentences without verbs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [
            change
            for key in keys
            for change in _changes(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if before == now else [f"{name} {json.dumps(before)}, now {json.dumps(now)}"]
