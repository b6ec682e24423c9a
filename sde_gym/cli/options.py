"""Options that several commands share, and what they do with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sde_gym.errors import InputError

Model = Annotated[str, typer.Option(help="A name from `sde-gym models list`, a folder, or a hub id.")]
DType = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, or on CUDA float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads for torch; its own choice if not given.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens generated per prompt.")]
PromptSet = Annotated[str, typer.Option("--prompts", help="A prompt set's name or a file of prompts.")]


def use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def read_text(path: Path) -> str:
    """A prompt file's text.

    Raises:
        InputError: the file is empty or not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    if not text:
        raise InputError(f"{path}: the file is empty; it should hold the text to continue")
    return text
