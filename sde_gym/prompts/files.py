"""Prompt files: JSON in our own shape or in that of four public prompt sets, as they are published."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sde_gym.errors import InputError
from sde_gym.prompts.prompt import Prompt

#: First bytes of a gzip file.
GZIP_MAGIC = b"\x1f\x8b"

#: The accepted kinds of object, in the order in which they are tried: (name, required keys).
SHAPES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("HumanEval", ("task_id", "prompt")),
    ("ours", ("prompt",)),
    ("GSM8K", ("question", "answer")),
    ("Spec-Bench", ("question_id", "category", "turns")),
    ("Alpaca", ("instruction",)),
)


def load_prompt_file(path: str | Path) -> list[Prompt]:
    """Read a file of prompts in its order: one JSON object a line, or one JSON array of objects.

    The file may be compressed with gzip, whatever its name. The shape of each object is
    recognised by its keys:

    - ours: `prompt`, optionally `id` and `task`;
    - HumanEval: `task_id`, `prompt` (the other keys are not read);
    - GSM8K: `question`, `answer` (not read);
    - Spec-Bench: `question_id`, `category`, `turns`, of which the first turn is the prompt;
    - Alpaca: `instruction`, optionally `input` (appended after an empty line) and `output` (not read).

    A missing id becomes `<file stem>/<number>`, a missing task the file's stem; the stem of
    `a.jsonl.gz` is `a`. The number is that of the line, or of the array's item, from 1. Ids
    may be strings or integers. Empty lines are skipped.

    Raises:
        InputError: the file cannot be read, is not UTF-8 or holds no prompt; or a line or item
            is not a JSON object, has keys of no known shape, an empty prompt, a value of the
            wrong type or an id that was used before. The message names file and line or item.
    """
    path = Path(path)
    unit, records = _read(path)
    prompts: list[Prompt] = []
    number_of_id: dict[str, int] = {}
    for number, record in records:
        where = _where(path, unit, number)
        prompt = _parse(record, path, number, where)
        if prompt.id in number_of_id:
            raise InputError(
                f"{where}: id {prompt.id!r} was used in {unit} {number_of_id[prompt.id]} already; "
                "give every prompt its own id"
            )
        number_of_id[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f'{path}: no prompts; put one JSON object a line, for example {{"prompt": "..."}}')
    return prompts


def read_records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The JSON objects of a prompt file, each with the number of its line or item (from 1).

    Raises:
        InputError: the file cannot be read or is not UTF-8, or a line or item is not a JSON object.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[str, list[tuple[int, dict[str, Any]]]]:
    """What the file's objects are counted in ("line" or "item"), and the numbered objects."""
    text = _read_text(path)
    parsed: Iterator[tuple[int, Any]]
    if text.lstrip().startswith("["):
        unit = "item"
        parsed = enumerate(_parse_array(text, path), start=1)
    else:
        unit = "line"
        parsed = _parse_lines(text, path)
    records: list[tuple[int, dict[str, Any]]] = []
    for number, record in parsed:
        if not isinstance(record, dict):
            raise InputError(
                f"{_where(path, unit, number)}: a JSON {_json_type(record)}, not an object; "
                "give every prompt an object"
            )
        records.append((number, record))
    return unit, records


def _read_text(path: Path) -> str:
    """The file's text, decompressed if need be.

    Raises:
        InputError: the file cannot be read, or is damaged or not UTF-8.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name a file of prompts") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: damaged gzip file ({error}); fetch or compress it again") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None


def _parse_array(text: str, path: Path) -> list[Any]:
    """The items of a file that is one JSON array."""
    try:
        return list(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not JSON ({error}); put one JSON object a line, or all of them in one array"
        ) from None


def _parse_lines(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a JSON Lines file, each with its line number."""
    # Only "\n" ends a line: JSON strings may hold the other characters `splitlines` splits at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON ({error}); put one JSON object a line") from None


def _where(path: Path, unit: str, number: int) -> str:
    """A line or item as messages name it."""
    return f"{path}:{number}" if unit == "line" else f"{path}: {unit} {number}"


def _stem(path: Path) -> str:
    """The file's name without its ending, and without that of the compression."""
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def _parse(record: dict[str, Any], path: Path, number: int, where: str) -> Prompt:
    """One object's prompt; `where` serves the messages, `path` and `number` the default names."""
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
        identifier = f"{_stem(path)}/{number}"
    if task is None:
        task = _stem(path)
    return Prompt(_string(identifier, "id", where), _string(task, "task", where), text, path.name)


def _string(value: Any, key: str, where: str) -> str:
    """`value`, if it is a string that says something and can be encoded."""
    if not isinstance(value, str):
        raise InputError(f"{where}: `{key}` must be a string, found a JSON {_json_type(value)}")
    if not value.strip():
        raise InputError(f"{where}: `{key}` is empty; give it a text or remove the prompt")
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
