"""The text of single tokens, and a model's tokenizer without its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sde_gym.errors import InputError
from sde_gym.models.loading import available_models

TOKENIZER_FILE = "tokenizer.json"


def token_pieces(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Split a decoded text into one piece per token.

    A token may hold only a part of a character (byte-level vocabularies); the character then
    appears with the token that completes it and the pieces before it are empty. Joined, the
    pieces equal `decode(ids)`.
    """
    pieces: list[str] = []
    shown = ""
    for count in range(1, len(ids) + 1):
        text = decode(list(ids[:count]))
        complete = text.startswith(shown) and (not text.endswith("\ufffd") or count == len(ids))
        pieces.append(text[len(shown) :] if complete else "")
        if complete:
            shown = text
    return pieces


def token_decoder(model: str, largest_id: int) -> Callable[[list[int]], str] | None:
    """Turns ids of a model into text, without loading the model.

    Args:
        model: a name that `load_model` knows, or a folder.
        largest_id: the largest id that will be asked for.

    Returns:
        ids to text, special tokens included; None if there is no `tokenizer.json` on this machine,
        or one with too few tokens, which then belongs to another model of the name.

    Raises:
        InputError: the file cannot be read as a tokenizer.
    """
    folders = [named.folder for named in available_models() if named.name == model]
    file = (folders[0] if folders else Path(model)) / TOKENIZER_FILE
    if not file.is_file():
        return None
    tokenizer = _tokenizer(file.resolve(), file.stat().st_mtime_ns)
    if largest_id >= tokenizer.get_vocab_size():
        return None

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return decode


@lru_cache(maxsize=4)
def _tokenizer(file: Path, modified: int) -> Any:
    """The tokenizer in a file; `modified` makes a changed file a new key."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"{file}: not a tokenizer ({error})") from None
