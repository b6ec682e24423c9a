"""The command line: one thin command a stage. It parses, calls, and shows; nothing else.

Libraries are imported inside the commands, so that `sde-gym --help` is quick.
"""

from __future__ import annotations

from sde_gym.cli import bench, data, learning, running  # each adds its commands
from sde_gym.cli.app import app

__all__ = ["app", "bench", "data", "learning", "main", "running"]


def main() -> None:
    """Entry point of `sde-gym` and of `python -m sde_gym`."""
    app(prog_name="sde-gym")
