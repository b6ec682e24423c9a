"""Prompt files: every shape is read, every fault is named with file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sde_gym.errors import InputError
from sde_gym.prompts import Prompt
from sde_gym.prompts.files import load_prompt_file


def write(folder: Path, *lines: object) -> Path:
    """A file of the given lines: strings as they are, everything else as JSON."""
    path = folder / "set.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "Hi"}, ("set/1", "set", "Hi")),
        ({"prompt": "Hi", "id": "a", "task": "t"}, ("a", "t", "Hi")),
        ({"prompt": "Hi", "id": 7, "extra": [1]}, ("7", "set", "Hi")),
        ({"prompt": "Hi", "id": None, "task": None}, ("set/1", "set", "Hi")),
        (
            {"task_id": "HumanEval/3", "prompt": "def f():\n", "entry_point": "f", "test": ""},
            ("HumanEval/3", "set", "def f():\n"),
        ),
        ({"question": "1 + 1?", "answer": "#### 2"}, ("set/1", "set", "1 + 1?")),
        (
            {"question_id": 81, "category": "writing", "turns": ["First", "Second"]},
            ("81", "writing", "First"),
        ),
        ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, ("set/1", "set", "Sort.\n\n3 1")),
        ({"instruction": "Sing.", "input": "", "output": "La"}, ("set/1", "set", "Sing.")),
        ({"instruction": "Sing."}, ("set/1", "set", "Sing.")),
    ],
)
def test_shapes(tmp_path: Path, line: object, expected: tuple[str, str, str]) -> None:
    assert load_prompt_file(write(tmp_path, line)) == [Prompt(*expected, source="set.jsonl")]


def test_shapes_may_be_mixed_and_numbers_count_empty_lines(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "one"}, "", "   ", {"question": "two", "answer": ""})
    assert [(prompt.id, prompt.text) for prompt in load_prompt_file(path)] == [
        ("set/1", "one"),
        ("set/4", "two"),
    ]


def test_the_text_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "  déjà vu \u2028 \x85 \U0001d4ab\n\n"
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n")
    assert [prompt.text for prompt in load_prompt_file(str(path))] == [text]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x"', ["set.jsonl:2", "not JSON"]),
        ("[" * 100_000, ["set.jsonl:2", "not JSON"]),
        (["x"], ["set.jsonl:2", "array"]),
        ("null", ["set.jsonl:2", "null"]),
        ('"text"', ["set.jsonl:2", "string"]),
        (
            {"text": "x", "label": 1},
            ["set.jsonl:2", "label, text", "HumanEval", "turns", "question", "prompt"],
        ),
        ({}, ["set.jsonl:2", "none", "instruction"]),
        ({"prompt": ""}, ["set.jsonl:2", "`prompt`", "empty"]),
        ({"prompt": " \n"}, ["set.jsonl:2", "`prompt`", "empty"]),
        ({"prompt": 5}, ["set.jsonl:2", "`prompt`", "number"]),
        ({"prompt": None}, ["set.jsonl:2", "`prompt`", "null"]),
        ({"prompt": ["a"]}, ["set.jsonl:2", "`prompt`", "array"]),
        ('{"prompt": "\\ud800"}', ["set.jsonl:2", "surrogate"]),
        ({"prompt": "x", "id": True}, ["set.jsonl:2", "`id`", "boolean"]),
        ({"prompt": "x", "id": 1.5}, ["set.jsonl:2", "`id`", "number"]),
        ({"prompt": "x", "id": ""}, ["set.jsonl:2", "`id`", "empty"]),
        ({"prompt": "x", "task": ["t"]}, ["set.jsonl:2", "`task`", "array"]),
        ({"prompt": "x", "id": "first"}, ["set.jsonl:2", "'first'", "line 1"]),
        ({"question_id": 1, "category": "c", "turns": []}, ["set.jsonl:2", "`turns`"]),
        ({"question_id": 1, "category": "c", "turns": "x"}, ["set.jsonl:2", "`turns`"]),
        ({"question_id": 1, "category": "c", "turns": [3]}, ["set.jsonl:2", "turns[0]", "number"]),
        ({"question": 3, "answer": ""}, ["set.jsonl:2", "`question`", "number"]),
        ({"instruction": "x", "input": 3}, ["set.jsonl:2", "`input`", "number"]),
        ({"instruction": ""}, ["set.jsonl:2", "`instruction`", "empty"]),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, words: list[str]) -> None:
    path = write(tmp_path, {"prompt": "fine", "id": "first"}, line)
    with pytest.raises(InputError) as error:
        load_prompt_file(path)
    assert [word for word in words if word not in str(error.value)] == []


def test_a_default_id_may_not_clash_either(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1"):
        load_prompt_file(write(tmp_path, {"prompt": "x", "id": "set/2"}, {"prompt": "y"}))


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_prompts(tmp_path: Path, content: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="no prompts"):
        load_prompt_file(path)


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_prompt_file(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="folder"):
        load_prompt_file(tmp_path)
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(InputError, match="UTF-8"):
        load_prompt_file(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_prompt_file(path / "below")


ALPACA = [
    {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
    {"instruction": "Sing.", "input": "", "output": "La"},
]


@pytest.mark.parametrize("indent", [None, 4])
def test_one_array_of_objects(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "alpaca_data.json"
    path.write_text("\n " + json.dumps(ALPACA, indent=indent))
    assert load_prompt_file(path) == [
        Prompt("alpaca_data/1", "alpaca_data", "Sort.\n\n3 1", "alpaca_data.json"),
        Prompt("alpaca_data/2", "alpaca_data", "Sing.", "alpaca_data.json"),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([*ALPACA, {"instruction": ""}], ["item 3", "`instruction`", "empty"]),
        ([*ALPACA, {"text": "x"}], ["item 3", "keys not recognised"]),
        ([*ALPACA, ["x"]], ["item 3", "array"]),
        ([*ALPACA, None], ["item 3", "null"]),
        ([{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}], ["item 2", "'a'", "in item 1"]),
        ([], ["no prompts"]),
        ('["x"]\n{"prompt": "y"}\n', ["not JSON", "line 2", "one array"]),
        ('[{"prompt": "x"}', ["not JSON", "one array"]),
        ("[" * 100_000, ["not JSON"]),
    ],
)
def test_a_bad_item_is_named_by_its_number(tmp_path: Path, content: object, words: list[str]) -> None:
    path = tmp_path / "set.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError) as error:
        load_prompt_file(path)
    assert [word for word in [str(path), *words] if word not in str(error.value)] == []


@pytest.mark.parametrize("name", ["HumanEval.jsonl.gz", "HumanEval.jsonl"])
def test_compressed_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "test": ""} for i in range(3)]
    content = "".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "more"}]).encode()
    path.write_bytes(gzip.compress(content))
    prompts = load_prompt_file(path)
    assert [prompt.id for prompt in prompts] == ["HumanEval/0", "HumanEval/1", "HumanEval/2", "HumanEval/4"]
    assert [prompt.text for prompt in prompts[1:3]] == ["def f1():\n", "def f2():\n"]
    assert {(prompt.task, prompt.source) for prompt in prompts} == {("HumanEval", name)}


def test_damaged_compressed_files(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt": "x"}\n' * 50)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for number, content in enumerate((whole[:-9], whole[:6], bytes(damaged))):
        path = tmp_path / f"{number}.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged gzip"):
            load_prompt_file(path)
    path.write_bytes(gzip.compress(b'{"prompt": "fine"}\nnull\n'))
    with pytest.raises(InputError, match=r"2\.jsonl\.gz:2: a JSON null"):
        load_prompt_file(path)
