"""States along text that a model writes itself, with what its last layer says: what adapters learn from.

A text starts from nothing but the model's own idea of a beginning. A chat model is given the template up
to the user's turn, draws a question there, and answers it greedily; another model draws some tokens behind
its first one and goes on greedily. So no data are needed, and states are those that a draft will meet.
Hundreds of texts are written at once (`text_lanes`), and states are kept as they come: there is no second
pass over the text.

Files of the folder, written as they are finished, so that a run that was stopped goes on behind them:

    request.json                what the states are of
    states-00000.safetensors    of one block of texts, see `OwnStates`

Same settings, same files, whether a run was stopped or not: every block has draws of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, read_json, write_json
from sde_gym.models.layered import LayeredModel
from sde_gym.models.text_lanes import TextLanes

#: Progress callback: tokens written, tokens wanted.
Progress = Callable[[int, int], None]

REQUEST_FILE = "request.json"

#: Stands where the user's words are, to find out what the chat template puts around them.
_MARK = "\u2603"

#: A drawn token has at least this share of the most probable one's probability: keeps beginnings sensible.
_MIN_P = 0.05

_OPENING, _BRIDGE, _ANSWER = range(3)


@dataclass(frozen=True)
class OwnTextSettings:
    """What texts are written.

    Attributes:
        tokens: at least so many are written in all, drawn and greedy ones.
        opening: most drawn tokens of a text; the user's turn of a chat.
        answer: most greedy tokens of a text.
        texts: of a block.
        lanes: texts written at once.
        top_k: most probable tokens of the last layer that are kept.
        seed: of what is drawn.

    Raises:
        InputError: a number below 1, or a seed below 0.
    """

    tokens: int = 1_000_000
    opening: int = 32
    answer: int = 96
    texts: int = 1536
    lanes: int = 512
    top_k: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "seed" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}: {value!r} must be a whole number of at least {least}")


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


@dataclass(frozen=True)
class Frame:
    """The tokens around what is drawn: `prefix`, then the opening, then `bridge`, then the answer."""

    prefix: tuple[int, ...]
    bridge: tuple[int, ...]


def frame(model: LayeredModel) -> Frame:
    """What surrounds a text of the model.

    Raises:
        InputError: no tokenizer, or a template that does not leave the user's words alone.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"model {model.name!r} has no tokenizer, so it cannot begin a text of its own")
    if not getattr(tokenizer, "chat_template", None):
        first = tokenizer.bos_token_id
        first = first if first is not None else (model.eos_token_ids or (0,))[0]
        return Frame((int(first),), ())
    turn = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    before, found, behind = text.partition(_MARK)
    prefix = tuple(tokenizer(before, add_special_tokens=False)["input_ids"])
    bridge = tuple(tokenizer(behind, add_special_tokens=False)["input_ids"])
    if not found or not prefix or not bridge:
        raise InputError(f"the chat template of {model.name!r} does not show where the user's words are")
    return Frame(prefix, bridge)


def write_own_states(
    model: LayeredModel, depths: Sequence[int], settings: OwnTextSettings, out: Path,
    progress: Progress | None = None,
) -> list[Path]:  # fmt: skip
    """Write texts and keep their states until there are enough; what is there already is kept.

    Args:
        model: of the Llama family; its dtype is that of the states.
        depths: whose states are kept, below L.
        settings: which texts.
        out: the folder.
        progress: called at every block, and often within one.

    Returns:
        The files, in order.

    Raises:
        InputError: depths out of range, texts that do not fit the context, or a folder with other states
            or without those of a depth.
    """
    chosen = model.check_depths(depths)
    request = {
        "model": model.name, "weights": model.weights_hash(),
        "dtype": str(model.dtype).removeprefix("torch."), "depths": list(chosen),
        "texts": {name: value for name, value in asdict(settings).items() if name != "tokens"},
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    path = out / REQUEST_FILE
    if not path.exists():
        write_json(path, request)
    found = read_json(path)
    kept = found.get("depths") if isinstance(found, dict) else None
    if not isinstance(kept, list) or {**request, "depths": kept} != found:
        raise InputError(f"{out}: holds states of another model or of other settings; choose another")
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
            _save(target, _write_block(model, tuple(kept), settings, len(files), tell))
        written += load_count(target)
        files.append(target)
        _tell(progress, settings.tokens, written, 0)
    return files


def _tell(progress: Progress | None, total: int, before: int, more: int) -> None:
    if progress is not None:
        progress(min(before + more, total), total)


class _Texts:
    """Which text each lane writes, and how far it is."""

    def __init__(self, around: Frame, settings: OwnTextSettings, ends: Sequence[int]) -> None:
        self.around, self.settings, self.ends = around, settings, set(ends)
        lanes = min(settings.lanes, settings.texts)
        self.text = np.arange(lanes)
        self.next = lanes  # the number of the next text
        self.phase = np.full(lanes, _OPENING)
        self.count = np.zeros(lanes, dtype=np.int64)  # tokens of the phase
        self.fed = np.full(lanes, around.prefix[-1])  # to be fed next

    def go_on(self, drawn: NDArray[np.int64], best: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Take up what was said behind the tokens fed; lanes that started anew, lanes that are done."""
        around, settings = self.around, self.settings
        anew, done = [], []
        for lane in range(len(self.text)):
            token = int(best[lane] if self.phase[lane] == _ANSWER else drawn[lane])
            self.count[lane] += 1
            over = False
            if self.phase[lane] == _OPENING:
                ended = token in self.ends or (around.bridge and token == around.bridge[0])
                if around.bridge and (ended or self.count[lane] > settings.opening):
                    self.phase[lane], self.count[lane], token = _BRIDGE, 0, around.bridge[0]
                elif ended:
                    over = True
                elif not around.bridge and self.count[lane] >= settings.opening:
                    self.phase[lane], self.count[lane] = _ANSWER, 0
            elif self.phase[lane] == _BRIDGE:
                token = around.bridge[self.count[lane]]
            else:
                over = token in self.ends or self.count[lane] >= settings.answer
            if self.phase[lane] == _BRIDGE and self.count[lane] == len(around.bridge) - 1:
                self.phase[lane], self.count[lane] = _ANSWER, 0  # the last one is fed now, then it answers
            self.fed[lane] = token
            if over:
                if self.next < settings.texts:
                    self.text[lane], self.next = self.next, self.next + 1
                    self.phase[lane], self.count[lane], self.fed[lane] = _OPENING, 0, around.prefix[-1]
                    anew.append(lane)
                else:
                    done.append(lane)
        return anew, done

    def keep(self, lanes: Sequence[int]) -> None:
        """Drop all other lanes."""
        chosen = list(lanes)
        self.text, self.phase = self.text[chosen], self.phase[chosen]
        self.count, self.fed = self.count[chosen], self.fed[chosen]


@torch.inference_mode()
def _write_block(
    model: LayeredModel, depths: tuple[int, ...], settings: OwnTextSettings, block: int,
    tell: Callable[[int], None],
) -> OwnStates:  # fmt: skip
    """Write one block of texts."""
    around, top = frame(model), model.num_layers
    texts = _Texts(around, settings, model.eos_token_ids)
    capacity = len(around.prefix) + settings.opening + len(around.bridge) + settings.answer + 1
    lanes = TextLanes(model, len(texts.text), capacity)
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence((settings.seed, block)).generate_state(1)[0])
    )
    for token in around.prefix[:-1]:
        lanes.step(torch.full((len(texts.text),), token), ())
    wanted = (*depths, top)
    most = settings.texts * (settings.opening + 1 + settings.answer)
    hidden = {depth: torch.empty((most, model.hidden_size), dtype=torch.bfloat16) for depth in depths}
    parts: list[tuple[Tensor, ...]] = []  # the rest, which is small
    positions = 0
    while len(texts.text):
        states = lanes.step(torch.from_numpy(texts.fed), wanted)
        own = texts.phase != _BRIDGE  # what follows is the model's own choice
        logits = model.heads.logits(states.pop(top), top)
        ids, differences = _most_probable(logits, settings.top_k)
        best = ids[:, 0].numpy().astype(np.int64)
        drawn = best.copy()
        opening = np.flatnonzero(texts.phase == _OPENING)
        if len(opening):
            drawn[opening] = _draw(logits[torch.from_numpy(opening)], generator)
        rows = torch.from_numpy(np.flatnonzero(own))
        parts.append(
            (
                ids[rows],
                differences[rows],
                torch.from_numpy((texts.phase == _ANSWER)[own]),
                torch.from_numpy(texts.text[own]).int(),
            )
        )
        for depth, state in states.items():
            hidden[depth][positions : positions + len(rows)] = state[rows]
        positions += len(rows)
        anew, done = texts.go_on(drawn, best)
        if anew:
            lanes.restart(anew, len(around.prefix) - 1)
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


def _draw(logits: Tensor, generator: torch.Generator) -> NDArray[np.int64]:
    """A token for each row, drawn from those that are not much less probable than the best."""
    shifted = logits - logits.amax(-1, keepdim=True)
    shifted.masked_fill_(shifted < np.log(_MIN_P), -torch.inf)
    noise = torch.empty_like(shifted).exponential_(generator=generator)
    drawn: NDArray[np.int64] = (shifted.exp() / noise).argmax(-1).numpy()
    return drawn


def _most_probable(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens, int32, and their logits less that of the best, float16."""
    values, ids = logits.topk(min(k, logits.shape[-1]), -1)
    return ids.int(), (values - values[:, :1]).half()


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
