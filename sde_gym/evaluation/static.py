"""The best static setting (exit depth E, draft length d): LayerSkip's, tuned fairly.

A grid is ranked from traces alone, then the front runners are timed in the real decoder.
Both use prompts other than those on which results are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sde_gym.envs.run import run_controller
from sde_gym.evaluation.benchmark import ar_method, controller_method, measure, summarise_rows
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.rules import StaticController
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.traces.store import TraceSet

#: Share of a measured speed-up below which two settings count as equally fast.
TIE = 0.03


@dataclass(frozen=True)
class StaticScore:
    """What a static setting did on a trace set."""

    exit_depth: int
    draft_length: int
    acceptance_rate: float
    layer_speedup: float  # L x tokens / sequential layers run


def static_grid(traces: TraceSet, max_draft: int = DEFAULT_MAX_DRAFT) -> list[StaticScore]:
    """All settings (E among the recorded depths, d in 1..max_draft), fastest by layers first.

    Raises:
        InputError: traces without overrun.
    """
    traces.check_overrun("comparing static settings")
    scores = []
    for exit_depth in traces.depths:
        for draft_length in range(1, max_draft + 1):
            controller = StaticController(exit_depth, draft_length)
            result = run_controller(traces, controller, max_draft=max_draft)
            scores.append(StaticScore(exit_depth, draft_length, result.acceptance_rate, result.layer_speedup))
    return sorted(scores, key=lambda score: -score.layer_speedup)


def best_static(
    model: LayeredModel,
    traces: TraceSet,
    prompts: Sequence[tuple[str, str, list[int]]],
    max_new_tokens: int,
    candidates: int = 6,
    max_draft: int = DEFAULT_MAX_DRAFT,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[StaticScore, list[tuple[StaticScore, float]]]:
    """Time the `candidates` front runners of the grid and take the fastest.

    Settings within `TIE` of the fastest are taken to be as fast, and of them the one that runs
    fewest layers is chosen: what is left between them is the machine's noise.

    Args:
        model: the model that the traces were recorded from.
        traces: to rank the grid on.
        prompts: (id, task, token ids) to time on.
        max_new_tokens: as in the measurement that follows.
        candidates: settings timed; at most three of one exit depth, to keep them different.
        max_draft: longest draft considered.
        progress: prompts done, prompts in all.

    Returns:
        The winner, and all timed settings with their measured speed-ups over AR.
    """
    front: list[StaticScore] = []
    for score in static_grid(traces, max_draft):
        if sum(other.exit_depth == score.exit_depth for other in front) < 3:
            front.append(score)
        if len(front) == candidates:
            break
    methods = {"ar": ar_method(model, max_new_tokens)} | {
        f"{s.exit_depth},{s.draft_length}": controller_method(
            model,
            StaticController(s.exit_depth, s.draft_length),
            traces.depths,
            max_new_tokens,
            max_draft=max_draft,
        )
        for s in front
    }
    rows, _ = measure(methods, prompts, progress=progress)
    speed = {row["method"]: float(row["speedup"]) for row in summarise_rows(rows)}
    timed = [(score, speed[f"{score.exit_depth},{score.draft_length}"]) for score in front]
    fastest = max(measured for _, measured in timed)
    ties = [score for score, measured in timed if measured >= (1 - TIE) * fastest]
    return max(ties, key=lambda score: score.layer_speedup), timed
