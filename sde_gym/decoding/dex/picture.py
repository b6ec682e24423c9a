"""The lattice over the ticks: which branch won, and what was dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sde_gym.colours import DepthColours
from sde_gym.decoding.dex.lattice import Node
from sde_gym.decoding.dex.result import DexResult
from sde_gym.errors import InputError
from sde_gym.files import atomic_path

_INK, _QUIET, _RULE, _FINAL, _DROPPED = "#1c2330", "#5d6779", "#d5dae2", "#2b3242", "#eceff3"


def lattice_picture(
    result: DexResult, path: Path, decode: Callable[[list[int]], str], tokens: int | None = None
) -> None:
    """Write a PNG of a recorded lattice.

    Time runs to the right, the text downwards: each position has its emitted token on top and below it
    what was run there and dropped. A bar is one lattice token, from the tick that it first runs in to the
    one that it leaves in; each of its cells is a stage, in the colour of the depth that it reaches, grey if
    it was in vain. A line leads from the end of the parent's stage that proposed a token to its bar.

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
    height = 1 + max(lanes.values())
    figure = Figure(
        figsize=(1.9 + 0.46 * last, 1.0 + 0.235 * height), dpi=150, facecolor="#ffffff", layout="constrained"
    )
    axes = figure.add_subplot()
    colours = DepthColours(result.exploration_set, result.num_layers)
    for node in shown:
        _draw(axes, node, lanes, last, result, colours, decode)
    for tick in result.commit_ticks[:count]:
        axes.axvline(tick, color=_RULE, linewidth=0.8, zorder=0)
    emitted = [node for node in shown if node.emitted is not None]
    axes.set_yticks([lanes[node.number] for node in emitted], [_label(node, decode) for node in emitted])
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_xlim(0, last + 1.6)
    axes.set_xticks([tick + 0.5 for tick in range(last)], [str(tick + 1) for tick in range(last)])
    axes.set_xlabel("tick; lines where a token is emitted", color=_QUIET, fontsize=8)
    axes.tick_params(length=0, colors=_INK, labelsize=7)
    for side in axes.spines.values():
        side.set_visible(False)
    _legend(axes, result, colours)
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


def _draw(
    axes: Any, node: Node, lanes: dict[int, int], last: int, result: DexResult, colours: DepthColours,
    decode: Callable[[list[int]], str],
) -> None:  # fmt: skip
    """One lattice token: its cells, its name, the line from its parent."""
    row, kept = lanes[node.number], node.emitted is not None
    end = _end(node, last)
    if node.parent is not None and node.parent.number in lanes:
        above = lanes[node.parent.number]
        axes.plot(
            [node.born, node.born], [above + 0.36, row - 0.36], linewidth=1.1 if kept else 0.6,
            color=_INK if kept else _QUIET, zorder=1,
        )  # fmt: skip
    for tick in range(node.born, end if node.runs else node.born):
        depth = result.exploration_set[tick - node.born]
        colour = (colours.background(depth) or _FINAL) if kept else _DROPPED
        axes.barh(row, 1, left=tick, height=0.72, color=colour, edgecolor="#ffffff", linewidth=0.6, zorder=2)
    first = result.exploration_set[0]
    ink = (colours.ink(first) or "#ffffff") if kept and node.runs and end > node.born else _QUIET
    axes.text(
        node.born + 0.06, row, _label(node, decode), fontsize=6, va="center", ha="left", zorder=3,
        color=_INK if kept and ink == _QUIET else ink,
    )  # fmt: skip
    if node.dropped and node.ended is not None and node.ended <= last:
        axes.text(end + 0.08, row, "×", fontsize=7, va="center", color=_QUIET, zorder=3)


def _end(node: Node, last: int) -> int:
    """The tick at which a token's bar ends."""
    return last if node.ended is None else min(node.ended, last)


def _label(node: Node, decode: Callable[[list[int]], str]) -> str:
    """A token as it can be shown: blanks visible, short, nothing that a font or matplotlib trips over."""
    text = decode([node.token])
    if not text:
        return f"#{node.token}"
    shown = text.replace(" ", "·").replace("\n", "↵").replace("\t", "→").replace("$", r"\$")
    shown = "".join(c if c.isprintable() and ord(c) < 0x2E80 else "?" for c in shown)
    return shown if len(shown) <= 12 else shown[:11] + "…"


def _legend(axes: Any, result: DexResult, colours: DepthColours) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=colours.background(depth) or _FINAL, label=f"to layer {depth}")
        for depth in result.exploration_set
    ]
    patches.append(Patch(color=_DROPPED, label="dropped"))
    axes.legend(
        handles=patches, frameon=False, fontsize=7, ncols=len(patches), loc="lower left",
        bbox_to_anchor=(0, 1.0), handlelength=1.2,
    )  # fmt: skip
