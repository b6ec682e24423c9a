"""LITE's calibration against a search over all thresholds, and CALM's formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.policies.ablation import keeps_state
from sde_gym.policies.lite import CALMController, LITEController, calibrated_thresholds, thresholds_for
from sde_gym.policies.observation import Phase
from sde_gym.policies.rules import ThresholdController
from tests.builders import random_traces
from tests.policies.views import told, view


@pytest.mark.parametrize("target", [0.0, 0.55, 0.7, 0.9, 1.0])
def test_the_target_is_reached_and_no_lower_threshold_reaches_it(target: float) -> None:
    rng = np.random.default_rng(0)
    probability = rng.integers(0, 60, (200, 4)).astype(np.float32) / 64  # many are equal
    match = rng.random((200, 4)) < probability
    match[:, 3] = False
    thresholds = thresholds_for(probability, match, target)
    for depth in range(4):
        column, right = probability[:, depth], match[:, depth]
        reaching = [value for value in np.unique(column) if right[column >= value].mean() >= target]
        threshold = thresholds[depth]
        if not reaching:
            assert threshold == math.inf
            continue
        let_in = column >= threshold
        assert right[let_in].mean() >= target
        np.testing.assert_array_equal(let_in, column >= min(reaching))
        assert threshold not in column or threshold == 0.0  # rounding decides nothing
    assert (thresholds[3] == math.inf) == (target > 0)


def test_a_calibration_on_paper() -> None:
    probability = np.array([[0.9], [0.8], [0.8], [0.6], [0.5]])
    match = np.array([[True], [True], [False], [True], [True]])
    # Shares of right ones from above: 1, 2/3 (both 0.8s), 3/4, 4/5.
    assert thresholds_for(probability, match, 1.0) == pytest.approx([0.85])
    assert thresholds_for(probability, match, 0.75) == pytest.approx([0.0])  # not 0.55: all reach it
    assert thresholds_for(probability, match, 0.81) == pytest.approx([0.85])
    match[-1] = False  # 3/5 in the end
    assert thresholds_for(probability, match, 0.75) == pytest.approx([0.55])


def test_calibrated_on_traces() -> None:
    traces = random_traces(3, 12, p_match=0.6, overrun=11)
    thresholds = calibrated_thresholds(traces, 0.8, (2, 6), [0, 3, 5])
    rows = np.concatenate([np.arange(traces.start[t] + 1, traces.start[t + 1]) for t in (0, 3, 5)])
    probability = np.exp(traces.top_logprobs[rows][:, [0, 2], 0])
    np.testing.assert_array_equal(thresholds, thresholds_for(probability, traces.match[rows][:, [0, 2]], 0.8))
    every = LITEController.calibrated(traces, 0.8)
    assert every.name == "lite(0.8)"
    assert isinstance(every, ThresholdController)
    assert not keeps_state(every)
    assert list(every.by_depth.values()) == calibrated_thresholds(traces, 0.8).tolist()


def test_it_acts_as_the_threshold_controller_it_is() -> None:
    traces = random_traces(3, 12, p_match=0.6, overrun=11)
    lite = LITEController.calibrated(traces, 0.7)
    plain = ThresholdController(list(lite.by_depth.values()))
    one, other = run_controller(traces, lite), run_controller(traces, plain)
    assert one.drafted.sum() > 20
    for name in ("returns", "cost", "rounds", "decisions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    some, cut = run_controller(traces, lite, depths=(3,)), ThresholdController(lite.by_depth[3])
    np.testing.assert_array_equal(some.returns, run_controller(traces, cut, depths=(3,)).returns)
    never = run_controller(traces, LITEController(dict.fromkeys(traces.depths, math.inf)))
    assert never.drafted.sum() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: calibrated_thresholds(t, 1.2), r"target_acceptance: 1.2 is not a number in 0\.\.1"),
        (lambda t: calibrated_thresholds(t, 0.5, (5,)), r"depths: 5 was not recorded; .* \[2, 3, 6\]"),
        (
            lambda t: calibrated_thresholds(t, 0.5, texts=[12]),
            r"texts: \[12\] are not indices in",
        ),
        (lambda t: calibrated_thresholds(t, 0.5, texts=[]), r"texts: \[\] are not"),
        (
            lambda t: run_controller(t, LITEController({2: 0.5})),
            r"none for the depths \[3, 6\], only",
        ),
        (lambda t: LITEController({2: math.nan}), "must have a number of at least 0"),
        (lambda t: LITEController({}), "at least one depth"),
        (lambda t: LITEController([0.5]), "no mapping of depths"),  # type: ignore[arg-type]
        (lambda t: LITEController({2: "high"}), "must have a number"),  # type: ignore[dict-item]
        (lambda t: LITEController({2.5: 0.5}), "depth: 2.5 is not a whole number"),  # type: ignore[dict-item]
        (lambda t: thresholds_for(np.ones((2, 1)), np.ones((3, 1), bool), 0.5), "same shape"),
    ],
)
def test_what_is_out_of_range_is_named(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(random_traces(3, 12))


def test_calm_follows_its_formula() -> None:
    controller = CALMController(0.8, 10)
    assert controller.name == "calm(0.8, 10)"
    np.testing.assert_allclose(
        controller.threshold_at(np.arange(20)),
        [0.8 * (0.9 + 0.1 * math.exp(-4 * i / 10)) for i in range(20)],
    )
    controller.bind((2, 4), 8, 6)
    controller.reset(np.arange(2))
    controller.feedback(told([1], [3], [2]))  # tokens 0 (prefill), 1, 2 and the correction: next is 4
    controller.feedback(told([1], [0], [0], depth_index=2))  # a plain step: next is 5
    for lane, index in ((0, 1), (1, 5)):
        for drafted in (0, 3):
            limit = 0.8 * (0.9 + 0.1 * math.exp(-4 * (index + drafted) / 10))
            phase = int(drafted > 0)
            for top1, action in ((limit + 1e-4, 1), (limit - 1e-4, 0)):
                assert controller.act(view([phase], [1], [drafted], [top1], [lane]))[0] == action
    assert all(controller.reads(phase, index) for phase in Phase for index in range(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 10), r"threshold: 1.5 is not a number in 0\.\.1"),
        ((0.5, 0), "max_new_tokens: 0 is not a whole number of at least 1"),
        ((0.5, 1.5), "max_new_tokens: 1.5"),
    ],
)
def test_calm_refuses_what_is_out_of_range(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CALMController(*arguments)
