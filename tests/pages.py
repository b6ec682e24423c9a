"""The documentation pages as tests read them: tables made from code, and runnable examples.

`python -m tests.pages` writes the tables that are made from code into the pages anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def read_page(name: str) -> str:
    """The text of `docs/NAME.md`."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def marked(page: str, mark: str) -> str:
    """What stands between `<!-- mark -->` and `<!-- /mark -->` in a page, which must have it once."""
    (found,) = re.findall(rf"<!-- {mark} -->\n(.*?)\n<!-- /{mark} -->", page, re.DOTALL)
    return str(found)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, as it has to stand in a page; a bar in a cell is escaped."""
    lines = [header, *rows]
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]])


def first_column(markdown: str) -> list[str]:
    """The names, in backticks, in the first column of a Markdown table; header and rule left out."""
    rows = [line for line in markdown.splitlines() if line.startswith("|")][2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def examples(page: str) -> list[str]:
    """The Python blocks of a page that are marked to be run, in order."""
    return re.findall(r"<!-- test -->\n```python\n(.*?)```", page, re.DOTALL)


def made_from_code() -> dict[tuple[str, str], str]:
    """By page and mark, the tables that repeat what the code says."""
    from sde_gym.offline.settings import DQNSettings
    from sde_gym.offline.transitions import COLUMNS
    from sde_gym.settings import describe
    from sde_gym.traces.schema import DEPTH_COLUMNS, OVERRUN_COLUMNS, POSITION_COLUMNS, TEXT_COLUMNS

    tables: dict[tuple[str, str], str] = {}
    for mark, columns in (
        ("texts", TEXT_COLUMNS),
        ("positions", POSITION_COLUMNS),
        ("depths", DEPTH_COLUMNS),
        ("overrun", OVERRUN_COLUMNS),
    ):
        rows = [(f"`{c.name}`", c.dtype, c.shape, c.unit, c.meaning) for c in columns]
        tables["traces", mark] = table(("column", "dtype", "shape", "unit", "meaning"), rows)
    settings = [(f"`{field.name}`", f"`{field.default!r}`", field.help) for field in describe(DQNSettings)]
    tables["offline", "settings"] = table(("setting", "default", "what it is"), settings)
    logged = [(f"`{name}`", dtype, meaning) for name, (dtype, meaning) in COLUMNS.items()]
    tables["offline", "transitions"] = table(("column", "dtype", "meaning"), logged)
    return tables


def main() -> None:
    """Write them into the pages."""
    for (name, mark), text in made_from_code().items():
        page = read_page(name)
        old, new = (f"<!-- {mark} -->\n{body}\n<!-- /{mark} -->" for body in (marked(page, mark), text))
        (DOCS / f"{name}.md").write_text(page.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main()
