"""The same numbers reach both logs, with TensorBoard and without."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from sde_gym.errors import InputError
from sde_gym.offline.scalars import SCALARS_FILE, ScalarLog


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / SCALARS_FILE).read_text().splitlines()]


def test_without_tensorboard_the_lines_say_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest)
    )
    with ScalarLog(tmp_path / "deep") as log:
        assert log.notice.startswith("tensorboard is not installed")
        log.add(5, {"loss": 1.5, "return": float("nan")})
        log.add(7, {"loss": 1.0})
        assert log.newest == 7
    assert lines(tmp_path / "deep") == [{"step": 5, "loss": 1.5}, {"step": 7, "loss": 1.0}]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [SCALARS_FILE]


def test_tensorboard_holds_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for step in (3, 4):  # the second run replaces the first
        with ScalarLog(tmp_path) as log:
            assert log.notice == ""
            log.add(step, {"loss": 0.25})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 0.25)]
    assert lines(tmp_path) == [{"step": 4, "loss": 0.25}]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out: is a file"):
        ScalarLog(tmp_path / "out")
