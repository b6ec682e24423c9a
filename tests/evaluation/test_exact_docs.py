"""docs/exact.md explains every column and attribute; its examples are run with those of all pages."""

from __future__ import annotations

import dataclasses

from sde_gym.evaluation.exact_q import ExactQ
from sde_gym.evaluation.value import policy_value
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet
from tests.pages import first_column, marked, read_page

PAGE = read_page("exact")


def test_the_columns_are_those_computed(toy_traces: TraceSet) -> None:
    row = policy_value(StaticController(3, 1), toy_traces, gammas=(1.0, 0.95)).rows()[0]
    assert first_column(marked(PAGE, "rows")) == list(row)


def test_the_attributes_are_those_returned() -> None:
    assert first_column(marked(PAGE, "exact")) == [field.name for field in dataclasses.fields(ExactQ)]
