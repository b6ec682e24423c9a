"""d3rlpy without its side effects.

Importing d3rlpy prints a notice of an old package, reconfigures structlog for the whole process
and, where there is a GPU, turns TF32 and compiled autograd on. Training needs none of that, and a
losslessness check in the same process must not run on changed arithmetic.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from sde_gym.errors import InputError


def import_d3rlpy() -> ModuleType:
    """Import d3rlpy, leaving the process as it was.

    Raises:
        InputError: it is not installed; the message says how to install it.
    """
    try:
        with _arithmetic_kept(), _structlog_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                import d3rlpy
    except ImportError as error:
        raise InputError(
            f"offline training needs d3rlpy ({error}); install it with: pip install 'sde_gym[offline]'"
        ) from None
    module: ModuleType = d3rlpy
    return module


@contextlib.contextmanager
def training_session(seed: int, threads: int) -> Iterator[ModuleType]:
    """d3rlpy for the length of a `with` block: seeded, quiet, on `threads` threads.

    Torch's random state, its number of threads and structlog's configuration are put back at the end.

    Args:
        seed: seeds torch, which draws the initial weights.
        threads: torch threads inside the block; small networks are fastest on one.

    Yields:
        The d3rlpy module.

    Raises:
        InputError: d3rlpy is not installed, or threads < 1.
    """
    if threads < 1:
        raise InputError(f"threads is {threads}; it must be at least 1")
    d3rlpy = import_d3rlpy()
    import structlog
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]), _structlog_kept():
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
            torch.manual_seed(seed)
            yield d3rlpy
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _arithmetic_kept() -> Iterator[None]:
    """Put torch's matrix-multiplication precision and compiled autograd back when the block ends."""
    import torch

    precision = torch.get_float32_matmul_precision()
    # Only where there is a GPU does d3rlpy touch _dynamo, and loading it takes a second.
    dynamo: Any = torch._dynamo.config if torch.cuda.is_available() else None
    compiled = dynamo.compiled_autograd if dynamo is not None else False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if dynamo is not None:
            dynamo.compiled_autograd = compiled


@contextlib.contextmanager
def _structlog_kept() -> Iterator[None]:
    """Put structlog's process-wide configuration back when the block ends."""
    try:
        import structlog
    except ImportError:  # it comes with d3rlpy, whose absence is reported by the caller
        yield
        return
    configured, configuration = structlog.is_configured(), structlog.get_config()
    try:
        yield
    finally:
        if configured:
            structlog.configure(**configuration)
        else:
            structlog.reset_defaults()
