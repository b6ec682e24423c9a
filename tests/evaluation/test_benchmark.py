"""The wall-clock table: what is counted, what is compared, what is restored, what is not measured twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sde_gym.decoding import DecodeResult, Round
from sde_gym.errors import InputError
from sde_gym.evaluation.benchmark import (
    Measurement,
    Method,
    ar_method,
    assistant_early_exit_method,
    controller_method,
    differing,
    generate_method,
    measure,
    rows_as_dicts,
    speedups,
    summarise_rows,
)
from sde_gym.evaluation.peers import prompt_lookup_method
from sde_gym.models import LayeredModel, load_model
from sde_gym.policies.rules import StaticController


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LayeredModel:
    return load_model(tiny_model_folder)


def fake(
    tokens: list[int], seconds: float, rounds: list[Round] | None = None, untimed: int = 1
) -> DecodeResult:
    fates = ["prefill"] + ["final"] * (len(tokens) - 1)
    result = DecodeResult(4, list(tokens), [4] * len(tokens), fates, rounds or [])  # type: ignore[arg-type]
    result.decode_seconds = seconds
    result.untimed_tokens = untimed
    return result


PROMPTS = [("a", "t", [0]), ("b", "t", [1])]


def recorded(
    results: dict[str, dict[str, DecodeResult]], calls: list[str] | None = None
) -> dict[str, Method]:
    """Methods that return these results, and note who was called for what."""

    def method(name: str) -> Method:
        def decode(ids: list[int], number: int) -> DecodeResult:
            if calls is not None:
                calls.append(f"{name}{number}")
            return results[name][PROMPTS[ids[0]][0]]

        return decode

    return {name: method(name) for name in results}


RESULTS = {
    "ar": {"a": fake([1, 2, 3], 2.0), "b": fake([1, 2, 3, 4, 5], 4.0)},
    "fast": {
        "a": fake([1, 2, 3], 0.5, [Round(1, 2, 1), Round(4, 0, 0)]),
        "b": fake([1, 2, 3, 4, 6], 1.0, [Round(2, 4, 2)]),
    },
}


def test_the_table_is_arithmetic() -> None:
    RESULTS["fast"]["a"].controller_seconds, RESULTS["fast"]["b"].idle_head_seconds = 0.3, 0.6
    rows, outputs = measure(recorded(RESULTS), PROMPTS, repeats=2)
    assert len(rows_as_dicts(rows)) == 8
    assert outputs["fast"]["b"].tokens[-1] == 6
    ar, fast = summarise_rows(rows)
    assert ar["tokens_per_second"] == pytest.approx(1.0)
    assert ar["acceptance_rate"] is None
    assert ar["tokens_per_round"] is None
    assert ar["identical_to_ar"] is True
    assert fast["tokens_per_second"] == pytest.approx(4.0)
    assert fast["tokens_per_second_range"] == [4.0, 4.0]
    assert fast["speedup"] == pytest.approx(4.0)
    assert speedups(rows, "ar", "fast") == [0.25, 0.25]
    assert fast["acceptance_rate"] == pytest.approx(3 / 6)
    assert fast["mean_exit_depth"] == pytest.approx(1.5)  # over rounds that drafted
    assert fast["mean_draft_length"] == pytest.approx(3.0)
    assert fast["tokens_per_round"] == pytest.approx(6 / 3)  # token 0 is prefill's
    assert fast["controller_share"] == pytest.approx(0.3 / 1.5)
    assert fast["idle_head_share"] == pytest.approx(0.6 / 1.5)
    assert fast["identical_to_ar"] is False
    assert fast["identical_prompts"] == 1
    assert list(differing(rows)) == [("fast", "b")]


def test_a_text_that_differs_once_is_not_identical() -> None:
    rows, _ = measure(recorded({"ar": RESULTS["ar"]}), PROMPTS, repeats=2)
    other = [replace(row, method="other") for row in rows]
    other[0] = replace(other[0], output=(9,))
    assert summarise_rows([*rows, *other])[1]["identical_prompts"] == 1


def test_the_spread_is_over_repeats() -> None:
    rows, _ = measure(recorded(RESULTS), PROMPTS, repeats=2)
    slower = [replace(r, decode_seconds=2 * r.decode_seconds) if r.repeat and r.method == "fast" else r
              for r in rows]  # fmt: skip
    fast = summarise_rows(slower)[1]
    assert fast["speedup_range"] == [2.0, 4.0]
    assert fast["speedup"] == 3.0
    assert fast["tokens_per_second_range"] == [2.0, 4.0]


def test_a_stopped_measurement_goes_on_behind_its_last_row() -> None:
    first: list[Measurement] = []

    def stop_after_five(row: Measurement) -> None:
        first.append(row)
        if len(first) == 5:
            raise KeyboardInterrupt

    whole, _ = measure(recorded(RESULTS), PROMPTS, repeats=2, seed=3)
    with pytest.raises(KeyboardInterrupt):
        measure(recorded(RESULTS), PROMPTS, repeats=2, seed=3, sink=stop_after_five)
    calls: list[str] = []
    sunk: list[Measurement] = []
    rows, _ = measure(recorded(RESULTS, calls), PROMPTS, repeats=2, seed=3, known=first, sink=sunk.append)
    assert rows == whole
    assert len(sunk) == 3
    assert {(r.method, r.prompt, r.repeat) for r in sunk}.isdisjoint(
        (r.method, r.prompt, r.repeat) for r in first
    )
    warmed = {row.method for row in sunk}
    assert len(calls) == len(sunk) + len(warmed)
    calls.clear()
    assert measure(recorded(RESULTS, calls), PROMPTS, repeats=2, known=rows)[0] == whole
    assert calls == []


def test_real_methods_agree_and_the_model_is_left_as_it_was(model: LayeredModel) -> None:
    budget = 24
    config = model.hf.generation_config
    before = {
        name: getattr(config, name, None)
        for name in ("num_assistant_tokens", "assistant_confidence_threshold", "prompt_lookup_num_tokens")
    }
    layers = len(model.hf.model.layers)
    methods = {
        "ar": ar_method(model, budget),
        "generate": generate_method(model, budget),
        "prompt_lookup": prompt_lookup_method(model, budget, 5),
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
    assert theirs["tokens_per_round"] == pytest.approx(ours["tokens_per_round"], rel=0.2)
    assert theirs["mean_exit_depth"] == ours["mean_exit_depth"] == 2
    assert table["prompt_lookup"]["tokens_per_round"] >= 1
    assert table["prompt_lookup"]["acceptance_rate"] is None
    assert before == {name: getattr(config, name, None) for name in before}
    assert model.hf.generation_config is config
    assert len(model.hf.model.layers) == layers
    assert len(outputs["ar"]["0"].tokens) <= budget


def test_transformers_methods_sample_by_their_seed(model: LayeredModel) -> None:
    prompt = model.encode("def f_1(value):\n")
    for method in (
        generate_method(model, 12, 1.5, lambda number: number),
        prompt_lookup_method(model, 12, 4, 1.5, lambda number: number),
        assistant_early_exit_method(model, 12, 2, 3, 1.5, lambda number: number),
    ):
        drawn = [tuple(method(prompt, number).tokens) for number in range(4)]
        assert tuple(method(prompt, 1).tokens) == drawn[1]
        assert len(set(drawn)) > 1


def test_bad_requests_are_refused(model: LayeredModel) -> None:
    methods = {"ar": ar_method(model, 4)}
    with pytest.raises(InputError, match="baseline 'x'"):
        measure(methods, [("a", "t", [1])], baseline="x")
    with pytest.raises(InputError, match="at least one prompt"):
        measure(methods, [])
    with pytest.raises(InputError, match="exit_depth 4"):
        assistant_early_exit_method(model, 4, 4, 2)
    with pytest.raises(InputError, match="lookup_tokens must be at least 1, not 0"):
        prompt_lookup_method(model, 4, 0)
