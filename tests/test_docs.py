"""The documentation holds: links lead somewhere, commands exist, examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from tests.pages import DOCS, examples, read_page

PAGES = sorted(path.stem for path in DOCS.glob("*.md"))


def test_every_page_is_linked_from_the_index() -> None:
    linked = set(re.findall(r"\]\((\w+)\.md\)", read_page("index")))
    assert linked == set(PAGES) - {"index"}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", read_page(name)):
        assert (DOCS / target).exists(), target


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    from sde_gym.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"^sde-gym (.+)$", read_page(name), re.MULTILINE):
        words = line.split()
        assert words[0] in commands, line
        below = getattr(commands[words[0]], "commands", None)
        assert below is None or words[1] in below, line


@pytest.mark.parametrize("name", PAGES)
def test_examples_compile(name: str) -> None:
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", read_page(name), re.DOTALL)):
        compile(code, f"docs/{name}.md, block {number}", "exec")


@pytest.mark.parametrize("name", [name for name in PAGES if examples(read_page(name))])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where examples leave their files
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for number, code in enumerate(examples(read_page(name))):
        exec(compile(code, f"docs/{name}.md, example {number}", "exec"), {"__name__": "__main__"})
