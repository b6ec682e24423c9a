"""docs/offline.md says what settings, data and log really hold; `python -m tests.pages` writes its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sde_gym.offline import DQNSettings, train_policy
from sde_gym.offline.pipeline import LOG_FILE
from sde_gym.traces import TraceSet
from tests.pages import first_column, made_from_code, marked, read_page

PAGE = read_page("offline")


@pytest.mark.parametrize("mark", ["settings", "transitions"])
def test_the_tables_are_those_of_the_code(mark: str) -> None:
    assert marked(PAGE, mark) == made_from_code()["offline", mark]


def test_the_log_and_the_files_are_those_written(toy_traces: TraceSet, tmp_path: Path) -> None:
    settings = DQNSettings(episodes=3, gradient_steps=1, batch_size=4, hidden=(4,))
    train_policy(toy_traces, tmp_path, settings)
    (row,) = (tmp_path / LOG_FILE).read_text(encoding="utf-8").splitlines()
    assert first_column(marked(PAGE, "log")) == list(json.loads(row))
    for path in tmp_path.iterdir():
        assert f"`{path.name}`" in PAGE, path.name
