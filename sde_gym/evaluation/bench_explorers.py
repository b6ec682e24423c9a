"""`sde-gym bench explorers`: depth exploration by one process a stage, beside plain decoding, in turns.

The explorers start once and stay for all prompts (`sde_gym.decoding.dex.group`); plain decoding, in this
process, has as many threads as all of them together. While one decodes the other waits. After each pass
over the prompts every stage is timed alone, for as many lattice tokens as it had in a tick. Thereby the
tick model can be held against the clock: a tick should take what the slowest stage takes, and what it took
beyond that is what passed between processes, the lattice's own Python, and memory that stages share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from sde_gym.decoding import DecodeResult, autoregressive
from sde_gym.decoding.dex import exploration_set as checked_set
from sde_gym.decoding.dex.group import Exploration, ExplorerGroup
from sde_gym.errors import InputError
from sde_gym.evaluation.benchmark import Measurement, measure, rows_as_dicts, summarise_rows
from sde_gym.evaluation.demo import Progress, hardware, silent, versions
from sde_gym.evaluation.exploration_sets import slowest_stage
from sde_gym.evaluation.explorers_table import markdown
from sde_gym.evaluation.measured_prompts import digest, encoded
from sde_gym.files import write_json, write_text
from sde_gym.models.cost import head_sizes
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.models.threads import torch_threads
from sde_gym.prompts import load_prompts
from sde_gym.settings import (
    DEFAULT_NEW_TOKENS,
    at_least_one,
    check_settings,
    command_of,
    is_number,
    is_whole,
    setting,
)

RESULTS_FILE = "results.json"
TABLE_FILE = "table.md"

#: Explorers unless said otherwise.
DEFAULT_EXPLORERS = 2

_COUNTS = ("limit", "max_new_tokens", "threads", "repeats", "stage_repeats")


@dataclass(frozen=True)
class ExplorerSettings:
    """What is measured."""

    model: str = setting("stdlib-20m", "model: a shipped name, a local path or a hub id")
    dtype: str = setting("float32", "float32 or bfloat16; the latter parts from plain decoding at near-ties")
    prompts: str = setting("stdlib:held-out", "prompt set or JSONL file to measure on")
    limit: int = setting(8, "prompts measured")
    max_new_tokens: int = setting(DEFAULT_NEW_TOKENS, "tokens generated per prompt")
    explorers: int | None = setting(
        None,
        f"processes, one for each stage; {DEFAULT_EXPLORERS}, or as many as the exploration set has depths",
    )
    exploration_set: tuple[int, ...] | None = setting(None, "depths, L the last; an even split if none")
    threads: int = setting(1, "torch threads of each explorer; plain decoding has those of all together")
    repeats: int = setting(3, "passes over the prompts")
    stage_repeats: int = setting(20, "times that a stage is timed alone, after each pass")
    timeout: float = setting(60.0, "seconds that explorers wait for each other")
    seed: int = setting(0, "seed of the order of turns")

    def __post_init__(self) -> None:
        """Refuse numbers out of range.

        Raises:
            InputError: the message names the setting, its value and its limit.
        """
        check_settings(self, (*_COUNTS, "seed"), is_whole, "{name} is {value!r}; it must be a whole number")
        check_settings(self, _COUNTS, at_least_one, "{name} must be at least 1, not {value}")
        check_settings(self, ("timeout",), is_number, "{name} is {value!r}; it must be a number")
        check_settings(self, ("timeout",), at_least_one, "{name} must be at least 1 second, not {value}")
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens must be at least 2, not {self.max_new_tokens}")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, not {self.seed}")
        if self.explorers is None or self.exploration_set is None:
            return
        if self.explorers != len(self.exploration_set):
            raise InputError(
                f"explorers: {self.explorers} were asked for, but the exploration set has "
                f"{len(self.exploration_set)} depths; leave one of the two out"
            )


def bench_explorers(settings: ExplorerSettings, out: Path, progress: Progress = silent) -> dict[str, Any]:
    """Measure explorers and plain decoding in turns, and hold both against the tick model.

    Args:
        settings: see `ExplorerSettings`.
        out: folder for `results.json` and `table.md`, written when all is measured.
        progress: told of every stage.

    Returns:
        What `results.json` holds; docs/dex.md explains it.

    Raises:
        InputError: a setting, prompt file or model that does not fit.
        ExplorersEndedError: an explorer has died, or does not answer the others.
    """
    started = datetime.now(UTC)
    model = load_model(settings.model, settings.dtype)
    given = settings.exploration_set or settings.explorers or DEFAULT_EXPLORERS
    depths = checked_set(given, model.num_layers)
    chosen = load_prompts(settings.prompts)[: settings.limit]
    prompts = encoded(model, chosen, settings.max_new_tokens)
    progress("start explorers", 0, 1)
    with ExplorerGroup(
        settings.model, depths, model.num_layers, dtype=settings.dtype, threads=settings.threads,
        timeout=settings.timeout,
    ) as group:  # fmt: skip
        progress("start explorers", 1, 1)
        passes = [
            _pass(settings, model, group, prompts, number, progress) for number in range(settings.repeats)
        ]
    rows = [replace(row, repeat=number) for number, each in enumerate(passes) for row in each.rows]
    table = summarise_rows(rows)
    for row, processes in zip(table, (1, len(depths)), strict=True):
        row |= {"processes": processes, "threads": settings.threads * len(depths) // processes}
    results: dict[str, Any] = {
        "rows": table,
        "exploration_set": list(depths),
        "ticks": _ticks(model, passes[-1]),
        "stages": _stages(passes, depths),
        "passes": [each.summary() for each in passes],
        "measurements": rows_as_dicts(rows),
        "settings": asdict(settings),
        "model": {"name": model.name, "layers": model.num_layers, "weights": model.weights_hash()},
        "prompts": {"measured": len(chosen), "measured_sha256": digest(chosen)},
        "hardware": hardware(model, settings.threads * len(depths)),
        "versions": versions(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
        "command": command_of("sde-gym bench explorers", settings),
    }
    write_json(out / RESULTS_FILE, results)
    write_text(out / TABLE_FILE, markdown(results))
    return results


@dataclass(frozen=True)
class Pass:
    """One pass over the prompts, and the stages timed alone after it.

    Attributes:
        rows: of both methods.
        explorations: of the prompts, in order.
        alone: by stage and number of lattice tokens in it, seconds; medians.
    """

    rows: list[Measurement]
    explorations: list[Exploration]
    alone: dict[tuple[int, int], float]

    def summary(self) -> dict[str, float]:
        """Sums over all prompts, prefill left out, in seconds but for the ratios."""
        plain, measured = (self._seconds(method) for method in ("ar", "explorers"))
        ticks = [tick for each in self.explorations for tick in _decode_ticks(each)]
        stages = len(ticks[0])
        one_token = max(self.alone[stage, 1] for stage in range(stages))
        predicted = len(ticks) * one_token
        wide = sum(
            max(self.alone[stage, count] for stage, count in enumerate(tick) if count) for tick in ticks
        )
        together = [sum(parts) for parts in zip(
            *(each.result.stage_seconds for each in self.explorations), strict=True
        )]  # fmt: skip
        return {
            "ar_seconds": plain,
            "explorers_seconds": measured,
            "speedup": plain / measured,
            "predicted_seconds": predicted,
            "predicted_speedup": plain / predicted,
            "predicted_with_width_seconds": wide,
            "busiest_stage_seconds": max(together),
            "overhead_seconds": measured - predicted,
            "overhead_share": (measured - predicted) / measured,
            "overhead_per_tick": (measured - predicted) / len(ticks),
        }

    def _seconds(self, method: str) -> float:
        return sum(row.decode_seconds for row in self.rows if row.method == method)


def _pass(
    settings: ExplorerSettings,
    model: LayeredModel,
    group: ExplorerGroup,
    prompts: Sequence[tuple[str, str, list[int]]],
    number: int,
    progress: Progress,
) -> Pass:
    budget = settings.max_new_tokens
    found: dict[int, Exploration] = {}  # by number of the prompt

    def plain(ids: list[int], _: int) -> DecodeResult:
        with torch_threads(settings.threads * len(group.depths)):
            return autoregressive(model, ids, budget)

    def explore(ids: list[int], prompt: int) -> DecodeResult:
        found[prompt] = group.explore(ids, budget)
        return found[prompt].result

    done = number * len(prompts)
    rows, _ = measure(
        {"ar": plain, "explorers": explore},
        prompts,
        seed=settings.seed + number,
        progress=lambda now, _: progress("measure", done + now, settings.repeats * len(prompts)),
    )
    explorations = [found[prompt] for prompt in range(len(prompts))]
    loads = {key for key in _loads(explorations) if key[1]}
    if not loads:
        raise InputError("prompts: every text ends with its first token; give others, or more of them")
    loads |= {(stage, 1) for stage in range(len(group.depths))}
    context = _context(prompts, explorations)
    alone = {
        (stage, count): median(group.stage_seconds(stage, context, count, settings.stage_repeats))
        for stage, count in sorted(loads)
    }
    return Pass(rows, explorations, alone)


def _context(prompts: Sequence[tuple[str, str, list[int]]], explorations: Sequence[Exploration]) -> list[int]:
    """Token ids as long as a text is on average, when it is half done: what attention spans meanwhile."""
    texts = [(ids, found.result.tokens) for (_, _, ids), found in zip(prompts, explorations, strict=True)]
    length = round(sum(len(ids) + len(tokens) / 2 for ids, tokens in texts) / len(texts))
    text = [token for ids, tokens in texts for token in (*ids, *tokens)]
    return text[: max(1, length)]


def _decode_ticks(found: Exploration) -> list[list[int]]:
    """Tokens in each stage, tick by tick; without prefill's ticks, which the clock leaves out, too."""
    return found.stage_tokens[found.result.commit_ticks[0] :]


def _loads(explorations: Sequence[Exploration]) -> Counter[tuple[int, int]]:
    """By stage and number of lattice tokens in it, in how many ticks it had so many."""
    return Counter(
        (stage, count)
        for each in explorations
        for tick in _decode_ticks(each)
        for stage, count in enumerate(tick)
    )


def _ticks(model: LayeredModel, last: Pass) -> dict[str, Any]:
    """What the tick model says without a clock, by the size of layers and heads; the same in every pass."""
    found = [each.result for each in last.explorations]
    depths = found[0].exploration_set
    exit_head, final_head = head_sizes(model)
    per_token = sum(each.ticks for each in found) / sum(len(each.tokens) for each in found)
    slowest = slowest_stage(depths, exit_head, final_head)
    evaluations, tokens = sum(each.lattice_tokens for each in found), sum(len(each.tokens) for each in found)
    return {
        "ticks_per_token": per_token,
        "tick_speedup": (model.num_layers + final_head) / (slowest * per_token),
        "lattice_tokens": evaluations / tokens,
        "useful_share": len(depths) * tokens / evaluations,
    }


def _stages(passes: Sequence[Pass], depths: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each stage and number of lattice tokens in it, its time alone the median over passes."""
    ticks = _loads(passes[-1].explorations)
    found = []
    for stage, count in sorted({key for each in passes for key in each.alone}):
        seconds = [each.alone[stage, count] for each in passes if (stage, count) in each.alone]
        found.append({
            "stage": stage, "from_depth": (0, *depths)[stage], "depth": depths[stage], "tokens": count,
            "ticks": ticks[stage, count], "seconds": median(seconds),
            "seconds_range": [min(seconds), max(seconds)],
        })  # fmt: skip
    return found
