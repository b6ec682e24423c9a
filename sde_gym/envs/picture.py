"""A snapshot as a picture: the text on the left, the ladder of depths on the right.

Drawn with matplotlib's own canvas: pyplot, its current figure and the user's settings stay as they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from sde_gym.colours import DepthColours
from sde_gym.envs.captions import FATE_LABELS, figures, last_round, quoted, situation, text_rows
from sde_gym.envs.snapshot import Fate, ShownToken, Snapshot

WIDTH, HEIGHT = 1200, 660
"""Pixels of every picture."""

_DPI = 100
_FONT = "DejaVu Sans Mono"  # comes with matplotlib
_EM = 0.602  # width of its characters
_SIZE = 13.0  # pixels
_LINE = 20.0
_COLUMNS, _LINES = 84, 22

_INK, _FAINT, _RULE = "#1c2330", "#8b94a5", "#d5dae2"
_GREY, _WHITE = "#e4e7ec", "#ffffff"

_MARGIN = 24.0
_TOP = 72.0
_LADDER = 752.0  # where the right panel begins
_BAR_LEFT, _BAR_WIDTH = _LADDER + 58, 158.0


def draw(snapshot: Snapshot) -> NDArray[np.uint8]:
    """The picture, uint8 (HEIGHT, WIDTH, 3)."""
    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, facecolor=_WHITE)
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    page = _Page(axes)
    colours = DepthColours(snapshot.depths, snapshot.num_layers)

    page.text(_MARGIN, 28, snapshot.title, size=15, weight="bold")
    page.line(_MARGIN, 48, WIDTH - _MARGIN, 48)
    for number, row in enumerate(text_rows(snapshot, _COLUMNS, _LINES)):
        x, y = _MARGIN, _TOP + _LINE * number
        for part, token in row:
            x = page.token(x, y, part, token, colours)
    page.line(_LADDER - 20, 60, _LADDER - 20, _TOP + _LINE * (_LINES - 1) + 12)
    _ladder(page, snapshot, colours)

    page.line(_MARGIN, 536, WIDTH - _MARGIN, 536)
    page.text(_MARGIN, 558, situation(snapshot), weight="bold")
    page.text(_MARGIN, 582, last_round(snapshot))
    page.text(_MARGIN, 606, figures(snapshot))
    _legend(page, snapshot, colours)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _ladder(page: _Page, snapshot: Snapshot, colours: DepthColours) -> None:
    """The depths from shallow to deep; bars and proposals where the newest token has been."""
    page.text(_LADDER, _TOP, "depth", colour=_FAINT)
    page.text(_BAR_LEFT, _TOP, "probability", colour=_FAINT)
    page.text(_BAR_LEFT + _BAR_WIDTH + 52, _TOP, "proposal", colour=_FAINT)
    said = {rung.depth: rung for rung in snapshot.rungs}
    newest = max(said, default=None)
    gap = min(38.0, (_LINE * (_LINES - 2)) / (len(snapshot.depths) + 1))
    size, height = min(_SIZE, 0.7 * gap), min(24.0, 0.84 * gap)
    for number, depth in enumerate(snapshot.depths, start=1):
        y = _TOP + 8 + gap * number - gap / 4
        background, ink = colours.background(depth) or _GREY, colours.ink(depth) or _INK
        visited = depth in said
        page.box(_LADDER, y - height / 2, 34, height, background if visited else _WHITE, background)
        page.text(_LADDER + 17, y, f"{depth}", size=size, colour=ink if visited else _FAINT, align="center")
        page.box(_BAR_LEFT, y - height / 2, _BAR_WIDTH, height, _WHITE, _RULE)
        if not visited:
            continue
        rung = said[depth]
        page.box(_BAR_LEFT, y - height / 2, rung.probability * _BAR_WIDTH, height, background)
        if depth == newest:
            page.box(_LADDER - 5, y - height / 2 - 4, WIDTH - _MARGIN - _LADDER + 5, height + 8, None, _INK)
        after = _BAR_LEFT + _BAR_WIDTH
        page.text(after + 42, y, f"{rung.probability:.2f}", size=size, align="right")
        page.text(after + 52, y, quoted(rung.text, 17), size=size)
    y = _TOP + 8 + gap * (len(snapshot.depths) + 1) - gap / 4
    page.box(_LADDER, y - height / 2, 34, height, _GREY, _GREY)
    page.text(_LADDER + 17, y, f"{snapshot.num_layers}", size=size, align="center")
    page.text(_BAR_LEFT, y, "final layer, verifies", size=size, colour=_FAINT)


def _legend(page: _Page, snapshot: Snapshot, colours: DepthColours) -> None:
    """A sample of each fate."""
    x, y, middle = _MARGIN, 636.0, snapshot.depths[len(snapshot.depths) // 2]
    fates: list[tuple[Fate, int]] = [
        ("prefill", snapshot.num_layers),
        ("final", snapshot.num_layers),
        ("accepted", middle),
        ("proposal", middle),
    ]
    page.text(x, y, "prompt", colour=_FAINT)
    x += 7 * _EM * _SIZE
    for fate, depth in fates:
        x = page.token(x, y, f" {FATE_LABELS[fate]} ", ShownToken("", depth, fate), colours) + 10
    page.text(x + 4, y, "colour: depth, as on the right", colour=_FAINT)


class _Page:
    """Boxes and texts in pixels, with every property given, so that no setting of the user's counts."""

    def __init__(self, axes: Any) -> None:
        self._axes = axes

    def token(self, x: float, y: float, text: str, token: ShownToken | None, colours: DepthColours) -> float:
        """Draw a piece of a token, or of the prompt for None; returns where it ends."""
        width = len(text) * _EM * _SIZE
        if token is None:
            self.text(x, y, text, colour=_FAINT)
            return x + width
        background, ink = colours.background(token.depth) or _GREY, colours.ink(token.depth) or _INK
        if token.fate == "proposal":  # a frame without filling: nothing is decided yet
            self.box(x + 1, y - 8.5, width - 2, 17, _WHITE, background, line=2)
            ink = _INK
        elif token.fate == "prefill":
            self.box(x + 0.5, y - 8.5, width - 1, 17, _WHITE, _RULE)
        else:
            self.box(x + 0.5, y - 9, width - 1, 18, background)
        self.text(x, y, text, colour=ink)
        return x + width

    def box(
        self, x: float, y: float, width: float, height: float, fill: str | None, edge: str | None = None,
        line: float = 1,
    ) -> None:  # fmt: skip
        """A rectangle, `y` its upper edge."""
        self._axes.add_patch(
            Rectangle(
                (x, y), width, height, facecolor=fill or "none", edgecolor=edge or "none",
                linewidth=line * 72 / _DPI if edge else 0, antialiased=True, fill=fill is not None,
                linestyle="-", hatch="",
            )
        )  # fmt: skip

    def line(self, left: float, top: float, right: float, bottom: float) -> None:
        """A thin grey line."""
        self.box(left, top, max(right - left, 1), max(bottom - top, 1), _RULE)

    def text(
        self, x: float, y: float, text: str, *, size: float = _SIZE, colour: str = _INK,
        weight: str = "normal", align: str = "left",
    ) -> None:  # fmt: skip
        """A text in one line, `y` its middle, `size` in pixels; what the font lacks is replaced."""
        known = _characters()
        shown = "".join(c if ord(c) in known else "\ufffd" for c in text)
        font = FontProperties(family=_FONT, size=size * 72 / _DPI, weight=weight, style="normal")
        self._axes.text(
            x, y, shown, fontproperties=font, color=colour, ha=align, va="center_baseline",
            parse_math=False, usetex=False,
        )  # fmt: skip


@lru_cache(maxsize=1)
def _characters() -> frozenset[int]:
    """Code points that the font has."""
    return frozenset(get_font(findfont(_FONT)).get_charmap())
