"""The embedded model's text: the running interpreter's standard library, as tokens.

The modules in `HELD_OUT` are never trained on. They serve to measure the language model
and to cut the prompts that policies are trained and judged on (`sde_gym.prompts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sde_gym.prompts.reference import library_root

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

#: Folders of the library that are not text worth learning: generated tables, vendored packages.
EXCLUDED_FOLDERS = ("site-packages", "__pycache__", "pydoc_data", "encodings", "lib2to3/tests/data")

#: Modules never trained on, as paths below the standard library's root.
HELD_OUT: tuple[str, ...] = (
    "argparse.py", "bisect.py", "calendar.py", "cmd.py", "colorsys.py", "configparser.py",
    "csv.py", "difflib.py", "email/utils.py", "filecmp.py", "fractions.py", "ftplib.py",
    "getopt.py", "gettext.py", "heapq.py", "html/entities.py", "html/parser.py",
    "http/cookies.py", "ipaddress.py", "json/decoder.py", "json/encoder.py", "linecache.py",
    "locale.py", "logging/handlers.py", "mailbox.py", "mimetypes.py", "netrc.py", "opcode.py",
    "plistlib.py", "poplib.py", "pprint.py", "pstats.py", "queue.py", "random.py", "sched.py",
    "shelve.py", "shlex.py", "smtplib.py", "sre_constants.py", "stat.py", "statistics.py",
    "string.py", "tarfile.py", "textwrap.py", "timeit.py", "token.py", "tokenize.py",
    "urllib/robotparser.py", "uuid.py", "wave.py", "zipapp.py", "zipfile.py",
    "encodings/aliases.py", "ctypes/wintypes.py", "http/__init__.py", "idlelib/config.py",
    "test/test_bisect.py", "test/test_calendar.py", "test/test_cmd.py", "test/test_csv.py",
    "test/test_difflib.py", "test/test_fractions.py", "test/test_getopt.py",
    "test/test_heapq.py", "test/test_htmlparser.py", "test/test_ipaddress.py",
    "test/test_mailbox.py", "test/test_netrc.py", "test/test_plistlib.py",
    "test/test_pprint.py", "test/test_queue.py", "test/test_random.py", "test/test_shelve.py",
    "test/test_shlex.py", "test/test_smtplib.py", "test/test_statistics.py",
    "test/test_string.py", "test/test_textwrap.py", "test/test_timeit.py",
    "test/test_uuid.py", "test/test_zipapp.py", "test/string_tests.py",
)  # fmt: skip


def library_files(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (path below the root, source text) of every readable module, in sorted order."""
    root = root or library_root()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name not in HELD_OUT and any(f"/{folder}/" in f"/{name}" for folder in EXCLUDED_FOLDERS):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # tests of broken encodings
            continue
        if text.strip():
            yield name, text


def split_library(root: Path | None = None) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts) of the standard library."""
    held_out = frozenset(HELD_OUT)
    train: list[str] = []
    test: list[str] = []
    for name, text in library_files(root):
        (test if name in held_out else train).append(text)
    return train, test


def train_tokenizer(texts: list[str], vocabulary_size: int):  # type: ignore[no-untyped-def]
    """Byte-level BPE of `vocabulary_size` entries; id 0 is the end-of-text token.

    Returns:
        `tokenizers.Tokenizer`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(tokenizer, texts: list[str]) -> np.ndarray:  # type: ignore[no-untyped-def]
    """All texts as one int32 stream, each followed by the end-of-text token."""
    pieces = []
    for encoding in tokenizer.encode_batch(texts):
        pieces.append(np.asarray([*encoding.ids, END_OF_TEXT_ID], dtype=np.int32))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
