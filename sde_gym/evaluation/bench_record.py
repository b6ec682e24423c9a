"""What recording costs, in time and bytes, against batched greedy generation of the same text.

The kinds of recording are measured in turns, `repeats` times over, each into a fresh folder. Every kind
generates the text first, so a ratio of 1 would mean that looking into all its depths came for free.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sde_gym.errors import InputError
from sde_gym.files import write_json
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel
from sde_gym.models.threads import torch_threads
from sde_gym.prompts import Prompt
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS
from sde_gym.traces.recorder import record

GENERATION = "greedy generation"
"""The yardstick: the text alone, nothing recorded."""

Progress = Callable[[int, int, str], None]
"""Called with measurements done, in all, and the name of the next."""


@dataclass(frozen=True)
class RecordCost:
    """One kind of recording.

    Attributes:
        name: what is recorded.
        seconds: of each repeat.
        ratios: to that repeat's generation.
        bytes_a_token: on disk, manifest included, by emitted token; 0 for generation.
    """

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    bytes_a_token: float

    @property
    def ratio(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class RecordCosts:
    """All kinds, the first being plain generation, and what was recorded.

    Attributes:
        model: its name.
        texts: prompts.
        tokens: emitted, in all.
        depths: candidate depths but for the kind that records all.
        threads: torch threads.
        rows: one a kind.
    """

    model: str
    texts: int
    tokens: int
    depths: tuple[int, ...]
    threads: int
    rows: tuple[RecordCost, ...]

    def save(self, path: Path) -> None:
        """Write it as JSON, atomically."""
        write_json(path, {**asdict(self), "depths": list(self.depths)})


def kinds(model: LayeredModel, depths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Arguments of `record` by name of the kind."""
    every = list(range(1, model.num_layers))
    longest = DEFAULT_MAX_DRAFT - 1
    return {
        "without overrun": {"depths": depths, "overrun": 0},
        "without overrun, full heads": {"depths": depths, "overrun": 0, "compact": False},
        "without overrun, all layers": {"depths": every, "overrun": 0},
        f"overrun {longest}": {"depths": depths, "overrun": longest},
    }


def bench_record(
    model: LayeredModel,
    prompts: Sequence[Prompt],
    *,
    depths: Sequence[int] | None = None,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    threads: int = 1,
    repeats: int = 3,
    progress: Progress | None = None,
) -> RecordCosts:
    """Measure every kind of recording.

    Args:
        model: any `LayeredModel`.
        prompts: at least one; all are generated together.
        depths: candidate depths; `DEFAULT_DEPTHS` below L if not given.
        max_new_tokens: tokens a text, at least 2.
        threads: torch threads.
        repeats: times that everything is measured, at least 1.
        progress: see `Progress`.

    Raises:
        InputError: an argument out of range.
    """
    if repeats < 1 or not prompts:
        raise InputError(f"repeats is {repeats} with {len(prompts)} prompts; both must be at least 1")
    chosen = model.check_depths(depths or [depth for depth in DEFAULT_DEPTHS if depth < model.num_layers])
    ids = [model.encode(prompt.text) for prompt in prompts]
    wanted = kinds(model, chosen)
    seconds: dict[str, list[float]] = {name: [] for name in (GENERATION, *wanted)}
    sizes, tokens, done = dict.fromkeys(seconds, 0), 0, 0
    with torch_threads(threads), torch.inference_mode():
        generate_greedy(model, ids[:1], 2)  # what is set up once is no part of it
        for _ in range(repeats):
            for name in seconds:
                if progress is not None:
                    progress(done, repeats * len(seconds), name)
                if name == GENERATION:
                    started = time.perf_counter()
                    tokens = sum(len(text) for text in generate_greedy(model, ids, max_new_tokens))
                    seconds[name].append(time.perf_counter() - started)
                else:
                    with tempfile.TemporaryDirectory() as folder:
                        started = time.perf_counter()
                        arguments = {**wanted[name], "batch_size": len(prompts)}
                        record(model, prompts, folder, max_new_tokens=max_new_tokens, **arguments)
                        seconds[name].append(time.perf_counter() - started)
                        sizes[name] = sum(file.stat().st_size for file in Path(folder).iterdir())
                done += 1
    return RecordCosts(
        model=model.name,
        texts=len(prompts),
        tokens=tokens,
        depths=chosen,
        threads=threads,
        rows=tuple(
            RecordCost(
                name=name,
                seconds=tuple(times),
                ratios=tuple(one / plain for one, plain in zip(times, seconds[GENERATION], strict=True)),
                bytes_a_token=sizes[name] / tokens,
            )
            for name, times in seconds.items()
        ),
    )
