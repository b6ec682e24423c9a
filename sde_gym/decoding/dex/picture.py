"""The lattice over the ticks: which branch won, and what was dropped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sde_gym.colours import DepthColours
from sde_gym.decoding.dex.lattice import Node
from sde_gym.decoding.dex.result import DexResult
from sde_gym.errors import InputError
from sde_gym.files import atomic_path

_INK, _QUIET, _RULE, _FINAL = "#1c2330", "#5d6779", "#d5dae2", "#2b3242"
_DROPPED, _LINE, _BAND = "#e3e7ed", "#98a2b3", "#f6f7f9"

_TICK, _ROW = 0.63, 0.265  # inches
_BEHIND = 3.3  # ticks that what stands behind the last bar takes
_LEAST = 14.0  # ticks that the explanation takes
_FONT = 8.5  # points
_IN_CELL, _BEHIND_BAR = 8, 12  # characters of a token, at most
_HALF = 0.37  # of a bar's height, rows

_EXPLANATION = (
    "A bar is a token on its way through the layers. Each explorer guesses what follows it, and the guess is "
    "run at once (arrow).\n"
    "At the end of a coloured bar the last layer knows: the branch that guessed right stays, the others, "
    "grey, are dropped (×).  · blank  ↵ new line"
)


def lattice_picture(
    result: DexResult, path: Path, decode: Callable[[list[int]], str], tokens: int | None = None
) -> None:
    """Write a PNG of a recorded lattice.

    Time runs to the right, the text downwards: each position has its emitted token on top and below it
    what was run there and dropped. A bar is one lattice token, from the tick that it first runs in to the
    one that it leaves in; each of its cells is a stage, in the colour of the depth that it reaches, grey if
    it was in vain. An arrow leads from the end of the parent's stage that proposed a token to its bar. Behind
    the bar of an emitted token stands what the last layer said, and the depth that had guessed it.

    Args:
        result: of `dex(..., record=True)`.
        path: the PNG file to write, atomically.
        decode: text of token ids.
        tokens: how many emitted tokens to show; None = all.

    Raises:
        InputError: nothing was recorded or generated.
    """
    if not result.nodes or not result.tokens:
        raise InputError("the lattice was not recorded; call dex(..., record=True) with max_new_tokens > 0")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot, which has global state and wants a display

    count = min(len(result.tokens), tokens or len(result.tokens))
    last = result.commit_ticks[count - 1]
    # What the tick of its birth dropped again was never run, and is left out.
    shown = [n for n in result.nodes if n.index < count and n.born <= last and n.ended != n.born]
    lanes = lattice_lanes(shown, last)
    height, span = 1 + max(lanes.values()), max(_LEAST, last + _BEHIND)
    figure = Figure(
        figsize=(0.6 + _TICK * span, 1.7 + _ROW * height), dpi=150, facecolor="#ffffff",
        layout="constrained",
    )  # fmt: skip
    axes = figure.add_subplot()
    # A depth of no stage takes the dark end of the scale, which is too close to the last layer's colour.
    colours = DepthColours((*result.exploration_set, result.num_layers - 1), result.num_layers)
    _bands(axes, shown, lanes, height)
    for tick in result.commit_ticks[:count]:
        axes.axvline(tick, color=_RULE, linewidth=0.8, zorder=0.5)
    slots = _arrow_slots(shown, lanes)
    for node in shown:
        _draw_arrow(axes, node, lanes, slots)
        _draw_bar(axes, node, lanes[node.number], last, result, colours, decode)
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_xlim(0, span)
    axes.set_xticks([tick + 0.5 for tick in range(last)], [str(tick + 1) for tick in range(last)])
    axes.set_xlabel("tick (a line where a token is emitted)", color=_QUIET, fontsize=9, loc="left")
    axes.tick_params(length=0, colors=_INK, labelsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)
    explorers = len(result.exploration_set)
    axes.set_title(
        f"{explorers} explorers: {count} tokens in {last} ticks; plain decoding takes {explorers * count}",
        loc="left", fontsize=11, fontweight="bold", color=_INK, pad=38,
    )  # fmt: skip
    axes.annotate(
        _EXPLANATION, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points",
        fontsize=_FONT, color=_QUIET, linespacing=1.4, va="bottom",
    )  # fmt: skip
    _legend(figure, result, colours)
    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def lattice_lanes(nodes: Sequence[Node], last: int) -> dict[int, int]:
    """A row for each token: positions in order, the emitted token first, bars never over one another.

    Args:
        nodes: in order of arrival.
        last: the tick at which the picture ends.

    Returns:
        Row by number of the lattice token.
    """
    lanes: dict[int, int] = {}
    top = 0
    for index in sorted({node.index for node in nodes}):
        here = sorted((n for n in nodes if n.index == index), key=lambda n: (n.emitted is None, n.born))
        free: list[int] = []  # by row of this position, the tick from which on it is empty
        for node in here:
            width = 1 if node.runs else 2
            row = next((r for r, tick in enumerate(free) if r and tick <= node.born), len(free))
            free += [0] * (row + 1 - len(free))
            free[row] = max(_end(node, last), node.born + width) + 1
            lanes[node.number] = top + row
        top += len(free)
    return lanes


def _bands(axes: Any, shown: Sequence[Node], lanes: Mapping[int, int], height: int) -> None:
    """Every other position on a tinted ground, and its number in the text."""
    tops = sorted((lanes[node.number], node.index) for node in shown if node.emitted is not None)
    for (top, index), (bottom, _) in pairwise([*tops, (height, 0)]):
        if index % 2 == 0:
            axes.axhspan(top - 0.5, bottom - 0.5, color=_BAND, linewidth=0, zorder=0)
    axes.set_yticks([top for top, _ in tops], [f"{i + 1}" if i >= 0 else "prompt" for _, i in tops])


def _arrow_slots(shown: Sequence[Node], lanes: Mapping[int, int]) -> dict[int, int]:
    """By number of a token, the place of its arrow among those that arise in the same tick.

    Arrows in one place do not share a row.
    """
    slots: dict[int, int] = {}
    taken: dict[tuple[int, int], int] = {}  # by tick and place, the lowest row in use
    with_parent = [node for node in shown if node.parent is not None and node.parent.number in lanes]
    for node in sorted(with_parent, key=lambda n: lanes[n.parent.number if n.parent else 0]):
        assert node.parent is not None
        slot = 0
        while taken.get((node.born, slot), -1) >= lanes[node.parent.number]:
            slot += 1
        taken[node.born, slot] = lanes[node.number]
        slots[node.number] = slot
    return slots


def _draw_arrow(axes: Any, node: Node, lanes: Mapping[int, int], slots: Mapping[int, int]) -> None:
    """From the stage that proposed a token to its bar."""
    if node.number not in slots:
        return
    assert node.parent is not None
    kept = node.emitted is not None
    colour, width = (_INK, 1.5) if kept else (_LINE, 0.9)
    x, row = node.born - 0.12 - 0.1 * slots[node.number], lanes[node.number]
    axes.plot(
        [x, x, node.born - 0.04], [lanes[node.parent.number] + _HALF, row, row], color=colour,
        linewidth=width, zorder=1.5 if kept else 1, solid_joinstyle="miter",
    )  # fmt: skip
    axes.plot(node.born - 0.05, row, marker=">", markersize=3.6, color=colour, markeredgewidth=0, zorder=1.5)


def _draw_bar(
    axes: Any, node: Node, row: int, last: int, result: DexResult, colours: DepthColours,
    decode: Callable[[list[int]], str],
) -> None:  # fmt: skip
    """One lattice token: its cells and its name; behind it, how it ended."""
    kept, end = node.emitted is not None, _end(node, last)
    cells = range(node.born, end if node.runs else node.born)
    for tick in cells:
        depth = result.exploration_set[tick - node.born]
        colour = (colours.background(depth) or _FINAL) if kept else _DROPPED
        axes.barh(
            row, 1, left=tick, height=2 * _HALF, color=colour, edgecolor="#ffffff", linewidth=0.8, zorder=2
        )
        if kept and tick > node.born:
            axes.text(
                tick + 0.5, row, f"→{depth}", fontsize=7, va="center", ha="center", zorder=3,
                color=colours.ink(depth) or "#ffffff",
            )  # fmt: skip
    ink = _INK if kept else _QUIET
    if kept and cells:
        ink = colours.ink(result.exploration_set[0]) or "#ffffff"
    axes.text(
        node.born + 0.07, row, _label(node.token, decode, _IN_CELL), fontsize=_FONT, va="center", zorder=3,
        family="monospace", fontweight="bold" if kept else "normal", color=ink,
    )  # fmt: skip
    if node.ended is None or node.ended > last or not cells:
        return
    if node.dropped:
        axes.text(end + 0.06, row, "×", fontsize=9, va="center", color=_QUIET, zorder=3)
    elif node.index + 1 < len(result.tokens):
        said = _label(result.tokens[node.index + 1], decode, _BEHIND_BAR)
        stage = result.selected[node.index + 1]
        depth = result.exploration_set[stage]
        origin = f"guessed at layer {depth}" if depth < result.num_layers else "no guess was right"
        axes.text(
            end + 0.12, row, said, fontsize=_FONT, va="center", family="monospace",
            fontweight="bold", color=_INK, zorder=3,
        )  # fmt: skip
        # A monospaced character is 0.6 of the font size wide, a point 1/72 of an inch.
        past = (len(said) + 1) * 0.6 * _FONT / 72 / _TICK
        axes.text(end + 0.12 + past, row, origin, fontsize=8, va="center", color=_QUIET, zorder=3)


def _end(node: Node, last: int) -> int:
    """The tick at which a token's bar ends."""
    return last if node.ended is None else min(node.ended, last)


def _label(token: int, decode: Callable[[list[int]], str], longest: int) -> str:
    """A token as it can be shown: blanks visible, short, nothing that a font or matplotlib trips over."""
    text = decode([token])
    if not text:
        return f"#{token}"
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    shown = re.sub("·{4,}", lambda blanks: f"·×{len(blanks[0])}", shown)
    shown = "".join(c if c.isprintable() and ord(c) < 0x2E80 else "?" for c in shown)
    shown = shown if len(shown) <= longest else shown[: longest - 1] + "…"
    return shown.replace("$", r"\$")


def _legend(figure: Any, result: DexResult, colours: DepthColours) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=colours.background(high) or _FINAL, label=f"explorer {number}: layers {low + 1}–{high}")
        for number, (low, high) in enumerate(pairwise((0, *result.exploration_set)), 1)
    ]
    patches.append(Patch(color=_DROPPED, label="dropped"))
    rows = math.ceil(len(patches) / 4)
    figure.legend(
        handles=patches, frameon=False, fontsize=_FONT, ncols=math.ceil(len(patches) / rows),
        loc="outside lower left", handlelength=1.2,
    )  # fmt: skip
