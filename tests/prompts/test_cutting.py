"""The list of references: rebuilt from the library, split by module, sound in its texts."""

from __future__ import annotations

import ast
import itertools
import platform
from collections import Counter
from pathlib import Path

import pytest

from sde_gym.models.corpus import HELD_OUT
from sde_gym.prompts.cutting import KINDS, LONGEST, MODULES, PER_KIND, SHORTEST, cut_references
from sde_gym.prompts.library import read_references
from sde_gym.prompts.reference import Reference, cut_text, library_root, read_module

HEADER, SHIPPED = read_references()
SAME_PYTHON = HEADER["python"] == f"{platform.python_implementation()} {platform.python_version()}"


@pytest.fixture(scope="module")
def afresh() -> list[Reference]:
    return cut_references(library_root())


def test_the_shipped_list_is_what_the_procedure_gives(afresh: list[Reference]) -> None:
    if not SAME_PYTHON:
        pytest.skip(f"the list was made with {HEADER['python']}")
    assert afresh == SHIPPED


def test_counts_of_the_shipped_list() -> None:
    counts = Counter((reference.split, reference.kind) for reference in SHIPPED)
    assert counts == {(split, kind): PER_KIND[split] for split in PER_KIND for kind in KINDS}
    assert len(SHIPPED) >= 360
    assert len({reference.id for reference in SHIPPED}) == len(SHIPPED)


def test_every_module_was_held_out_and_stands_in_one_split() -> None:
    assert set(MODULES["train"]) | set(MODULES["held-out"]) <= set(HELD_OUT)
    assert not set(MODULES["train"]) & set(MODULES["held-out"])
    assert all(reference.module in MODULES[reference.split] for reference in SHIPPED)
    split_of = {module: split for split, modules in MODULES.items() for module in modules}
    tested = 0
    for module in split_of:
        name = Path(module).name
        for other in split_of:
            subject = Path(other).with_suffix("").as_posix().replace("/", "")
            if name in (f"test_{Path(other).name}", f"test_{subject}.py") and name != Path(other).name:
                assert split_of[module] == split_of[other], (module, other)
                tested += 1
    assert tested >= 20
    assert split_of["test/string_tests.py"] == split_of["string.py"]


def test_no_module_dominates_a_kind() -> None:
    counts = Counter((reference.split, reference.kind, reference.module) for reference in SHIPPED)
    assert max(counts.values()) <= 6
    assert len({reference.module for reference in SHIPPED}) >= 60


def test_texts_are_whole_lines_that_ask_for_more(afresh: list[Reference]) -> None:
    spans: dict[str, list[tuple[int, int]]] = {}
    for module in sorted({reference.module for reference in afresh}):
        source = read_module(library_root(), module)
        assert source is not None
        for reference in (one for one in afresh if one.module == module):
            text = cut_text(source, reference)
            assert text is not None
            assert SHORTEST <= len(text) <= LONGEST
            node = source.objects[reference.object]
            stop = source.start_of(node) + reference.cut
            start = stop - reference.length
            assert start in source.line_starts
            assert not text.startswith("\n")
            spans.setdefault(module, []).append((start, stop))
            assert stop < source.line_starts[node.end_lineno or 0] or reference.kind == "data_table"
            if reference.kind == "docstring":
                assert text.endswith(('"""\n', "'''\n")) or not text[-1].isspace()
            else:
                assert text.endswith("\n")
                assert text.splitlines()[-1].strip()
            if reference.kind in ("function_body", "test"):
                assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                assert text.rstrip().endswith((":", '"', "'")) or "#" in text.splitlines()[-1]
            if reference.kind == "class":
                assert isinstance(node, ast.ClassDef)
            assert module.startswith("test/") or reference.kind != "test"
    for taken in spans.values():
        taken.sort()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(taken))


def test_missing_modules_are_passed_over_and_seeds_matter() -> None:
    small = {"train": ("heapq.py", "no/such.py"), "held-out": ("bisect.py",)}
    wanted = {"train": 3, "held-out": 2}
    first = cut_references(library_root(), modules=small, per_kind=wanted)
    assert first
    assert {reference.module for reference in first} == {"heapq.py", "bisect.py"}
    counts = Counter((reference.split, reference.kind) for reference in first)
    assert all(count <= wanted[split] for (split, _), count in counts.items())
    assert cut_references(library_root(), modules=small, per_kind=wanted) == first
    assert cut_references(library_root(), modules=small, per_kind=wanted, seed=1) != first
    other = cut_references(library_root(), modules=small, per_kind=wanted, id_prefix="mine")
    assert all(reference.id.startswith("mine/") for reference in other)
