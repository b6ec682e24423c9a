"""The shipped chat prompts."""

from __future__ import annotations

from collections import Counter

from sde_gym.prompts.chat import CHAT_FILE, CHAT_TASKS, load_chat
from sde_gym.prompts.files import load_prompt_file, read_records


def test_counts_by_task_and_split() -> None:
    records = [record for _, record in read_records(CHAT_FILE)]
    assert all(set(record) == {"id", "task", "split", "prompt"} for record in records)
    counts = Counter((record["task"], record["split"]) for record in records)
    assert counts == {(task, split): 8 for task in CHAT_TASKS for split in ("train", "held-out")}


def test_texts_are_sound() -> None:
    prompts = load_chat()
    assert all(prompt.id.startswith(f"chat/{prompt.task}/") for prompt in prompts)
    assert all(prompt.text == prompt.text.strip() and 40 <= len(prompt.text) <= 1000 for prompt in prompts)
    passages = [prompt for prompt in prompts if prompt.task == "extraction_summary"]
    assert all("\n\n" in prompt.text and len(prompt.text) > 300 for prompt in passages)


def test_the_data_file_is_an_ordinary_prompt_file() -> None:
    by_id = {prompt.id: prompt for prompt in load_prompt_file(CHAT_FILE)}
    assert by_id == {prompt.id: prompt for prompt in load_chat()}
