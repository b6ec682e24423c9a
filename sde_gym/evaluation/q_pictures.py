"""Pictures of action values against the truth: over-estimation, n-step bias, calibration.

Each function takes what `sde_gym.evaluation.q_error` found and returns a matplotlib `Figure`; nothing
goes through pyplot, so no display is needed and no figure is left behind.

    python -m sde_gym.evaluation.q_pictures --out pictures --reward speed --depths 4 --gamma 0.9 --n 1,3,10

trains Q-learners on an exploratory log, one for each algorithm and n, prints what their values are
off by, and draws every picture into the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.colours import DepthColours
from sde_gym.errors import InputError
from sde_gym.evaluation.estimators import QModel
from sde_gym.evaluation.fitted_q import FittedQ, FQESettings, LeastSquaresQ
from sde_gym.evaluation.q_error import (
    QErrors,
    Row,
    error_table,
    model_errors,
    n_step_bias,
    policy_errors,
    rows_table,
)
from sde_gym.files import atomic_path, write_json
from sde_gym.offline.behaviours import exploratory_schedule
from sde_gym.offline.collect import collect
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.training import train
from sde_gym.offline.transitions import Transitions
from sde_gym.options import parse_list
from sde_gym.policies.controller import Controller
from sde_gym.policies.qnetwork import QController
from sde_gym.terminal import errors_as_sentences
from sde_gym.traces import load_traces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

#: Of lines and bars, in order; they differ in lightness, too.
LINE_COLOURS = ("#1c2330", "#c8553d", "#2a7f9e", "#8a79c9", "#5aa469", "#d9a13b", "#8b94a5")
_MARKERS = "osD^vPX"
_INK, _QUIET, _RULE = "#1c2330", "#5d6779", "#b8c0cc"

#: Values of n at which targets are measured.
STEPS = (1, 2, 3, 5, 7, 10, 15, 20)

#: Bins of equally many states in a calibration curve.
_BINS = 20

#: What the program's table says of n-step targets.
_TARGET_COLUMNS = ("label", "n", "bias", "standard_error", "root_mean_square_error", "own_actions")

#: Share of the values that a picture leaves out at either end, so that a few do not squeeze the rest.
_TAIL = 0.001


def values_picture(errors: Sequence[QErrors]) -> Figure:
    """Predicted against true value of both actions at every logged state, a panel for each.

    Density on a logarithmic scale; on the diagonal a value is exact, above it an over-estimate.

    Raises:
        InputError: nothing to draw.
    """
    _check_some(errors)
    figure, panels = _panels(len(errors), width=3.3, height=3.5)
    pooled = np.concatenate([np.concatenate([each.truth.q, each.predicted]).ravel() for each in errors])
    low, high = np.quantile(pooled, (_TAIL, 1 - _TAIL))
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin
    for axes, each in zip(panels, errors, strict=True):
        axes.hexbin(
            each.truth.q.ravel(), each.predicted.ravel(), gridsize=45, extent=(low, high, low, high),
            bins="log", mincnt=1, cmap=_density(), linewidths=0,
        )  # fmt: skip
        axes.plot([low, high], [low, high], color=_INK, linewidth=1)
        row = each.rows()[0]
        note = f"bias {row['bias']:+.2f}\nRMS error {row['root_mean_square_error']:.2f}"
        axes.text(0.04, 0.96, note, transform=axes.transAxes, va="top", fontsize=8, color=_INK)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        axes.set_title(each.label, fontsize=9)
    figure.supxlabel("true value of the action, Q$^π$(s, a)", fontsize=9)
    figure.supylabel("predicted value", fontsize=9)
    return figure


def curves_picture(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], along: str, of: str = "over-estimation"
) -> Figure:
    """A measured error along something, such as gradient steps or n, a line for each label; 0 is right.

    Args:
        curves: by label, places along the horizontal axis and what was measured there.
        along: name of that axis.
        of: what was measured.

    Raises:
        InputError: nothing to draw.
    """
    _check_some(curves)
    figure, (axes,) = _panels(1, width=5.6, height=3.4)
    axes.axhline(0.0, color=_RULE, linewidth=1)
    for number, (label, (places, values)) in enumerate(curves.items()):
        axes.plot(places, values, label=label, **_line(number))
    axes.set_xlabel(along, fontsize=9)
    axes.set_ylabel(of, fontsize=9)
    _legend(figure, axes)
    return figure


def n_step_picture(targets: Mapping[str, Sequence[Row]], learned: Sequence[QErrors] = ()) -> Figure:
    """Exact bias of n-step targets along n, and beside it what networks ended with.

    Args:
        targets: by label of the policy pi, what `n_step_bias` gave; rows of all states are drawn.
        learned: values whose over-estimation and root mean square error are drawn as bars.

    Raises:
        InputError: nothing to draw.
    """
    from matplotlib.ticker import MaxNLocator

    _check_some(targets)
    figure, panels = _panels(2 if learned else 1, width=4.0, height=3.4)
    axes = panels[0]
    axes.axhline(0.0, color=_RULE, linewidth=1)
    for number, (label, rows) in enumerate(targets.items()):
        drawn = [row for row in rows if row["by"] == "all"]
        places, bias = [row["n"] for row in drawn], [row["bias"] for row in drawn]
        error = [2.0 * (row["standard_error"] or 0.0) for row in drawn]
        axes.errorbar(places, bias, yerr=error, capsize=2, label=f"π of {label}", **_line(number))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("n", fontsize=9)
    axes.set_title("bias of the targets, true value bootstrapped", fontsize=9)
    if learned:
        _bars(panels[1], learned, ("overestimation", "root_mean_square_error"))
        panels[1].set_title("what the networks ended with", fontsize=9)
        _legend_below(panels[1])
    _legend_below(axes)
    return figure


def calibration_picture(errors: Sequence[QErrors], bins: int = _BINS) -> Figure:
    """Mean true advantage of EXIT by predicted advantage, in bins of equally many states.

    On the diagonal a predicted advantage is right on average. The sign is what a policy acts by: a
    curve through the lower right or upper left quarter takes the worse action there.

    Raises:
        InputError: nothing to draw, or fewer than one bin.
    """
    _check_some(errors)
    if bins < 1:
        raise InputError(f"bins is {bins}; it must be at least 1")
    figure, (axes,) = _panels(1, width=4.6, height=4.4)
    drawn = [calibration_curve(each, bins) for each in errors]
    low, high = (pick(pick(pick(curve) for curve in pair) for pair in drawn) for pick in (min, max))
    for rule in (axes.axhline, axes.axvline):
        rule(0.0, color=_RULE, linewidth=1)
    axes.plot([low, high], [low, high], color=_RULE, linewidth=1, linestyle="--")
    for number, (each, (predicted, true)) in enumerate(zip(errors, drawn, strict=True)):
        axes.plot(predicted, true, label=each.label, **_line(number))
    axes.set_xlabel("predicted advantage of EXIT", fontsize=9)
    axes.set_ylabel("mean true advantage", fontsize=9)
    _legend(figure, axes)
    return figure


def calibration_curve(errors: QErrors, bins: int = _BINS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean predicted and mean true advantage of EXIT in bins of states, float64 (b,) each, b <= bins.

    States are ordered by predicted advantage and cut into bins of equal size; those that are
    predicted the same stay together.
    """
    predicted, true = errors.advantages
    values, first = np.unique(np.sort(predicted), return_index=True)
    bin_of = (first * bins // len(predicted))[np.searchsorted(values, predicted)]
    _, number, count = np.unique(bin_of, return_inverse=True, return_counts=True)
    return np.bincount(number, predicted) / count, np.bincount(number, true) / count


def error_picture(errors: Sequence[QErrors]) -> Figure:
    """Bias, over-estimation, mean absolute and root mean square error of each, as bars.

    Raises:
        InputError: nothing to draw.
    """
    _check_some(errors)
    figure, (axes,) = _panels(1, width=6.4, height=1.0 + 0.62 * len(errors))
    _bars(axes, errors, ("bias", "overestimation", "mean_absolute_error", "root_mean_square_error"))
    _legend(figure, axes)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", facecolor="#ffffff")


def _check_some(given: Sequence[Any] | Mapping[str, Any]) -> None:
    if not given:
        raise InputError("errors: there is nothing to draw; give at least one")


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, at most three in a line, each so large in inches."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and wants a display

    columns = min(3, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * lines + 0.2), dpi=120, layout="constrained")
    panels = [figure.add_subplot(lines, columns, place + 1) for place in range(count)]
    for axes in panels:
        axes.tick_params(labelsize=8, colors=_QUIET)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_RULE)
    return figure, panels


def _line(number: int) -> dict[str, Any]:
    colour, marker = LINE_COLOURS[number % len(LINE_COLOURS)], _MARKERS[number % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False
    )


def _legend_below(axes: Axes) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8, frameon=False)


def _density() -> Colormap:
    """The scale of the exit depths, without its palest colour, which would be lost on white."""
    from matplotlib.colors import LinearSegmentedColormap

    steps = range(1, 6)
    colours = DepthColours(steps, len(steps) + 1)
    return LinearSegmentedColormap.from_list("density", [colours.background(step) or "" for step in steps])


def _bars(axes: Axes, errors: Sequence[QErrors], measures: Sequence[str]) -> None:
    """Horizontal bars of some measures over all states, the labels in order from the top."""
    rows = [each.rows()[0] for each in errors]
    place = np.arange(len(rows))
    height = 0.8 / len(measures)
    for number, measure in enumerate(measures):
        offset = (number - (len(measures) - 1) / 2) * height
        lengths = [row[measure] for row in rows]
        bars = axes.barh(
            place + offset,
            lengths,
            height * 0.92,
            color=LINE_COLOURS[number],
            label=measure.replace("_", " "),
        )
        axes.bar_label(bars, fmt="%+.2f" if min(lengths) < 0 else "%.2f", fontsize=7, padding=2, color=_QUIET)
    axes.axvline(0.0, color=_RULE, linewidth=1)
    axes.set_yticks(place, [row["label"] for row in rows], fontsize=8, color=_INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _trained(
    algorithm: str, settings: DQNSettings, transitions: Transitions
) -> tuple[QController, dict[int, QController]]:
    """The last checkpoint of an algorithm, and all of them by gradient step.

    Raises:
        InputError: an algorithm whose policy has no action values.
    """
    checkpoints: dict[int, QController] = {}

    def keep(policy: Controller, metrics: Mapping[str, float]) -> None:
        if not isinstance(policy, QController) or "value" not in metrics:
            raise InputError(
                f"algorithm {algorithm!r}: its policy has no action values to compare; use dqn, double_dqn, "
                "cql, nfq or qr_dqn"
            )
        checkpoints[int(metrics["step"])] = policy

    # Nothing is played, so every checkpoint counts as the best so far, and the last one is returned.
    train(transitions, algorithm, settings, on_best=keep)
    return checkpoints[max(checkpoints)], checkpoints


def main(arguments: Sequence[str] | None = None) -> str:
    """Run as a program; returns the tables that it shows."""
    parser = argparse.ArgumentParser(
        prog="python -m sde_gym.evaluation.q_pictures", description=(__doc__ or "").split("\n")[0]
    )
    defaults = DQNSettings()
    parser.add_argument("--out", type=Path, required=True, help="Folder for the pictures and q_error.json.")
    parser.add_argument("--traces", default="stdlib-20m", help="Trace set: name or folder.")
    parser.add_argument("--algorithm", default="double_dqn", help="Algorithms, joined by commas.")
    parser.add_argument("--n", default="1,3,10", help="Values of n to train with, joined by commas.")
    parser.add_argument("--reward", default=defaults.reward, help="lede, speed or module:function.")
    parser.add_argument(
        "--depths", help="Candidate depths, such as 4 or 2,4; all recorded ones if not given."
    )
    parser.add_argument("--gamma", type=float, default=defaults.gamma, help="Discount per decision.")
    parser.add_argument("--episodes", type=int, default=defaults.episodes, help="Exploratory episodes.")
    parser.add_argument("--gradient-steps", type=int, default=6_000, help="Of each network.")
    parser.add_argument("--seed", type=int, default=0, help="Of exploration and training.")
    parser.add_argument(
        "--estimators", action="store_true", help="Also the Q models of estimators, of the first policy."
    )
    given = parser.parse_args(arguments)
    traces = load_traces(given.traces)
    depths = None if given.depths is None else tuple(parse_list(given.depths, int, "depths"))
    settings = DQNSettings(
        depths=depths, reward=given.reward, gamma=given.gamma, episodes=given.episodes, seed=given.seed,
        gradient_steps=given.gradient_steps,
    )  # fmt: skip
    data = collect(
        traces, exploratory_schedule(depths or traces.depths, settings.max_draft), settings.episodes,
        settings.seed, depths=depths, reward=settings.reward, max_draft=settings.max_draft,
    )  # fmt: skip
    policies: dict[str, QController] = {}
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for algorithm in parse_list(given.algorithm, str, "algorithm"):
        for n in parse_list(given.n, int, "n"):
            label = f"{algorithm}, n = {n}"
            policies[label], checkpoints = _trained(algorithm, dataclasses.replace(settings, n_steps=n), data)
            named = {str(step): policy for step, policy in checkpoints.items()}
            along = policy_errors(named, data, traces, gamma=given.gamma)
            curves[label] = (list(checkpoints), [each.rows()[0]["overestimation"] for each in along])
    errors = policy_errors(policies, data, traces, gamma=given.gamma)
    targets = {each.label: n_step_bias(data, each.truth, STEPS, each.groups) for each in errors}
    figures: dict[str, Figure] = {
        "q_against_truth": values_picture(errors),
        "overestimation": curves_picture(curves, "gradient steps"),
        "n_step_bias": n_step_picture(targets, errors),
        "advantage_calibration": calibration_picture(errors),
        "q_errors": error_picture(errors),
    }
    if given.estimators:
        first = errors[0]
        models: dict[str, QModel] = {
            "LSTD-Q": LeastSquaresQ(),
            "fitted Q": FittedQ(FQESettings(gradient_steps=given.gradient_steps, seed=given.seed)),
        }
        estimated = model_errors(
            models, policies[first.label], data, traces, gamma=given.gamma, truth=first.truth
        )
        figures["estimators"] = error_picture(estimated)
        errors = [*errors, *estimated]
    for name, figure in figures.items():
        save_figure(figure, given.out / f"{name}.png")
    labelled = [{"label": label, **row} for label, rows in targets.items() for row in rows]
    found = {
        "settings": settings.to_json(),
        "decisions": len(data),
        "errors": [row for each in errors for row in each.rows()],
        "n_step_targets": labelled,
    }
    write_json(given.out / "q_error.json", found)
    shown = [{name: row[name] for name in _TARGET_COLUMNS} for row in labelled if row["by"] == "all"]
    return "\n\n".join([error_table(errors), error_table(errors, "phase"), rows_table(shown)])


if __name__ == "__main__":
    import sys

    import typer

    try:
        with errors_as_sentences():
            sys.stdout.write(main() + "\n")
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
