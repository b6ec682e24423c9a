"""Draft & Verify: thresholds worked out by hand, and what it does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.observation import Phase
from tests.policies.views import told, view

DEPTHS, LAYERS, MAX_DRAFT = (2, 4, 8), 12, 6


def bound(*arguments: Any, **settings: Any) -> DraftVerifyController:
    controller = DraftVerifyController(*arguments, **settings)
    controller.bind(DEPTHS, LAYERS, MAX_DRAFT)
    controller.reset(np.arange(2))
    return controller


def test_the_threshold_on_paper() -> None:
    controller = bound(4)
    sequence = [
        # drafted, accepted, acceptance, threshold
        (4, 4, 0.5, 0.801),  # 0.9 x 0.8 + 0.1 x 0.81
        (4, 4, 0.75, 0.802),
        (4, 4, 0.875, 0.803),
        (4, 4, 0.9375, 0.802),  # good enough: down
        (6, 6, 0.96875, 0.802),  # good, but the draft could not be longer: stays
        (4, 1, 0.609375, 0.803),
        (6, 6, 0.8046875, 0.804),  # not good enough: up, whatever the length
    ]
    for drafted, accepted, acceptance, threshold in sequence:
        controller.feedback(told([0], [drafted], [accepted]))
        assert controller.state["acceptance"][0] == pytest.approx(acceptance)
        assert controller.state["threshold"][0] == pytest.approx(threshold)
    assert controller.state["threshold"][1] == 0.8  # the other lane is another text
    controller.feedback(told([0, 1], [0, 0], [0, 0]))  # nothing was drafted, nothing is learnt
    assert controller.state["threshold"][:2] == pytest.approx([0.804, 0.8])


def test_every_number_is_an_argument() -> None:
    controller = bound(2, 0.5, target=0.4, step=0.2, acceptance_memory=0.0, threshold_memory=0.5)
    controller.feedback(told([0], [4], [1]))
    assert controller.state["threshold"][0] == pytest.approx(0.6)
    controller.feedback(told([0], [4], [2]))  # no memory: acceptance is 0.5
    assert controller.state["threshold"][0] == pytest.approx(0.5)
    for _ in range(8):
        controller.feedback(told([0], [4], [0]))
    assert controller.state["threshold"][0] == 1.0  # and not beyond
    for _ in range(20):
        controller.feedback(told([0], [4], [4]))
    assert controller.state["threshold"][0] == 0.0


def test_its_decisions() -> None:
    controller = bound(4, 0.6)
    assert controller.name == "draft_verify(4, 0.6)"
    assert bound(4).name == "draft_verify(4)"
    assert bound(4, carry_over=True).name == "draft_verify(4, carry_over)"
    assert controller.act(view([0, 0], [0, 1], [0, 0], [0.99, 0.0])).tolist() == [0, 1]
    controller.feedback(told([1], [6], [0]))  # its threshold rises to 0.601
    shown = view([1, 1], [1, 1], [1, 1], [0.6005, 0.6005])
    assert controller.act(shown).tolist() == [1, 0]
    assert controller.act(shown).tolist() == [1, 0]  # asking changes nothing
    assert [controller.reads(phase, 1) for phase in Phase] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exit_depth": 3}, r"exit_depth: 3 is not one of the depths \[2, 4, 8\]; choose"),
        ({"exit_depth": 2, "carry_over": "no"}, "carry_over: 'no' is neither True nor False"),
        ({"exit_depth": True}, "exit_depth: True is not a whole number"),
        ({"exit_depth": 2.0}, "exit_depth: 2.0 is not a whole number of layers"),
        ({"exit_depth": 2, "threshold": 1.5}, r"threshold: 1.5 is not a number in 0\.\.1"),
        ({"exit_depth": 2, "target": float("nan")}, "target: nan"),
        ({"exit_depth": 2, "step": -0.1}, "step: -0.1"),
        ({"exit_depth": 2, "acceptance_memory": "half"}, "acceptance_memory: 'half'"),
        ({"exit_depth": 2, "threshold_memory": True}, "threshold_memory: True"),
    ],
)
def test_what_is_out_of_range_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bound(**arguments)
