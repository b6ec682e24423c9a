"""Measured and simulated speed-ups of every method, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sde_gym.files import atomic_path

_MEASURED, _SIMULATED, _BASE, _INK, _QUIET = "#2f6fb4", "#c9772b", "#9aa5b5", "#1c2330", "#5d6779"


def speedup_picture(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: measured speed-ups over AR as bars, their range as whiskers, simulated ones as diamonds.

    Args:
        results: what `bench_decode` returns.
        path: the PNG file to write, atomically.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot, which has global state and wants a display

    rows: Sequence[Mapping[str, Any]] = [row for row in results["rows"] if row["speedup"] is not None]
    figure = Figure(figsize=(8.4, 1.5 + 0.36 * len(rows)), dpi=160, facecolor="#ffffff", layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    measured = [row["speedup"] for row in rows]
    ends = [row["speedup_range"] for row in rows]
    for colour, label, base in ((_MEASURED, "measured", False), (_BASE, None, True)):
        at = [place for place, row in zip(places, rows, strict=True) if (row["method"] == "ar") == base]
        axes.barh(at, [measured[place] for place in at], height=0.62, color=colour, label=label)
    below = [value - low for value, (low, _) in zip(measured, ends, strict=True)]
    above = [high - value for value, (_, high) in zip(measured, ends, strict=True)]
    axes.errorbar(
        measured, places, xerr=[below, above], fmt="none", ecolor=_INK, elinewidth=1.1, capsize=3,
        label="range of the repeats",
    )  # fmt: skip
    simulated = [(n, row["simulated_speedup"]) for n, row in enumerate(rows) if row["simulated_speedup"]]
    if simulated:
        heights, values = zip(*simulated, strict=True)
        axes.plot(
            values, heights, "D", color=_SIMULATED, markersize=6, markeredgecolor="#ffffff", label="simulated"
        )
    rightmost = [
        max(high, row["simulated_speedup"] or 0.0) for row, (_, high) in zip(rows, ends, strict=True)
    ]
    widest = 1.06 * max(rightmost, default=1.0)
    for place, value in zip(places, measured, strict=True):
        inside = value > 0.08 * widest
        axes.annotate(
            f"{value:.2f}×", (0 if inside else value, place), xytext=(6, 0), textcoords="offset points",
            va="center_baseline", fontsize=8.5, color="#ffffff" if inside else _INK,
        )  # fmt: skip
    axes.axvline(1.0, color=_QUIET, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(places, [_label(row) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, widest)
    axes.set_xlabel("speed-up over our autoregressive decoder (prefill left out)", color=_QUIET, fontsize=9)
    axes.grid(axis="x", color="#e4e7ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.suptitle(_title(results), fontsize=9.5, color=_INK)
    if rows:
        axes.legend(frameon=False, fontsize=8.5, ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def _label(row: Mapping[str, Any]) -> str:
    if row.get("exit_depth") is None:
        return str(row["method"])
    return f"{row['method']} ({row['exit_depth']}, {row['draft_length']})"


def _title(results: Mapping[str, Any]) -> str:
    settings, machine = results["settings"], results["hardware"]
    drawn = f"temperature {settings['temperature']:g}" if settings["temperature"] > 0 else "greedy"
    return (
        f"{results['model']['name']}, {results['prompts']['measured']} prompts × "
        f"{settings['max_new_tokens']} tokens, {drawn}, {settings['repeats']} repeats; "
        f"{machine['cpu']}, {machine['threads']} threads"
    )
