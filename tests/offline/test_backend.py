"""d3rlpy is used without leaving marks on the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from sde_gym.errors import InputError
from sde_gym.offline.backend import training_session

FRESH_PROCESS = """
import sys
import sde_gym.offline.training, sde_gym.offline.collect, sde_gym.offline.pipeline
for name in ("d3rlpy", "torch"):
    assert name not in sys.modules, f"importing sde_gym.offline must not import {name}"
import structlog, torch
precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
from sde_gym.offline.backend import training_session
with training_session(seed=0, threads=1) as d3rlpy:
    algorithm = d3rlpy.algos.DQNConfig().create(device=False)
    algorithm.create_impl((3,), 2)
    algorithm.create_impl((3,), 2)  # d3rlpy logs a warning here
    d3rlpy.logging.LOG.info("chatter")
assert not structlog.is_configured()
assert torch.get_float32_matmul_precision() == precision
assert torch.get_num_threads() == threads
"""


def test_a_fresh_process_is_left_as_it_was_and_nothing_is_printed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "chatter" not in result.stdout + result.stderr
    assert "Gym has been unmaintained" not in result.stderr


def test_the_session_seeds_inside_and_restores_outside() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draws = []
    for _ in range(2):
        with training_session(seed=1, threads=1):
            draws.append(torch.rand(3))
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(torch.rand(3), expected)


def test_threads_are_restored_after_an_exception() -> None:
    before = torch.get_num_threads()

    def fail_inside() -> None:
        with training_session(seed=0, threads=before + 1):
            assert torch.get_num_threads() == before + 1
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert torch.get_num_threads() == before
    with pytest.raises(InputError, match="threads is 0"):
        training_session(seed=0, threads=0).__enter__()
