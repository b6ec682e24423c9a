"""Names of sets, paths, and what is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from sde_gym.errors import InputError
from sde_gym.prompts import PROMPT_SETS, load_prompts
from sde_gym.prompts.library import read_references


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_every_set_loads_and_its_prefixes_are_balanced(name: str) -> None:
    prompts = load_prompts(name)
    tasks = sorted({prompt.task for prompt in prompts})
    own_python = name.startswith("chat") or len(load_prompts("stdlib")) == len(read_references()[1])
    assert len(tasks) == 5 or not own_python
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= 40
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert [prompt for prompt in prompts if not prompt.text.strip() or not prompt.source] == []
    for length in (5, 17, 40) if own_python else (5,):
        counts = [sum(prompt.task == task for prompt in prompts[:length]) for task in tasks]
        assert max(counts) - min(counts) <= 1, counts


@pytest.mark.parametrize("family", ["stdlib", "chat"])
def test_the_splits_make_up_the_whole(family: str) -> None:
    train, held_out = load_prompts(f"{family}:train"), load_prompts(f"{family}:held-out")
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == set(load_prompts(family))


def test_a_result_is_the_callers_own() -> None:
    load_prompts("stdlib:train").clear()
    assert load_prompts("stdlib:train")


def test_a_path_loads_a_file_and_a_name_wins_over_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat").write_text('{"prompt": "from the file"}\n')
    monkeypatch.chdir(tmp_path)
    assert len(load_prompts("chat")) > 1
    for path in ("./chat", Path("chat"), str(tmp_path / "chat")):
        assert [prompt.text for prompt in load_prompts(path)] == ["from the file"]


@pytest.mark.parametrize("name", ["stdlib:test", "Chat", "", "no/such.jsonl", "x" * 5000, "a\0b"])
def test_what_is_neither_is_answered_with_the_names(name: str) -> None:
    with pytest.raises(InputError) as error:
        load_prompts(name)
    assert all(known in str(error.value) for known in PROMPT_SETS)


def test_a_folder_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder"):
        load_prompts(tmp_path)
