"""Judgements: numbers by hand, and estimators that rank well where weights are finite."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.estimators import KINDS, Estimate, Estimator
from sde_gym.evaluation.fitted_q import FQESettings
from sde_gym.evaluation.judging import _judged, default_estimators, judge, regret, summarise
from sde_gym.evaluation.player import Policy
from sde_gym.evaluation.policy_suite import policy_suite
from sde_gym.evaluation.truth import TrueValue
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.policies.rules import StaticController
from tests.builders import random_traces
from tests.pages import first_column, marked, read_page

NAN = float("nan")
TRACES = random_traces(seed=8, texts=9, overrun=3)


def said(value: float, low: float = NAN, high: float = NAN, size: float = 1.0) -> Estimate:
    return Estimate("is", "p", value, low, high, 0.95, 0.9, size, 10)


def test_the_summary_by_hand() -> None:
    truth = np.array([1.0, 2.0, 3.0, 4.0])
    row = summarise(
        [said(3.0, 0.5, 4.0, 2), said(1.0, 0.0, 1.5, 4), said(2.5, 2.0, 3.5, 6), said(NAN, size=0)], truth
    )
    assert row == {
        "gamma": 0.9,
        "policies": 4,
        "estimated": 3,
        "mean_absolute_error": pytest.approx((2.0 + 1.0 + 0.5) / 3),
        "rank_correlation": pytest.approx(-0.5),  # ranks 3, 1, 2 against 1, 2, 3
        "regret@1": 3.0,
        "regret@3": 1.0,
        "regret@5": 1.0,
        "coverage": pytest.approx(2 / 3),
        "median_effective_sample_size": 3.0,
    }
    nothing = summarise([said(NAN), said(NAN)], truth[:2])
    assert nothing["estimated"] == 0
    assert nothing["mean_absolute_error"] is nothing["rank_correlation"] is nothing["regret@1"] is None


def test_an_infinite_estimate_leaves_plain_json() -> None:
    truth = TrueValue("p", (0.9,), np.array([1.0]), np.array([0.0]), 1)
    judgement = _judged([said(float("inf")), said(1.0)], [truth, truth], ["is"])
    assert [row["error"] for row in judgement.estimates] == [None, 0.0]
    json.dumps([judgement.estimates, judgement.summary], allow_nan=False)


def test_regret() -> None:
    truth = np.array([5.0, 1.0, 4.0])
    assert regret(truth, truth, 1) == 0.0
    assert regret(-truth, truth, 1) == 4.0
    assert regret(-truth, truth, 2) == 1.0
    assert regret(np.array([2.0, 2.0, 2.0]), truth, 1) == 0.0  # the first of equal ones


def test_rounds_are_ranked_well_and_covered() -> None:
    transitions = collect(TRACES, UniformRandom(), 3000, seed=2, episode="round", max_draft=4)
    policies = policy_suite(transitions)
    assert len(policies) >= 20
    steps: list[tuple[int, int]] = []
    judgement = judge(
        default_estimators(0.9, fqe=False), policies, transitions, TRACES, samples=200, repeats=8,
        progress=lambda done, of: steps.append((done, of)),
    )  # fmt: skip
    rows = {row["estimator"]: row for row in judgement.summary}
    assert set(rows) == {"is", "pdis", "wis", "wpdis", "lstd", "dr-lstd", "wdr-lstd"}
    for name in ("is", "pdis", "wis", "wpdis", "dr-lstd", "wdr-lstd"):
        assert rows[name]["estimated"] == len(policies)
        assert rows[name]["rank_correlation"] > 0.9, name
        assert rows[name]["coverage"] > 0.75, name
    assert rows["dr-lstd"]["mean_absolute_error"] < rows["is"]["mean_absolute_error"]
    assert rows["is"]["median_effective_sample_size"] > 100
    assert len(judgement.estimates) == 7 * len(policies)
    json.dumps([judgement.estimates, judgement.summary], allow_nan=False)
    table = judgement.markdown().splitlines()
    assert len(table) == 2 + 7
    assert len({line.count("|") for line in table}) == 1
    assert steps[-1] == (len(policies), len(policies))


def test_whole_texts_with_fitted_q_and_two_gammas() -> None:
    transitions = collect(TRACES, UniformRandom(), 30, seed=1, max_draft=4, observation=("top1", "trace"))
    quick = FQESettings(hidden=(8,), gradient_steps=10, batch_size=16)
    estimators = [*default_estimators(1.0, quick), Estimator("is at 0.5", "is", 0.5)]
    policies: list[Policy] = [StaticController(2, 1), StaticController(6, 4), UniformRandom(0.5)]
    judgement = judge(estimators, policies, transitions, TRACES, samples=50, repeats=2)
    rows = {(row["estimator"], row["policy"]): row for row in judgement.estimates}
    assert len(rows) == (len(KINDS) + 3 + 1) * 3
    assert rows["is", "uniform"]["value"] == pytest.approx(transitions.returns().mean())
    assert rows["is", "uniform"]["truth"] != rows["is at 0.5", "uniform"]["truth"]
    lost = [row for row in rows.values() if row["value"] is None]
    assert lost
    assert all(row["reason"] for row in lost)
    assert rows["fqe", "uniform"]["value"] is not None
    json.dumps(judgement.summary, allow_nan=False)


def test_bad_input_is_refused() -> None:
    transitions = collect(TRACES, UniformRandom(), 3, seed=1, max_draft=4)
    one, other = StaticController(2, 1), StaticController(2, 2)
    weights = [Estimator("is", "is", 0.9)]
    with pytest.raises(InputError, match="at least 2 policies"):
        judge(weights, [one], transitions, TRACES)
    with pytest.raises(InputError, match="2 are named"):
        judge(weights, [one, one], transitions, TRACES)
    with pytest.raises(InputError, match="a name is given twice"):
        judge(weights * 2, [one, other], transitions, TRACES)


def test_the_page_explains_every_kind_and_column() -> None:
    page = read_page("estimators")
    assert first_column(marked(page, "kinds")) == list(KINDS)
    assert first_column(marked(page, "estimate")) == list(said(1.0).row())
    summary = summarise([said(1.0), said(2.0)], np.array([1.0, 2.0]))
    assert first_column(marked(page, "summary")) == ["estimator", *summary]
