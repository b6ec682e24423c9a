"""States along text that a model writes itself, with what its last layer says: what adapters learn from.

No data are needed (`text_plan` says what is written), and states are those that a draft will meet.
Hundreds of texts are written at once (`text_lanes`), and states are kept as they come: there is no second
pass over the text.

Files of the folder, written as they are finished, so that a run that was stopped goes on behind them:

    request.json                what the states are of
    states-00000.safetensors    of one block of texts, see `OwnStates`

Same settings, same files, whether a run was stopped or not: every block has draws of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, read_json, write_json
from sde_gym.models.adapter_settings import OwnTextSettings
from sde_gym.models.layered import LayeredModel
from sde_gym.models.text_lanes import TextLanes
from sde_gym.models.text_plan import TextPlan, frame

#: Progress callback: tokens written, tokens wanted.
Progress = Callable[[int, int], None]

REQUEST_FILE = "request.json"

#: Drawn tokens are among so many most probable ones.
_CANDIDATES = 256


@dataclass(frozen=True, eq=False)
class OwnStates:
    """States of one block of texts, n positions ordered by text, then place.

    Attributes:
        hidden: bfloat16 (n, hidden_size) at each depth.
        ids: int32 (n, k), the k tokens that the last layer finds most probable next, best first.
        logits: float16 (n, k), their logits less that of the best.
        greedy: bool (n,), whether the text goes on with the best of them; else with a draw.
        text: int32 (n,), number of the text in its block.
    """

    hidden: dict[int, Tensor]
    ids: Tensor
    logits: Tensor
    greedy: Tensor
    text: Tensor

    def __len__(self) -> int:
        return len(self.text)


def write_own_states(
    model: LayeredModel, depths: Sequence[int], settings: OwnTextSettings, out: Path,
    progress: Progress | None = None, prompts: Sequence[Sequence[int]] = (),
) -> list[Path]:  # fmt: skip
    """Write texts and keep their states until there are enough; what is there already is kept.

    Args:
        model: of the Llama family; its dtype is that of the states.
        depths: whose states are kept, below L.
        settings: which texts.
        out: the folder.
        progress: called at every block, and often within one.
        prompts: token ids of whole prompts, `settings.prompt_share` of the texts answers them.

    Returns:
        The files, in order.

    Raises:
        InputError: depths out of range, texts that do not fit the context, or a folder with other states
            or without those of a depth.
    """
    chosen = model.check_depths(depths)
    if not all(prompts):
        raise InputError("prompts: one of them has no tokens; leave it out")
    request = {
        "model": model.name, "weights": model.weights_hash(),
        "dtype": str(model.dtype).removeprefix("torch."), "depths": list(chosen),
        "texts": {
            field.name: getattr(settings, field.name)
            for field in fields(OwnTextSettings)
            if field.name != "tokens"
        },
        "prompts": hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16],
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    path = out / REQUEST_FILE
    if not path.exists():
        write_json(path, request)
    found = read_json(path)
    kept = found.get("depths") if isinstance(found, dict) else None
    if not isinstance(kept, list) or {**request, "depths": kept} != found:
        raise InputError(
            f"{out}: holds states of another model, of other settings or prompts; choose another"
        )
    if not set(chosen) <= set(kept):
        raise InputError(
            f"{out}: holds states at {kept}, not at {list(chosen)}; states are kept while text is written, "
            "so choose another folder"
        )
    files: list[Path] = []
    written = 0
    while written < settings.tokens:
        target = out / f"states-{len(files):05}.safetensors"
        if not target.exists():
            tell = partial(_tell, progress, settings.tokens, written)
            _save(target, _write_block(model, tuple(kept), settings, prompts, len(files), tell))
        written += load_count(target)
        files.append(target)
        _tell(progress, settings.tokens, written, 0)
    return files


def _tell(progress: Progress | None, total: int, before: int, more: int) -> None:
    if progress is not None:
        progress(min(before + more, total), total)


@torch.inference_mode()
def _write_block(
    model: LayeredModel, depths: tuple[int, ...], settings: OwnTextSettings,
    prompts: Sequence[Sequence[int]], block: int, tell: Callable[[int], None],
) -> OwnStates:  # fmt: skip
    """Write one block of texts."""
    top = model.num_layers
    texts = TextPlan(frame(model), settings, model.eos_token_ids, prompts, block)
    lanes = TextLanes(model, len(texts.text), texts.capacity)
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence((settings.seed, block)).generate_state(1)[0])
    )
    for token in texts.common:
        lanes.step(torch.full((len(texts.text),), token), ())
    wanted = (*depths, top)
    most = settings.texts * (settings.opening + 1 + settings.answer)
    hidden = {depth: torch.empty((most, model.hidden_size), dtype=torch.bfloat16) for depth in depths}
    parts: list[tuple[Tensor, ...]] = []  # the rest, which is small
    positions = 0
    while len(texts.text):
        states = lanes.step(torch.from_numpy(texts.fed), wanted)
        own = texts.is_own
        logits = model.heads.logits(states.pop(top), top)
        ids, differences = _most_probable(logits, max(_CANDIDATES, settings.top_k))
        first = torch.from_numpy(texts.is_first)
        drawn = _draw(ids[:, :_CANDIDATES], differences[:, :_CANDIDATES], first, settings, generator)
        ids, differences = ids[:, : settings.top_k].int(), differences[:, : settings.top_k].half()
        best = ids[:, 0].numpy().astype(np.int64)
        rows = torch.from_numpy(np.flatnonzero(own))
        parts.append(
            (
                ids[rows],
                differences[rows],
                torch.from_numpy(texts.is_greedy[own]),
                torch.from_numpy(texts.text[own]).int(),
            )
        )
        for depth, state in states.items():
            hidden[depth][positions : positions + len(rows)] = state[rows]
        positions += len(rows)
        anew, done = texts.go_on(drawn, best)
        if anew:
            lanes.restart(anew, len(texts.common))
        if done:
            left = [lane for lane in range(len(texts.text)) if lane not in set(done)]
            texts.keep(left)
            if left:
                lanes.keep(left)
        if len(parts) % 16 == 0:
            tell(positions)
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    order = torch.argsort(columns[-1], stable=True)
    for depth in depths:  # one at a time: together they are gigabytes
        hidden[depth] = hidden[depth][:positions][order]
    return OwnStates(hidden, *(column[order] for column in columns))


def _draw(
    ids: Tensor, differences: Tensor, first: Tensor, settings: OwnTextSettings, generator: torch.Generator
) -> NDArray[np.int64]:
    """A token for each row, drawn from its candidates, best first; `first` marks the first ones of a text."""
    floor = float(np.log(settings.min_p)) if settings.min_p > 0 else -torch.inf
    kept = torch.where(first[:, None] | (differences >= floor), differences, -torch.inf)
    kept = torch.where(first[:, None], kept / settings.first_temperature, kept)
    noise = torch.empty_like(kept).exponential_(generator=generator)
    place = (kept.exp() / noise).argmax(-1, keepdim=True)
    drawn: NDArray[np.int64] = ids.gather(1, place)[:, 0].numpy()
    return drawn


def _most_probable(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens, int64, and their logits less that of the best."""
    values, ids = logits.topk(min(k, logits.shape[-1]), -1)
    return ids, values - values[:, :1]


def _save(path: Path, block: OwnStates) -> None:
    from safetensors.torch import save_file

    tensors = {f"hidden.{depth}": state.contiguous() for depth, state in block.hidden.items()}
    for name in ("ids", "logits", "greedy", "text"):
        tensors[name] = getattr(block, name).contiguous()
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"positions": str(len(block))})


def load_count(path: Path) -> int:
    """Positions of a block.

    Raises:
        InputError: the file is cut or damaged.
    """
    with _opened(path) as stored:
        return int(stored.metadata()["positions"])


def load_own_states(path: Path, depths: Sequence[int]) -> OwnStates:
    """One block, with the states of these depths only.

    Raises:
        InputError: the file is cut or damaged, or has no states at a depth.
    """
    with _opened(path) as stored:
        names = set(stored.keys())
        for depth in depths:
            if f"hidden.{depth}" not in names:
                raise InputError(f"{path}: holds no states at depth {depth}")
        hidden = {depth: stored.get_tensor(f"hidden.{depth}") for depth in depths}
        rest = [stored.get_tensor(n) for n in ("ids", "logits", "greedy", "text")]
    return OwnStates(hidden, *rest)


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")  # type: ignore[no-untyped-call]
    except (SafetensorError, FileNotFoundError) as error:
        raise InputError(f"{path}: truncated or damaged ({error}); remove it to write it again") from None
