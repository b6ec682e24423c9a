"""Pictures of what depth exploration has to gain and gains: EAD by task, speed-up against N."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sde_gym.colours import DepthColours
from sde_gym.errors import InputError
from sde_gym.files import atomic_path

_INK, _QUIET, _GRID, _FINAL = "#1c2330", "#5d6779", "#e4e7ec", "#2b3242"

#: Rows of DEX that make a line: method -> label, colour, marker.
_LINES = {
    "dex_chosen": ("DEX, chosen depths", "#c9772b", "D"),
    "dex": ("DEX, even split", "#2f6fb4", "o"),
    "dex_without_decs": ("without DECS", "#7fa9d6", "s"),
    "dex_single_exit": ("single exit", "#9aa5b5", "^"),
}
_ONE_DEVICE = {"layerskip": "LayerSkip, best static", "del": "DEL", "adadecode": "AdaDecode",
               "lite": "LITE", "lede": "LEDE"}  # fmt: skip


def ead_picture(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: for all texts and for each task, the share of tokens by EAD, and its mean.

    Args:
        results: what `dex_report` returns.
        path: the PNG file to write, atomically.
    """
    from matplotlib.figure import Figure  # not pyplot, which has global state and wants a display

    parts, layers = results["ead"], results["num_layers"]
    recorded = results["depths"]
    colours = DepthColours(recorded, layers)
    columns = min(3, len(parts))
    lines = math.ceil(len(parts) / columns)
    figure = Figure(figsize=(3.3 * columns, 0.7 + 2.1 * lines), dpi=160, facecolor="#ffffff",
                    layout="constrained")  # fmt: skip
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    for axes, part in zip(grid.flat, parts, strict=False):
        shares = {int(depth): count / part["positions"] for depth, count in part["counts"].items()}
        axes.bar(
            list(shares), list(shares.values()), width=0.82,
            color=[colours.background(depth) or _FINAL for depth in shares],
        )  # fmt: skip
        axes.axvline(part["mean"], color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"mean {part['mean']:.1f}\noracle {part['oracle_speedup']:.1f}×", (part["mean"], 0.97),
            xycoords=("data", "axes fraction"), xytext=(5, 0), textcoords="offset points", va="top",
            fontsize=8.5, color=_INK,
        )  # fmt: skip
        axes.set_title(part["task"] or "all texts", fontsize=9.5, color=_INK, loc="left")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlim(0.3, layers + 0.7)
        axes.set_xticks(_ticks(layers))
        _plain(axes)
    grid[0, 0].set_ylim(0, None)
    figure.supxlabel(f"earliest available depth, of {layers} layers", fontsize=9, color=_QUIET)
    figure.supylabel("share of tokens", fontsize=9, color=_QUIET)
    unseen = layers - 1 - len(recorded)
    grid_note = f"; {unseen} of the depths were not recorded" if unseen else ""
    figure.suptitle(
        f"How deep a token must go: {results['model']}, {parts[0]['positions']} tokens{grid_note}; "
        "dashed: mean; oracle: L / mean",
        fontsize=9.5, color=_INK,
    )  # fmt: skip
    _save(figure, path)


def speedup_picture(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of two panels, both against the number of explorers.

    Left the simulated speed-up, heads counted, beside the selection methods on one device; right
    `depth_speedup` with the oracle's line.

    Args:
        results: what `dex_report` returns after a sweep.
        path: the PNG file to write, atomically.

    Raises:
        InputError: there is no row of DEX to show.
    """
    from matplotlib.figure import Figure

    lines = {
        method: sorted(
            (row for row in results["rows"] if row["method"] == method), key=lambda r: r["explorers"]
        )
        for method in _LINES
    }
    lines = {method: rows for method, rows in lines.items() if rows}
    if not lines:
        raise InputError("no row of DEX to show: sweep over at least one number of explorers")
    figure = Figure(figsize=(9.6, 4.3), dpi=160, facecolor="#ffffff", layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {
        "simulated_speedup": "Simulated speed-up, heads counted",
        "depth_speedup": "Depths found: L / mean depth",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for method, rows in lines.items():
            label, colour, marker = _LINES[method]
            wide = 2.2 if method == "dex_chosen" else 1.0  # seen where the even split covers it
            axes.plot(
                [row["explorers"] for row in rows], [row[key] for row in rows], marker=marker, color=colour,
                label=label, linewidth=1.6 * wide, markersize=5.5 * wide**0.5,
                markeredgecolor="#ffffff", zorder=3,
            )  # fmt: skip
        axes.set_title(title, fontsize=9.5, color=_INK, loc="left")
        axes.set_xlabel("explorers N (devices)", fontsize=9, color=_QUIET)
        numbers = sorted({row["explorers"] for rows in lines.values() for row in rows})
        axes.set_xlim(min(numbers) - 0.4, max(numbers) + 0.4)
        axes.set_xticks(numbers)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        _plain(axes)
        single = [row for row in results["rows"] if row["method"] in _ONE_DEVICE]
        for row, height in zip(single, _spread(axes, [row[key] for row in single]), strict=True):
            axes.axhline(row[key], color=_QUIET, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
            # a method that was decoded, not replayed, may stand for a few of the texts only
            few = "" if row["texts"] == results["texts"] else f", {row['texts']} texts"
            axes.annotate(
                f"{_ONE_DEVICE[row['method']]} {row[key]:.2f}×{few}", (1, height),
                xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=7.8, color=_QUIET, annotation_clip=False,
            )  # fmt: skip
    oracle = results["ead"][0]["oracle_speedup"]
    panels[1].axhline(oracle, color=_INK, linewidth=1.1, linestyle=(0, (6, 3)))
    panels[1].annotate(
        f"oracle: L / mean EAD = {oracle:.2f}×", (0.01, oracle), xycoords=("axes fraction", "data"),
        xytext=(2, 4), textcoords="offset points", fontsize=8.5, color=_INK, zorder=4,
        bbox={"facecolor": "#ffffff", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
    )  # fmt: skip
    for axes in panels:
        axes.set_ylim(0.9 if axes.get_ylim()[0] > 0.9 else None, 1.06 * axes.get_ylim()[1])
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8.5, ncols=4,
                  loc="outside lower center")  # fmt: skip
    figure.suptitle(
        f"{results['model']}, {results['texts']} texts; passing between devices costs nothing; "
        f"dotted: methods of one device{_deepest(results)}",
        fontsize=9.5, color=_INK,
    )  # fmt: skip
    _save(figure, path)


def _deepest(results: Mapping[str, Any]) -> str:
    """Where explorers cannot stand, if deep layers were not recorded: the last stage stays long then."""
    deepest, layers = max(results["depths"], default=0), results["num_layers"]
    return "" if deepest == layers - 1 else f"\nno depth between {deepest} and {layers} was recorded"


def _spread(axes: Any, values: list[float]) -> list[float]:
    """Heights of labels near these values, none closer to another than a line of text."""
    low, high = axes.get_ylim()
    apart = 0.05 * (max([high, *values]) - min([low, *values]))
    heights = dict.fromkeys(range(len(values)), 0.0)
    free = -math.inf
    for place in sorted(heights, key=lambda place: values[place]):
        heights[place] = free = max(values[place], free + apart)
    return list(heights.values())


def _ticks(layers: int) -> list[int]:
    """1, L and a few round depths between."""
    step = max(1, math.ceil(layers / 6))
    return [1, *range(step, layers - step // 2, step), layers] if step > 1 else list(range(1, layers + 1))


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_INK, labelsize=8.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))
