"""Figures of predicted probabilities, against values worked by hand and plain counting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.models.reliability import (
    auc,
    expected_calibration_error,
    figures,
    log_loss,
    reliability_curve,
)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    score, happened = rng.integers(0, 6, 80) / 5, rng.random(80) < 0.4  # many ties
    pairs = [(a > b) + 0.5 * (a == b) for a in score[happened] for b in score[~happened]]
    assert auc(score, happened) == pytest.approx(np.mean(pairs))
    assert auc([0.9, 0.8, 0.1], [True, True, False]) == 1.0
    assert math.isnan(auc([0.9, 0.8], [True, True]))


def test_log_loss_by_hand() -> None:
    assert log_loss([0.5, 0.25], [True, False]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)
    assert math.isfinite(log_loss([1.0], [False]))


def test_reliability_by_hand() -> None:
    count, mean, share = reliability_curve([0.1, 0.2, 0.9, 1.0], [False, True, True, True], bins=2)
    assert count.tolist() == [2, 2]
    np.testing.assert_allclose(mean, [0.15, 0.95])
    np.testing.assert_allclose(share, [0.5, 1.0])
    error = expected_calibration_error([0.1, 0.2, 0.9, 1.0], [False, True, True, True], bins=2)
    assert error == pytest.approx((0.35 + 0.05) / 2)


def test_predictions_that_mean_what_they_say_have_no_error() -> None:
    rng = np.random.default_rng(1)
    probability = rng.random(200_000)
    happened = rng.random(200_000) < probability
    assert expected_calibration_error(probability, happened) < 0.01
    assert expected_calibration_error(probability**2, happened) > 0.1


def test_figures_are_plain_json_even_where_there_is_no_auc() -> None:
    found = figures(np.array([0.5, 0.6]), np.array([True, True]))
    assert found["auc"] is None
    assert (found["rows"], found["share"]) == (2, 1.0)
    assert sum(found["reliability"]["rows"]) == 2


@pytest.mark.parametrize(
    ("score", "happened", "message"),
    [
        ([], [], "at least one row"),
        ([0.5], [True, False], "one of each a row"),
        ([np.nan], [True], "not finite"),
    ],
)
def test_what_cannot_be_measured_is_refused(score: list[float], happened: list[bool], message: str) -> None:
    with pytest.raises(InputError, match=message):
        auc(score, happened)
