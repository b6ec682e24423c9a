"""A checkpoint's first use: record it, find its best static setting, train a policy for it.

The prompts are divided by a seed: on the training part depths and the static setting are chosen and the
policy is trained, on the held-out part both are judged. Everything after the recording is exact replay of
recorded texts under a cost model, so the figures do not depend on the moment's load, unless costs are
measured (`cost`).

    prepared = prepare(settings)  # sde_gym.evaluation.tuning_settings
    print(*estimate(prepared, out).lines())  # sde_gym.evaluation.tuning_time
    results = tune(prepared, out)

The output folder, in the order in which it fills:

    settings.json   the settings
    traces/         a trace set; a run that was stopped goes on recording there
    cost.json       costs measured on this machine, if asked for
    policy/         the policy, its data and its log, see `sde_gym.offline.pipeline`
    tune.json       what was chosen, and the figures
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sde_gym.envs.run import RunResult, run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.calibration import DEFAULT_REPEATS, calibrate
from sde_gym.evaluation.demo import Progress, hardware, silent, versions
from sde_gym.evaluation.tuning_settings import TRACES_FOLDER, Prepared, TuneSettings
from sde_gym.evaluation.tuning_time import Estimate
from sde_gym.files import write_json
from sde_gym.models.cost import UNIT, CostModel
from sde_gym.models.threads import torch_threads
from sde_gym.offline import train_policy
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet
from sde_gym.traces.recorder import record

RESULT_FILE = "tune.json"
COST_FILE = "cost.json"
POLICY_PATH = "policy/policy"

#: Stages in order; `calibrate` only with `cost`.
STAGES = ("record", "calibrate", "choose", "train")


def tune(
    prepared: Prepared, out: Path, progress: Progress = silent, estimate: Estimate | None = None
) -> dict[str, Any]:
    """Run all stages.

    Args:
        prepared: from `prepare`.
        out: folder, see the module.
        progress: told of every stage of `STAGES`.
        estimate: kept beside the seconds that the stages took.

    Returns:
        What `tune.json` holds.

    Raises:
        InputError: an `out` that holds the traces of another run, or texts too short to learn from.
    """
    with torch_threads(prepared.settings.threads):
        return _tune(prepared, out, progress, estimate)


def _tune(prepared: Prepared, out: Path, progress: Progress, estimate: Estimate | None) -> dict[str, Any]:
    started = datetime.now(UTC)
    settings, model = prepared.settings, prepared.model
    seconds: dict[str, float] = {}
    with _timed(seconds, "record"):
        training, held_out = _record(prepared, out, progress)
    (out / RESULT_FILE).unlink(missing_ok=True)  # of an earlier run with this folder
    write_json(out / "settings.json", asdict(settings))
    cost: str | CostModel = UNIT
    if settings.cost:
        with _timed(seconds, "calibrate"):
            cost = _calibrate(prepared, progress)
            cost.save(out / COST_FILE)
    with _timed(seconds, "choose"):
        ranking = rank_static(training, settings.max_draft, cost, progress)
        best = ranking[0]
        offered = offered_depths(ranking, settings.offered_depths)
    with _timed(seconds, "train"):
        progress("train", 0, settings.gradient_steps)
        policy = train_policy(
            training,
            out / "policy",
            replace(settings.training(), depths=offered),
            progress=lambda done, total, metrics: progress("train", done, total, _note(metrics)),
        ).policy
    static = StaticController(best.exit_depth, best.draft_length)
    rows = [
        _row(name, part, run_controller(traces, controller, depths=depths, max_draft=longest, cost=cost))
        for part, traces in (("training", training), ("held-out", held_out))
        for name, controller, depths, longest in (
            ("static", static, (best.exit_depth,), best.draft_length),
            ("policy", policy, policy.depths, policy.max_draft),
        )
    ]
    results: dict[str, Any] = {
        "rows": rows,
        "fastest": _fastest(rows),
        "static": {"exit_depth": best.exit_depth, "draft_length": best.draft_length},
        "policy": {"path": POLICY_PATH, "depths": list(policy.depths), "max_draft": policy.max_draft},
        "static_ranking": [asdict(score) for score in ranking],
        "depths": list(prepared.depths),
        "cost_model": cost if isinstance(cost, str) else COST_FILE,
        "model": {"name": model.name, "layers": model.num_layers, "weights": model.weights_hash()},
        "prompts": {"training": training.text_ids, "held_out": held_out.text_ids},
        "tokens": {"training": len(training.token), "held_out": len(held_out.token)},
        "estimate": None if estimate is None else estimate.seconds,
        "seconds": seconds,
        "settings": asdict(settings),
        "hardware": hardware(model, settings.threads),
        "versions": versions(),
        "started": started.isoformat(timespec="seconds"),
    }
    write_json(out / RESULT_FILE, results)
    return results


def _record(prepared: Prepared, out: Path, progress: Progress) -> tuple[TraceSet, TraceSet]:
    """The traces of the training and of the held-out prompts; one folder holds both."""
    settings = prepared.settings
    prompts = [*prepared.training, *prepared.held_out]
    progress("record", 0, len(prompts))
    traces = record(
        prepared.model,
        prompts,
        out / TRACES_FOLDER,
        prepared.depths,
        max_new_tokens=settings.max_new_tokens,
        overrun=settings.max_draft - 1,
        progress=lambda done, total, tokens: progress("record", done, total, f"{tokens} tokens"),
    )
    parts = []
    for name, chosen in (("training", prepared.training), ("held-out", prepared.held_out)):
        ids = {prompt.id for prompt in chosen}
        texts = [n for n, text_id in enumerate(traces.text_ids) if text_id in ids]
        if not texts:  # texts of fewer than two tokens are not recorded
            raise InputError(f"all {name} texts end with their first token; give other prompts, or more")
        parts.append(traces.subset(texts))
    return parts[0], parts[1]


def _calibrate(prepared: Prepared, progress: Progress) -> CostModel:
    """This machine's costs, on training prompts."""
    settings, model = prepared.settings, prepared.model
    return calibrate(
        model,
        [model.encode(prompt.text) for prompt in prepared.training[:DEFAULT_REPEATS]],
        prepared.depths,
        max_draft=settings.max_draft,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        progress=lambda done, total: progress("calibrate", done, total),
    )


@dataclass(frozen=True)
class StaticSetting:
    """A static setting on recorded texts."""

    exit_depth: int
    draft_length: int
    speedup: float  # simulated


def rank_static(
    traces: TraceSet, max_draft: int, cost: str | CostModel, progress: Progress = silent
) -> list[StaticSetting]:
    """All settings of recorded depths and lengths 1..max_draft, fastest first.

    Args:
        traces: with overrun, unless max_draft is 1.
        max_draft: longest draft.
        cost: as `run_controller` takes it.
        progress: told of the stage `choose`.
    """
    grid = [(depth, length) for depth in traces.depths for length in range(1, max_draft + 1)]
    found = []
    progress("choose", 0, len(grid))
    for number, (depth, length) in enumerate(grid, start=1):
        result = run_controller(
            traces, StaticController(depth, length), depths=(depth,), max_draft=length, cost=cost
        )
        found.append(StaticSetting(depth, length, result.speedup))
        progress("choose", number, len(grid))
    return sorted(found, key=lambda row: -row.speedup)


def offered_depths(ranking: list[StaticSetting], count: int) -> tuple[int, ...]:
    """The `count` depths whose best static settings are fastest, rising."""
    by_speed = list(dict.fromkeys(row.exit_depth for row in ranking))
    return tuple(sorted(by_speed[:count]))


def _row(name: str, part: str, result: RunResult) -> dict[str, Any]:
    """One row of the figures."""
    return {
        "method": name,
        "part": part,
        "texts": len(result.texts),
        "tokens": int(result.tokens.sum()),
        "simulated_speedup": result.speedup,
        "layer_speedup": result.layer_speedup,
        "acceptance_rate": result.acceptance_rate,
        "mean_exit_depth": result.mean_exit_depth,
        "mean_draft_length": result.mean_draft_length,
    }


def _fastest(rows: list[dict[str, Any]]) -> str:
    """ "static", "policy", or "plain" where neither is faster than that, on held-out texts."""
    speed = {row["method"]: row["simulated_speedup"] for row in rows if row["part"] == "held-out"}
    best = max(speed, key=lambda name: speed[name])
    return best if speed[best] > 1 else "plain"


def usage(settings: TuneSettings, results: dict[str, Any], out: Path) -> list[str]:
    """What a user may do with the results, as sentences and commands."""
    words = ["sde-gym", "generate", "--model", settings.model]
    for name in ("dtype", "device"):
        value = getattr(settings, name)
        if value != getattr(TuneSettings, name):
            words += [f"--{name}", value]
    policy = str(out / results["policy"]["path"])
    static = results["static"]
    options = {
        "policy": ["--policy", policy],
        "static": ["--exit-depth", str(static["exit_depth"]), "--draft-length", str(static["draft_length"])],
        "plain": [],
    }
    spoken = {"policy": "the trained policy", "static": "the static setting", "plain": "plain decoding"}
    fastest = results["fastest"]
    lines = [f"fastest on held-out texts, simulated: {spoken[fastest]}"]
    for name in dict.fromkeys((fastest, "policy")):
        lines.append(shlex.join([*words, *options[name], "--prompt", "..."]))
    lines.append(
        f"in Python: policy = sde_gym.policies.load_policy({policy!r}), then "
        "sde_gym.decoding.generate(model, text, policy, max_new_tokens=64)"
    )
    return lines


def _note(metrics: Mapping[str, float]) -> str:
    return f"return {metrics['return']:.1f}" if "return" in metrics else ""


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note how long a stage took."""
    started = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - started, 1)
