"""The shipped prompts for chat models, written for this package."""

from __future__ import annotations

from pathlib import Path

from sde_gym.prompts.files import read_records
from sde_gym.prompts.prompt import Prompt, interleave

CHAT_FILE = Path(__file__).parent / "data" / "chat.jsonl"
CHAT_TASKS: tuple[str, ...] = (
    "coding",
    "extraction_summary",
    "question_answering",
    "reasoning",
    "writing",
)


def load_chat(split: str | None = None) -> list[Prompt]:
    """The chat prompts of one split ("train" or "held-out"), or all: tasks take turns.

    Each line of the data file has `id`, `task`, `split` and `prompt`.
    """
    records = [record for _, record in read_records(CHAT_FILE)]
    ordered = interleave(records, lambda record: record["split"], lambda record: record["task"])
    return [
        Prompt(record["id"], record["task"], record["prompt"], CHAT_FILE.name)
        for record in ordered
        if split in (None, record["split"])
    ]
