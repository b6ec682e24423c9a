"""Checks of arguments, for every layer of the package: what is wrong is named before anything runs."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sde_gym.errors import InputError

_INTS = {int}


def is_whole(value: Any) -> bool:
    """Whether it is an int, of Python or of numpy; True and False are not, and neither is 2.0."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def whole_number(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int; InputError naming the argument and its range unless it is one within it."""
    if high is not None:
        limits = f" ({low}..{high})"
    else:
        limits = "" if low is None else f" (at least {low})"
    if not is_whole(value):
        raise InputError(f"{name}: {shown(value)} is not a whole number{limits}; give one such as {low or 1}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InputError(f"{name}: {value} is out of range{limits}; give a number within it")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool; InputError naming the argument unless it is one."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name}: {shown(value)} is neither True nor False; give one of them")
    return bool(value)


def token_ids(name: str, given: Any) -> list[int]:
    """Token ids as a list of ints; InputError naming the argument unless they are ints in a row.

    A list, a tuple, a range, or a one-dimensional integer array of numpy or torch will do.
    """
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, (str, bytes, bytearray, Mapping)) or not isinstance(found, Sequence):
        raise InputError(
            f"{name}: {shown(given)} is no list of token ids; give one, such as [1, 2] (model.encode makes "
            "them of text)"
        )
    ids = list(found)
    if set(map(type, ids)) <= _INTS:
        return ids
    ids = [token.item() if getattr(token, "shape", None) == () else token for token in ids]
    for token in ids:
        if not is_whole(token):
            raise InputError(f"{name}: {shown(token)} is no token id; give whole numbers from 0 on")
    return [int(token) for token in ids]


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, and cut if long."""
    return " ".join(reprlib.repr(value).split())
