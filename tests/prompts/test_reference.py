"""References into a library: what a name finds, and what text a cut gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from sde_gym.errors import InputError
from sde_gym.prompts.reference import (
    Reference,
    cut_text,
    library_root,
    read_module,
    resolve_source,
    text_hash,
)

SOURCE = """\
\"\"\"Ünïcode, and a form feed:\x0c here.\"\"\"
TABLE = {
    "é": 1,
}
if True:
    class Thing:
        size: int = 3
        bare: int

        @property
        def twice(self):
            return 2

        @twice.setter
        def twice(self, value):
            pass

        @staticmethod
        def make():
            local = [1]
            return local
else:
    def other():
        pass
last = 1"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "m.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    return tmp_path


def reference(module: str, name: str, cut: int, text: str) -> Reference:
    return Reference("id", "kind", "train", module, name, cut, len(text), text_hash(text))


def test_objects_are_found_by_qualified_name(root: Path) -> None:
    source = read_module(root, "m.py")
    assert source is not None
    # `twice` is bound twice and `bare` not at all, so neither can be referred to.
    assert list(source.objects) == [
        "TABLE",
        "Thing",
        "Thing.size",
        "Thing.make",
        "Thing.make.local",
        "other",
        "last",
    ]
    starts = {name: source.text[source.start_of(node) :] for name, node in source.objects.items()}
    assert starts["TABLE"].startswith('TABLE = {\n    "é"')
    assert starts["Thing.make"].startswith("        @staticmethod\n")
    assert starts["last"] == "last = 1"
    assert source.line(2) == "TABLE = {\n"
    assert source.line_starts[-1] == len(source.text)


def test_a_cut_gives_the_text_before_it(root: Path) -> None:
    source = read_module(root, "m.py")
    text = 'TABLE = {\n    "é": 1,\n'
    assert cut_text(source, reference("m.py", "TABLE", len(text), text)) == text
    text = "TABLE = {\n"  # ends before the object's own start
    below = SOURCE.index("    class") - SOURCE.index("TABLE") - len(text)
    assert cut_text(source, reference("m.py", "Thing", -below, text)) == text


def test_what_differs_gives_nothing(root: Path) -> None:
    source = read_module(root, "m.py")
    text = 'TABLE = {\n    "é": 1,\n'
    good = reference("m.py", "TABLE", len(text), text)
    assert cut_text(source, good) == text
    assert cut_text(None, good) is None
    assert cut_text(source, reference("m.py", "NOTABLE", len(text), text)) is None
    assert cut_text(source, reference("m.py", "TABLE", len(text), text.replace("1", "2"))) is None
    assert cut_text(source, reference("m.py", "TABLE", len(SOURCE), text)) is None
    assert cut_text(source, reference("m.py", "TABLE", 5, "x" * 500)) is None


@pytest.mark.parametrize("module", ["missing.py", "broken.py", "latin.py", "."])
def test_an_unreadable_module_is_none(root: Path, module: str) -> None:
    assert read_module(root, module) is None


def test_a_source_string_gives_the_text_back(root: Path) -> None:
    text = 'TABLE = {\n    "é": 1,\n'
    good = reference("m.py", "TABLE", len(text), text)
    assert good.source == f"stdlib:m.py:TABLE:{len(text)}:{len(text)}:{text_hash(text)}"
    assert resolve_source(good.source, root) == text
    with pytest.raises(InputError, match="Python version"):
        resolve_source(good.source)  # the real library has no m.py
    with pytest.raises(InputError, match="not a reference"):
        resolve_source("set.jsonl")
    with pytest.raises(InputError, match="not a reference"):
        resolve_source("stdlib:m.py:TABLE:x:3:abc")


def test_the_library_root_is_the_running_one() -> None:
    assert (library_root() / "ast.py").is_file()
