"""The set "stdlib" on the library it was made from, on a changed one and on none."""

from __future__ import annotations

import platform
import re
import runpy
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from sde_gym.errors import InputError
from sde_gym.prompts import Prompt, load_prompts, resolve_source
from sde_gym.prompts.cutting import MODULES
from sde_gym.prompts.library import (
    MINIMUM_PER_SPLIT,
    load_library,
    main,
    prompts_from,
    read_references,
    write_references,
)
from sde_gym.prompts.reference import Reference, library_root

HEADER, SHIPPED = read_references()
SAME_PYTHON = HEADER["python"] == f"{platform.python_implementation()} {platform.python_version()}"


def foreign_library(folder: Path, rewrite: bool) -> Path:
    """A copy of the modules, without the tests; or of the shorter ones, indented twice as deep.

    Modules that the running interpreter does not have are passed over, as `read_module` does.
    """
    for module in (*MODULES["train"], *MODULES["held-out"]):
        source = library_root() / module
        if module.startswith("test/") or not source.is_file():
            continue
        if not rewrite or source.stat().st_size <= 30_000:
            text = source.read_text(encoding="utf-8")
            target = folder / module
            target.parent.mkdir(parents=True, exist_ok=True)
            changed = re.sub(r"(?m)^( +)", r"\1\1", text) if rewrite else text
            target.write_text(changed, encoding="utf-8")
    return folder


def counts_by_split(pairs: list[tuple[Prompt, str]]) -> Counter[str]:
    return Counter(split for _, split in pairs)


def test_on_its_own_python_nothing_is_missing() -> None:
    if not SAME_PYTHON:
        pytest.skip(f"the list was made with {HEADER['python']}")
    prompts = {prompt.id: prompt for prompt in load_library()}
    assert set(prompts) == {one.id for one in SHIPPED}
    assert all(prompts[one.id].task == one.kind for one in SHIPPED)


def test_sources_give_the_texts_back() -> None:
    for prompt in load_prompts("stdlib")[:4]:
        assert resolve_source(prompt.source) == prompt.text


def test_what_differs_is_left_out_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    if not SAME_PYTHON:
        pytest.skip(f"the list was made with {HEADER['python']}")
    monkeypatch.setattr("sde_gym.prompts.library.MINIMUM_PER_SPLIT", 2)
    some = [one for one in SHIPPED if one.module in ("queue.py", "heapq.py", "shlex.py", "token.py")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(prompts_from(library_root(), some)) == len(some)
    wrong = [replace(one, sha256="0" * 16) for one in some[:3]]
    with pytest.warns(UserWarning, match=rf"3 of {len(some)} prompts differ") as caught:
        pairs = prompts_from(library_root(), wrong + some[3:])
    assert len(caught) == 1
    assert {prompt.id for prompt, _ in pairs} == {one.id for one in some[3:]}


def test_a_process_is_warned_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sde_gym.prompts.library.library_root", lambda: tmp_path / "lib")
    foreign_library(tmp_path / "lib", rewrite=False)
    with pytest.warns(UserWarning, match="differ") as caught:
        train, held_out = load_library("train"), load_library("held-out")
    assert len(caught) == 1
    assert "test" not in {prompt.task for prompt in train + held_out}
    assert min(len(train), len(held_out)) >= MINIMUM_PER_SPLIT


def test_a_foreign_library_is_cut_afresh(tmp_path: Path) -> None:
    root = foreign_library(tmp_path, rewrite=True)
    with pytest.warns(UserWarning, match="cut .* others") as caught:
        pairs = prompts_from(root, SHIPPED)
    assert len(caught) == 1
    assert min(counts_by_split(pairs).values()) >= MINIMUM_PER_SPLIT
    prefix = f"stdlib-{platform.python_version()}/"
    assert all(prompt.id.startswith(prefix) for prompt, _ in pairs)
    for prompt, _ in pairs[:5]:
        assert resolve_source(prompt.source, root) == prompt.text


def test_without_a_library_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"0 train and 0 held-out .* prompt file"):
        prompts_from(tmp_path, SHIPPED)


def test_a_list_is_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    write_references(path, SHIPPED[:3], seed=4)
    header, references = read_references(path)
    assert header == {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "seed": 4,
    }
    assert references == SHIPPED[:3]


@pytest.mark.parametrize("content", ["", '{"id": "x"}\n', '{"python": "CPython 3.11.7"}\n{"id": "x"}\n'])
def test_what_is_no_list_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="not a list of references"):
        read_references(path)


def test_the_program_writes_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(root: Path, seed: int) -> list[Reference]:
        assert root == library_root()
        return SHIPPED[seed : seed + 2]

    monkeypatch.setattr("sde_gym.prompts.library.cut_references", two)
    main(["--out", str(tmp_path / "list.jsonl"), "--seed", "1"])
    assert read_references(tmp_path / "list.jsonl")[1] == SHIPPED[1:3]
    assert "train: data_table 2 class 0" in capsys.readouterr().out


def test_the_program_starts_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["library", "--help"])
    monkeypatch.delitem(sys.modules, "sde_gym.prompts.library")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("sde_gym.prompts.library", run_name="__main__")
    assert end.value.code == 0
