"""The number of torch threads, for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sde_gym.errors import InputError


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use `count` torch threads within the block, and what there was before after it."""
    if count < 1:
        raise InputError(f"threads must be at least 1, not {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
