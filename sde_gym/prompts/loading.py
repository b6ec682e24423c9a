"""One function for every source of prompts: the shipped sets by name, or a file."""

from __future__ import annotations

from pathlib import Path

from sde_gym.errors import InputError
from sde_gym.prompts.files import load_prompt_file
from sde_gym.prompts.prompt import Prompt

#: Names of the shipped sets.
PROMPT_SETS: tuple[str, ...] = (
    "stdlib",
    "stdlib:train",
    "stdlib:held-out",
    "chat",
    "chat:train",
    "chat:held-out",
)


def load_prompts(name_or_path: str | Path) -> list[Prompt]:
    """Load a shipped prompt set or a file of prompts.

    Args:
        name_or_path: one of `PROMPT_SETS` (a string; it wins over a file of that name, which
            can be had as `./stdlib` or as a `Path`), or the path of a file as described in
            `load_prompt_file`. The shipped sets come in a fixed order in which tasks take
            turns, so that the first prompts of a set are a fair, smaller set.

    Returns:
        At least one prompt; ids are unique.

    Raises:
        InputError: no such set or file, or the file is at fault (see `load_prompt_file`);
            or the running interpreter has too little of its standard library's source.
    """
    if isinstance(name_or_path, str) and name_or_path in PROMPT_SETS:
        family, _, split = name_or_path.partition(":")
        if family == "chat":
            from sde_gym.prompts.chat import load_chat

            return load_chat(split or None)
        # Imported here so that `python -m sde_gym.prompts.library` runs a fresh module.
        from sde_gym.prompts.library import load_library

        return load_library(split or None)
    path = Path(name_or_path)
    try:
        exists = bool(str(name_or_path)) and path.exists()
    except (OSError, ValueError):  # a name no file system takes, such as a prompt's text
        exists = False
    if not exists:
        raise InputError(
            f"{str(name_or_path)!r}: neither a prompt set nor an existing file; "
            f"the sets are {', '.join(PROMPT_SETS)}"
        )
    return load_prompt_file(path)
