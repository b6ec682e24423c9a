"""What the exit probe is worth: how well each set of features tells which proposals will be accepted.

At every depth, drafts of `LENGTH` proposals are made along recorded texts, round after round, whatever the
head says. Each proposal is a row: the features that a policy would see, and whether it is accepted,
which it is not behind a wrong one. A logistic regression on each set of features is fitted to one trace
set and measured on another. The sets grow: LEDE's three, then top-1 and margin, then `chain`, then `probe`.
The regression has the squares of its features, too, so that a set is not judged by their shape.

    python -m sde_gym.evaluation.calibration_curves --out docs/images/probe.png

prints the table and draws the reliability curves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.errors import InputError
from sde_gym.files import atomic_path, write_json
from sde_gym.models.probe_training import logistic
from sde_gym.models.reliability import figures, reliability_curve
from sde_gym.policies.observation import PAPER, Action
from sde_gym.traces import TraceSet, load_traces

LENGTH = 6
"""Proposals of a draft: long enough that many are made in vain."""

FEATURE_SETS: dict[str, tuple[str, ...]] = {
    "paper": PAPER,
    "+ top1, margin": (*PAPER, "top1", "margin"),
    "+ chain": (*PAPER, "top1", "margin", "chain"),
    "+ probe": (*PAPER, "top1", "margin", "chain", "probe"),
}
"""What is compared, each with all that the ones before it have."""

Predictions = dict[tuple[int, str], tuple[NDArray[np.float64], NDArray[np.bool_]]]
"""By depth and feature set: predicted probabilities and what came, of the proposals measured on."""


def drafts(
    traces: TraceSet, depth: int, names: Sequence[str], length: int = LENGTH
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Every proposal of drafts at one depth: features float32 (n, f), accepted bool (n,).

    Args:
        traces: recorded texts.
        depth: one of the recorded depths.
        names: features.
        length: of a draft; at most the recorded overrun + 1.
    """
    engine = ReplayEngine(
        traces, depths=[depth], observation=names, max_draft=length, lanes=len(traces), accelerator="numpy"
    )
    lanes = np.flatnonzero(engine.tables.playable)
    observation = engine.reset_lanes(lanes, lanes)
    rows, accepted = [], []
    while lanes.size:
        rows.append(observation)
        observation, _, terminated, outcome = engine.step(np.full(lanes.size, Action.EXIT), lanes)
        # A proposal that equals the text's token at its place is one only where those before it do.
        accepted.append(outcome.accepted)
        lanes, observation = lanes[~terminated], observation[~terminated]
    return np.concatenate(rows), np.concatenate(accepted)


def predictions(
    fitted: TraceSet, measured: TraceSet, depths: Sequence[int] | None = None, length: int = LENGTH
) -> Predictions:
    """Fit on one trace set and predict the other, at every depth and by every feature set.

    Args:
        fitted: to fit to.
        measured: to predict: other texts of the same model.
        depths: all that were recorded if not given.
        length: of the drafts.

    Raises:
        InputError: sets of different models, or recorded without overrun or without an exit probe.
    """
    if fitted.manifest["model_hash"] != measured.manifest["model_hash"]:
        raise InputError("traces: the two sets are of different models; give two of the same one")
    for traces in (fitted, measured):
        traces.check_overrun("measuring what features are worth")
    names = FEATURE_SETS["+ probe"]
    found: Predictions = {}
    for depth in depths or fitted.depths:
        rows, accepted = drafts(fitted, depth, names, length)
        others, came = drafts(measured, depth, names, length)
        for label, chosen in FEATURE_SETS.items():
            columns = [names.index(name) for name in chosen]
            weights, scale = _fit(rows[:, columns], accepted)
            logit = _inputs(others[:, columns], *scale) @ weights
            found[depth, label] = 1.0 / (1.0 + np.exp(-np.clip(logit, -60.0, 60.0))), came
    return found


def _fit(
    rows: NDArray[np.float32], accepted: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Weights for `_inputs`, and mean and spread of the features."""
    mean, spread = rows.mean(axis=0, dtype=np.float64), rows.std(axis=0, dtype=np.float64)
    scale = mean, np.where(spread > 0.0, spread, 1.0)
    x = _inputs(rows, *scale)
    return logistic(x, accepted, np.full(x.shape[1], 1e-2)), scale


def _inputs(
    rows: NDArray[np.float32], mean: NDArray[np.float64], spread: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Features standardised, their squares, and a constant: float64 (n, 2 f + 1)."""
    standard = (rows - mean) / spread
    return np.column_stack([standard, standard**2, np.ones(len(rows))])


def worth_table(found: Predictions) -> list[dict[str, Any]]:
    """One row a depth and feature set: depth, features, rows, share, auc, log_loss, calibration error."""
    table = []
    for (depth, label), (probability, came) in found.items():
        measured = figures(probability, came)
        del measured["reliability"]
        table.append({"depth": depth, "features": label, **measured})
    return table


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """AUC, and behind the bar the expected calibration error, by depth and feature set."""
    labels = list(dict.fromkeys(row["features"] for row in table))
    by = {(row["depth"], row["features"]): row for row in table}
    depths = list(dict.fromkeys(row["depth"] for row in table))
    lines = ["| depth | accepted | " + " | ".join(labels) + " |", "|---|---|" + "---|" * len(labels)]
    for depth in depths:
        cells = [
            f"{by[depth, label]['auc'] or float('nan'):.3f} / "
            f"{by[depth, label]['expected_calibration_error']:.3f}"
            for label in labels
        ]
        lines.append(f"| {depth} | {by[depth, labels[0]]['share']:.1%} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(found: Predictions, recorded: TraceSet, path: Path) -> None:
    """Draw reliability curves as a PNG: the probe as it is, and the fits with it and without, by depth.

    Args:
        found: what `predictions` gives.
        recorded: the set that was measured on; its own `probe` is drawn against `match` on the true text.
        path: the file.

    Raises:
        InputError: a set without an exit probe.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot, which has global state and wants a display

    if recorded.probe is None:
        raise InputError("traces: recorded without an exit probe; there is no curve to draw")
    depths = list(dict.fromkeys(depth for depth, _ in found))
    columns = min(4, len(depths))
    lines = -(-len(depths) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.9 * lines + 0.4), dpi=120, layout="constrained")
    for place, depth in enumerate(depths):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.plot([0, 1], [0, 1], color="#b8c0cc", linewidth=1)
        index = recorded.depths.index(depth)
        said = recorded.probe[:, index].astype(np.float64)
        for label, colour, (probability, came) in (
            ("probe, true text", "#1c2330", (said, recorded.match[:, index])),
            ("paper, drafts", "#c8553d", found[depth, "paper"]),
            ("all with probe, drafts", "#2a7f9e", found[depth, "+ probe"]),
        ):
            count, mean, share = reliability_curve(probability, came)
            enough = count >= 20  # a share of fewer is mostly chance
            axes.plot(mean[enough], share[enough], marker="o", markersize=3, color=colour, label=label)
        axes.set(title=f"depth {depth}", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.tick_params(labelsize=7)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    figure.supxlabel("predicted", fontsize=9)
    figure.supylabel("came true", fontsize=9)
    FigureCanvasAgg(figure)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def main(arguments: Sequence[str] | None = None) -> str:
    """Run as a program; returns the table that it shows."""
    parser = argparse.ArgumentParser(
        prog="python -m sde_gym.evaluation.calibration_curves", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--traces", default="stdlib-20m", help="Trace set to fit to.")
    parser.add_argument("--held-out", default="stdlib-20m-held-out", help="Trace set to measure on.")
    parser.add_argument("--length", type=int, default=LENGTH, help="Proposals of a draft.")
    parser.add_argument("--out", type=Path, help="PNG file for the reliability curves.")
    parser.add_argument("--json", type=Path, help="JSON file for the figures.")
    given = parser.parse_args(arguments)
    measured = load_traces(given.held_out)
    found = predictions(load_traces(given.traces), measured, length=given.length)
    table = worth_table(found)
    if given.out is not None:
        picture(found, measured, given.out)
    if given.json is not None:
        write_json(given.json, table)
    return markdown(table)


if __name__ == "__main__":
    import sys

    sys.stdout.write(main() + "\n")
