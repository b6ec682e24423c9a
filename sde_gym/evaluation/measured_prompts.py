"""Which prompts a benchmark measures on, as token ids, and what they should be continued with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sde_gym.decoding.result import check_request
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.prompts import PROMPT_SETS, Prompt, load_prompts
from sde_gym.prompts.files import read_records

#: Keys of a prompt file's objects under which a reference text may stand, the first found is taken:
#: ours and Spec-Bench's, HumanEval's, GSM8K's, Alpaca's.
REFERENCE_KEYS = ("reference", "canonical_solution", "answer", "output")


def of_task(prompts: Sequence[Prompt], task: str | None) -> list[Prompt]:
    """The prompts of one task, all if None.

    Raises:
        InputError: none is of that task; the message names the tasks that there are.
    """
    chosen = [prompt for prompt in prompts if task is None or prompt.task == task]
    if not chosen:
        tasks = ", ".join(sorted({prompt.task for prompt in prompts}))
        raise InputError(f"task: no prompt is of the task {task!r}; the tasks are {tasks}")
    return chosen


def unseen(prompts: Sequence[Prompt], train: Sequence[Prompt]) -> list[Prompt]:
    """The prompts whose text is not among those trained on.

    Raises:
        InputError: there is none.
    """
    used = {prompt.text for prompt in train}
    left = [prompt for prompt in prompts if prompt.text not in used]
    if not left:
        raise InputError("every prompt to measure on was also trained on; give other prompts")
    return left


def encoded(
    model: LayeredModel, prompts: Sequence[Prompt], max_new_tokens: int = 0
) -> list[tuple[str, str, list[int]]]:
    """(id, task, token ids) of each prompt.

    Raises:
        InputError: one that cannot be encoded or fills the context; the message names it.
    """
    found = []
    for prompt in prompts:
        try:
            ids = model.encode(prompt.text)
            check_request(model, ids, max_new_tokens)
        except InputError as error:
            raise InputError(f"prompt {prompt.id!r}: {error}") from None
        found.append((prompt.id, prompt.task, ids))
    return found


def digest(prompts: Sequence[Prompt]) -> str:
    """16 hex digits that identify a list of prompts: equal where figures may be compared."""
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(f"{prompt.id}\0{prompt.text}\0".encode())
    return found.hexdigest()[:16]


def load_references(name_or_path: str) -> dict[str, str]:
    """By prompt id, the reference texts of a prompt file, under one of `REFERENCE_KEYS`.

    Shipped sets have none. Of a list, as Spec-Bench has it, the first string counts.

    Raises:
        InputError: the file is at fault, see `load_prompts`.
    """
    if name_or_path in PROMPT_SETS:
        return {}
    prompts = load_prompts(name_or_path)
    records = [record for _, record in read_records(Path(name_or_path))]
    texts = [_reference(record) for record in records]
    return {prompt.id: text for prompt, text in zip(prompts, texts, strict=True) if text}


def _reference(record: dict[str, Any]) -> str | None:
    for key in REFERENCE_KEYS:
        value = record.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str):
            return value
    return None
