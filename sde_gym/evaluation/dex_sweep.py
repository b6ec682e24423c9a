"""DEX and the selection methods side by side: counted from traces, and the lattice decoded on some texts.

Every row has the same columns. Two of them can be compared across all methods, though N explorers are N
devices and a selection method is one:

- `simulated_speedup`: what heads cost is counted. Of DEX it is `tick_speedup`, of a selection method the
  replay under the unit cost model (a layer 1, a head its size).
- `layer_speedup`: heads cost nothing. Of DEX L / (longest stage x ticks a token), of a selection method
  L x tokens / layers run one after the other.

`depth_speedup`, L / mean depth, tells how well depths are selected and no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sde_gym.envs.arguments import candidate_depths
from sde_gym.errors import InputError
from sde_gym.evaluation.dex_live import LiveTexts, model_of
from sde_gym.evaluation.dex_rows import COLUMNS, dex_row
from sde_gym.evaluation.dex_selection import (
    adadecode_row,
    best_replayed_static,
    chosen_adadecode,
    selection_row,
)
from sde_gym.evaluation.dex_ticks import dex_ticks
from sde_gym.evaluation.exploration_choice import chosen_exploration_set
from sde_gym.evaluation.exploration_sets import head_costs, nested_split
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
from sde_gym.traces.ead import ead_summaries

#: Numbers of explorers compared unless others are given.
DEFAULT_EXPLORERS = (2, 3, 4, 6, 8)

#: Texts decoded for real unless said otherwise.
DEFAULT_LATTICE_TEXTS = 3

#: What LITE's thresholds aim at.
LITE_ACCEPTANCE = 0.9

#: Settings that nothing but the sweep reads.
_SWEEP_ONLY = ("explorers", "policy", "chosen_on", "depths")

Progress = Callable[[int, int, str], None]

#: A planned row: its method, and what makes it.
Planned = tuple[str, Callable[[], dict[str, Any]]]


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
    model: str | None = setting(
        None, "model that the traces were recorded from, to decode with; by the name they hold if not given"
    )
    lattice_texts: int = setting(
        DEFAULT_LATTICE_TEXTS, "texts decoded for real, to count the lattice; 0: from traces alone"
    )
    policy: tuple[str, ...] | None = setting(None, "LEDE policy files or folders to compare with")
    depths: tuple[int, ...] | None = setting(
        None, f"candidate depths of selection methods; the recorded ones of {DEFAULT_DEPTHS} if not given"
    )
    max_draft: int = setting(DEFAULT_MAX_DRAFT, "most proposals in a round of a selection method")

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be.

        Raises:
            InputError: the message names the setting, its value and its limit.
        """
        counts = ("max_draft", "lattice_texts")
        check_settings(self, counts, is_whole, "{name} is {value!r}; it must be a whole number")
        check_settings(self, ("max_draft",), at_least_one, "{name} must be at least 1, not {value}")
        for number in self.explorers or ():
            if not is_whole(number) or number < 1:
                raise InputError(f"explorers: {number!r} explorers cannot be; give whole numbers from 1")
        if self.lattice_texts < 0:
            raise InputError(f"lattice_texts must be at least 0, not {self.lattice_texts}")
        if isinstance(self.policy, (str, Path)):
            raise InputError(f"policy: {self.policy!r} is one policy; give a list of them, such as [...]")


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
        InputError: a set that cannot be loaded, does not fit, or was recorded without a depth that is needed;
            a model that was named and did not record the traces; settings of the sweep without it.
        TickMismatchError: the lattice takes other ticks than were counted (`dex_live.compare_ticks`).
    """
    unused = [] if sweep else [name for name in _SWEEP_ONLY if getattr(settings, name) is not None]
    if unused:
        raise InputError(
            f"{', '.join(unused)}: of the sweep only; give --sweep (sweep=True), or leave it out"
        )
    traces = load_traces(settings.traces)
    training = None if settings.chosen_on is None else load_traces(settings.chosen_on)
    if training is not None:
        _check_training(traces, training)
    notes: list[str] = []
    planned: list[Planned] = []
    if settings.exploration_set is not None or sweep:
        live = _live(traces, settings, notes)
    if settings.exploration_set is not None:
        given = dex_ticks(traces, settings.exploration_set)
        planned.append(("dex_given", lambda: dex_row("dex_given", given, traces, live=live)))
    if sweep:
        planned += _explorers(traces, training, settings, notes, live)
        planned += _selection(traces, training, settings, notes, live)
    rows = []
    for number, (method, row) in enumerate(planned):
        if progress is not None:
            progress(number, len(planned), method)
        rows.append(row())
    if progress is not None and planned:
        progress(len(planned), len(planned), "")
    exit_head, final_head = head_costs(traces)
    return {
        "rows": [{name: row[name] for name in COLUMNS} for row in rows],
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


def _live(traces: TraceSet, settings: DexSettings, notes: list[str]) -> LiveTexts | None:
    """The texts to decode; None if none are asked for, or the traces' own model is not here."""
    if settings.lattice_texts == 0:
        notes.append("nothing was decoded (lattice_texts 0): lattice columns are empty")
        return None
    try:
        return LiveTexts(model_of(traces, settings.model), traces, settings.lattice_texts)
    except InputError as error:
        if settings.model is not None:
            raise
        notes.append(f"nothing was decoded, lattice columns are empty: {error}")
        return None


def _explorers(
    traces: TraceSet,
    training: TraceSet | None,
    settings: DexSettings,
    notes: list[str],
    live: LiveTexts | None,
) -> list[Planned]:
    """Rows of DEX for each number of explorers."""
    planned: list[Planned] = []

    def plan(method: str, chosen: Sequence[int], decs: bool = True, single_exit: bool = False) -> None:
        def row() -> dict[str, Any]:
            count = dex_ticks(traces, chosen, decs=decs, single_exit=single_exit)
            return dex_row(method, count, traces, decs, single_exit, live)

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
    traces: TraceSet,
    training: TraceSet | None,
    settings: DexSettings,
    notes: list[str],
    live: LiveTexts | None,
) -> list[Planned]:
    """Rows of the selection methods."""
    if not traces.overrun:
        notes.append(
            "selection methods are left out: recorded without overrun, which hides the cost of drafting on"
        )
        return []
    common = [depth for depth in DEFAULT_DEPTHS if depth in traces.depths]
    depths = candidate_depths(settings.depths or common or None, traces)
    planned: list[Planned] = []

    def plan(method: str, make: Callable[[], Controller], offered: tuple[int, ...], most: int) -> None:
        planned.append((method, lambda: selection_row(method, make(), traces, offered, most, live)))

    static = None
    if training is not None and training.overrun:
        static = best_replayed_static(training, depths, settings.max_draft)
        best = static
        plan("layerskip", lambda: best, depths, settings.max_draft)
    elif training is not None:
        notes.append("layerskip is left out: the set that it would be chosen on was recorded without overrun")
    plan("del", DELController, depths, settings.max_draft)
    if live is None:
        notes.append(
            "adadecode is left out: one depth goes on from what another proposed, which no trace holds, so "
            "it has to be decoded"
        )
    else:
        if len(live) < len(traces):
            notes.append(
                f"adadecode is decoded on {len(live)} of the {len(traces)} texts, so that its row is not to "
                "be compared closely; lattice_texts says on how many"
            )
        planned.append(("adadecode", _adadecode(live, training, static, depths, settings)))
    if training is not None:
        lite = LITEController.calibrated(training, LITE_ACCEPTANCE, depths)
        plan("lite", lambda: lite, depths, settings.max_draft)
    for given in settings.policy or ():
        _plan_policy(given, traces, plan)
    return planned


def _adadecode(
    live: LiveTexts,
    training: TraceSet | None,
    static: StaticController | None,
    depths: tuple[int, ...],
    settings: DexSettings,
) -> Callable[[], dict[str, Any]]:
    """AdaDecode, its setting chosen on texts of the other set where there is one."""

    def row() -> dict[str, Any]:
        others = None if training is None else LiveTexts(live.model, training, settings.lattice_texts)
        static_depth = None if static is None else static.exit_depth
        controller, offered = chosen_adadecode(others, depths, static_depth, settings.max_draft)
        return adadecode_row(controller, live, offered, settings.max_draft)

    return row


def _plan_policy(
    given: str, traces: TraceSet, plan: Callable[[str, Callable[[], Controller], tuple[int, ...], int], None]
) -> None:
    """A policy at its own depths and cap."""
    policy = load_policy(given)
    plan("lede", lambda: policy, candidate_depths(policy.depths, traces), policy.max_draft)


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
