"""The wall-clock table: what is counted, what is compared, what is restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from sde_gym.decoding import DecodeResult, Round
from sde_gym.errors import InputError
from sde_gym.evaluation.benchmark import (
    ar_method,
    assistant_early_exit_method,
    controller_method,
    generate_method,
    measure,
    rows_as_dicts,
    summarise_rows,
)
from sde_gym.models import LayeredModel, load_model
from sde_gym.policies.rules import StaticController


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LayeredModel:
    return load_model(tiny_model_folder)


def fake(
    tokens: list[int], seconds: float, rounds: list[Round] | None = None, untimed: int = 1
) -> DecodeResult:
    result = DecodeResult(4, list(tokens), [4] * len(tokens), ["final"] * len(tokens), rounds or [])
    result.decode_seconds = seconds
    result.untimed_tokens = untimed
    return result


def test_the_table_is_arithmetic() -> None:
    results = {
        "ar": {"a": fake([1, 2, 3], 2.0), "b": fake([1, 2, 3, 4, 5], 4.0)},
        "fast": {
            "a": fake([1, 2, 3], 0.5, [Round(1, 2, 1), Round(4, 0, 0)]),
            "b": fake([1, 2, 3, 4, 6], 1.0, [Round(2, 4, 2)]),
        },
    }
    prompts = [("a", "t", [0]), ("b", "t", [1])]
    names = {0: "a", 1: "b"}
    methods = {name: (lambda ids, number, name=name: results[name][names[ids[0]]]) for name in results}
    rows, outputs = measure(methods, prompts, repeats=2)
    assert len(rows_as_dicts(rows)) == 8
    assert outputs["fast"]["b"].tokens[-1] == 6
    ar, fast = summarise_rows(rows)
    assert ar["tokens_per_second"] == pytest.approx(1.0)
    assert ar["acceptance_rate"] is None
    assert ar["identical_to_ar"] is True
    assert fast["tokens_per_second"] == pytest.approx(4.0)
    assert fast["speedup"] == pytest.approx(4.0)
    assert fast["acceptance_rate"] == pytest.approx(3 / 6)
    assert fast["mean_exit_depth"] == pytest.approx(1.5)  # over rounds that drafted
    assert fast["mean_draft_length"] == pytest.approx(3.0)
    assert fast["identical_to_ar"] is False
    assert fast["identical_prompts"] == 1


def test_real_methods_agree_and_the_model_is_left_as_it_was(model: LayeredModel) -> None:
    budget = 24
    config = model.hf.generation_config
    before = {
        name: getattr(config, name, None)
        for name in ("num_assistant_tokens", "assistant_confidence_threshold")
    }
    layers = len(model.hf.model.layers)
    methods = {
        "ar": ar_method(model, budget),
        "generate": generate_method(model, budget),
        "assistant_early_exit": assistant_early_exit_method(model, budget, 2, 3),
        "static": controller_method(model, StaticController(2, 3), (1, 2), budget),
    }
    prompts = [(str(i), "t", model.encode(f"def f_{i}(value):\n")) for i in range(3)]
    rows, outputs = measure(methods, prompts)
    table = {row["method"]: row for row in summarise_rows(rows)}
    assert all(row["identical_to_ar"] for row in table.values())
    assert all(row["tokens_per_second"] > 0 for row in table.values())
    # Two implementations of the same static setting accept alike (the last rounds are cut differently).
    theirs, ours = table["assistant_early_exit"], table["static"]
    assert theirs["acceptance_rate"] == pytest.approx(ours["acceptance_rate"], abs=0.1)
    assert theirs["mean_exit_depth"] == ours["mean_exit_depth"] == 2
    assert before == {name: getattr(config, name, None) for name in before}
    assert len(model.hf.model.layers) == layers
    assert len(outputs["ar"]["0"].tokens) <= budget


def test_bad_requests_are_refused(model: LayeredModel) -> None:
    methods = {"ar": ar_method(model, 4)}
    with pytest.raises(InputError, match="baseline 'x'"):
        measure(methods, [("a", "t", [1])], baseline="x")
    with pytest.raises(InputError, match="at least one prompt"):
        measure(methods, [])
    with pytest.raises(InputError, match="exit_depth 4"):
        assistant_early_exit_method(model, 4, 4, 2)
