"""`sde-gym bench`: commands that measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sde_gym.cli.app import bench_app
from sde_gym.cli.options import Model, PromptSet
from sde_gym.errors import InputError
from sde_gym.options import settings_command
from sde_gym.settings import DEFAULT_NEW_TOKENS
from sde_gym.terminal import progress_bars


@bench_app.command("env")
def bench_env(
    lanes: Annotated[int, typer.Option(min=1, help="Lanes of the vector environments.")] = 4096,
    threads: Annotated[int, typer.Option(min=1, help="Threads that share our lanes.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.0, help="Least time of each measurement.")] = 1.0,
    traces: Annotated[str, typer.Option(help="A trace set's name or its folder.")] = "stdlib-20m",
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file for every measurement.")
    ] = None,
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
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="JSON file for every run.")] = None,
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
        Path, typer.Option(file_okay=False, help="Folder for all that is made; a stopped run goes on there.")
    ] = Path("runs/bench-exact"),
    batch: Annotated[int, typer.Option(min=1, help="Texts decoded at once.")] = 8,
) -> None:
    """Compare every method's greedy texts with plain decoding's, over many prompts."""
    from sde_gym.evaluation.bench_exact import EXACT_FILE, bench_exact, table

    if settings.repeats != type(settings).repeats:
        raise InputError("--repeats: every text is decoded once; leave it out, it is of `bench decode`")
    with progress_bars() as advance:
        results = bench_exact(settings, out, batch, advance)
    console = Console(highlight=False)
    console.print(table(results), soft_wrap=True, markup=False)
    console.print(f"{out / EXACT_FILE}: texts, and where they part", soft_wrap=True)
    wrong = [row["method"] for row in results["rows"] if row["different"] > row["at_near_ties"]]
    if wrong and settings.dtype != "float32":
        largest = max(each["gap"] for each in results["differences"])
        console.print(
            f"In {settings.dtype} logits are coarse: texts part where the two best are up to {largest:g} "
            "apart.",
            soft_wrap=True,
        )
    elif wrong:
        raise InputError(f"{', '.join(wrong)}: a text parts from plain decoding's where no near-tie is")


@bench_app.command("record")
def bench_record(
    model: Model = "stdlib-20m",
    prompts: PromptSet = "stdlib:train",
    limit: Annotated[int, typer.Option(min=1, help="Use only the first N prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = DEFAULT_NEW_TOKENS,
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file for every measurement.")
    ] = None,
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
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the figures and the table.")] = Path(
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
        Path, typer.Option(file_okay=False, help="Folder for all that is made; a stopped run goes on there.")
    ] = Path("runs/bench-decode"),
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file for tables and facts, besides `out`.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="PNG file for the speed-ups, besides `out`.")
    ] = None,
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
