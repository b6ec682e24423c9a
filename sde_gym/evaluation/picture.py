"""A picture of generated texts, each token on the colour of its exit depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sde_gym.evaluation.samples import DepthColours, Sample
from sde_gym.files import atomic_path


def picture(samples: Sequence[Sample], path: Path, columns: int = 92, lines: int = 44) -> None:
    """Write a PNG of the texts, each token on the colour of its exit depth, atomically.

    Args:
        samples: generated texts of one model; what does not fit in `lines` is left out.
        path: the PNG file to write.
        columns: characters in a line; longer lines are wrapped.
        lines: lines in the picture, at most.

    Raises:
        InputError: there is no sample, or they are of models with different depths.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot, which has global state and wants a display
    from matplotlib.patches import Rectangle

    colours = DepthColours.of(samples)
    cells = layout(samples, columns, lines)
    rows = 1 + max((row for row, *_ in cells), default=0)
    columns = max([48] + [column + len(text) for _, column, text, _ in cells])  # 48: room for the legend
    size, dpi, legend_rows, margin = 9.0, 160, 2, 2
    cell_width, cell_height = 0.602 * size / 72, 1.62 * size / 72  # inches; the font is 0.602 em wide
    total_columns, total_rows = columns + 2 * margin, rows + legend_rows + 1.4
    figure = Figure(
        figsize=(total_columns * cell_width, total_rows * cell_height), dpi=dpi, facecolor="#ffffff"
    )
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-margin, columns + margin), ylim=(rows + 0.7, -legend_rows - 0.7))
    axes.axis("off")

    def put(row: float, column: float, text: str, background: str | None, ink: str) -> None:
        if background is not None:
            opacity = 1.0 if text.strip() else 0.4  # indentation is toned down
            box = Rectangle(
                (column, row + 0.04), len(text), 0.92, color=background, linewidth=0, alpha=opacity
            )
            axes.add_patch(box)
        axes.text(
            column, row + 0.5, text, family="DejaVu Sans Mono", size=size, color=ink, va="center_baseline",
            parse_math=False,
        )  # fmt: skip

    label = f"exit depth, of {colours.num_layers} layers"
    put(-1.9, 0, label, None, "#5d6779")
    column = len(label) + 2
    for depth in colours.depths:
        put(-1.9, column, f" {depth} ", colours.background(depth), colours.ink(depth) or "")
        column += len(f" {depth} ") + 1
    put(-1.9, column, " final layer ", "#e4e7ec", "#1c2330")
    for row, column, text, drawn_depth in cells:
        if drawn_depth is None:
            put(row, column, text, None, "#8b94a5")
        else:
            background = colours.background(drawn_depth) or "#e4e7ec"
            put(row, column, text, background, colours.ink(drawn_depth) or "#1c2330")
    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def layout(samples: Sequence[Sample], columns: int, lines: int) -> list[tuple[int, int, str, int | None]]:
    """Place texts on a grid: [(row, column, text within one line, depth or None for a prompt)]."""
    cells: list[tuple[int, int, str, int | None]] = []
    row = 0
    for sample in samples:
        column = 0
        pieces: list[tuple[str, int | None]] = [(sample.prompt, None)]
        pieces += list(zip(sample.tokens, sample.depths, strict=True))
        for text, depth in pieces:
            for number, line in enumerate(text.expandtabs(4).replace("\r", "").split("\n")):
                if number:
                    row, column = row + 1, 0
                while line:
                    if column == columns:
                        row, column = row + 1, 0
                    part, line = line[: columns - column], line[columns - column :]
                    if row < lines:
                        cells.append((row, column, part, depth))
                    column += len(part)
        row += 2
    return cells
