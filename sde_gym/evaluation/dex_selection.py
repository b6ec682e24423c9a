"""The selection methods beside DEX: each chooses a depth for every token, on one device.

All but AdaDecode are replayed on the traces. AdaDecode lets one depth go on from what another proposed,
which no trace holds, so it is decoded for real and its layers are counted, on a few texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.decoding.result import DecodeResult
from sde_gym.envs.hindsight import headroom
from sde_gym.envs.run import run_controller
from sde_gym.evaluation.adadecode_settings import adadecode_candidates, middle_depths
from sde_gym.evaluation.dex_live import LiveTexts
from sde_gym.evaluation.dex_rows import NOT_DECODED, finite
from sde_gym.evaluation.exploration_sets import head_costs
from sde_gym.evaluation.selection_overhead import selection_overhead
from sde_gym.policies.adadecode import AdaDecodeController
from sde_gym.policies.controller import Controller
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet
from sde_gym.traces.ead import earliest_depths

#: What a selection method has no figure for: it has no explorers, ticks or lattice.
NO_LATTICE: dict[str, None] = dict.fromkeys(
    (
        "explorers", "exploration_set", "resolution", "decs", "ticks_per_token", "tick_speedup",
        "lattice_tokens", "lattice_tokens_max", "lattice_bound", "useful_share", "ticks_checked", "near_ties",
    )
)  # fmt: skip


def selection_row(
    method: str,
    controller: Controller,
    traces: TraceSet,
    depths: Sequence[int],
    max_draft: int,
    live: LiveTexts | None = None,
) -> dict[str, Any]:
    """The row of a method that replay can serve.

    Args:
        method: its name.
        controller: the method.
        traces: judged on.
        depths: candidate depths.
        max_draft: most proposals in a round.
        live: texts that are decoded, too, to see that they are plain decoding's.
    """
    found = selection_overhead(traces, controller, depths=depths, max_draft=max_draft)
    identity = NOT_DECODED
    if live is not None:
        identity = live.identity(live.decoded(controller, depths, max_draft))
    return {
        "method": method,
        "setting": found.result.controller,
        "devices": 1,
        "texts": len(found.result.texts),
        "tokens": len(found.rows),
        "simulated_speedup": found.result.speedup,
        "layer_speedup": found.result.layer_speedup,
        "depth_speedup": found.depth_speedup,
        "oracle_share": finite(found.oracle_share),
        "late_exit": found.late_exit,
        "fallback": found.fallback,
        "early_match": found.early_match,
        **NO_LATTICE,
        **identity,
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


def chosen_adadecode(
    training: LiveTexts | None, depths: Sequence[int], static_depth: int | None, max_draft: int
) -> tuple[AdaDecodeController, tuple[int, ...]]:
    """AdaDecode and its depths: the candidate that decodes other texts with the fewest layers, heads counted.

    Args:
        training: these texts; without them the paper's threshold at the middle depths is taken.
        depths: candidate depths.
        static_depth: the best static setting's, where it is known.
        max_draft: most proposals in a round.
    """
    if training is None or static_depth is None:
        return AdaDecodeController(), middle_depths(depths)
    candidates, heads = adadecode_candidates(depths, static_depth), head_costs(training.traces)
    return max(
        candidates,
        key=lambda each: _simulated(training.decoded(each[0], each[1], max_draft), heads),
    )


def adadecode_row(
    controller: AdaDecodeController, live: LiveTexts, depths: Sequence[int], max_draft: int
) -> dict[str, Any]:
    """The row of AdaDecode, decoded: the same figures as `selection_row`'s, on fewer texts."""
    traces = live.traces
    results = live.decoded(controller, depths, max_draft)
    depth, corrected, ead = (np.concatenate(parts) for parts in zip(
        *(_choices(result, traces, text) for result, text in zip(results, live.texts.tolist(), strict=True)),
        strict=True,
    ))  # fmt: skip
    layers = sum(result.sequential_layers for result in results)
    tokens = sum(len(result.tokens) - 1 for result in results)
    waste, top = depth - ead, traces.num_layers
    depth_speedup = top / float(depth.mean())
    return {
        "method": "adadecode",
        "setting": f"{controller.name} of {', '.join(map(str, depths))}",
        "devices": 1,
        "texts": len(results),
        "tokens": tokens,
        "simulated_speedup": _simulated(results, head_costs(traces)),
        "layer_speedup": top * tokens / layers,
        "depth_speedup": depth_speedup,
        "oracle_share": finite(headroom(depth_speedup, 1.0, top / float(ead.mean()))),
        "late_exit": float(np.where(corrected, 0, np.maximum(waste, 0)).mean()),
        "fallback": float(np.where(corrected, waste, 0).mean()),
        "early_match": float(np.maximum(-waste, 0).mean()),
        **NO_LATTICE,
        **live.identity(results),
    }


def _simulated(results: Sequence[DecodeResult], heads: tuple[float, float]) -> float:
    """Speed-up over plain decoding in layers, heads counted by their size.

    A round asks the last layer's head once, for all its tokens; all other heads are exit heads.
    """
    exit_head, final_head = heads
    plain = cost = 0.0
    for result in results:
        rounds = len(result.rounds)
        plain += (len(result.tokens) - 1) * (result.num_layers + final_head)
        cost += result.sequential_layers + rounds * final_head + (result.head_calls - rounds) * exit_head
    return plain / cost


def _choices(
    result: DecodeResult, traces: TraceSet, text: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Of every token but prefill's: the depth that made it, whether it is a correction, and its EAD.

    A text that parts from the recorded one counts up to there: behind it there is no EAD.
    """
    recorded = traces.tokens_of(text).tolist()
    same = 0
    while same < min(len(recorded), len(result.tokens)) and result.tokens[same] == recorded[same]:
        same += 1
    corrected = np.zeros(len(result.tokens), dtype=bool)
    at = 1
    for each in result.rounds:
        at += each.accepted
        if each.accepted < each.drafted and at < len(corrected):
            corrected[at] = True
        at += 1
    first = int(traces.start[text])
    ead = earliest_depths(traces)[first + 1 : first + same]
    return np.array(result.depths, dtype=np.int64)[1:same], corrected[1:same], ead
