"""docs/controllers.md says the defaults, names and messages of the code."""

from __future__ import annotations

import inspect

import pytest

from sde_gym.evaluation.policy_names import FORMS
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.lite import LITEController
from tests.pages import marked, read_page

PAGE = read_page("controllers")


@pytest.mark.parametrize(
    ("mark", "controller"), [("draft-verify", DraftVerifyController), ("del", DELController)]
)
def test_defaults_are_those_of_the_code(mark: str, controller: type) -> None:
    rows = [
        f"| `{parameter.name}` | "
        + ("none" if parameter.default is parameter.empty else f"`{parameter.default!r}`")
        for parameter in inspect.signature(controller).parameters.values()
    ]
    said = marked(PAGE, mark).splitlines()[2:]
    assert len(said) == len(rows)
    assert all(line.startswith(row + " |") for line, row in zip(said, rows, strict=True))


def test_what_the_text_says_of_the_others() -> None:
    assert f"`gamma` (default {AdaDecodeController().gamma:g};" in " ".join(PAGE.split())
    target = inspect.signature(LITEController.calibrated).parameters["target_acceptance"].default
    assert f"`target_acceptance` (default {target:g})" in " ".join(PAGE.split())


def test_every_name_of_a_method_is_there() -> None:
    for form in set(FORMS) - {"PATH", "threshold:0.2"}:
        assert f"`{form}`" in PAGE, form
