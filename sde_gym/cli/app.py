"""The command line's groups of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from sde_gym.terminal import SentenceGroup

app = typer.Typer(
    name="sde-gym",
    cls=SentenceGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Self-speculative decoding of a language model, as a reinforcement-learning problem.",
)
models_app = typer.Typer(no_args_is_help=True, help="The models that are known by name.")
traces_app = typer.Typer(no_args_is_help=True, help="Recorded traces.")
bench_app = typer.Typer(no_args_is_help=True, help="How fast parts of the package are here.")
app.add_typer(bench_app, name="bench")
app.add_typer(models_app, name="models")
app.add_typer(traces_app, name="traces")


def _show_version(wanted: bool) -> None:
    if wanted:
        from sde_gym import __version__

        typer.echo(f"sde_gym {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before any command."""
