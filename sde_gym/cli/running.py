"""Commands that decode, or compute what decoding takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from sde_gym.cli.app import app
from sde_gym.cli.options import Device, DType, Model, NewTokens, PromptSet, Threads, read_text, use_threads
from sde_gym.errors import InputError
from sde_gym.options import parse_list, settings_command
from sde_gym.settings import DEFAULT_DEPTHS, DEFAULT_DRAFT_LENGTH, DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS
from sde_gym.terminal import progress_bars, show_generated

if TYPE_CHECKING:
    from sde_gym.decoding import DecodeResult
    from sde_gym.models.layered import LayeredModel


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(dir_okay=False, help="JSON file for the cost model.")],
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
    use_threads(threads)
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
        Path,
        typer.Option(
            dir_okay=False, help="JSON file for the skip set; a stopped search goes on from OUT.trials.jsonl."
        ),
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
    use_threads(threads)
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
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file for the rows and the EAD.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for ead.png and, with --sweep, speedup.png.")
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
        typer.Option(
            help=f"Always draft so many tokens; {DEFAULT_DRAFT_LENGTH} if not given, with --skips as many as "
            "Draft & Verify's threshold says."
        ),
    ] = None,
    skips: Annotated[
        Path | None,
        typer.Option(help="Draft by the whole model without these sublayers: a file of search-skips."),
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
    if skips is not None and (policy is not None or exit_depth is not None):
        raise typer.BadParameter("--skips is a drafter of its own: leave out --policy and --exit-depth")
    if draft_length is not None and exit_depth is None and skips is None:
        raise typer.BadParameter("--draft-length needs --exit-depth or --skips")
    text = prompt if prompt_file is None else read_text(prompt_file)
    assert text is not None
    from sde_gym.decoding import autoregressive, speculative
    from sde_gym.models.loading import load_model
    from sde_gym.policies.files import load_policy
    from sde_gym.policies.rules import StaticController

    learned = load_policy(policy) if policy is not None else None
    use_threads(threads)
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
        if not 1 <= exit_depth < loaded.num_layers:
            raise InputError(
                f"--exit-depth is {exit_depth}; {model} has {loaded.num_layers} layers, so a draft can exit "
                f"at 1..{loaded.num_layers - 1}"
            )
        static = StaticController(exit_depth, min(DEFAULT_DRAFT_LENGTH if draft_length is None else
                                                  draft_length, max_new_tokens))  # fmt: skip
        result = speculative(
            loaded, ids, static, (exit_depth,), max_new_tokens, max_draft=static.draft_length
        )
    elif skips is not None:
        result = _skipping(loaded, ids, skips, draft_length, max_new_tokens)
    else:
        result = autoregressive(loaded, ids, max_new_tokens)
    show_generated(loaded, text, len(ids), result)


def _skipping(
    model: LayeredModel, ids: list[int], skips: Path, draft_length: int | None, max_new_tokens: int
) -> DecodeResult:
    """Decode with drafts that leave out sublayers, of one length or under Draft & Verify's threshold."""
    from sde_gym.decoding.skipping import skipping
    from sde_gym.models.skipping import load_skip_set
    from sde_gym.policies.draft_verify import DraftVerifyController
    from sde_gym.policies.rules import StaticController

    skip = load_skip_set(skips, model.num_layers)
    depth = skip.depth(model.num_layers)
    if draft_length is None:
        return skipping(model, ids, skip, DraftVerifyController(depth), max_new_tokens)
    static = StaticController(depth, min(draft_length, max_new_tokens))
    return skipping(model, ids, skip, static, max_new_tokens, max_draft=static.draft_length)
