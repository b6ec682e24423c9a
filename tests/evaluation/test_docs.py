"""docs/evaluation.md explains every column of `results.json`."""

from __future__ import annotations

from sde_gym.evaluation.benchmark import Measurement, summarise_rows
from sde_gym.evaluation.report import METHOD_NAMES
from tests.pages import first_column, marked, read_page

PAGE = read_page("evaluation")


def test_the_columns_are_those_computed() -> None:
    row = Measurement("ar", "p", "t", 0, 4, 1.0, 0.1, 5, 0, 0, 4, 0, 0, 0.0, True)
    (computed,) = summarise_rows([row])
    assert first_column(marked(PAGE, "rows")) == list(computed)


def test_every_method_is_named() -> None:
    for method in METHOD_NAMES:
        assert f"| `{method}` |" in PAGE
