"""Settings dataclasses: one frozen dataclass a stage, with a line of help under every field.

The dataclass is the only place that knows a stage's options and defaults; the command line
is built from it (`sde_gym.cli`), and stages save it as JSON beside what they made.
"""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from sde_gym.errors import InputError

#: Tokens generated per text wherever texts are recorded or counted, unless said otherwise.
DEFAULT_NEW_TOKENS = 96

#: Most tokens drafted in a round, LEDE's cap; what is recorded behind wrong proposals reaches as far.
DEFAULT_MAX_DRAFT = 12

#: More tokens than any draft can use: acceptance falls with each of them.
LONGEST_DRAFT = 1024

#: Tokens drafted in every round of a static setting, unless said otherwise.
DEFAULT_DRAFT_LENGTH = 4

#: Candidate exit depths, of which a model has those below its number of layers.
DEFAULT_DEPTHS = (1, 2, 3, 4, 6, 8, 12)

Value = TypeVar("Value")


def setting(default: Value, help: str) -> Value:
    """A dataclass field with a default and a line of help.

    Typed as the default's own type, because that is what the field holds on an instance.
    """
    return dataclasses.field(default=default, metadata={"help": help})


def command_of(command: str, settings: Any) -> str:
    """The command line that asks for these settings: `command`, and the options that are not defaults."""
    words = [command]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += ["--" + field.name.replace("_", "-"), shlex.quote(shown)]
    return " ".join(words)


@dataclass(frozen=True)
class Field:
    """One field of a settings dataclass."""

    name: str
    type: Any  # the resolved annotation
    default: Any  # dataclasses.MISSING if the field has none
    help: str


def describe(settings: type[Any]) -> list[Field]:
    """The fields of a settings dataclass, in order, with their annotations resolved."""
    hints = typing.get_type_hints(settings)
    described = []
    for field in dataclasses.fields(settings):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        described.append(Field(field.name, hints[field.name], default, field.metadata.get("help", "")))
    return described


def check_settings(settings: Any, names: Iterable[str], holds: Callable[[Any], bool], message: str) -> None:
    """Refuse the first of the named fields whose value something does not hold for.

    Args:
        settings: an instance of a settings dataclass.
        names: of its fields.
        holds: `is_whole`, `is_number`, `at_least_one`, or any other condition on a value.
        message: what is wrong, with places for `{name}` and `{value}`.

    Raises:
        InputError: that message.
    """
    for name in names:
        value = getattr(settings, name)
        if not holds(value):
            raise InputError(message.format(name=name, value=value))


def is_whole(value: Any) -> bool:
    """Whether it is an int of Python, as JSON has them; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is an int or a float; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def at_least_one(value: Any) -> bool:
    """Whether a number is 1 or more."""
    return bool(value >= 1)
