"""The lattice decoded on a trace set's texts: held against the count, and a wrong count is told of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sde_gym.decoding.dex import dex
from sde_gym.errors import InputError
from sde_gym.evaluation.dex_live import LiveTexts, TickMismatchError, compare_ticks, model_of
from sde_gym.evaluation.dex_selection import adadecode_row, selection_row
from sde_gym.evaluation.dex_sweep import DexSettings, dex_report
from sde_gym.evaluation.dex_ticks import TickCount, dex_ticks
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.rules import StaticController
from sde_gym.prompts import load_prompts
from sde_gym.traces import TraceSet
from sde_gym.traces.recorder import record

X = (1, 2, 4)


@pytest.fixture(scope="module")
def folders(
    tiny_model_folder: Path, prompt_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """(texts to judge on, other texts) of the tiny model, every depth below its 4 layers."""
    model, root = load_model(tiny_model_folder), tmp_path_factory.mktemp("live")
    found = []
    for name, path in (("judged", prompt_files[1]), ("other", prompt_files[0])):
        record(model, load_prompts(str(path))[:4], root / name, (1, 2, 3), max_new_tokens=20)
        found.append(str(root / name))
    return found[0], found[1]


@pytest.fixture(scope="module")
def traces(folders: tuple[str, str]) -> TraceSet:
    from sde_gym.traces import load_traces

    return load_traces(folders[0])


@pytest.fixture(scope="module")
def model(traces: TraceSet, tiny_model_folder: Path) -> LayeredModel:
    return model_of(traces, str(tiny_model_folder))


def test_a_sweep_builds_every_lattice(folders: tuple[str, str], tiny_model_folder: Path) -> None:
    settings = DexSettings(
        traces=folders[0], chosen_on=folders[1], model=str(tiny_model_folder), lattice_texts=2,
        explorers=(2, 4), exploration_set=X, max_draft=3,
    )  # fmt: skip
    found = dex_report(settings)
    rows = {row["method"]: row for row in found["rows"]}
    assert {"dex_given", "dex", "dex_chosen", "layerskip", "del", "adadecode", "lite"} <= set(rows)
    for row in found["rows"]:
        assert (row["decoded_texts"], row["identical_texts"], row["identical_to_ar"]) == (2, 2, True)
        if row["explorers"] is None:
            assert row["lattice_tokens"] is None
            continue
        # Each emitted token passes all stages, but for the last ones of a text.
        assert 0 < row["lattice_tokens"] <= row["lattice_tokens_max"] <= row["lattice_bound"]
        assert row["useful_share"] == pytest.approx(row["explorers"] / row["lattice_tokens"])
        assert row["ticks_checked"] > 2
        assert row["near_ties"] == 0
    assert any("adadecode is decoded on 2 of the 4 texts" in note for note in found["notes"])


def test_without_the_model_the_columns_are_empty(folders: tuple[str, str], tmp_path: Path) -> None:
    found = dex_report(DexSettings(traces=folders[0], explorers=(2,), lattice_texts=0))
    assert all(row["identical_to_ar"] is None for row in found["rows"])
    assert "adadecode" not in {row["method"] for row in found["rows"]}
    assert "nothing was decoded (lattice_texts 0): lattice columns are empty" in found["notes"]
    with pytest.raises(InputError, match="other weights"):
        dex_report(DexSettings(traces=folders[0], explorers=(2,), model="stdlib-20m"))


def altered(traces: TraceSet, **arrays: np.ndarray) -> TraceSet:
    return dataclasses.replace(traces, **arrays)  # type: ignore[arg-type]


def decoded(model: LayeredModel, traces: TraceSet, text: int = 1) -> tuple[Any, TickCount]:
    (prompt,) = LiveTexts(model, traces.subset([text]), 1).prompts
    return dex(model, prompt, X, 20), dex_ticks(traces, X)


def test_a_wrong_stage_is_told_of_by_text_and_token(model: LayeredModel, traces: TraceSet) -> None:
    result, count = decoded(model, traces)
    assert compare_ticks(result, traces, 1, count) == (len(result.tokens), 0)
    row = int(traces.start[1]) + 3
    stage = count.stage.copy()
    stage[row] = (stage[row] + 1) % 3
    wrong = dataclasses.replace(count, stage=stage)
    with pytest.raises(TickMismatchError, match=rf"{traces.text_ids[1]}', token 3: .* selects stage"):
        compare_ticks(result, traces, 1, wrong)
    logprobs = traces.top_logprobs.copy()
    logprobs[row, :, 1] = logprobs[row, :, 0] - 1e-4  # now any two candidates may change places there
    assert compare_ticks(result, altered(traces, top_logprobs=logprobs), 1, wrong) == (len(result.tokens), 1)


def test_a_wrong_token_is_told_of_unless_it_nearly_ties(model: LayeredModel, traces: TraceSet) -> None:
    result, count = decoded(model, traces)
    row = int(traces.start[1]) + 5
    token = traces.token.copy()
    token[row] += 1
    with pytest.raises(TickMismatchError, match="token 5: the lattice emits"):
        compare_ticks(result, altered(traces, token=token), 1, count)
    gap = traces.final_gap.copy()
    gap[row] = 1e-5
    assert compare_ticks(result, altered(traces, token=token, final_gap=gap), 1, count) == (6, 1)
    result.tokens, result.selected = result.tokens[:-1], result.selected[:-1]
    with pytest.raises(TickMismatchError, match="ticks, but by the stages that were selected"):
        compare_ticks(result, traces, 1, count)


def test_what_is_decoded_counts_as_what_is_replayed(model: LayeredModel, traces: TraceSet) -> None:
    """A static setting by the decoder's counters, as AdaDecode is counted, and by replay."""
    controller = StaticController(2, 3)
    live = LiveTexts(model, traces, len(traces))
    replayed = selection_row("static", controller, traces, (2,), 3, live)
    counted = adadecode_row(controller, live, (2,), 3)  # type: ignore[arg-type]
    same = {"texts", "tokens", "simulated_speedup", "layer_speedup", "depth_speedup", "late_exit", "fallback",
            "early_match", "oracle_share", "identical_texts"}  # fmt: skip
    for name in same:
        assert counted[name] == pytest.approx(replayed[name]), name
    ada = adadecode_row(AdaDecodeController(0.4), live, (1, 2, 3), 3)
    assert ada["identical_to_ar"]
    lost = ada["late_exit"] + ada["fallback"] - ada["early_match"]
    assert 0 <= 4 / ada["depth_speedup"] - lost <= 4  # the mean EAD
