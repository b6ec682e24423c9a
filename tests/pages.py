"""The documentation pages as tests read them: tables made from code, and runnable examples.

`python -m tests.pages` writes the tables that are made from code into the pages anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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


def summary(thing: Any) -> str:
    """The first paragraph of a docstring, in one line, without its full stop."""
    return " ".join(inspect.cleandoc(thing.__doc__).split("\n\n")[0].split()).removesuffix(".")


def documented_arguments(thing: Any, section: str = "Args") -> dict[str, str]:
    """By argument, what a section of a docstring says, in one line, without its full stop.

    "a, b: text" says the same of both.
    """
    (body,) = re.findall(
        rf"^{section}:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(thing.__doc__), re.DOTALL | re.MULTILINE
    )
    meanings = {}
    for entry in re.split(r"\n(?= {4}\S)", body.rstrip()):
        names, _, meaning = " ".join(entry.split()).partition(": ")
        meanings |= {name.strip(): meaning.removesuffix(".") for name in names.split(",")}
    return meanings


def arguments_table(thing: Any) -> str:
    """The arguments of a class with their defaults, and what its docstring says of them.

    Those that are "as in" another environment are left out.
    """
    meanings = documented_arguments(thing)
    parameters = inspect.signature(thing).parameters.values()
    rows = [(f"`{p.name}`", f"`{p.default!r}`", meanings[p.name]) for p in parameters]
    rows = [row for row in rows if not row[2].startswith("as in `sde_gym/")]  # they stand in that table
    return table(("argument", "default", "meaning"), rows)


def made_from_code() -> dict[tuple[str, str], str]:
    """By page and mark, the tables that repeat what the code says."""
    from sde_gym.envs.lede import LEDEEnv
    from sde_gym.envs.live import LEDELiveEnv
    from sde_gym.envs.rewards import StepOutcome
    from sde_gym.envs.wallclock import LEDEWallClockEnv
    from sde_gym.envs.wrappers import DepthOnly, LengthOnly
    from sde_gym.offline.settings import DQNSettings
    from sde_gym.offline.transitions import COLUMNS
    from sde_gym.settings import describe
    from sde_gym.traces.schema import (
        DEPTH_COLUMNS,
        OVERRUN_COLUMNS,
        OVERRUN_PROBE_COLUMNS,
        POSITION_COLUMNS,
        PROBE_COLUMNS,
        TEXT_COLUMNS,
    )

    tables: dict[tuple[str, str], str] = {}
    for mark, columns in (
        ("texts", TEXT_COLUMNS),
        ("positions", POSITION_COLUMNS),
        ("depths", DEPTH_COLUMNS),
        ("probe", PROBE_COLUMNS),
        ("overrun", OVERRUN_COLUMNS),
        ("overrun-probe", OVERRUN_PROBE_COLUMNS),
    ):
        rows = [(f"`{c.name}`", c.dtype, c.shape, c.unit, c.meaning) for c in columns]
        tables["traces", mark] = table(("column", "dtype", "shape", "unit", "meaning"), rows)
    settings = [(f"`{field.name}`", f"`{field.default!r}`", field.help) for field in describe(DQNSettings)]
    tables["offline", "settings"] = table(("setting", "default", "what it is"), settings)
    for mark, environment in (
        ("arguments", LEDEEnv), ("live-arguments", LEDELiveEnv), ("wall-clock-arguments", LEDEWallClockEnv),
    ):  # fmt: skip
        tables["environment", mark] = arguments_table(environment)
    wrappers = [
        (f"`{wrapper.__name__}({', '.join(list(inspect.signature(wrapper).parameters))})`", summary(wrapper))
        for wrapper in (DepthOnly, LengthOnly)
    ]
    tables["environment", "wrappers"] = table(("wrapper", "what is left to the agent"), wrappers)
    outcome = [(f"`{name}`", says) for name, says in documented_arguments(StepOutcome, "Attributes").items()]
    tables["environment", "outcome"] = table(("field", "what it is, by step of a lane"), outcome)
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
