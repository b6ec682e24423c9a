"""A reference to a piece of the standard library, and the text it stands for.

The package ships no source of others: a prompt cut from the library is stored as module,
object, cut point, length and hash, and its text is cut from the running interpreter's own
library when it is asked for.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sde_gym.errors import InputError

#: First word of the source strings that `resolve_source` understands.
SOURCE_PREFIX = "stdlib"

#: Statements that name an object, and those whose bodies belong to the scope around them.
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)


@dataclass(frozen=True)
class Reference:
    """Where a prompt's text stands in the standard library.

    Attributes:
        id: unique name of the prompt.
        kind: the prompt's task, one of `sde_gym.prompts.cutting.KINDS`.
        split: "train" or "held-out".
        module: path of the module below the library's root, such as "json/decoder.py".
        object: qualified name of a function, class or assigned name in the module.
        cut: where the prompt ends, in characters after the start of the object's first line.
        length: characters in the prompt, counted backwards from the cut.
        sha256: first 16 hex digits of the SHA-256 of the prompt's text in UTF-8.
    """

    id: str
    kind: str
    split: str
    module: str
    object: str
    cut: int
    length: int
    sha256: str

    @property
    def source(self) -> str:
        """The reference as one string; `resolve_source` turns it back into the text."""
        return ":".join(
            (SOURCE_PREFIX, self.module, self.object, str(self.cut), str(self.length), self.sha256)
        )


@dataclass(frozen=True)
class ModuleSource:
    """A module's text with its named objects.

    Attributes:
        text: the source.
        tree: its syntax tree.
        line_starts: character offset of each line's first character, then the text's length;
            line numbers as in `ast` are one more than the index.
        objects: statements by qualified name, in the order of the source; a name that is
            bound more than once in its scope is left out, since it would be ambiguous.
    """

    text: str
    tree: ast.Module
    line_starts: tuple[int, ...]
    objects: dict[str, ast.stmt]

    def line(self, number: int) -> str:
        """The text of a line, numbered from 1, with its newline."""
        return self.text[self.line_starts[number - 1] : self.line_starts[number]]

    def start_of(self, node: ast.stmt) -> int:
        """Character offset of the start of the line on which `node`, decorators included, begins."""
        return self.line_starts[first_line(node) - 1]


def library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_hash(text: str) -> str:
    """First 16 hex digits of the SHA-256 of `text` in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def first_line(node: ast.stmt) -> int:
    """Number of the first line of a statement, its decorators included."""
    decorators = node.decorator_list if isinstance(node, Definition) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def assigned_name(node: ast.stmt) -> str | None:
    """The name a plain assignment binds (the first of several), else None."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return node.target.id
    return None


def scopes(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield (prefix of the qualified names inside, statements) of every block, outermost first."""
    yield prefix, body
    for node in body:
        if isinstance(node, Definition):
            yield from scopes(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, _BLOCKS):
            inner = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            for block in inner:
                if block:
                    yield from scopes(block, prefix)


def read_module(root: Path, module: str) -> ModuleSource | None:
    """Read and parse one module; None if it is missing, unreadable or not this Python's."""
    try:
        text = (root / module).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return None
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    starts[-1] = len(text)
    found: dict[str, ast.stmt] = {}
    repeated: set[str] = set()
    for prefix, body in scopes(tree.body):
        for node in body:
            name = node.name if isinstance(node, Definition) else assigned_name(node)
            if name is None:
                continue
            if prefix + name in found:
                repeated.add(prefix + name)
            found[prefix + name] = node
    ordered = sorted(found.items(), key=lambda entry: entry[1].lineno)
    objects = {name: node for name, node in ordered if name not in repeated}
    return ModuleSource(text, tree, tuple(starts), objects)


def cut_text(source: ModuleSource | None, reference: Reference) -> str | None:
    """The text of a reference in its module, or None if it is missing or differs there."""
    if source is None or reference.object not in source.objects:
        return None
    stop = source.start_of(source.objects[reference.object]) + reference.cut
    start = stop - reference.length
    if start < 0 or stop > len(source.text):
        return None
    text = source.text[start:stop]
    return text if text_hash(text) == reference.sha256 else None


def resolve_source(source: str, root: Path | None = None) -> str:
    """The text of a prompt from its `source` string, cut from the library below `root`.

    Args:
        source: `Prompt.source` of a prompt of the set "stdlib".
        root: folder of the standard library; by default the running interpreter's.

    Raises:
        InputError: the string is no such reference, or this library's text differs.
    """
    parts = source.split(":")
    if len(parts) != 6 or parts[0] != SOURCE_PREFIX or not (parts[3].isdecimal() and parts[4].isdecimal()):
        raise InputError(
            f"{source!r}: not a reference into the standard library ({SOURCE_PREFIX}:module:...)"
        )
    reference = Reference("", "", "", parts[1], parts[2], int(parts[3]), int(parts[4]), parts[5])
    root = root or library_root()
    text = cut_text(_read_module_once(root, reference.module), reference)
    if text is None:
        raise InputError(
            f"{source!r}: missing from the standard library at {root}, or not the same text there; "
            "use the Python version that made the reference"
        )
    return text


@lru_cache(maxsize=8)
def _read_module_once(root: Path, module: str) -> ModuleSource | None:
    """`read_module` for callers who ask for many texts in a row."""
    return read_module(root, module)
