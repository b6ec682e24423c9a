"""LEDE (arXiv 2606.03113) in one script: explore, train a DQN offline, compare on texts it never saw.

    python agents/lede_dqn.py --traces stdlib-20m --out runs/lede --episodes 400 --seed 0

1. Split the recorded texts into training and held-out ones.
2. Explore: episodes of coin flips, and of random departures from static and threshold settings.
3. Train a DQN with n-step returns and a target network on those episodes only.
4. Keep the checkpoint of highest return on the training texts; write it as a policy file.
5. Replay the held-out texts under it and under what it has to beat.

Steps 2 to 4 are `sde_gym.offline.train_policy`; its module says what the folder then holds, and
`sde_gym.offline.training` explains every metric and lists the departures from the paper; metrics also
go to TensorBoard (`tensorboard --logdir OUT`) and to OUT/scalars.jsonl. The speed-up printed here is
simulated: layers run one after the other and heads by their size, Python for free. The real speed-up is
measured by `sde-gym demo`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from sde_gym.envs.run import RunResult, run_controller
from sde_gym.errors import InputError
from sde_gym.offline import DQNSettings, train_policy
from sde_gym.offline.pipeline import LOG_FILE
from sde_gym.offline.scalars import ScalarLog
from sde_gym.options import with_settings
from sde_gym.policies.controller import Controller
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.terminal import progress_bars
from sde_gym.traces import TraceSet, load_traces

STATIC_LENGTHS = (1, 2, 3, 4, 6, 8, 12)
OPTIMISTIC = (
    "The traces were recorded without overrun: drafting on behind a wrong proposal costs nothing in replay, "
    "so these figures are optimistic. Compare none of them with a live run."
)
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def main(
    settings: Any,
    out: Annotated[Path, typer.Option(help="Folder for the policy, its data and its log.")],
    traces: Annotated[str, typer.Option(help="A trace set's name or its folder.")] = "stdlib-20m",
    held_out: Annotated[float, typer.Option(help="Share of the texts kept for the comparison.")] = 0.25,
) -> None:
    """Train LEDE's policy offline on recorded traces and compare it on held-out texts."""
    train, test = split(load_traces(traces), held_out, settings.seed)

    console = Console(highlight=False)
    with ScalarLog(out) as log, progress_bars() as advance:
        if log.notice:
            console.print(log.notice)

        def progress(done: int, total: int, metrics: Mapping[str, float]) -> None:
            note = f"return {metrics['return']:.1f}, loss {metrics['loss']:.3f}" if metrics else ""
            advance("train", done, total, note)
            if metrics and metrics["step"] != log.newest:
                # Several checkpoints may lie between two calls; the file has them all.
                for line in (out / LOG_FILE).read_text(encoding="utf-8").splitlines():
                    row = json.loads(line)
                    if row["step"] > log.newest:
                        log.add(int(row["step"]), row)

        trained = train_policy(train, out, settings, progress)

    rules: dict[str, Controller] = {
        "plain decoding": RandomController(0.0),
        "random": RandomController(0.5, seed=settings.seed),
        "best static": best_on(train, statics(train, settings), settings),
        "best threshold": best_on(train, [ThresholdController(value) for value in THRESHOLDS], settings),
        "LEDE": trained.policy,
    }
    table = Table(
        "policy", "setting", "return", "simulated speed-up", "acceptance", "exit depth", "draft length"
    )
    for name, controller in rules.items():
        result = play(test, controller, settings)
        table.add_row(
            name,
            controller.name,
            f"{result.returns.mean():.2f}",
            f"{result.speedup:.2f}x",
            f"{result.acceptance_rate:.2f}",
            f"{result.mean_exit_depth:.1f}",
            f"{result.mean_draft_length:.1f}",
        )
    source = "taken from an earlier run" if trained.reused else "collected"
    console.print(
        f"{len(trained.transitions)} transitions {source}; {int(trained.log[-1]['step'])} gradient steps; "
        f"{len(train)} training and {len(test)} held-out texts; static and threshold chosen on the former"
    )
    console.print(table)
    if not train.overrun:
        console.print(OPTIMISTIC)
    console.print(f"policy: {out / 'policy.safetensors'}", soft_wrap=True)


def split(traces: TraceSet, share: float, seed: int) -> tuple[TraceSet, TraceSet]:
    """Training and held-out texts, at least one of each.

    Raises:
        InputError: a share outside (0, 1), or too few texts to split.
    """
    if not 0 < share < 1:
        raise InputError(f"held_out is {share}; it must be inside (0, 1)")
    if len(traces) < 2:
        raise InputError(f"the trace set has {len(traces)} text; at least 2 are needed to hold one out")
    order = np.random.default_rng(seed).permutation(len(traces))
    count = min(max(1, round(share * len(traces))), len(traces) - 1)
    return traces.subset(np.sort(order[count:])), traces.subset(np.sort(order[:count]))


def play(traces: TraceSet, controller: Controller, settings: DQNSettings) -> RunResult:
    """All texts under a controller, in the environment that the policy was trained in."""
    same: dict[str, Any] = {
        "depths": settings.depths,
        "reward": settings.reward,
        "final_token_reward": settings.final_token_reward,
        "k": settings.k,
        "window": settings.window,
        "max_draft": settings.max_draft,
    }
    return run_controller(traces, controller, **same)


def statics(traces: TraceSet, settings: DQNSettings) -> list[Controller]:
    """LayerSkip's settings: every depth, with some draft lengths."""
    return [
        StaticController(depth, length)
        for depth in settings.depths or traces.depths
        for length in STATIC_LENGTHS
        if length <= settings.max_draft
    ]


def best_on(traces: TraceSet, controllers: list[Any], settings: DQNSettings) -> Controller:
    """The controller with the highest simulated speed-up on these texts."""
    best: Controller = max(controllers, key=lambda controller: play(traces, controller, settings).speedup)
    return best


if __name__ == "__main__":
    typer.run(with_settings(main, DQNSettings))
