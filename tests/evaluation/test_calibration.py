"""Calibration on a tiny model: what is counted, what is fitted, and that the decoder is left as it is."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sde_gym.decoding import speculative
from sde_gym.errors import InputError
from sde_gym.evaluation.calibration import _fitted, _Samples, calibrate, cost_table
from sde_gym.evaluation.prediction import Prediction, check_controllers, predict
from sde_gym.evaluation.stopwatch import Stopwatch, watched
from sde_gym.models.cost import load_cost, unit_cost
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.prompts import Prompt
from tests.decoding.conftest import agreeing_model

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    return agreeing_model()


def test_the_stopwatch_sees_every_layer_and_head_and_changes_nothing(model: LayeredModel) -> None:
    stopwatch = Stopwatch(model.device)
    controller = ThresholdController(0.3)
    seen = speculative(watched(model, stopwatch), PROMPT, controller, (1, 3), 20)
    plain = speculative(model, PROMPT, ThresholdController(0.3), (1, 3), 20)
    assert seen.tokens == plain.tokens
    assert [event.rows for event in stopwatch.events[:2]] == [3, 1]  # prefill: its pass and its head
    events = stopwatch.events[2:]
    passes = [event for event in events if event.stop]
    assert sum((event.stop - event.first) * event.rows for event in passes) == plain.layer_passes
    assert sum(event.stop - event.first for event in passes) == plain.sequential_layers
    assert len(events) - len(passes) == plain.head_calls
    assert all(before.end <= after.start for before, after in pairwise(events))
    stopwatch.clear()
    assert not stopwatch.events


def test_calibration(model: LayeredModel, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    cost = calibrate(
        model, [PROMPT, [5, 4]], (1, 3), max_draft=4, max_new_tokens=40, repeats=2,
        progress=lambda *counts: done.append(counts),
    )  # fmt: skip
    assert done == [(n, 8) for n in range(1, 9)]  # plain, two depths, and one whose heads are read
    assert (cost.name, cost.unit, cost.num_layers) == ("agreeing", "seconds", 6)
    assert cost.max_draft == 4
    assert cost.draft_depths == (1, 3)
    assert 0 < cost.first_draft[0] < cost.first_draft[1]
    assert min(*cost.layer, *cost.final_head, *cost.later_draft, cost.exit_head) > 0
    assert cost.fixed_decision > cost.fixed_blind_decision > 0
    cost.save(tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json") == cost
    assert json.loads((tmp_path / "cost.json").read_text())["provenance"] == cost.provenance
    assert cost.provenance["weights_hash"] == model.weights_hash()
    assert cost.provenance["hardware"]["threads"] == 1
    measured = {
        (row["part"], row.get("tokens", row.get("depth", row.get("proposals")))): row
        for row in cost.provenance["measured"]
    }
    assert {n for part, n in measured if part == "layer"} >= {1, 2, 3, 4}
    assert {n for part, n in measured if part == "later draft pass"} == {1, 3}
    for row in measured.values():
        assert row["quartiles"][0] <= row["quartiles"][1]
        assert row["samples"] > 0
    assert measured["layer", 1]["average"] == cost.layer[0]
    rest = measured["rest of a plain step", None]["average"]
    assert cost.plain_token == pytest.approx(6 * cost.layer[0] + cost.final_head[0] + rest)
    parts = [row[0] for row in cost_table(cost)]
    assert "layer, 1 token" in parts
    assert "first draft pass to depth 3, a layer" in parts
    assert "fixed, a round" in parts


def test_the_rest_of_rounds_is_divided(model: LayeredModel) -> None:
    """3 ms a round, 0.2 ms a proposal and 0.5 ms a decision come out as they went in."""
    samples = _Samples()
    for name in ("rest of a plain step", "exit head", "blind decision"):
        samples.add(name, 1e-5)
    for n in (1, 2, 4):
        samples.add("layer", n * 1e-3, n)
        samples.add("final head", 1e-4, n)
        samples.add("rest of a round", 3e-3 + n * 2e-4, n)
        samples.add("rest of a round", 3e-3 + n * 2e-4, n)
        samples.reading.append((3e-3 + n * 2e-4 + (n + 2) * 5e-4, n + 2, n))
    for depth, seconds in ((1, 2e-3), (3, 1e-3)):
        for name in ("first draft pass", "later draft pass"):
            samples.add(name, seconds, depth)
    cost = _fitted(samples, model, (1, 3), 3, 1, 1)
    assert cost.fixed_round == pytest.approx(3e-3)
    assert cost.fixed_proposal == pytest.approx(2e-4)
    assert cost.fixed_decision == pytest.approx(5e-4)
    assert cost.layer == pytest.approx((1e-3, 2e-3, 3e-3, 4e-3))  # three tokens never went together
    assert cost.later_draft == (2e-3, 2e-3)  # a deeper pass takes no less
    assert cost.plain_token == pytest.approx(6 * 1e-3 + 1e-4 + 1e-5)
    for value in range(1, 21):
        samples.add("odd", float(value**9), value % 2)
    middle = [value**9 for value in range(3, 18, 2)]  # of ten odd numbers all but the first and the last
    assert samples.average("odd", 1) == pytest.approx(np.mean(middle))
    empty = _Samples()
    with pytest.raises(InputError, match="not once could 'rest of a round' be timed"):
        _fitted(empty, model, (1, 3), 3, 1, 1)


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"max_draft": 0}, {"max_new_tokens": 1}])
def test_wrong_numbers_are_refused(wrong: dict[str, int], model: LayeredModel) -> None:
    with pytest.raises(InputError, match="must be at least 1 and max_new_tokens at least 2"):
        calibrate(model, [PROMPT], (1, 3), **wrong)
    with pytest.raises(InputError, match="depths"):
        calibrate(model, [PROMPT], (1, 6))


def test_texts_too_short_are_refused(model: LayeredModel) -> None:
    with pytest.raises(InputError, match="the texts end too soon"):
        calibrate(model, [PROMPT], (1, 3), max_new_tokens=2, repeats=1)


def test_predictions_stand_beside_measurements(model: LayeredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's clock is replaced by the unit model's: then every prediction is exact."""
    from sde_gym.evaluation import prediction

    ids = {f"prompt {n}": np.random.default_rng(n).integers(1, 39, 4 + n).tolist() for n in range(3)}
    monkeypatch.setattr(model, "encode", ids.__getitem__)  # the model has no tokenizer
    real = prediction.measure

    def measure_in_layers(methods, prompts, **options):  # type: ignore[no-untyped-def]
        def counted(method):  # type: ignore[no-untyped-def]
            def decode(prompt, number):  # type: ignore[no-untyped-def]
                result = method(prompt, number)
                result.decode_seconds = float(result.sequential_layers)
                return result

            return decode

        return real({name: counted(method) for name, method in methods.items()}, prompts, **options)

    monkeypatch.setattr(prediction, "measure", measure_in_layers)
    controllers = check_controllers((1, 3), 5, StaticController(3, 3))
    assert list(controllers) == [
        "static(1, 2)", "static(1, 4)", "static(3, 2)", "static(3, 4)", "threshold(0.5, 0.5)", "static(3, 3)",
    ]  # fmt: skip
    prompts = [Prompt(id=text, task="toy", text=text) for text in ids]
    found = predict(
        model, unit_cost(6), prompts, controllers, (1, 3), max_draft=5, max_new_tokens=20, repeats=1
    )
    assert [row.controller for row in found] == list(controllers)
    for row in found:
        assert row.predicted == pytest.approx(row.measured)
        assert row.error == pytest.approx(0.0)
    assert len({row.predicted for row in found}) > 2
    with pytest.raises(InputError, match="'ar' is the name of plain decoding"):
        predict(model, unit_cost(6), prompts, {"ar": StaticController(1, 1)}, (1, 3))


def test_the_error_of_a_prediction() -> None:
    assert Prediction("x", 2.2, 2.0).error == pytest.approx(0.1)
