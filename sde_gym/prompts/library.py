"""The prompt set "stdlib": the shipped references, cut from the running interpreter's library.

Run as a program, it rebuilds the shipped list: `python -m sde_gym.prompts.library --out FILE`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from sde_gym.errors import InputError
from sde_gym.files import write_text
from sde_gym.prompts.cutting import KINDS, cut_references
from sde_gym.prompts.files import read_records
from sde_gym.prompts.prompt import SPLITS, Prompt, interleave
from sde_gym.prompts.reference import Reference, cut_text, library_root, read_module

REFERENCE_FILE = Path(__file__).parent / "data" / "stdlib.jsonl"

#: With fewer prompts than this in a split, the list is cut afresh from the library at hand.
MINIMUM_PER_SPLIT = 40


def load_library(split: str | None = None) -> list[Prompt]:
    """The library prompts of one split ("train" or "held-out"), or all: kinds take turns.

    References whose text is missing from the running interpreter's library, or differs there,
    are left out with one warning a process. If that leaves fewer than `MINIMUM_PER_SPLIT` in
    a split, the list is cut afresh by the same procedure; the ids then name the version.

    Raises:
        InputError: this interpreter has too little of its library's source.
    """
    return [prompt for prompt, where in _load_once(library_root()) if split in (None, where)]


@lru_cache(maxsize=1)
def _load_once(root: Path) -> tuple[tuple[Prompt, str], ...]:
    """`prompts_from` the shipped list; once, so that it warns once."""
    return tuple(prompts_from(root, read_references()[1]))


def prompts_from(root: Path, references: list[Reference]) -> list[tuple[Prompt, str]]:
    """(prompt, split) of every reference that the library below `root` agrees with.

    Raises:
        InputError: fewer than `MINIMUM_PER_SPLIT` prompts in a split, even when cut afresh.
    """
    kept, texts = _matching(root, references)
    differ = len(references) - len(kept)
    if _too_few(kept):
        version = platform.python_version()
        afresh = cut_references(root, id_prefix=f"stdlib-{version}")
        if counts := _too_few(afresh):
            raise InputError(
                f"the standard library at {root} gives only {counts} prompts, at least {MINIMUM_PER_SPLIT} "
                "of each split are needed; use a Python whose library has its source, or a prompt file"
            )
        kept, texts = _matching(root, afresh)
        warnings.warn(
            f"{differ} of {len(references)} prompts differ in this interpreter's library; "
            f"cut {len(kept)} others from it, with ids that start with stdlib-{version}",
            stacklevel=2,
        )
    elif differ:
        warnings.warn(
            f"{differ} of {len(references)} prompts differ in this interpreter's library "
            f"(Python {platform.python_version()}) and are left out",
            stacklevel=2,
        )
    ordered = interleave(kept, lambda reference: reference.split, lambda reference: reference.kind)
    return [
        (Prompt(reference.id, reference.kind, texts[reference.id], reference.source), reference.split)
        for reference in ordered
    ]


def _matching(root: Path, references: list[Reference]) -> tuple[list[Reference], dict[str, str]]:
    """The references that the library below `root` agrees with, and their texts by id."""
    texts: dict[str, str] = {}
    for module in sorted({reference.module for reference in references}):
        source = read_module(root, module)  # one at a time: syntax trees are large
        for reference in references:
            if reference.module == module and (text := cut_text(source, reference)) is not None:
                texts[reference.id] = text
    return [reference for reference in references if reference.id in texts], texts


def _too_few(references: list[Reference]) -> str:
    """The counts by split in words if one is below the minimum, else the empty string."""
    counts = {split: sum(reference.split == split for reference in references) for split in SPLITS}
    if min(counts.values()) >= MINIMUM_PER_SPLIT:
        return ""
    return " and ".join(f"{count} {split}" for split, count in counts.items())


def read_references(path: Path = REFERENCE_FILE) -> tuple[dict[str, Any], list[Reference]]:
    """The list's header (the Python and seed it was made with) and its references.

    Raises:
        InputError: the file is missing or not such a list.
    """
    records = [record for _, record in read_records(path)]
    try:
        if "python" not in records[0]:
            raise TypeError("its first line does not name the Python it was made with")
        return records[0], [Reference(**record) for record in records[1:]]
    except (IndexError, TypeError) as error:
        raise InputError(f"{path}: not a list of references ({error}); reinstall sde-gym") from None


def write_references(path: Path, references: list[Reference], seed: int = 0) -> None:
    """Write a list of references: a header line, then one reference a line."""
    header = {"python": f"{platform.python_implementation()} {platform.python_version()}", "seed": seed}
    rows = [header, *(vars(reference) for reference in references)]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: list[str] | None = None) -> None:
    """Rebuild the list of references from the running interpreter's library."""
    parser = argparse.ArgumentParser(prog="python -m sde_gym.prompts.library", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="another seed cuts another list (default 0)")
    options = parser.parse_args(arguments)
    references = cut_references(library_root(), seed=options.seed)
    write_references(options.out, references, options.seed)
    for split in SPLITS:
        counts = {
            kind: sum((reference.split, reference.kind) == (split, kind) for reference in references)
            for kind in KINDS
        }
        words = " ".join(f"{kind} {count}" for kind, count in counts.items())
        sys.stdout.write(f"{split}: {words}\n")


if __name__ == "__main__":
    main()
