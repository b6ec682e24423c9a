"""Where prompts of each kind end, on a module small enough to check by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sde_gym.prompts.finding import FINDERS, draw
from sde_gym.prompts.reference import ModuleSource, read_module

SOURCE = '''\
"""A module."""
A = 1
B = 2
C = 3
D = A | B
E = "e"
F = -1
G = (1, 2)
H = None
total = sum([1, 2])

ROWS = [
    ("one", 1),
    ("two", 2), ("three", 3),

    # A comment.
    ("four", 4),
    ("five", 5),
    ("six", 6),
    ("seven", 7),
    ("eight", 8),
    ("nine", 9),
]


def one_line(): return 1


def plain(first,  # not the colon: this one
          second=lambda: 3) -> int:
    # A comment between.
    value = first + second()
    value += 1
    value += 2
    return value


def documented(x):
    """Return twice the value of x, which must be a number.
    """

    y = x
    y += x
    return y


def short(x):
    return x


class Words:
    """

    Text that begins on the third line.
    """

    size = 3
    other = 4

    def method(self):
        \'\'\'Do the thing that it says here, and no more.\'\'\'
        a = 1
        b = 2
        return a + b

    def test_me(self):
        "Single quotes are not cut, however long the text within them is."
        a = 1
        b = 2
        return a + b
'''


@pytest.fixture
def source(tmp_path: Path) -> ModuleSource:
    (tmp_path / "m.py").write_text(SOURCE)
    found = read_module(tmp_path, "m.py")
    assert found is not None
    return found


def cuts(source: ModuleSource, kind: str, module: str = "m.py", seed: int = 0) -> dict[str, str]:
    """Text from each found object's start to its cut, by object."""
    return {
        cut.object: source.text[source.start_of(source.objects[cut.object]) : cut.stop]
        for cut in FINDERS[kind](source, module, seed)
    }


def test_function_bodies(source: ModuleSource) -> None:
    found = cuts(source, "function_body")
    assert list(found) == ["plain", "documented", "Words.method"]
    assert found["plain"].endswith("second=lambda: 3) -> int:\n")
    assert found["documented"].endswith('a number.\n    """\n')
    assert found["Words.method"].endswith("and no more.'''\n")
    assert cuts(source, "function_body", "test/m.py") == {}


def test_tests(source: ModuleSource) -> None:
    assert cuts(source, "test") == {}
    found = cuts(source, "test", "test/m.py")
    assert list(found) == ["Words.test_me"]
    assert found["Words.test_me"].endswith('them is."\n')


def test_docstrings(source: ModuleSource) -> None:
    ends = {"documented": set(), "Words.method": set(), "Words": set()}  # type: dict[str, set[str]]
    for seed in range(30):
        found = cuts(source, "docstring", seed=seed)
        assert set(found) == set(ends)  # neither single quotes nor undocumented ones
        for name, text in found.items():
            ends[name].add(text.split("\n", 1)[1])
    assert ends["documented"] == {'    """', '    """Return', '    """Return twice'}
    assert ends["Words.method"] == {"        '''", "        '''Do", "        '''Do the"}
    assert ends["Words"] == {'    """\n'}


def test_classes(source: ModuleSource) -> None:
    ends = {cuts(source, "class", seed=seed)["Words"] for seed in range(60)}
    lines = {text.count("\n") for text in ends}
    # After the docstring's text or its end, either constant, the first method's header or end.
    assert lines == {4, 5, 7, 8, 10, 14}
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in ends)


def test_data_tables(source: ModuleSource) -> None:
    ends = {"ROWS": set(), "run": set()}  # type: dict[str, set[str]]
    for seed in range(60):
        for name, text in cuts(source, "data_table", seed=seed).items():
            ends["ROWS" if name == "ROWS" else "run"].add(text if name != "ROWS" else text[-16:])
    assert ends["run"] == {"C = 3\n", "D = A | B\n", 'E = "e"\n'}
    # Before an entry that starts a line, never after an empty line.
    assert {text.strip().rsplit("\n", 1)[-1].strip() for text in ends["ROWS"]} == {
        "# A comment.",
        '("four", 4),',
        '("five", 5),',
        '("six", 6),',
    }


def test_long_tables_and_runs_are_cut_again(tmp_path: Path) -> None:
    rows = "".join(f"    {number},\n" for number in range(100))
    run = "".join(f"N{number} = {number}\n" for number in range(40))
    (tmp_path / "m.py").write_text(f"T = [\n{rows}]\nprint(1)\n{run}")
    source = read_module(tmp_path, "m.py")
    assert source is not None
    found = list(FINDERS["data_table"](source, "m.py", 0))
    lines = [source.text.count("\n", 0, cut.stop) for cut in found if cut.object == "T"]
    assert len(lines) == 3
    assert {later - earlier for earlier, later in itertools.pairwise(lines)} == {40}
    assert len(found) == 3 + 3


def test_draws_depend_on_seed_and_name_only() -> None:
    # Pinned: the shipped references depend on it.
    assert [draw(0, 9, seed, "a", 1) for seed in range(8)] == [8, 1, 4, 6, 0, 3, 9, 3]
