"""docs/policies.md names every entry of a policy file and every member of the protocol."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from sde_gym.files import read_json
from sde_gym.policies.controller import Controller, View
from sde_gym.policies.files import save_policy
from sde_gym.policies.qnetwork import QController, QNetwork
from tests.pages import first_column, marked, read_page

PAGE = read_page("policies")


def test_the_entries_are_those_of_the_file(tmp_path: Path) -> None:
    network = QNetwork([(np.ones((1, 2)), np.zeros(2))])
    _, described = save_policy(tmp_path / "p", QController(network, ("top1",), (1,), 2, 1))
    assert first_column(marked(PAGE, "policy-json")) == list(read_json(described))


def test_the_protocol_is_complete() -> None:
    for name, member in vars(Controller).items():
        if callable(member) and not name.startswith("_"):
            assert f"| `{name}(" in PAGE, name
    members = PAGE.split("| member | meaning |")[1].split("\n\n")[0]
    for name in Controller.__annotations__:
        assert f"`{name}`" in members, name
    for field in fields(View):
        assert f"`{field.name}`" in PAGE, field.name
