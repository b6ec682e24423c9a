"""Fixtures that several test folders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from sde_gym.traces import TraceSet
from tests.builders import random_traces, store_traces


@pytest.fixture(scope="session")
def toy_traces() -> TraceSet:
    """A seeded random trace set in memory: 6 texts, depths 2, 3 and 6 of 8 layers."""
    return random_traces()


@pytest.fixture(scope="session")
def toy_folder(toy_traces: TraceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same set on disk; not to be changed."""
    return store_traces(tmp_path_factory.mktemp("traces") / "toy", toy_traces)
