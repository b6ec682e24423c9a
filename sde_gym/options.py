"""Command-line options made from a settings dataclass, so that defaults live in one place.

The dataclass is named, not imported: the modules that hold settings may import torch, and
`sde-gym --help` has to be quick. A command made here receives its arguments unparsed,
imports the dataclass, and parses them then.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING
from importlib import import_module
from typing import Annotated, Any

import typer

from sde_gym.errors import InputError
from sde_gym.settings import Field, describe
from sde_gym.terminal import errors_as_sentences


def settings_command(app: typer.Typer, name: str, settings: str) -> Callable[[Callable[..., None]], None]:
    """Decorator: add a command whose options are a function's own plus a dataclass's fields.

    Args:
        app: where the command is added.
        name: of the command.
        settings: the dataclass, as 'module:class'.

    The function takes the settings as its argument `settings`.
    """

    def decorate(function: Callable[..., None]) -> None:
        @app.command(
            name,
            help=inspect.getdoc(function),
            add_help_option=False,  # --help reaches the command below, like every other option
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
        def stage(context: typer.Context) -> None:
            command = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
            command.command(help=inspect.getdoc(function))(with_settings(function, _load(settings)))
            status = command(args=context.args, prog_name=context.command_path, standalone_mode=False)
            if status:
                raise typer.Exit(status)

    return decorate


def _load(location: str) -> type[Any]:
    module, _, name = location.partition(":")
    return typing.cast("type[Any]", getattr(import_module(module), name))


def with_settings(function: Callable[..., None], settings: type[Any]) -> Callable[..., None]:
    """`function` with its argument `settings` replaced by one option for each field."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if name != "settings"
    ]
    fields = describe(settings)
    parameters = own + [_parameter(field) for field in fields]

    def call(**values: Any) -> None:
        with errors_as_sentences():
            given = {field.name: _value(field, values.pop(field.name)) for field in fields}
            function(settings=settings(**given), **values)

    # Typer reads a function's options from these two.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameter(field: Field) -> inspect.Parameter:
    """One option; tuples are given as a list with commas, like '1,2,3'."""
    annotation, default, metavar = field.type, field.default, None
    if _is_tuple(annotation):
        metavar = "A,B,..."
        annotation = str | None if default is None else str
        if default is not None and default is not MISSING:
            default = ",".join(str(item) for item in default)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[annotation, typer.Option(help=field.help, metavar=metavar)],
    )


def _value(field: Field, given: Any) -> Any:
    """The value that a field takes for what was given on the command line."""
    if given is None or not _is_tuple(field.type):
        return given
    kind = next(
        typing.get_args(option)[0] for option in _options(field.type) if typing.get_origin(option) is tuple
    )
    return parse_list(given, kind, field.name)


def parse_list(text: str, kind: type[Any], name: str) -> tuple[Any, ...]:
    """'1,2,3' as a tuple of numbers or words.

    Raises:
        InputError: an item is not of that kind, or there is none.
    """
    try:
        return tuple(kind(item.strip()) for item in text.split(","))
    except ValueError:
        option = "--" + name.replace("_", "-")
        words = {int: "whole numbers", float: "numbers"}.get(kind, "items")
        raise InputError(f"{option} {text!r}: expected {words} with commas between, such as 1,2,3") from None


def _options(annotation: Any) -> tuple[Any, ...]:
    """The annotation and, of a union, its members."""
    return (annotation, *typing.get_args(annotation))


def _is_tuple(annotation: Any) -> bool:
    return any(typing.get_origin(option) is tuple for option in _options(annotation))
