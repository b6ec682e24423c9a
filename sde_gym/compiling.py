"""Functions compiled by numba, for the modules that are imported only where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[Function], Function]:
    """Decorator: compile when first called, and keep the code on disk where numba finds a place for it.

    Args:
        options: of `numba.njit`.
    """

    def decorate(function: Function) -> Function:
        found: Any
        try:
            found = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder to keep compiled code in
            found = numba.njit(**options)(function)
        return cast(Function, found)

    return decorate
