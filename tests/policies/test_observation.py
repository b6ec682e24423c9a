"""Features: golden names, values worked by hand, bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.policies.observation import (
    BOUNDS,
    EXTENDED,
    FEATURES,
    HEAD_FEATURES,
    PAPER,
    Action,
    Phase,
    acceptance,
    bounds,
    clip,
    confidence,
    margin,
    observation_row,
    observation_rows,
    resolve_observation,
    top1,
)

LOGPROBS = np.log(np.array([[0.5, 0.25, 0.125], [0.9, 0.05, 0.025]])).astype(np.float32)


def test_names_and_numbers_that_saved_policies_depend_on() -> None:
    assert PAPER == ("confidence", "entropy", "trace")
    assert EXTENDED == (
        "confidence",
        "entropy",
        "trace",
        "depth",
        "phase",
        "draft_length",
        "top1",
        "margin",
        "stable",
        "acceptance",
        "chain",
    )
    assert (Action.CONTINUE, Action.EXIT) == (0, 1)
    assert (Phase.SELECT, Phase.DRAFT) == (0, 1)
    assert (*EXTENDED, "probe") == FEATURES
    assert set(BOUNDS) == set(FEATURES) > HEAD_FEATURES
    assert BOUNDS == {
        "confidence": (0, 50),
        "entropy": (0, 16),
        "trace": (0, 16),
        "depth": (0, 1),
        "phase": (0, 1),
        "draft_length": (0, 1),
        "top1": (0, 1),
        "margin": (0, 1),
        "stable": (0, 1),
        "acceptance": (0, 1),
        "chain": (0, 192),
        "probe": (0, 1),
    }


def test_resolve_observation() -> None:
    assert resolve_observation("paper") == PAPER
    assert resolve_observation("extended") == EXTENDED
    assert resolve_observation(["chain", "trace"]) == ("chain", "trace")
    assert resolve_observation(()) == ()


@pytest.mark.parametrize("wrong", ["full", ["prob"], ["trace", "trace"], 5, [3]])
def test_unknown_features_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="observation: "):
        resolve_observation(wrong)


def test_confidence_by_hand() -> None:
    """-(1/3) (log 1/2 + log 1/4 + log 1/8) = 2 log 2."""
    np.testing.assert_allclose(confidence(LOGPROBS, 3)[0], 2 * math.log(2), rtol=1e-6)
    np.testing.assert_allclose(confidence(LOGPROBS, 1), [math.log(2), -math.log(0.9)], rtol=1e-6)


def test_peaked_means_a_large_confidence() -> None:
    assert confidence(LOGPROBS, 3)[1] > confidence(LOGPROBS, 3)[0]


@pytest.mark.parametrize("k", [0, 4])
def test_confidence_needs_its_log_probabilities(k: int) -> None:
    with pytest.raises(InputError, match=rf"k: {k} is outside 1\.\.3"):
        confidence(LOGPROBS, k)


def test_probabilities() -> None:
    np.testing.assert_allclose(top1(LOGPROBS), [0.5, 0.9], rtol=1e-6)
    np.testing.assert_allclose(margin(LOGPROBS), [0.25, 0.85], rtol=1e-6)


def test_acceptance_before_the_first_proposal() -> None:
    assert acceptance(np.array([0, 0, 3]), np.array([0, 2, 4])).tolist() == [1.0, 0.0, 0.75]


def test_rows_in_the_order_asked_for() -> None:
    everything: dict[str, Any] = {
        "top_logprobs": LOGPROBS,
        "entropy": np.array([1.5, 0.4]),
        "trace": np.array([0.25, 0.5]),
        "depth": np.array([3, 6]),
        "num_layers": 12,
        "phase": np.array([Phase.SELECT, Phase.DRAFT]),
        "draft_length": np.array([0, 3]),
        "max_draft": 12,
        "stable": np.array([True, False]),
        "acceptance": np.array([1.0, 0.5]),
        "chain": np.array([0.0, 2.0]),
        "probe": np.array([0.75, 0.5]),
        "k": 3,
    }
    expected = {
        "confidence": [2 * math.log(2), -math.log(0.9 * 0.05 * 0.025) / 3],
        "entropy": [1.5, 0.4],
        "trace": [0.25, 0.5],
        "depth": [0.25, 0.5],
        "phase": [0, 1],
        "draft_length": [0, 0.25],
        "top1": [0.5, 0.9],
        "margin": [0.25, 0.85],
        "stable": [1, 0],
        "acceptance": [1, 0.5],
        "chain": [0, 2],
        "probe": [0.75, 0.5],
    }
    for names in (EXTENDED, PAPER, FEATURES[::-1], ("chain", "top1"), ("probe",), ()):
        rows = observation_rows(names, 2, **everything)
        assert rows.dtype == np.float32
        assert rows.shape == (2, len(names))
        for column, name in enumerate(names):
            np.testing.assert_allclose(rows[:, column], expected[name], rtol=1e-6, err_msg=name)


def test_scalars_serve_every_row_and_unused_ingredients_may_be_missing() -> None:
    rows = observation_rows(("entropy", "depth"), 3, entropy=2.0, depth=3, num_layers=6)
    assert rows.tolist() == [[2.0, 0.5]] * 3
    for names in (("confidence",), ("depth",), ("draft_length",), ("trace",), ("probe",)):
        with pytest.raises(TypeError, match=names[0]):
            observation_rows(names, 1, entropy=2.0)
    with pytest.raises(TypeError, match="depth"):
        observation_rows(("depth",), 1, depth=3)  # of how many layers?


def test_values_are_clipped_to_the_bounds() -> None:
    rows = observation_rows(
        EXTENDED,
        1,
        top_logprobs=np.full((1, 5), -1e4),
        entropy=99.0,
        trace=-1.0,
        depth=9,
        num_layers=3,
        phase=1,
        draft_length=50,
        max_draft=12,
        stable=True,
        acceptance=1.0,
        chain=1e9,
    )
    low, high = bounds(EXTENDED)
    assert rows.tolist() == [[50, 16, 0, 1, 1, 1, 0, 0, 1, 1, 192]]
    assert (rows >= low).all()
    assert (rows <= high).all()
    assert clip(np.array([[-5.0, 99.0]], np.float32), ("trace", "top1")).tolist() == [[0.0, 1.0]]
    with pytest.raises(ValueError, match="read-only"):
        low[0] = 1.0


def test_one_row_equals_the_same_row_among_many() -> None:
    """The decoder builds rows one by one, replay in tables: they must be the same numbers."""
    rng = np.random.default_rng(0)
    logprobs = np.sort(-rng.exponential(2.0, (64, 8)).astype(np.float32))[:, ::-1]
    entropy, trace = rng.random(64).astype(np.float32), rng.random(64)
    many = observation_rows(PAPER, 64, top_logprobs=logprobs, entropy=entropy, trace=trace)
    for row in range(64):
        one = observation_rows(
            PAPER, 1, top_logprobs=logprobs[row : row + 1], entropy=float(entropy[row]), trace=trace[row]
        )
        np.testing.assert_array_equal(one[0], many[row])


def test_one_row_in_plain_numbers_says_the_same() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        logprobs = -np.sort(rng.exponential(rng.choice([0.1, 3.0, 40.0]), 8)).astype(np.float32)
        given = {
            "entropy": rng.uniform(0, 20), "trace": rng.uniform(0, 20), "depth": int(rng.integers(1, 24)),
            "num_layers": 24, "phase": int(rng.integers(2)), "draft_length": int(rng.integers(15)),
            "max_draft": 12, "stable": bool(rng.integers(2)), "acceptance": rng.uniform(),
            "chain": rng.uniform(0, 250), "probe": rng.uniform(), "k": int(rng.integers(1, 9)),
        }  # fmt: skip
        names = tuple(rng.permutation(FEATURES)[: int(rng.integers(1, len(FEATURES) + 1))].tolist())
        rows = observation_rows(names, 1, top_logprobs=logprobs[np.newaxis], **given)
        row = observation_row(names, top_logprobs=logprobs.tolist(), **given)
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, rows, rtol=2e-6, atol=2e-7)


def test_one_row_of_an_unknown_feature_is_refused() -> None:
    with pytest.raises(InputError, match="'colour' is not a feature"):
        observation_row(("colour",))
