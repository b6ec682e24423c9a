"""Wall-clock comparison: every method on the same prompts, in one process, interleaved.

The methods take turns prompt by prompt, in an order drawn afresh for each prompt, so that a
slow minute of the machine, or a cache that another method warmed, hits all of them alike;
the first prompt is run once by every method before the clock counts. Prefill is timed apart:
a rate is tokens after the first emission over the time after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sde_gym.decoding import autoregressive, speculative
from sde_gym.decoding.result import DecodeResult
from sde_gym.decoding.round import TokenRules
from sde_gym.errors import InputError
from sde_gym.evaluation.peers import Method as Method
from sde_gym.evaluation.peers import assistant_early_exit_method as assistant_early_exit_method
from sde_gym.evaluation.peers import generate_method as generate_method
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Controller


@dataclass(frozen=True)
class Measurement:
    """One method on one prompt in one repeat."""

    method: str
    prompt: str  # prompt id
    task: str
    repeat: int
    timed_tokens: int  # tokens emitted while the decode clock ran
    decode_seconds: float
    prefill_seconds: float
    drafted: int
    accepted: int
    rounds: int
    round_tokens: int  # tokens that rounds emitted
    drafting_rounds: int
    exit_depth_sum: int  # over drafting rounds
    controller_seconds: float
    idle_head_seconds: float  # in exit heads that nothing was proposed from
    output: tuple[int, ...]  # the generated token ids


#: How the tokens of the prompt of this number are chosen; None = the most probable one.
Rules = Callable[[int], TokenRules | None]


def greedy(number: int) -> None:
    """`Rules`: always the most probable token."""


def ar_method(model: LayeredModel, max_new_tokens: int, rules: Rules = greedy) -> Method:
    """Our own autoregressive decoder."""
    return lambda prompt, number: autoregressive(model, prompt, max_new_tokens, rules=rules(number))


def controller_method(
    model: LayeredModel,
    controller: Controller,
    depths: Sequence[int],
    max_new_tokens: int,
    rules: Rules = greedy,
    **options: Any,
) -> Method:
    """Our speculative decoder under a controller; `options` as for `speculative`."""
    return lambda prompt, number: speculative(
        model, prompt, controller, depths, max_new_tokens, text=number, rules=rules(number), **options
    )


def measure(
    methods: Mapping[str, Method],
    prompts: Sequence[tuple[str, str, list[int]]],
    *,
    baseline: str = "ar",
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    sink: Callable[[Measurement], None] | None = None,
    known: Iterable[Measurement] = (),
) -> tuple[list[Measurement], dict[str, dict[str, DecodeResult]]]:
    """Run all methods over all prompts, `repeats` times.

    Args:
        methods: by name; `baseline` must be among them.
        prompts: (id, task, token ids).
        baseline: the method that the table will compare with.
        repeats: whole passes over the prompts.
        seed: of the order in which the methods take turns.
        progress: called with prompts done and prompts in all (over all repeats).
        sink: given every row as soon as it is measured.
        known: rows of the same measurement that was stopped; these are not measured again.

    Returns:
        One row per (method, prompt, repeat), and the last result of each method and prompt that was
        measured now.
    """
    if baseline not in methods:
        raise InputError(f"baseline {baseline!r} is not one of the methods {', '.join(methods)}")
    if not prompts or repeats < 1:
        raise InputError(f"at least one prompt and one repeat are needed, got {len(prompts)} and {repeats}")
    rows = {(row.repeat, row.prompt, row.method): row for row in known}
    outputs: dict[str, dict[str, DecodeResult]] = {name: {} for name in methods}
    names = list(methods)
    wanted = [(repeat, prompt[0], name) for repeat in range(repeats) for prompt in prompts for name in names]
    waiting = {name for repeat, prompt, name in wanted if (repeat, prompt, name) not in rows}
    for name in names:
        if name in waiting:
            methods[name](prompts[0][2], 0)  # warm-up, not counted
    for repeat in range(repeats):
        for number, (prompt_id, task, ids) in enumerate(prompts):
            for turn in np.random.default_rng((seed, repeat, number)).permutation(len(names)):
                name = names[turn]
                if (repeat, prompt_id, name) in rows:
                    continue
                result = outputs[name][prompt_id] = methods[name](ids, number)
                row = rows[repeat, prompt_id, name] = _row(name, prompt_id, task, repeat, result)
                if sink is not None:
                    sink(row)
            if progress is not None:
                progress(repeat * len(prompts) + number + 1, repeats * len(prompts))
    return [rows[key] for key in wanted], outputs


def _row(name: str, prompt: str, task: str, repeat: int, result: DecodeResult) -> Measurement:
    drafting = [r for r in result.rounds if r.drafted]
    return Measurement(
        method=name,
        prompt=prompt,
        task=task,
        repeat=repeat,
        timed_tokens=max(0, len(result.tokens) - result.untimed_tokens),
        decode_seconds=result.decode_seconds,
        prefill_seconds=result.prefill_seconds,
        drafted=result.drafted,
        accepted=result.accepted,
        rounds=len(result.rounds),
        round_tokens=sum(fate != "prefill" for fate in result.fates) if result.rounds else 0,
        drafting_rounds=len(drafting),
        exit_depth_sum=sum(r.exit_depth for r in drafting),
        controller_seconds=result.controller_seconds,
        idle_head_seconds=result.idle_head_seconds,
        output=tuple(result.tokens),
    )


def rate(rows: Iterable[Measurement]) -> float | None:
    """Timed tokens over their seconds; None where no token was timed."""
    chosen = list(rows)
    seconds, tokens = sum(r.decode_seconds for r in chosen), sum(r.timed_tokens for r in chosen)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def speedups(rows: Sequence[Measurement], method: str, baseline: str) -> list[float]:
    """Ratios of the rates of two methods, one for each repeat in which both have one."""
    ratios = []
    for repeat in sorted({row.repeat for row in rows}):
        ours, theirs = (
            rate(row for row in rows if row.method == name and row.repeat == repeat)
            for name in (method, baseline)
        )
        if ours is not None and theirs is not None:
            ratios.append(ours / theirs)
    return ratios


def differing(rows: Iterable[Measurement], baseline: str = "ar") -> dict[tuple[str, str], Measurement]:
    """By (method, prompt), the first row whose text is not the baseline's of the same repeat."""
    listed = list(rows)
    expected = {(row.prompt, row.repeat): row.output for row in listed if row.method == baseline}
    found: dict[tuple[str, str], Measurement] = {}
    for row in listed:
        if row.output != expected[row.prompt, row.repeat]:
            found.setdefault((row.method, row.prompt), row)
    return found


def summarise_rows(rows: Sequence[Measurement], baseline: str = "ar") -> list[dict[str, Any]]:
    """One table row per method, in order of first appearance.

    Rates are total tokens over total seconds; the speed-up is the ratio to the baseline's
    rate of the same repeat, averaged over repeats, with the lowest and highest beside it.
    What was not measured is None: rates where no token was timed; acceptance, exit depth
    and draft length of methods that do not draft; tokens per round of those without rounds.
    """
    different = differing(rows, baseline)
    return [
        _summary(rows, method, baseline, sum(name == method for name, _ in different))
        for method in dict.fromkeys(row.method for row in rows)
    ]


def _summary(rows: Sequence[Measurement], method: str, baseline: str, different: int) -> dict[str, Any]:
    """The table row of one method, of whose texts so many are not the baseline's."""
    chosen = [row for row in rows if row.method == method]
    rates = [rate(row for row in chosen if row.repeat == repeat) for repeat in {r.repeat for r in chosen}]
    known_rates = [value for value in rates if value is not None]
    ratios = speedups(rows, method, baseline)
    prompts = len({row.prompt for row in chosen})
    drafted = sum(r.drafted for r in chosen)
    drafting = sum(r.drafting_rounds for r in chosen)
    rounds = sum(r.rounds for r in chosen)
    decode = sum(r.decode_seconds for r in chosen)
    return {
        "method": method,
        "tokens_per_second": rate(chosen),
        "tokens_per_second_range": [min(known_rates), max(known_rates)] if known_rates else None,
        "prefill_seconds": float(np.mean([r.prefill_seconds for r in chosen])),
        "speedup": float(np.mean(ratios)) if ratios else None,
        "speedup_range": [min(ratios), max(ratios)] if ratios else None,
        "acceptance_rate": sum(r.accepted for r in chosen) / drafted if drafted else None,
        "mean_exit_depth": sum(r.exit_depth_sum for r in chosen) / drafting if drafting else None,
        "mean_draft_length": drafted / drafting if drafting else None,
        "tokens_per_round": sum(r.round_tokens for r in chosen) / rounds if rounds else None,
        "controller_share": sum(r.controller_seconds for r in chosen) / decode if decode else 0.0,
        "idle_head_share": sum(r.idle_head_seconds for r in chosen) / decode if decode else 0.0,
        "identical_to_ar": different == 0,
        "identical_prompts": prompts - different,
        "prompts": prompts,
    }


def rows_as_dicts(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The raw rows as JSON-ready objects."""
    return [asdict(row) for row in rows]
