"""Trace sets with what an exit probe says: recorded, stored, read back, optional."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from sde_gym.decoding.speculative import speculative
from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.live import LEDELiveEnv
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.probe import HEAD_INPUTS, ExitProbe
from sde_gym.policies.controller import BaseController
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet, load_traces
from sde_gym.traces.recorder import record, usable_probe
from sde_gym.traces.schema import position_columns
from tests.builders import open_writer, random_traces, store_traces, text_arguments
from tests.decoding.conftest import agreeing_model

DEPTHS = (1, 2, 4)
PROMPTS = [Prompt(id=f"p{n}", task="toy", text=str(n)) for n in range(3)]


@pytest.fixture(scope="module")
def with_probe() -> TraceSet:
    return random_traces(overrun=11, probe=True)


@pytest.fixture
def model() -> LayeredModel:
    model = agreeing_model(compact=list(range(0, 40, 2)))
    model.encode = lambda text: [int(text) + 3, 7]  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    weight = 0.3 * rng.normal(size=(4, model.hidden_size + len(HEAD_INPUTS)))
    known = {"model_hash": model.weights_hash(), "head": model.head_hash()}
    model.attach_probe(ExitProbe((1, 2, 3, 4), weight, np.zeros(4), **known))
    return model


def test_round_trip(with_probe: TraceSet, tmp_path: Path) -> None:
    folder = store_traces(tmp_path, with_probe)
    found = load_traces(folder)
    for name in ("probe", "overrun_probe", "entropy", "overrun_entropy"):
        np.testing.assert_array_equal(getattr(found, name), getattr(with_probe, name))
        assert getattr(found, name).dtype == np.float32
    assert json.loads((folder / "manifest.json").read_text())["probe"] == "f" * 16
    positions = parquet.read_table(folder / "positions-00000.parquet")
    assert positions.column_names == [c.name for c in position_columns(with_probe.depths, probe=True)]
    with pytest.raises(InputError, match=r"recorded with probe 'f+', cannot be resumed with None"):
        open_writer(folder, with_probe, probe=None)


def test_a_subset_keeps_its_rows(with_probe: TraceSet) -> None:
    part = with_probe.subset([3, 1])
    assert part.probe is not None
    assert with_probe.probe is not None
    rows = np.r_[with_probe.start[3] : with_probe.start[4], with_probe.start[1] : with_probe.start[2]]
    np.testing.assert_array_equal(part.probe, with_probe.probe[rows])
    assert part.overrun_probe is not None
    assert len(part.overrun_probe) == len(part.overrun_entropy)
    assert random_traces().subset([0]).probe is None


def test_sets_from_before_there_were_probes_still_load(toy_folder: Path, tmp_path: Path) -> None:
    folder = store_traces(tmp_path, load_traces(toy_folder))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.pop("probe") is None
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = load_traces(folder)
    assert found.probe is None
    assert found.overrun_probe is None


def test_without_overrun_there_is_an_empty_column(tmp_path: Path) -> None:
    found = load_traces(store_traces(tmp_path, random_traces(probe=True)))
    assert found.probe is not None
    assert found.overrun_probe is not None
    assert found.overrun_probe.shape == (0,)
    ReplayEngine(found, observation=["probe"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: {"probe": None}, "what an exit probe says is missing"),
        (lambda text: {"probe": text["probe"] + 1.0}, "probe holds a value that is no probability"),
        (lambda text: {"probe": np.full_like(text["probe"], np.nan)}, "is no probability"),
        (lambda text: {"probe": text["probe"][:, :2]}, "probe has shape"),
        (lambda text: {"overrun": replace(text["overrun"], probe=None)}, "rows are without what an exit"),
    ],
)
def test_what_cannot_be_is_not_written(
    change: Any, message: str, with_probe: TraceSet, tmp_path: Path
) -> None:
    text = text_arguments(with_probe, 0)
    with pytest.raises(InputError, match=message):
        open_writer(tmp_path, with_probe).add_text(**{**text, **change(text)})
    bare = random_traces(overrun=11)
    with pytest.raises(InputError, match="what an exit probe says is given, but the set has probe None"):
        open_writer(tmp_path, bare).add_text(**text)


def test_the_recorder_asks_the_probe_at_every_row(model: LayeredModel, tmp_path: Path) -> None:
    traces = record(model, PROMPTS, tmp_path, DEPTHS, max_new_tokens=8)
    assert model.probe is not None
    assert traces.manifest["probe"] == model.probe.identity
    assert traces.probe is not None
    assert traces.overrun_probe is not None
    assert traces.probe.shape == (len(traces.token), 3)
    assert len(traces.overrun_probe) == len(traces.overrun_entropy) > 20
    for n, prompt in enumerate(PROMPTS):
        ids, text = model.encode(prompt.text), traces.tokens_of(n).tolist()
        rows = slice(traces.start[n], traces.start[n + 1])
        for column, depth in enumerate(DEPTHS):
            sequence = model.sequence(32)
            sequence.append(ids + text[:-1])
            sequence.advance(depth)
            seen = model.heads.states(sequence.hidden(depth, len(text)), depth).numpy()
            said = model.probe(depth, seen, traces.top_logprobs[rows, column], traces.entropy[rows, column])
            np.testing.assert_allclose(traces.probe[rows, column], said, atol=1e-5)


def test_a_probe_that_does_not_fit_is_left_out(model: LayeredModel, tmp_path: Path) -> None:
    assert usable_probe(model, (1, 3)) is model.probe
    assert usable_probe(model, (1, 5)) is None  # it does not know that depth
    assert usable_probe(model, (1, 3), compact=False) is None  # nor those heads
    traces = record(model, PROMPTS[:1], tmp_path, (1, 5), max_new_tokens=4)
    assert traces.manifest["probe"] is None
    assert traces.probe is None


class Prober(BaseController):
    """Reads the probe and nothing else."""

    name = "prober"
    observation = ("probe",)

    def act(self, view: Any) -> np.ndarray:
        return (view.observation[:, 0] > 0.5).astype(np.int64)


def test_who_asks_for_a_probe_that_is_not_there_is_told(model: LayeredModel) -> None:
    with pytest.raises(InputError, match=r"'probe' .* recorded without an exit probe; .*train-probe"):
        ReplayEngine(random_traces(), observation=["probe"])
    with pytest.raises(InputError, match=r"knows the depths \[1, 2, 3, 4\], not \[5\]"):
        speculative(model, [5, 7], Prober(), (1, 5), 4)
    model.probe = None
    with pytest.raises(InputError, match="'agreeing' has no exit probe; leave it out, or train one"):
        speculative(model, [5, 7], Prober(), DEPTHS, 4)
    with pytest.raises(InputError, match="'agreeing' has no exit probe"):
        LEDELiveEnv(model, PROMPTS, depths=DEPTHS, observation=["probe"])
