"""DEX and the selection methods side by side, computed from traces alone.

Every row has the same columns. Two of them can be compared across all methods, though N explorers are N
devices and a selection method is one:

- `simulated_speedup`: what heads cost is counted. Of DEX it is `tick_speedup`, of a selection method the
  replay under the unit cost model (a layer 1, a head its size).
- `layer_speedup`: heads cost nothing. Of DEX L / (longest stage x ticks a token), of a selection method
  L x tokens / layers run one after the other.

`depth_speedup`, L / mean depth, tells how well depths are selected and no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sde_gym.envs.arguments import candidate_depths
from sde_gym.envs.hindsight import headroom
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.dex_ticks import TickCount, dex_ticks
from sde_gym.evaluation.exploration_choice import chosen_exploration_set
from sde_gym.evaluation.exploration_sets import head_costs, nested_split
from sde_gym.evaluation.selection_overhead import SelectionOverhead, selection_overhead
from sde_gym.offline.collect import trace_set_id
from sde_gym.policies.controller import Controller
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.files import load_policy
from sde_gym.policies.lite import LITEController
from sde_gym.policies.rules import StaticController
from sde_gym.settings import (
    DEFAULT_DEPTHS,
    DEFAULT_MAX_DRAFT,
    at_least_one,
    check_settings,
    is_whole,
    setting,
)
from sde_gym.traces import TraceSet, load_traces
from sde_gym.traces.ead import ead_summaries, earliest_depths

#: Numbers of explorers compared unless others are given.
DEFAULT_EXPLORERS = (2, 3, 4, 6, 8)

#: What LITE's thresholds aim at.
LITE_ACCEPTANCE = 0.9

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class DexSettings:
    """What is counted."""

    traces: str = setting("stdlib-20m", "trace set to judge on: a name or a folder")
    explorers: tuple[int, ...] | None = setting(
        None, f"numbers of explorers; those of {DEFAULT_EXPLORERS} whose depths were recorded if not given"
    )
    exploration_set: tuple[int, ...] | None = setting(
        None, "a further set of depths, the last layer among them"
    )
    chosen_on: str | None = setting(
        None,
        "trace set of other texts, to choose exploration sets, the static setting and LITE's thresholds on",
    )
    policy: str | None = setting(None, "a LEDE policy file to compare with")
    depths: tuple[int, ...] | None = setting(
        None, f"candidate depths of selection methods; the recorded ones of {DEFAULT_DEPTHS} if not given"
    )
    max_draft: int = setting(DEFAULT_MAX_DRAFT, "most proposals in a round of a selection method")

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            InputError: the message names the setting, its value and its limit.
        """
        check_settings(self, ("max_draft",), is_whole, "{name} is {value!r}; it must be a whole number")
        check_settings(self, ("max_draft",), at_least_one, "{name} must be at least 1, not {value}")


def dex_report(settings: DexSettings, sweep: bool = True, progress: Progress | None = None) -> dict[str, Any]:
    """EAD and speed-ups of a trace set.

    Args:
        settings: what is counted.
        sweep: whether to go through numbers of explorers and selection methods; else the EAD and the
            exploration set that was given, if one was, are all.
        progress: told of rows done, of rows in all, and of the next one's method.

    Returns:
        Plain JSON values: `rows`, `ead` (of all texts, then by task), `notes` and what was read. docs/dex.md
        explains every entry.

    Raises:
        InputError: a set that cannot be loaded, does not fit, or was recorded without a depth that is needed.
    """
    traces = load_traces(settings.traces)
    training = None if settings.chosen_on is None else load_traces(settings.chosen_on)
    if training is not None:
        _check_training(traces, training)
    notes: list[str] = []
    planned: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    if settings.exploration_set is not None:
        given = dex_ticks(traces, settings.exploration_set)
        planned.append(("dex_given", lambda: dex_row("dex_given", given, traces)))
    if sweep:
        planned += _explorers(traces, training, settings, notes)
        planned += _selection(traces, training, settings, notes)
    rows = []
    for number, (method, row) in enumerate(planned):
        if progress is not None:
            progress(number, len(planned), method)
        rows.append(row())
    if progress is not None and planned:
        progress(len(planned), len(planned), "")
    exit_head, final_head = head_costs(traces)
    return {
        "rows": rows,
        "ead": [
            {
                "task": found.task,
                "positions": found.positions,
                "mean": found.mean,
                "mean_bounds": list(found.bounds),
                "oracle_speedup": found.oracle_speedup,
                "oracle_bounds": list(found.oracle_bounds),
                "counts": {str(depth): count for depth, count in found.counts.items()},
            }
            for found in ead_summaries(traces)
        ],
        "notes": notes,
        "model": traces.manifest["model"],
        "num_layers": traces.num_layers,
        "exit_head": exit_head,
        "final_head": final_head,
        "depths": list(traces.depths),
        "texts": len(traces),
        "traces": {"name": settings.traces, "id": trace_set_id(traces)},
        "chosen_on": training and {"name": settings.chosen_on, "id": trace_set_id(training)},
    }


def dex_row(method: str, count: TickCount, traces: TraceSet, decs: bool = True) -> dict[str, Any]:
    """The row of an exploration set.

    Args:
        method: its name.
        count: of these traces.
        traces: judged on.
        decs: whether the count is with DECS.
    """
    ead = earliest_depths(traces)
    return {
        "method": method,
        "setting": f"N = {count.explorers}",
        "devices": count.explorers,
        "explorers": count.explorers,
        "exploration_set": list(count.exploration_set),
        "resolution": count.resolution,
        "decs": decs,
        "tokens": int(count.tokens.sum()),
        "ticks_per_token": count.ticks_per_token,
        "tick_speedup": count.tick_speedup,
        "simulated_speedup": count.tick_speedup,
        "layer_speedup": count.layer_speedup,
        "depth_speedup": count.depth_speedup,
        "oracle_share": _number(headroom(count.depth_speedup, 1.0, traces.num_layers / float(ead.mean()))),
        "late_exit": float(np.maximum(count.depth - ead, 0).mean()),
        "fallback": 0.0,
        "early_match": float(np.maximum(ead - count.depth, 0).mean()),
        "lattice_tokens": count.lattice_bound,
        "lattice_tokens_kind": "bound",
        "identical_to_ar": None,
    }


def selection_row(method: str, found: SelectionOverhead) -> dict[str, Any]:
    """The row of a selection method."""
    return {
        "method": method,
        "setting": found.result.controller,
        "devices": 1,
        "explorers": None,
        "exploration_set": None,
        "resolution": None,
        "decs": None,
        "tokens": len(found.rows),
        "ticks_per_token": None,
        "tick_speedup": None,
        "simulated_speedup": found.result.speedup,
        "layer_speedup": found.result.layer_speedup,
        "depth_speedup": found.depth_speedup,
        "oracle_share": _number(found.oracle_share),
        "late_exit": found.late_exit,
        "fallback": found.fallback,
        "early_match": found.early_match,
        "lattice_tokens": None,
        "lattice_tokens_kind": None,
        "identical_to_ar": None,
    }


def best_replayed_static(traces: TraceSet, depths: Sequence[int], max_draft: int) -> StaticController:
    """The static setting of highest simulated speed-up, heads counted: depths x lengths 1..max_draft."""
    grid = [StaticController(depth, length) for depth in depths for length in range(1, max_draft + 1)]
    return max(
        grid,
        key=lambda static: (
            run_controller(traces, static, depths=(static.exit_depth,), max_draft=max_draft).speedup
        ),
    )


def _explorers(
    traces: TraceSet, training: TraceSet | None, settings: DexSettings, notes: list[str]
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Rows of DEX for each number of explorers."""
    planned: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def plan(method: str, chosen: Sequence[int], decs: bool = True, single_exit: bool = False) -> None:
        def row() -> dict[str, Any]:
            return dex_row(
                method, dex_ticks(traces, chosen, decs=decs, single_exit=single_exit), traces, decs
            )

        planned.append((method, row))

    if settings.explorers is None:
        most = min(traces.num_layers, traces.k + 1)
        numbers = [n for n in DEFAULT_EXPLORERS if n <= most]
    else:
        numbers = list(settings.explorers)
    for n in numbers:
        even = nested_split(traces.num_layers, n)
        missing = sorted({*even[:-1]} - {*traces.depths})
        if missing and settings.explorers is None:
            notes.append(f"dex with {n} explorers is left out: depths {missing} were not recorded")
        else:
            dex_ticks(traces, even)  # refused now, not when its row is due
            plan("dex", even)
            plan("dex_without_decs", even, decs=False)
            plan("dex_single_exit", even, single_exit=True)
        if training is not None:
            plan("dex_chosen", chosen_exploration_set(training, n))
    if training is None:
        notes.append(
            "dex_chosen, layerskip and lite are left out: they are chosen on other texts (chosen_on)"
        )
    return planned


def _selection(
    traces: TraceSet, training: TraceSet | None, settings: DexSettings, notes: list[str]
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Rows of the selection methods that replay can serve."""
    notes.append(
        "adadecode is left out: one depth goes on from what another proposed, which no trace holds; "
        "`sde-gym bench decode` measures it"
    )
    if not traces.overrun:
        notes.append(
            "selection methods are left out: recorded without overrun, which hides the cost of drafting on"
        )
        return []
    common = [depth for depth in DEFAULT_DEPTHS if depth in traces.depths]
    depths = candidate_depths(settings.depths or common or None, traces)
    methods: list[tuple[str, Callable[[], Controller], tuple[int, ...], int]] = []
    if training is not None and training.overrun:
        methods.append((
            "layerskip", lambda: best_replayed_static(training, depths, settings.max_draft), depths,
            settings.max_draft,
        ))  # fmt: skip
    elif training is not None:
        notes.append("layerskip is left out: the set that it would be chosen on was recorded without overrun")
    methods.append(("del", DELController, depths, settings.max_draft))
    if training is not None:
        lite = LITEController.calibrated(training, LITE_ACCEPTANCE, depths)
        methods.append(("lite", lambda: lite, depths, settings.max_draft))
    if settings.policy is not None:
        policy = load_policy(settings.policy)
        offered = candidate_depths(policy.depths, traces)
        methods.append(("lede", lambda: policy, offered, policy.max_draft))

    def row(
        method: str, make: Callable[[], Controller], offered: tuple[int, ...], max_draft: int
    ) -> Callable[[], dict[str, Any]]:
        return lambda: selection_row(
            method, selection_overhead(traces, make(), depths=offered, max_draft=max_draft)
        )

    return [(entry[0], row(*entry)) for entry in methods]


def _check_training(traces: TraceSet, training: TraceSet) -> None:
    """Refuse a set of another model, or one that shares texts with the one judged on."""
    for name in ("model_hash", "num_layers"):
        if traces.manifest[name] != training.manifest[name]:
            raise InputError(
                f"chosen_on: recorded from another model ({name} {training.manifest[name]!r}, not "
                f"{traces.manifest[name]!r}); give traces of {traces.manifest['model']}"
            )
    shared = sorted({*traces.text_ids} & {*training.text_ids})
    if shared:
        raise InputError(
            f"chosen_on: {len(shared)} of its texts are judged on, too (for instance {shared[0]!r}); give "
            "traces of other texts"
        )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
