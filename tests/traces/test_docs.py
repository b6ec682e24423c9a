"""docs/traces.md says what the one table of columns says; `python -m tests.pages` makes it so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sde_gym.files import read_json
from sde_gym.traces.trace_set import OVERRUN_ARRAYS, PROBE_ARRAYS, ROW_ARRAYS, TEXT_LISTS
from tests.pages import made_from_code, marked, read_page

PAGE = read_page("traces")


@pytest.mark.parametrize("mark", ["texts", "positions", "depths", "probe", "overrun", "overrun-probe"])
def test_the_columns_are_those_of_the_schema(mark: str) -> None:
    assert marked(PAGE, mark) == made_from_code()["traces", mark]


def test_every_entry_of_the_manifest_is_named(toy_folder: Path) -> None:
    for name in read_json(toy_folder / "manifest.json"):
        assert f"`{name}`" in PAGE, name


def test_every_attribute_of_a_trace_set_is_named() -> None:
    for name in (*ROW_ARRAYS, *OVERRUN_ARRAYS, *PROBE_ARRAYS, "branch_start", *TEXT_LISTS):
        assert f"`{name}`" in PAGE, name
