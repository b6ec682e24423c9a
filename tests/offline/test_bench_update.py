"""The benchmark runs both ways on the same data and reports what it measured; no test asks for a speed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.offline import DQNSettings
from sde_gym.offline.bench_update import Curve, UpdateBenchmark, bench_update, report
from sde_gym.traces import TraceSet

SMALL = DQNSettings(episodes=6, gradient_steps=8, evaluate_every=4, hidden=(8,), batch_size=16)


def test_both_ways_train_from_the_same_weights(toy_traces: TraceSet, tmp_path: Path) -> None:
    names: list[str] = []
    state = np.random.get_state()[1].copy()  # type: ignore[union-attr]  # noqa: NPY002
    found = bench_update(toy_traces, SMALL, repeats=2, progress=lambda done, total, way: names.append(way))
    assert names == ["fit", "ours", "ours", "fit"]
    assert [(curve.way, curve.seed) for curve in found.curves] == [
        ("fit", 0), ("ours", 0), ("ours", 1), ("fit", 1),
    ]  # fmt: skip
    assert found.checkpoints == (4, 8)
    for curve in found.curves:
        assert len(curve.loss) == len(curve.returns) == 2
        assert np.isfinite([*curve.loss, *curve.returns]).all()
        assert curve.rate == pytest.approx(8 / curve.seconds)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]  # noqa: NPY002
    found.save(tmp_path / "bench.json")
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["speedup"] == found.speedup
    assert saved["settings"]["batch_size"] == 16
    text = report(found)
    assert "at batch 16, 1 thread, 2 repeats" in text
    assert len(text.splitlines()) == 3 + 1 + 1 + 1 + 2


def test_figures_follow_from_the_curves() -> None:
    curves = (
        Curve("fit", 0, 2.0, 10, (1.0,), (5.0,)),
        Curve("ours", 0, 1.0, 10, (2.0,), (8.0,)),
        Curve("fit", 1, 2.0, 10, (3.0,), (7.0,)),
        Curve("ours", 1, 0.5, 10, (4.0,), (8.0,)),
    )
    found = UpdateBenchmark(curves, (10,), {}, {})
    assert found.rates("ours") == [10.0, 20.0]
    assert found.speedup == 3.0
    mean, spread = found.mean_and_spread("fit", "loss")
    np.testing.assert_allclose([mean[0], spread[0]], [2.0, 2**0.5])
    np.testing.assert_allclose(found.differences("loss"), [1.0 / (4 / 2) ** 0.5])
    np.testing.assert_allclose(found.differences("returns"), [2.0 / (2 / 2) ** 0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"settings": DQNSettings(gradient_steps=7, evaluate_every=4)}, "no multiple of evaluate_every"),
        ({"algorithm": "fame"}, "not registered"),
        ({"algorithm": "decision_transformer", "settings": SMALL}, "learns from sequences"),
    ],
)
def test_what_cannot_be_measured_is_refused(toy_traces: TraceSet, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench_update(toy_traces, **changes)
