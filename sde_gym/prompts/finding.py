"""Finding the places in a module where a prompt of each kind could end.

Every finder yields cuts in the order of the source. All but the docstrings' stand right
after the newline of a complete line, so that the model begins with the indentation of the
next one; a docstring's stands after the opening quotes or the first words, without a space.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sde_gym.prompts.reference import Definition, ModuleSource, assigned_name, scopes

#: Lines that must be left of an object after the cut, so that there is something to write.
LINES_LEFT = 3
#: Lines below the header of a class that is worth a prompt, and constants in a run that is.
SHORTEST_CLASS, SHORTEST_RUN = 8, 8
#: A long table is cut again after at least this many lines, a run of constants after as many constants.
LINES_BETWEEN_CUTS, CONSTANTS_BETWEEN_CUTS = 40, 12

_QUOTES = re.compile(r"[rRuU]?(\"\"\"|''')")
_PLAIN = (
    ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop,
    ast.expr_context, ast.Tuple, ast.List, ast.Set, ast.Dict,
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """A point at which a prompt could end: in which object, and how many characters into the module."""

    object: str
    stop: int


def draw(low: int, high: int, *key: object) -> int:
    """An integer from low to high, both included, drawn from a hash of `key`."""
    digest = hashlib.sha256("\n".join(map(str, key)).encode("utf-8")).digest()
    return low + int.from_bytes(digest[:8], "big") % (high - low + 1)


# One function a kind: every place in a module where a prompt of this kind could end.


def function_bodies(source: ModuleSource, module: str, seed: int) -> Iterator[Cut]:
    """After the header, and the docstring if there is one, of a function outside the tests."""
    if not module.startswith("test/"):
        yield from _bodies(source, lambda name: not name.startswith("test"))


def tests(source: ModuleSource, module: str, seed: int) -> Iterator[Cut]:
    """After the header (and docstring) of a test function of a module of tests."""
    if module.startswith("test/"):
        yield from _bodies(source, lambda name: name.startswith("test"))


def docstrings(source: ModuleSource, module: str, seed: int) -> Iterator[Cut]:
    """After the opening quotes of a docstring, in two of three cases with its first words."""
    for name, node in source.objects.items():
        if not isinstance(node, Definition) or _docstring(node) is None:
            continue
        start = source.line_starts[node.body[0].lineno - 1] + node.body[0].col_offset
        quotes = _QUOTES.match(source.text, start)
        stop = source.line_starts[node.body[0].end_lineno or 0]
        if quotes is None or len(source.text[quotes.end() : stop].strip()) < 30:
            continue
        line_end = source.text.index("\n", start)
        words = [word.end() for word in re.finditer(r"\S+", source.text[quotes.end() : line_end])]
        take = min(draw(0, 2, seed, module, name, "words"), len(words) - 3)
        if not words:  # the docstring's text starts on the next line
            yield Cut(name, line_end + 1)
        else:
            yield Cut(name, quotes.end() + (words[take - 1] if take > 0 else 0))


def classes(source: ModuleSource, module: str, seed: int) -> Iterator[Cut]:
    """After a class's header and its docstring or first statements, two to fourteen lines in."""
    for name, node in source.objects.items():
        last = _last_line(node)
        if not isinstance(node, ast.ClassDef) or last - node.lineno < SHORTEST_CLASS:
            continue
        ends = [_last_line(statement) for statement in node.body[:4]]
        ends += [line for statement in node.body[:4] if (line := _header_end(source, statement))]
        if (text := _docstring(node)) is not None:
            first_lines = range(text.lineno + 1, min(text.lineno + 4, _last_line(text)))
            ends += [line for line in first_lines if source.line(line).strip()]
        ends = sorted({line for line in ends if 2 <= line - node.lineno < 14 and last - line >= LINES_LEFT})
        if ends:
            yield Cut(name, _line_stop(source, ends[draw(0, len(ends) - 1, seed, module, name, "line")]))


def data_tables(source: ModuleSource, module: str, seed: int) -> Iterator[Cut]:
    """After some entries of a long literal, or after some of a run of assigned constants."""
    for prefix, body in scopes(source.tree.body):
        run: list[str] = []
        for node in body:
            name = assigned_name(node)
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            if name is None or value is None or source.objects.get(prefix + name) is not node:
                name = None
            elif isinstance(value, (ast.Dict, ast.List, ast.Tuple, ast.Set)):
                yield from _table_cuts(source, prefix + name, value, module, seed)
            if name is not None and all(isinstance(part, _PLAIN) for part in ast.walk(value or node)):
                run.append(prefix + name)
                continue
            yield from _run_cuts(source, run, module, seed)
            run = []
        yield from _run_cuts(source, run, module, seed)


FINDERS: dict[str, Callable[[ModuleSource, str, int], Iterator[Cut]]] = {
    "function_body": function_bodies,
    "docstring": docstrings,
    "test": tests,
    "class": classes,
    "data_table": data_tables,
}


def _bodies(source: ModuleSource, wanted: Callable[[str], bool]) -> Iterator[Cut]:
    """After the header and docstring of each function whose own name is wanted."""
    for name, node in source.objects.items():
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not wanted(node.name):
            continue
        header = _header_end(source, node)
        text = _docstring(node)
        end = text.end_lineno if text is not None else header
        if header and end and _last_line(node) - end >= LINES_LEFT:
            yield Cut(name, _line_stop(source, end))


def _table_cuts(
    source: ModuleSource, name: str, table: ast.Dict | ast.List | ast.Tuple | ast.Set, module: str, seed: int
) -> Iterator[Cut]:
    """Before an entry among the third to sixth of a table, and further down if it is long.

    An entry counts only if it starts a line, so that the lines above it are complete.
    """
    keys = table.keys if isinstance(table, ast.Dict) else table.elts
    lines = [entry.lineno for entry in keys if entry is not None]
    fresh = [later for earlier, later in itertools.pairwise(lines) if later > max(earlier, table.lineno)]
    last = table.end_lineno or table.lineno
    position = draw(1, 4, seed, module, name, "entry")
    previous = -LINES_BETWEEN_CUTS
    for line in fresh[position:]:
        if last - line >= LINES_LEFT and line - previous >= LINES_BETWEEN_CUTS:
            yield Cut(name, _line_stop(source, line - 1))
            previous = line


def _run_cuts(source: ModuleSource, run: list[str], module: str, seed: int) -> Iterator[Cut]:
    """After the third to fifth of a run of assigned constants, and further down if it is long."""
    if len(run) >= SHORTEST_RUN:
        first = draw(2, SHORTEST_RUN - LINES_LEFT - 1, seed, module, run[0], "constant")
        for name in run[first : len(run) - LINES_LEFT : CONSTANTS_BETWEEN_CUTS]:
            yield Cut(name, _line_stop(source, _last_line(source.objects[name])))


def _docstring(node: Definition) -> ast.Expr | None:
    """The statement that is the docstring of a function or class."""
    statement = node.body[0]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement if isinstance(statement.value.value, str) else None
    return None


def _header_end(source: ModuleSource, node: ast.stmt) -> int | None:
    """Number of the line that ends a function's header; None for others and for one-line bodies."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    inner = [
        node.lineno,
        *(part.end_lineno or 0 for part in ast.walk(node.args) if isinstance(part, ast.arg | ast.expr)),
    ]
    if node.returns is not None:
        inner.append(node.returns.end_lineno or 0)
    for line in range(max(inner), node.body[0].lineno):
        if source.line(line).split("#")[0].rstrip().endswith(":"):
            return line
    return None


def _last_line(node: ast.stmt) -> int:
    """Number of a statement's last line."""
    return node.end_lineno or node.lineno


def _line_stop(source: ModuleSource, line: int) -> int:
    """Offset after the newline of `line`, or of the nearest line above it that is not empty."""
    while line > 1 and not source.line(line).strip():
        line -= 1
    return source.line_starts[line]
