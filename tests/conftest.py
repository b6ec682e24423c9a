"""Surroundings that are the same on every machine, and fixtures that several test folders share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sde_gym.traces import TraceSet

# Before rich, typer, torch and the hub's client are imported, since they read these then.
for _name in (
    "CLICOLOR_FORCE", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH", "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
):  # fmt: skip
    os.environ.pop(_name, None)
os.environ.update(
    COLUMNS="160",
    HF_HUB_OFFLINE="1",  # no test reaches a network
    NO_COLOR="1",
    OMP_NUM_THREADS="1",  # for sessions' fixtures, torch imported inside a test, and processes started
    TRANSFORMERS_OFFLINE="1",
    _TYPER_FORCE_DISABLE_TERMINAL="1",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and on busy cores they lose.

    Tests that need no torch do not import it for this.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def toy_traces() -> TraceSet:
    """A seeded random trace set in memory: 6 texts, depths 2, 3 and 6 of 8 layers, overrun 11."""
    from tests.builders import random_traces

    return random_traces(overrun=11)


@pytest.fixture(scope="session")
def toy_folder(toy_traces: TraceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same set on disk; not to be changed."""
    from tests.builders import store_traces

    return store_traces(tmp_path_factory.mktemp("traces") / "toy", toy_traces)
