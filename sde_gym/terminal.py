"""What the command line shows: errors as sentences, progress bars, tables, coloured texts."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from sde_gym.errors import InputError

if TYPE_CHECKING:
    from sde_gym.decoding import DecodeResult
    from sde_gym.evaluation.samples import Sample
    from sde_gym.models.layered import LayeredModel

#: Exit status of an interrupted command, as shells have it: 128 + SIGINT.
INTERRUPTED = 130
BAD_INPUT = 2

#: Packages of the extras: what to install if one is missing.
_EXTRAS = {
    "accelerate": "smollm2",
    "d3rlpy": "offline",
    "gguf": "smollm2",
    "h5py": "offline",
    "minari": "offline",
    "numba": "fast",
    "optuna": "search",
    "rouge_score": "bench",
    "stable_baselines3": "online",
    "tensorboard": "offline",
}


def _fail(message: str) -> NoReturn:
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Turn what the user can mend into one sentence on stderr and an exit status.

    Bad input and files that cannot be read or written: status 2. An interrupt: status 130.
    Everything else is a fault of the program and keeps its traceback.
    """
    try:
        yield
    except InputError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _fail("the disk is full; what was written before is complete and stays")
        if error.filename is None:  # not about a file: a fault, or a closed pipe
            raise
        _fail(f"{error.filename}: {(error.strerror or type(error).__name__).lower()}")
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this needs the package {error.name}: pip install 'sde_gym[{extra}]'")
    except KeyboardInterrupt:
        Console(stderr=True).print("\ninterrupted; what was written before is complete and stays")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Show this package's own warnings as one plain sentence on stderr, without file and line.

    Other packages' warnings keep the form that Python gives them.
    """
    before = warnings.showwarning
    package = Path(__file__).parent

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int,
             file: TextIO | None = None, line: str | None = None) -> None:  # fmt: skip
        if issubclass(category, UserWarning) and package in Path(filename).parents:
            console = Console(stderr=True, highlight=False)
            console.print(Text.assemble(("note: ", "bold"), str(message)), soft_wrap=True)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


class SentenceGroup(TyperGroup):
    """A group of commands whose errors and warnings are shown as sentences."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with warnings_as_sentences(), errors_as_sentences():
            return super().invoke(ctx)


#: Called with (stage, steps done, of how many, a short note); 0 done when a stage begins.
Advance = Callable[..., None]


@contextmanager
def progress_bars() -> Iterator[Advance]:
    """Progress bars on stderr, if that is a terminal, one a stage; yields what moves them."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    console = Console(stderr=True)
    stages: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def advance(stage: str, done: float, total: float, note: str = "") -> None:
            if stage not in stages:
                stages[stage] = progress.add_task(stage, note="")
            progress.update(stages[stage], completed=done, total=total, note=note)

        try:
            yield advance
        except InputError:
            progress.live.transient = True  # the sentence is enough
            raise


#: Headings of `report.COLUMNS` that fit, with a method's name, into 80 characters.
_SHORT_HEADINGS = ("tokens/s", "speed-up", "accepted", "depth", "draft")


def results_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of `results.json`, one method a line, at most 80 characters wide."""
    from sde_gym.evaluation.report import row_figures, row_identical

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in _SHORT_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same", justify="right")  # text as plain decoding's
    for row in rows:
        name = str(row["method"])
        if row.get("exit_depth") is not None and row.get("draft_length") is not None:
            name += f" {row['exit_depth']},{row['draft_length']}"
        style = "bold" if row["method"] == "lede" else None
        table.add_row(name, *row_figures(row), row_identical(row), style=style)
    return table


def show_generated(model: LayeredModel, prompt: str, prompt_tokens: int, result: DecodeResult) -> None:
    """Print a generated text, each token on its depth's colour, and on stderr how it came about.

    Args:
        model: that generated it.
        prompt: its text.
        prompt_tokens: how many tokens that is.
        result: what was generated.
    """
    from sde_gym.evaluation.samples import Sample, token_pieces

    pieces = token_pieces(model.decode, result.tokens)
    text, legend = coloured(Sample(prompt, pieces, result.depths, result.fates, result.num_layers))
    Console(highlight=False).print(text, soft_wrap=True)
    count = len(result.tokens)
    facts = f"{count} token{'' if count == 1 else 's'}"
    if count > 1 and result.decode_seconds > 0:
        facts += f", {(count - 1) / result.decode_seconds:.1f} tokens/s after the first"
    console = Console(stderr=True, highlight=False)
    if result.drafted:
        facts += f", {result.accepted} of {result.drafted} drafts accepted"
        console.print(legend)
    # the last token need not fit: it is never run
    if prompt_tokens + count > model.context_limit:
        facts += f"; the context of {model.context_limit} tokens is full"
    console.print(facts, style="dim")


def coloured(sample: Sample) -> tuple[Text, Text]:
    """(text, legend): the prompt dimmed, each token on its depth's colour."""
    from sde_gym.evaluation.samples import DepthColours

    colours = DepthColours.of([sample])

    def style(depth: int) -> str:
        background = colours.background(depth)
        return f"{colours.ink(depth)} on {background}" if background else ""

    text = Text.assemble((sample.prompt, "dim"))
    for token, depth in zip(sample.tokens, sample.depths, strict=True):
        text.append(token, style(depth))
    legend = Text("exit depth: ")
    for depth in colours.depths:
        legend.append(f" {depth} ", style(depth))
        legend.append(" ")
    legend.append(f"no colour: the final layer, {sample.num_layers}")
    return text, legend
