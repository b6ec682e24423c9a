"""Text that a model writes itself: what its early exits are best trained on.

A draft is judged against the last layer along text that the model generates, and a model's greedy
text is not the text that it was trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path
from sde_gym.models import corpus
from sde_gym.models.layered import LayeredModel

#: Windows generated at once: wide enough to keep two cores busy, small enough for 2 GB of keys.
BATCH = 512

OWN_TEXT_FILE = "own-text.safetensors"


def own_windows(
    model: Any, stream: Tensor, count: int, length: int, seed: int, out: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Windows whose first half is training text and whose rest the model wrote, greedily.

    Kept in `out`, so that an interrupted call goes on where it stopped.

    Args:
        model: a Hugging Face causal language model; run in bfloat16.
        stream: int (tokens,), the text that beginnings are cut from at random.
        count: windows.
        length: tokens of a window; one more is stored, the last one's target.
        seed: of the cuts.
        out: folder for `own-text.safetensors`.
        progress: called with windows done, windows in all.

    Returns:
        int64 (count, length + 1). A text that ended is filled up with end-of-text tokens.
    """
    from safetensors.torch import save_file

    beginning = length // 2
    path = out / OWN_TEXT_FILE
    windows = _stored(path, length)
    writer = None
    while len(windows) < count:
        if writer is None:
            writer = model.to(torch.bfloat16).eval()
        rng = np.random.default_rng((seed, len(windows)))
        starts = rng.integers(0, len(stream) - beginning, min(BATCH, count - len(windows)))
        prompts = torch.stack([stream[s : s + beginning] for s in starts]).long()
        with torch.inference_mode():
            written = writer.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=length + 1 - beginning,
                cache_implementation="static",
                disable_compile=True,
                pad_token_id=writer.config.eos_token_id,
            )
        rows = torch.full((len(prompts), length + 1), writer.config.eos_token_id)
        rows[:, : written.shape[1]] = written
        windows = torch.cat([windows, rows])
        with atomic_path(path) as temporary:
            save_file({"windows": windows.int()}, temporary)
        if progress is not None:
            progress(len(windows), count)
    return windows[:count]


def count_own_tokens(
    model: LayeredModel, tokens: int, out: Path, seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:  # fmt: skip
    """How often each token occurs in text that a model writes: int64 (vocab_size,).

    The text is that of `own_windows`, of 256 tokens, behind the standard library's training modules.
    The model is left in bfloat16.

    Args:
        model: with a tokenizer of the `tokenizers` library.
        tokens: at least so many are counted, at least 1.
        out: folder for the text.
        seed: of the cuts.
        progress: called with windows done, windows in all.
    """
    length = 256
    if tokens < 1:
        raise InputError(f"tokens must be at least 1, not {tokens}")
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"the model {model.name} has no tokenizer of the `tokenizers` library")
    texts, _ = corpus.split_library()
    stream = torch.from_numpy(corpus.tokenize(backend, texts))
    count = -(-tokens // (length - length // 2))
    windows = own_windows(model.hf, stream, count, length, seed, out, progress)
    return np.bincount(windows[:, length // 2 :].flatten().numpy(), minlength=model.vocab_size)


def _stored(path: Path, length: int) -> Tensor:
    """The windows that are there already, int64 (n, length + 1)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        return torch.zeros((0, length + 1), dtype=torch.int64)
    try:
        windows = load_file(path)["windows"].long()
    except (SafetensorError, KeyError) as error:
        raise InputError(f"{path}: truncated or damaged ({error}); remove the file") from None
    if windows.ndim != 2 or windows.shape[1] != length + 1:
        raise InputError(f"{path}: holds windows of {windows.shape[-1] - 1} tokens, not {length}; remove it")
    return windows
