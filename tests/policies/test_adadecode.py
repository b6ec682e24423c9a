"""AdaDecode's rule."""

from __future__ import annotations

from typing import Any

import pytest

from sde_gym.errors import InputError
from sde_gym.policies.ablation import keeps_state
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.controller import Controller
from sde_gym.policies.observation import Phase
from tests.policies.views import view


def test_its_decisions() -> None:
    controller = AdaDecodeController(0.5)
    assert isinstance(controller, Controller)
    assert controller.walks_every_token
    assert not keeps_state(controller)
    assert controller.name == "adadecode(0.5)"
    controller.bind((2, 4), 8, 3)
    shown = view([0] * 5, [0, 0, 1, 1, 0], [0, 0, 2, 2, 3], [0.51, 0.5, 0.6, 0.4, 0.9])
    assert controller.act(shown).tolist() == [1, 0, 1, 0, 0]  # above, not at; and at most three wait
    assert [controller.reads(phase, 1) for phase in Phase] == [True, False]


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan"), "high"])
def test_what_is_out_of_range_is_named(gamma: Any) -> None:
    with pytest.raises(InputError, match=f"gamma: {gamma!r} is not a number in 0..1; give one"):
        AdaDecodeController(gamma)
