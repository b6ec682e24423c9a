"""docs/algorithms.md names every algorithm there is."""

from __future__ import annotations

from tests.offline.test_algorithms import NAMES
from tests.pages import first_column, marked, read_page


def test_the_table_names_every_algorithm() -> None:
    assert tuple(first_column(marked(read_page("algorithms"), "algorithms"))) == NAMES
