"""Selection overhead: by hand, and the identity that its parts have to satisfy."""

from __future__ import annotations

import numpy as np
import pytest

from sde_gym.envs.hindsight import least_cost
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.selection_overhead import Origin, selection_overhead
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.controller import Controller
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.lite import CALMController, LITEController
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from sde_gym.traces.ead import earliest_depths
from tests.builders import random_traces, written_traces


def test_by_hand() -> None:
    proposals = [(1, 1), (2, 2), (9, 3), (4, 9), (5, 5), (6, 6)]
    traces = written_traces([1, 2, 3, 4, 5, 6], proposals, end="budget", depths=(2, 4), num_layers=6)
    found = selection_overhead(traces, StaticController(2, 2))
    assert found.rows.tolist() == [1, 2, 3, 4, 5]
    assert found.ead.tolist() == [2, 4, 6, 2, 2]
    # Accepted and rejected, then two accepted and the last layer's own.
    assert found.depth.tolist() == [2, 6, 2, 2, 6]
    proposal, correction, final = Origin
    assert found.origin.tolist() == [proposal, correction, proposal, proposal, final]
    assert found.late_exit == pytest.approx(4 / 5)
    assert found.fallback == pytest.approx(2 / 5)
    assert found.early_match == pytest.approx(4 / 5)
    assert (found.late_share, found.fallback_share) == (1 / 5, 1 / 5)
    assert found.depth_speedup == pytest.approx(6 / 3.6)
    assert found.oracle_share == pytest.approx((6 / 3.6 - 1) / (6 / 3.2 - 1))
    assert found.discarded == 1


CONTROLLERS = (
    StaticController(3, 4),
    ThresholdController(0.5),
    DraftVerifyController(3),
    LITEController({2: 0.6, 3: 0.4, 6: 0.2}),
    CALMController(0.7, 20),
    DELController(),
    RandomController(0.5, seed=1),
)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda controller: controller.name)
@pytest.mark.parametrize("overrun", [0, 11])
def test_every_controller_is_taken_apart_without_a_rest(controller: Controller, overrun: int) -> None:
    traces = random_traces(2, 10, overrun=overrun)
    found = selection_overhead(traces, controller, [3, 0, 7, 5])
    result = run_controller(traces, controller, [3, 0, 7, 5])
    assert found.result.totals() == result.totals()
    rows = [np.arange(traces.start[text] + 1, traces.start[text + 1]) for text in (3, 0, 7, 5)]
    np.testing.assert_array_equal(found.rows, np.concatenate(rows))
    np.testing.assert_array_equal(found.ead, earliest_depths(traces)[found.rows])
    assert (found.origin == Origin.PROPOSAL).sum() == result.accepted.sum()
    assert found.discarded == (result.drafted - result.accepted).sum()
    assert found.mean_depth - found.mean_ead == pytest.approx(
        found.late_exit + found.fallback - found.early_match
    )
    for row, origin, depth in zip(found.rows, found.origin, found.depth, strict=True):
        if origin == Origin.PROPOSAL:
            assert traces.match[row, traces.depths.index(depth)]
        else:
            assert depth == traces.num_layers
    # What was rejected lay shallower than the EAD.
    assert (found.ead[found.origin == Origin.CORRECTION] > traces.depths[0]).all()


def test_fewer_tokens_than_recorded(toy_traces: TraceSet) -> None:
    found = selection_overhead(toy_traces, StaticController(2, 3), max_new_tokens=4)
    assert len(found.rows) == np.minimum(toy_traces.lengths, 4).sum() - len(toy_traces)


def test_hindsight_falls_back_less(toy_traces: TraceSet) -> None:
    optimum = least_cost(toy_traces).controller()
    known, blind = (selection_overhead(toy_traces, c) for c in (optimum, StaticController(2, 4)))
    assert known.discarded == 0
    assert known.fallback_share == 0.0
    assert blind.fallback > 0.0


def test_totals_are_plain(toy_traces: TraceSet) -> None:
    totals = selection_overhead(toy_traces, StaticController(3, 2)).totals()
    assert totals["controller"] == StaticController(3, 2).name
    assert all(isinstance(value, (str, int, float)) for value in totals.values())


def test_adadecode_is_refused(toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match="walks every token"):
        selection_overhead(toy_traces, AdaDecodeController(0.75))
