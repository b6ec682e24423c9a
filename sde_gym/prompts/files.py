"""Prompt files: JSON Lines in our own shape or in that of four public prompt sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sde_gym.errors import InputError
from sde_gym.prompts.prompt import Prompt

#: The accepted kinds of line, in the order in which they are tried: (name, required keys).
SHAPES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("HumanEval", ("task_id", "prompt")),
    ("ours", ("prompt",)),
    ("GSM8K", ("question", "answer")),
    ("Spec-Bench", ("question_id", "category", "turns")),
    ("Alpaca", ("instruction",)),
)


def load_prompt_file(path: str | Path) -> list[Prompt]:
    """Read a JSON Lines file of prompts, one object a line, in the file's order.

    The shape of each line is recognised by its keys:

    - ours: `prompt`, optionally `id` and `task`;
    - HumanEval: `task_id`, `prompt` (the other keys are not read);
    - GSM8K: `question`, `answer` (not read);
    - Spec-Bench: `question_id`, `category`, `turns`, of which the first turn is the prompt;
    - Alpaca: `instruction`, optionally `input` (appended after an empty line) and `output` (not read).

    A missing id becomes `<file stem>/<line number>`, a missing task the file's stem. Ids may
    be strings or integers. Empty lines are skipped; line numbers count from 1.

    Raises:
        InputError: the file cannot be read, is not UTF-8 or holds no prompt; or a line is
            not a JSON object, has keys of no known shape, an empty prompt, a value of the
            wrong type or an id that was used before. The message names file and line.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    for number, record in read_records(path):
        prompt = _parse(record, path, number)
        if prompt.id in line_of_id:
            raise InputError(
                f"{path}:{number}: id {prompt.id!r} was used in line {line_of_id[prompt.id]} already; "
                "give every prompt its own id"
            )
        line_of_id[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f'{path}: no prompts; put one JSON object a line, for example {{"prompt": "..."}}')
    return prompts


def read_records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The JSON objects of a JSON Lines file, each with its line number (from 1).

    Raises:
        InputError: the file cannot be read or is not UTF-8, or a line is not a JSON object.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name a JSON Lines file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    records: list[tuple[int, dict[str, Any]]] = []
    # Only "\n" ends a line: JSON strings may hold the other characters `splitlines` splits at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON ({error}); put one JSON object a line") from None
        if not isinstance(record, dict):
            raise InputError(
                f"{path}:{number}: a JSON {_json_type(record)}, not an object; put one JSON object a line"
            )
        records.append((number, record))
    return records


def _parse(record: dict[str, Any], path: Path, number: int) -> Prompt:
    """One line's prompt; `path` and `number` serve the messages and the default names."""
    where = f"{path}:{number}"
    shape = next((name for name, keys in SHAPES if all(key in record for key in keys)), None)
    identifier: Any = None
    task: Any = None
    if shape == "HumanEval":
        identifier, task = record["task_id"], record.get("task")
        text = _string(record["prompt"], "prompt", where)
    elif shape == "ours":
        identifier, task = record.get("id"), record.get("task")
        text = _string(record["prompt"], "prompt", where)
    elif shape == "GSM8K":
        text = _string(record["question"], "question", where)
    elif shape == "Spec-Bench":
        identifier, task = record["question_id"], record["category"]
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise InputError(f"{where}: `turns` must be a list with at least one string")
        text = _string(turns[0], "turns[0]", where)
    elif shape == "Alpaca":
        text = _string(record["instruction"], "instruction", where)
        if record.get("input") not in (None, ""):
            text += "\n\n" + _string(record["input"], "input", where)
    else:
        found = ", ".join(sorted(record)) or "none"
        accepted = "; ".join(f"{name}: {' + '.join(keys)}" for name, keys in SHAPES)
        raise InputError(f"{where}: keys not recognised (found: {found}; accepted: {accepted})")
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    if identifier is None:
        identifier = f"{path.stem}/{number}"
    if task is None:
        task = path.stem
    return Prompt(_string(identifier, "id", where), _string(task, "task", where), text, path.name)


def _string(value: Any, key: str, where: str) -> str:
    """`value`, if it is a string that says something and can be encoded."""
    if not isinstance(value, str):
        raise InputError(f"{where}: `{key}` must be a string, found a JSON {_json_type(value)}")
    if not value.strip():
        raise InputError(f"{where}: `{key}` is empty; give it a text or remove the line")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: `{key}` holds half a surrogate pair at character {error.start}; mend the escape"
        ) from None
    return value


def _json_type(value: Any) -> str:
    """JSON's own name for the type of a parsed value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
