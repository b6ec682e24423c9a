"""What features are worth: the rows are those of real drafts, and a probe that knows something shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.calibration_curves import (
    FEATURE_SETS,
    drafts,
    main,
    markdown,
    picture,
    predictions,
    worth_table,
)
from sde_gym.traces import TraceSet
from tests.builders import random_traces, store_traces


def knowing(seed: int) -> TraceSet:
    """A toy set whose probe knows more than the head: it is high where the proposal matches."""
    traces = random_traces(seed, 12, overrun=11, probe=True, max_new_tokens=40)
    rng = np.random.default_rng(seed)
    probe = np.clip(0.3 + 0.4 * traces.match + 0.15 * rng.normal(size=traces.match.shape), 0, 1)
    behind = np.clip(0.3 + 0.15 * rng.normal(size=len(traces.overrun_proposal)), 0, 1)
    return replace(traces, probe=probe.astype(np.float32), overrun_probe=behind.astype(np.float32))


def test_a_proposal_counts_where_all_before_it_are_right() -> None:
    traces = knowing(0)
    rows, accepted = drafts(traces, 3, ("probe", "chain"), length=4)
    assert rows.shape == (len(accepted), 2)
    right = 0
    for text in range(len(traces)):
        match = traces.match[traces.start[text] : traces.start[text + 1], traces.depths.index(3)].tolist()
        at = 1  # of the round's first proposal
        while at < len(match):
            run = 0
            while run < 4 and at + run < len(match) and match[at + run]:
                run += 1
            right += run
            at += run + 1
    assert accepted.sum() == right
    first = rows[:, 1] == 0  # the chain of a round's first proposal
    assert 0 < first.sum() < len(rows)
    assert rows[accepted, 0].mean() > rows[~accepted, 0].mean() + 0.2


def test_a_probe_that_knows_more_is_worth_more(tmp_path: Path) -> None:
    fitted, measured = knowing(1), knowing(2)
    found = predictions(fitted, measured, length=4)
    assert {label for _, label in found} == set(FEATURE_SETS)
    table = worth_table(found)
    by = {(row["depth"], row["features"]): row for row in table}
    for depth in fitted.depths:
        assert by[depth, "+ probe"]["auc"] > by[depth, "+ chain"]["auc"]
        assert by[depth, "+ probe"]["log_loss"] < by[depth, "paper"]["log_loss"]
        assert by[depth, "+ probe"]["rows"] == by[depth, "paper"]["rows"]
    shown = markdown(table)
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:]] == ["| 2", "| 3", "| 6"]
    picture(found, measured, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_as_a_program(tmp_path: Path) -> None:
    folders = [str(store_traces(tmp_path / str(seed), knowing(seed))) for seed in (1, 2)]
    png, figures = tmp_path / "p.png", tmp_path / "p.json"
    shown = main(
        ["--traces", folders[0], "--held-out", folders[1], "--length", "4", "--out", str(png),
         "--json", str(figures)]
    )  # fmt: skip
    assert shown == markdown(worth_table(predictions(knowing(1), knowing(2), length=4)))
    assert png.exists()
    assert figures.exists()


def test_sets_that_do_not_serve_are_refused(tmp_path: Path) -> None:
    good = knowing(1)
    bare = random_traces(1, 4, overrun=11)
    with pytest.raises(InputError, match="'probe' was asked for, but these traces were recorded without"):
        predictions(bare, good)
    with pytest.raises(InputError, match="of different models"):
        predictions(good, replace(good, manifest={**good.manifest, "model_hash": "other"}))
    with pytest.raises(InputError, match="recorded without overrun"):
        predictions(good, random_traces(1, 4, probe=True))
    with pytest.raises(InputError, match="no curve to draw"):
        picture({}, bare, tmp_path / "p.png")
