"""Commands that train: the demo, policies, language models, probes, adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sde_gym.cli.app import app
from sde_gym.cli.options import Device, DType, Model, PromptSet, Threads, use_threads
from sde_gym.errors import InputError
from sde_gym.options import parse_list, settings_command
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.terminal import progress_bars, results_table


@settings_command(app, "demo", "sde_gym.evaluation.demo:DemoSettings")
def demo(
    settings: Any,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for everything that the run makes.")
    ] = Path("sde-gym-demo"),
) -> None:
    """Run the whole loop on the embedded model: record, train a policy, measure its speed-up."""
    from sde_gym.evaluation.demo import run_demo

    with progress_bars() as advance:
        results = run_demo(settings, out, advance)
    console = Console(highlight=False)
    console.print(results_table(results["rows"]))
    console.print(f"{out / 'report.html'}: the report; {out / 'results.json'}: the figures", soft_wrap=True)


@settings_command(app, "tune", "sde_gym.evaluation.tuning_settings:TuneSettings")
def tune(
    settings: Any,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for all that is made; a stopped run goes on there.")
    ],
) -> None:
    """A checkpoint's first use: record it, find its best static setting, train a policy for it."""
    from sde_gym.evaluation.tuning import RESULT_FILE, tune, usage
    from sde_gym.evaluation.tuning_settings import prepare
    from sde_gym.evaluation.tuning_time import estimate

    console = Console(highlight=False)
    prepared = prepare(settings)
    expected = estimate(prepared, out)
    for line in expected.lines():
        console.print(line, soft_wrap=True)
    with progress_bars() as advance:
        results = tune(prepared, out, advance, expected)
    table = Table("method", "texts", "simulated speed-up", "accepted", "mean depth", "mean draft")
    for row in results["rows"]:
        table.add_row(
            row["method"], row["part"], f"{row['simulated_speedup']:.2f}x", f"{row['acceptance_rate']:.1%}",
            f"{row['mean_exit_depth']:.1f}", f"{row['mean_draft_length']:.1f}",
        )  # fmt: skip
    console.print(table)
    for line in usage(settings, results, out):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"{out / RESULT_FILE}: the figures", soft_wrap=True)


@settings_command(app, "train-lm", "sde_gym.models.lm_training:LMTrainingSettings")
def train_lm(
    settings: Any,
    out: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder for the model; a run that was stopped there goes on."),
    ],
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch.")] = 2,
) -> None:
    """Train a small early-exit language model on Python's standard library."""
    from sde_gym.models.lm_training import jsonl_logger, train_lm

    log = jsonl_logger(out / "log.jsonl")
    with progress_bars() as advance:

        def progress(record: dict[str, float]) -> None:
            if "own_windows" in record:
                advance("write own text", record["own_windows"], record["own_windows_wanted"], "")
                return
            log(record)
            note = f"loss {record['loss']:.3f}, {record['tokens_per_second']:.0f} tokens/s"
            advance("train", record["step"], record["steps"], note)

        measured = train_lm(settings, out, threads, progress)
    console = Console(highlight=False)
    console.print(f"held-out text: {measured['bits_per_byte']:.3f} bits per byte")
    for depth, share in measured["agreement"].items():
        console.print(f"depth {depth:>3}: agrees with the final layer on {share:.1%} of tokens")


@settings_command(app, "train-probe", "sde_gym.models.probe_training:ProbeSettings")
def train_probe(
    settings: Any,
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Folder for probe.safetensors; the model's own makes it its probe."
        ),
    ],
    model: Model = "stdlib-20m",
    prompts: PromptSet = "stdlib:train",
    dtype: DType = "float32",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Train the exit probe: how probable it is that a depth's token is the last layer's."""
    from sde_gym.models.loading import load_model
    from sde_gym.models.probe_training import train_probe
    from sde_gym.prompts import load_prompts

    chosen = load_prompts(prompts)
    use_threads(threads)
    loaded = load_model(model, dtype, device)
    with progress_bars() as advance:
        probe = train_probe(
            loaded, chosen, out, settings, lambda done, total: advance("collect", done, total)
        )
    console = Console(highlight=False)
    table = Table("depth", "matches", "AUC", "log loss", "calibration error", "ridge")
    for found in probe.report["depths"]:
        table.add_row(
            str(found["depth"]), f"{found['share']:.1%}", f"{found['auc'] or float('nan'):.3f}",
            f"{found['log_loss']:.3f}", f"{found['expected_calibration_error']:.3f}", f"{found['ridge']:g}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"{out}: the probe {probe.identity} of {probe.model}; on prompts not fitted to", soft_wrap=True
    )


@settings_command(app, "train-adapters", "sde_gym.models.adapter_settings:AdapterSettings")
def train_adapters(
    settings: Any,
    out: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder for the adapters; a run that was stopped there goes on."),
    ],
    model: Model = "smollm2-135m",
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch.")] = 2,
) -> None:
    """Train adapters: small maps that let a standard model's shallow layers speak."""
    from sde_gym.models.adapter_training import train_adapters

    with progress_bars() as advance:
        found = train_adapters(model, settings, out, threads, advance)
    table = Table("depth", "without", "with adapter", "vocabulary allows", "sure", "right where sure")
    for depth, row in found["report"].items():
        right = row["sure_agreement"]
        table.add_row(
            depth, f"{row['without']:.1%}", f"{row['agreement']:.1%}", f"{row['offered']:.1%}",
            f"{row['sure']:.1%}", "–" if right is None else f"{right:.1%}",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    console.print(f"use them as --model {model}+{out}", soft_wrap=True, markup=False)


@app.command()
def collect(
    out: Annotated[
        str, typer.Option(help="A Minari id, such as sde_gym/stdlib-20m/uniform-v0, or a file PATH.npz.")
    ],
    traces: Annotated[str, typer.Option(help="A trace set's name or its folder.")] = "stdlib-20m",
    behaviour: Annotated[
        str,
        typer.Option(
            help="uniform, random:0.3, static:4,6+0.1, threshold:0.5+0.1, schedule, softmax:POLICY@0.5, "
            "mixture:A|B|... (one for each episode) or step-mixture:A|B|... (one for each decision)."
        ),
    ] = "schedule",
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 400,
    episode: Annotated[
        str, typer.Option(help="What an episode is: generation (a text) or round (the text goes on).")
    ] = "generation",
    seed: Annotated[int, typer.Option(min=0, help="Of texts, mixtures and actions.")] = 0,
    observation: Annotated[
        str, typer.Option(help="'paper', 'extended', or feature names joined by commas.")
    ] = "extended",
    depths: Annotated[
        str | None, typer.Option(help="Candidate depths, such as 1,2,3; else all recorded ones.")
    ] = None,
    reward: Annotated[str, typer.Option(help="'lede', 'speed' or 'module:function'.")] = "lede",
    final_token_reward: Annotated[
        float, typer.Option(help="Reward of a token that comes from the final layer.")
    ] = 1.0,
    credit: Annotated[str, typer.Option(help="When a proposal is paid: immediate or round.")] = "immediate",
    k: Annotated[
        int | None, typer.Option(min=1, help="Tokens behind 'confidence'; else the behaviour's, or 5.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens behind 'trace'; else the behaviour's, or 8.")
    ] = None,
    max_draft: Annotated[int, typer.Option(min=1, help="Most proposals in one round.")] = DEFAULT_MAX_DRAFT,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Token budget of a text; else the recorded one.")
    ] = None,
    q_true: Annotated[
        str | None,
        typer.Option(
            help="Also store the exact action values of this policy at every state: static:4,4, "
            "threshold:0.2 or a policy file. Not in an .npz."
        ),
    ] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Discount per decision of --q-true; 1 if not given.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Play recorded texts by a behaviour policy and log every decision with its propensity."""
    from sde_gym.envs.arguments import candidate_depths
    from sde_gym.envs.shadow import check_replayable
    from sde_gym.evaluation.exact_q import exact_q
    from sde_gym.evaluation.policy_names import describe_policy, named_policy, with_q_true
    from sde_gym.offline.behaviour_names import parse_behaviour
    from sde_gym.offline.buffer import check_returns
    from sde_gym.offline.collect import collect
    from sde_gym.offline.minari_data import check_id, save_minari
    from sde_gym.offline.transitions import save_transitions
    from sde_gym.traces import load_traces

    as_file = out.endswith(".npz")
    if not as_file:
        check_id(out, overwrite)
    elif Path(out).exists() and not overwrite:
        raise InputError(f"{out}: is there already; choose another file, or give --overwrite")
    if gamma is not None and q_true is None:
        raise InputError("--gamma is the discount of --q-true; give that, too, or leave it out")
    if as_file and q_true is not None:
        raise InputError(f"{out}: an .npz file has no place for --q-true; give a Minari id, or leave it out")
    discount = 1.0 if gamma is None else gamma
    check_returns(1, discount)
    recorded = load_traces(traces)
    given = parse_list(depths, int, "depths") if depths is not None else None
    offered = candidate_depths(given, recorded)
    policy = parse_behaviour(behaviour, offered, max_draft)
    target = None if q_true is None else named_policy(q_true)
    if target is not None:
        check_replayable(target)  # refused before anything is collected
        target.bind(offered, recorded.num_layers, max_draft)
    truth = None
    with progress_bars() as advance:
        transitions = collect(
            recorded, policy, episodes, seed,
            observation=observation
            if observation in ("paper", "extended")
            else parse_list(observation, str, "observation"),
            depths=given, reward=reward, final_token_reward=final_token_reward, credit=credit,
            episode=episode, k=k, window=window, max_draft=max_draft, max_new_tokens=max_new_tokens,
            progress=lambda done, total: advance("collect", done, total),
        )  # fmt: skip
        if target is not None:
            truth = exact_q(
                target, transitions, recorded, gamma=discount,
                progress=lambda done, total: advance("exact values", done, total),
            )  # fmt: skip
            transitions = with_q_true(transitions, truth, describe_policy(target, q_true))
    if as_file:
        save_transitions(out, transitions)
    else:
        exact = None if truth is None else truth.q
        save_minari(out, transitions, traces, q_true=exact, overwrite=overwrite)
    Console(highlight=False).print(
        f"{out}: {len(transitions)} decisions in {transitions.num_episodes} episodes, "
        f"mean return {transitions.returns().mean():.2f}",
        soft_wrap=True,
    )


@settings_command(app, "train", "sde_gym.offline.settings:DQNSettings")
def train(
    settings: Any,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the policy, its data and its log.")],
    traces: Annotated[str, typer.Option(help="A trace set's name or its folder.")] = "stdlib-20m",
) -> None:
    """Train a LEDE policy offline on recorded traces."""
    from sde_gym.offline import train_policy
    from sde_gym.traces import load_traces

    recorded = load_traces(traces)
    with progress_bars() as advance:

        def progress(done: int, total: int, metrics: Mapping[str, float]) -> None:
            note = f"return {metrics['return']:.2f}" if "return" in metrics else ""
            advance("train", done, total, note)

        trained = train_policy(recorded, out, settings, progress)
    best = max(trained.log, key=lambda row: row["return"])
    Console(highlight=False).print(
        f"{out}: policy of step {best['step']:.0f}, mean return {best['return']:.2f} on the training texts",
        soft_wrap=True,
    )
