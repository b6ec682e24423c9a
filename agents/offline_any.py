"""Any offline algorithm in one script: data, training, a policy file, texts it never saw.

    python agents/offline_any.py --algo cql --out runs/cql --seed 0
    python agents/offline_any.py --algo bcq --data sde_gym/stdlib-20m/uniform-v0 --out runs/bcq
    python agents/offline_any.py --algo dqn --data runs/policy/transitions.npz --out runs/dqn

1. Data: exploratory episodes on the training texts, or what `--data` names. Observation, depths and
   reward of given data replace those of the options: a policy knows only what its data show.
2. Train; every checkpoint is played on the training texts, exactly, and the best one is kept.
3. Write the policy, unless it is a Decision Transformer, which no policy file can hold.
4. Play training and test texts under it.

Algorithms are those of `sde_gym.offline.algorithms`; one's own needs a function and a line in here:
`register("mine", factory)`. Metrics: see `sde_gym.offline.training`; they go to TensorBoard
(`tensorboard --logdir OUT`) and to OUT/scalars.jsonl. The speed-up is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sde_gym.errors import InputError
from sde_gym.files import write_json
from sde_gym.offline import DQNSettings, Transitions, load_transitions, train
from sde_gym.offline.algorithms import algorithm_factory, algorithm_names
from sde_gym.offline.collect import trace_set_id
from sde_gym.offline.pipeline import explore
from sde_gym.offline.scalars import ScalarLog
from sde_gym.offline.selection import (
    check_fit,
    check_same_model,
    environment_of,
    replay_metrics,
    settings_of,
)
from sde_gym.offline.sequences import SequenceController
from sde_gym.options import with_settings
from sde_gym.policies.controller import Controller
from sde_gym.policies.files import policy_paths, save_policy
from sde_gym.policies.qnetwork import QController
from sde_gym.terminal import progress_bars
from sde_gym.traces import TraceSet, load_traces


def main(
    settings: Any,
    out: Annotated[Path, typer.Option(help="Folder for the policy and its logs.")],
    algo: Annotated[str, typer.Option(help=f"One of {', '.join(algorithm_names())}.")] = "double_dqn",
    traces: Annotated[str, typer.Option(help="Trace set to train on: name or folder.")] = "stdlib-20m",
    test: Annotated[str, typer.Option(help="Trace set never trained on.")] = "stdlib-20m-held-out",
    data: Annotated[
        str | None, typer.Option(help="Train on a Minari data set, by its id, or on PATH.npz.")
    ] = None,
) -> None:
    """Train any algorithm offline on logged decisions, and play texts it never saw."""
    algorithm_factory(algo)
    console = Console(highlight=False)
    training, held_out = load_traces(traces), load_traces(test)
    check_same_model(training, held_out)
    identity = trace_set_id(training)
    if identity == trace_set_id(held_out):
        raise InputError(f"--test {test} holds the texts that are trained on; name other ones")
    if data is None:
        transitions = explore(training, settings)
    else:
        transitions = read_data(data)
        check_origin(data, transitions, training, held_out)
        settings = settings_of(transitions, settings)
        check_fit(transitions, settings, training)
    console.print(f"{len(transitions)} transitions, {transitions.num_episodes} episodes; {algo}")
    best: dict[str, float] = {}

    def start(policy: Controller) -> None:
        # A policy of an earlier run must not lie beside the settings of this one.
        for stale in policy_paths(out / "policy"):
            stale.unlink(missing_ok=True)
        run = {**settings.to_json(), "algorithm": algo, "data": data, "traces": traces}
        write_json(out / "settings.json", run)

    def keep(policy: Controller, metrics: Mapping[str, float]) -> None:
        best.update(metrics)
        if isinstance(policy, QController):
            save_policy(
                out / "policy",
                policy,
                model={
                    "name": training.manifest["model"],
                    "weights_hash": training.manifest["model_hash"],
                },
                traces=transitions.settings.get("traces", identity),
                training=settings.to_json(),
                provenance={
                    "algorithm": algo,
                    "checkpoint": dict(metrics),
                    "data": dict(transitions.settings),
                },
            )

    with ScalarLog(out) as log, progress_bars() as advance:
        if log.notice:
            console.print(log.notice)

        def progress(done: int, total: int, metrics: Mapping[str, float]) -> None:
            advance("train", done, total, f"return {metrics['return']:.1f}" if metrics else "")

        policy = train(
            transitions,
            algo,
            settings,
            traces=training,
            progress=progress,
            on_start=start,
            on_best=keep,
            on_checkpoint=lambda metrics: log.add(int(metrics["step"]), metrics),
        )
    table = Table("texts", "return", "simulated speed-up", "acceptance", "exit depth", "draft length")
    for name, texts in (("training", training), ("test", held_out)):
        player = policy.on(texts) if isinstance(policy, SequenceController) else policy
        found = replay_metrics(texts, player, **environment_of(transitions))
        table.add_row(
            name,
            f"{found['return']:.2f}",
            f"{found['speedup']:.2f}x",
            f"{found['acceptance_rate']:.2f}",
            f"{found['mean_exit_depth']:.1f}",
            f"{found['mean_draft_length']:.1f}",
        )
    console.print(f"best checkpoint: step {int(best['step'])} of {settings.gradient_steps}")
    console.print(table)
    if isinstance(policy, QController):
        console.print(f"policy: {out / 'policy.safetensors'}", soft_wrap=True)
    else:
        console.print(f"no policy file: {algo} runs in replay comparisons only")


def read_data(name: str) -> Transitions:
    """Transitions from a file or from Minari.

    Raises:
        InputError: there are none of that name.
    """
    if name.endswith(".npz"):
        return load_transitions(name)
    if Path(name).exists():
        raise InputError(f"--data {name}: neither a .npz file nor the id of a Minari data set")
    from sde_gym.offline.minari_read import dataset_to_transitions

    return dataset_to_transitions(name)


def check_origin(name: str, transitions: Transitions, training: TraceSet, held_out: TraceSet) -> None:
    """Refuse data of the test texts or of another model, as far as they say where they come from.

    Raises:
        InputError: they are.
    """
    if transitions.settings.get("traces") == trace_set_id(held_out):
        raise InputError(f"--data {name} was collected on the texts of --test; name other ones")
    model = transitions.settings.get("model") or {}
    weights = model.get("weights_hash")
    if weights is not None and weights != training.manifest["model_hash"]:
        raise InputError(
            f"--data {name} was collected with {model.get('name', 'a model')} and --traces was recorded with "
            f"{training.manifest['model']} of other weights; give data and texts of one model"
        )


if __name__ == "__main__":
    typer.run(with_settings(main, DQNSettings))
