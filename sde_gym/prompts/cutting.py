"""Cutting prompts from the standard library: from modules to a list of references.

Each kind of prompt is a question put to the model at a point where code is predictable to
a different degree. A prompt starts at the start of a line, some statements before the cut
(`sde_gym.prompts.finding` says where cuts stand).

Everything random is drawn from a hash of the seed and the object's name, so the list does
not depend on the interpreter's random module.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from sde_gym.prompts.finding import FINDERS, Cut, draw
from sde_gym.prompts.prompt import SPLITS
from sde_gym.prompts.reference import (
    Definition,
    ModuleSource,
    Reference,
    first_line,
    read_module,
    scopes,
    text_hash,
)

#: The kinds of prompt, scarcest first: a stretch of source serves at most one prompt.
KINDS: tuple[str, ...] = ("data_table", "class", "docstring", "function_body", "test")

#: The modules cut, by split. A module and its tests stand on one side; all are modules that
#: the embedded model never saw.
MODULES: dict[str, tuple[str, ...]] = {
    "train": (
        "argparse.py", "calendar.py", "configparser.py", "csv.py", "difflib.py",
        "encodings/aliases.py", "filecmp.py", "ftplib.py", "getopt.py", "gettext.py",
        "html/entities.py", "html/parser.py", "idlelib/config.py", "mailbox.py", "mimetypes.py",
        "opcode.py", "plistlib.py", "pstats.py", "queue.py", "random.py", "smtplib.py",
        "statistics.py", "tarfile.py", "textwrap.py", "timeit.py", "token.py", "tokenize.py",
        "urllib/robotparser.py",
        "test/test_calendar.py", "test/test_csv.py", "test/test_difflib.py",
        "test/test_getopt.py", "test/test_htmlparser.py", "test/test_mailbox.py",
        "test/test_plistlib.py", "test/test_queue.py", "test/test_random.py",
        "test/test_smtplib.py", "test/test_statistics.py", "test/test_textwrap.py",
        "test/test_timeit.py",
    ),
    "held-out": (
        "bisect.py", "cmd.py", "colorsys.py", "ctypes/wintypes.py", "email/utils.py",
        "fractions.py", "heapq.py", "http/__init__.py", "http/cookies.py", "ipaddress.py",
        "json/decoder.py", "json/encoder.py", "linecache.py", "locale.py",
        "logging/handlers.py", "netrc.py", "poplib.py", "pprint.py", "sched.py", "shelve.py",
        "shlex.py", "stat.py", "string.py", "uuid.py", "wave.py", "zipapp.py", "zipfile.py",
        "test/string_tests.py", "test/test_bisect.py", "test/test_cmd.py",
        "test/test_fractions.py", "test/test_heapq.py", "test/test_ipaddress.py",
        "test/test_netrc.py", "test/test_pprint.py", "test/test_shelve.py",
        "test/test_shlex.py", "test/test_string.py", "test/test_uuid.py",
        "test/test_zipapp.py",
    ),
}  # fmt: skip

#: Prompts of each kind and split (as far as the modules allow).
PER_KIND: dict[str, int] = {"train": 54, "held-out": 36}

#: Characters in a prompt: fewest and most allowed, and the range its wished length is drawn from.
SHORTEST, LONGEST = 150, 800
WISHED = (280, 650)
#: Of a prompt's characters, at most one in this many may be a backslash: dumps of bytes are no text.
CHARACTERS_PER_BACKSLASH = 16
#: Characters of difference from the wished length that one column of indentation is worth.
COST_PER_COLUMN = 40


@dataclass
class _Module:
    """A module while prompts are cut from it.

    Attributes:
        name: path below the library's root.
        source: its text.
        starts: (offset, column) of the lines on which a prompt may well start.
        taken: (start, stop) of the prompts cut so far.
        queue: the cuts of the kind in hand, in the order in which they are tried.
    """

    name: str
    source: ModuleSource
    starts: list[tuple[int, int]]
    taken: list[tuple[int, int]] = field(default_factory=list)
    queue: list[Cut] = field(default_factory=list)


def cut_references(
    root: Path,
    *,
    modules: dict[str, tuple[str, ...]] = MODULES,
    per_kind: dict[str, int] = PER_KIND,
    seed: int = 0,
    id_prefix: str = "stdlib",
) -> list[Reference]:
    """Cut the list of references from the library below `root`.

    Args:
        root: folder of a standard library.
        modules: paths of modules below the root, by split; missing ones are passed over.
        per_kind: prompts wanted of each kind, by split; the modules of a split take turns in
            giving one, until there are enough or nothing is left.
        seed: changes which objects are taken, where they are cut and how long prompts are.
        id_prefix: first part of the ids.

    Returns:
        References, those of one split and kind in a row. No two share a character of source.
    """
    references: list[Reference] = []
    for split in SPLITS:
        sources = {name: read_module(root, name) for name in modules[split]}
        found = [
            _Module(name, source, statement_starts(source)) for name, source in sources.items() if source
        ]
        for kind in KINDS:
            references += _cut_kind(found, split, kind, per_kind[split], seed, id_prefix)
    return references


def _cut_kind(
    modules: list[_Module], split: str, kind: str, wanted: int, seed: int, id_prefix: str
) -> list[Reference]:
    """Up to `wanted` references of one kind; the modules take turns, in a drawn order."""
    for module in modules:
        cuts = FINDERS[kind](module.source, module.name, seed)
        module.queue = sorted(cuts, key=lambda cut: draw(0, 2**62, seed, kind, cut.object, cut.stop))
    order = sorted(modules, key=lambda module: draw(0, 2**62, seed, kind, module.name))
    references: list[Reference] = []
    used: set[str] = set()
    while any(module.queue for module in modules):
        for module in order:
            if len(references) == wanted:
                return references
            if (span := _take(module, kind, seed)) is None:
                continue
            name, start, stop = span
            offset = stop - module.source.start_of(module.source.objects[name])
            text = module.source.text[start:stop]
            identifier = f"{id_prefix}/{kind}/{module.name}/{name}"
            if identifier in used:  # a long table's second cut
                identifier += f"@{offset}"
            used.add(identifier)
            references.append(
                Reference(identifier, kind, split, module.name, name, offset, len(text), text_hash(text))
            )
    return references


def _take(module: _Module, kind: str, seed: int) -> tuple[str, int, int] | None:
    """(object, start, stop) of the module's next prompt on source not yet taken; None if there is none."""
    while module.queue:
        cut = module.queue.pop(0)
        wished = draw(*WISHED, seed, kind, module.name, cut.object, cut.stop, "length")
        start = _start_before(module, cut, wished)
        if start is None or any(start < stop and begin < cut.stop for begin, stop in module.taken):
            continue
        backslashes = module.source.text.count("\\", start, cut.stop)
        if backslashes * CHARACTERS_PER_BACKSLASH <= cut.stop - start:
            module.taken.append((start, cut.stop))
            return cut.object, start, cut.stop
    return None


def statement_starts(source: ModuleSource) -> list[tuple[int, int]]:
    """(offset, column) of the lines on which statements start, comments right above them included.

    Docstrings are left out, save the module's: a prompt that starts with one is puzzling.
    """
    starts: list[tuple[int, int]] = []
    for prefix, body in scopes(source.tree.body):
        for node in body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and prefix:
                continue
            line = first_line(node)
            while line > 1 and source.line(line - 1).lstrip().startswith("#"):
                line -= 1
            starts.append((source.line_starts[line - 1], node.col_offset))
    return sorted(set(starts))


def _start_before(module: _Module, cut: Cut, wished: int) -> int | None:
    """The best start for a prompt that ends at the cut, or None if there is none.

    Starts of statements near the wished length are preferred, outer ones above inner ones.
    A cut deep in a table, whose own start is too far away, may start with any line of it.
    """
    source = module.source
    node = source.objects[cut.object]
    top = source.start_of(node)
    starts = [(offset, column) for offset, column in module.starts if offset <= top]
    if not isinstance(node, Definition) and cut.stop - top > LONGEST:
        numbered = enumerate(source.line_starts[:-1], start=1)
        starts = [(offset, 0) for line, offset in numbered if top < offset and source.line(line).strip()]
    costs = [
        (abs(cut.stop - offset - wished) + COST_PER_COLUMN * column, offset)
        for offset, column in starts
        if SHORTEST <= cut.stop - offset <= LONGEST
    ]
    return min(costs)[1] if costs else None
