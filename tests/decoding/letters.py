"""A tokenizer for the forty tokens of `agreeing_model`: one letter each."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

LETTERS = string.ascii_letters[:40]


def letter_tokenizer() -> Any:
    """Token i is `LETTERS[i]`."""
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left")
