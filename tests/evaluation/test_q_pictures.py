"""Pictures of action values: what is drawn is what was found, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure
from matplotlib.image import imread

from sde_gym.errors import InputError
from sde_gym.evaluation.exact_q import ExactQ, exact_q
from sde_gym.evaluation.q_error import QErrors, n_step_bias, state_groups
from sde_gym.evaluation.q_pictures import (
    calibration_curve,
    calibration_picture,
    curves_picture,
    error_picture,
    main,
    n_step_picture,
    save_figure,
    values_picture,
)
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet


@pytest.fixture(scope="module")
def data(toy_traces: TraceSet) -> Transitions:
    return collect(toy_traces, UniformRandom(), 12, seed=1)


@pytest.fixture(scope="module")
def truth(data: Transitions, toy_traces: TraceSet) -> ExactQ:
    return exact_q(StaticController(3, 2), data, toy_traces, gamma=0.9)


@pytest.fixture(scope="module")
def errors(data: Transitions, truth: ExactQ, toy_traces: TraceSet) -> list[QErrors]:
    """Exact values, and values that are too high by a random amount."""
    groups = state_groups(data, toy_traces)
    noise = np.random.default_rng(0).exponential(size=truth.q.shape)
    return [QErrors("exact", truth.q, truth, groups), QErrors("rough", truth.q + noise, truth, groups)]


def texts(figure: Figure) -> str:
    """All that is written in the panels."""
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


def test_values_are_drawn_around_the_diagonal(errors: list[QErrors]) -> None:
    figure = values_picture(errors)
    assert [axes.get_title() for axes in figure.axes] == ["exact", "rough"]
    assert figure.axes[0].get_xlim() == figure.axes[0].get_ylim() == figure.axes[1].get_xlim()
    bias = errors[1].rows()[0]["bias"]
    assert "bias +0.00\nRMS error 0.00" in texts(figure)
    assert f"bias {bias:+.2f}" in texts(figure)
    hexagons = figure.axes[0].collections[0].get_offsets()
    width = np.ptp(figure.axes[0].get_xlim())
    assert np.abs(np.diff(np.asarray(hexagons), axis=1)).max() < width / 20  # exact values lie on it


def test_the_targets_bias_is_what_was_measured(
    errors: list[QErrors], data: Transitions, truth: ExactQ
) -> None:
    rows = n_step_bias(data, truth, (1, 3, 8), errors[0].groups)
    assert len(n_step_picture({"static": rows}).axes) == 1
    figure = n_step_picture({"static": rows}, errors)
    line = figure.axes[0].get_lines()[1]  # behind the rule at 0
    assert np.asarray(line.get_xdata()).tolist() == [1, 3, 8]
    assert np.asarray(line.get_ydata()).tolist() == [row["bias"] for row in rows if row["by"] == "all"]
    drawn = [bar.get_width() for bar in figure.axes[1].containers[0]]
    assert drawn == [each.rows()[0]["overestimation"] for each in errors]


def test_errors_and_curves_are_drawn(errors: list[QErrors]) -> None:
    figure = error_picture(errors)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["exact", "rough"]
    measures = ("bias", "overestimation", "mean_absolute_error", "root_mean_square_error")
    for bars, measure in zip(figure.axes[0].containers, measures, strict=True):
        assert bars.get_label() == measure.replace("_", " ")
        assert [bar.get_width() for bar in bars] == [each.rows()[0][measure] for each in errors]
    figure = curves_picture({"a": ([1, 2], [0.5, 0.25]), "b": ([1], [0.0])}, "gradient steps")
    lines = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].get_lines()}
    assert (lines["a"], lines["b"]) == ([0.5, 0.25], [0.0])


def test_a_calibration_curve_of_exact_values_is_the_diagonal(
    errors: list[QErrors], truth: ExactQ, toy_traces: TraceSet, data: Transitions
) -> None:
    predicted, true = calibration_curve(errors[0])
    np.testing.assert_allclose(predicted, true)
    assert (np.diff(predicted) > 0).all()
    assert 1 < len(predicted) <= 20
    doubled = QErrors("doubled", 2.0 * truth.q, truth, errors[0].groups)
    predicted, true = calibration_curve(doubled, bins=7)
    np.testing.assert_allclose(predicted, 2.0 * true)
    flat = QErrors("flat", np.zeros_like(truth.q), truth, errors[0].groups)
    predicted, true = calibration_curve(flat)
    assert predicted.tolist() == [0.0]
    np.testing.assert_allclose(true, [(truth.q[:, 1] - truth.q[:, 0]).mean()])
    lines = calibration_picture([doubled, flat]).axes[0].get_lines()
    assert [line.get_label() for line in lines[-2:]] == ["doubled", "flat"]


def test_a_file_is_a_picture_and_no_figure_is_left(errors: list[QErrors], tmp_path: Path) -> None:
    before = Gcf.get_num_fig_managers()
    path = tmp_path / "new" / "values.png"
    save_figure(values_picture(errors), path)
    assert imread(path).shape[1] == round(120 * 3.3 * 2)
    assert [file.name for file in path.parent.iterdir()] == ["values.png"]
    assert Gcf.get_num_fig_managers() == before


def test_nothing_to_draw_is_refused(errors: list[QErrors]) -> None:
    for draw in (values_picture, error_picture, calibration_picture):
        with pytest.raises(InputError, match="nothing to draw"):
            draw([])
    with pytest.raises(InputError, match="nothing to draw"):
        n_step_picture({})
    with pytest.raises(InputError, match="bins is 0"):
        calibration_picture(errors, bins=0)


def test_the_program_trains_measures_and_draws(toy_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("d3rlpy")
    options = ["--traces", str(toy_folder), "--depths", "2,6", "--gamma", "0.9", "--episodes", "8"]
    shown = main([*options, "--n", "1,4", "--gradient-steps", "20", "--estimators", "--out", str(tmp_path)])
    for label in ("double_dqn, n = 1", "double_dqn, n = 4", "LSTD-Q", "fitted Q"):
        assert f"| {label} |" in shown
    names = {path.name for path in tmp_path.iterdir()}
    pictures = ("q_against_truth", "overestimation", "n_step_bias", "advantage_calibration", "q_errors")
    assert names == {"q_error.json", "estimators.png", *(f"{name}.png" for name in pictures)}
    found = json.loads((tmp_path / "q_error.json").read_text())
    assert {row["label"] for row in found["errors"]} >= {"double_dqn, n = 1", "fitted Q"}
    assert found["settings"]["depths"] == [2, 6]
    with pytest.raises(InputError, match="'bc': its policy has no action values"):
        main([*options, "--algorithm", "bc", "--gradient-steps", "5", "--out", str(tmp_path / "bc")])


def test_the_program_says_what_is_wrong_in_a_sentence(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "sde_gym.evaluation.q_pictures"]
    options = ["--out", str(tmp_path / "out"), "--traces", str(tmp_path / "nowhere")]
    done = subprocess.run([*program, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
