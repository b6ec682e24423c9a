"""docs/decoding.md explains every field of a result."""

from __future__ import annotations

from dataclasses import fields

from sde_gym.decoding import DecodeResult
from tests.pages import first_column, marked, read_page

PAGE = read_page("decoding")


def test_the_fields_are_those_of_a_result() -> None:
    names = [line.split("`")[1] for line in marked(PAGE, "result").splitlines()[2:]]
    assert names == [field.name for field in fields(DecodeResult)]
    assert first_column(marked(PAGE, "result")) == names
