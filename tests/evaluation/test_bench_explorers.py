"""`bench explorers` with two real processes of a tiny model: its figures, and an end for all if one dies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sde_gym.cli import app
from sde_gym.decoding import DecodeResult, autoregressive
from sde_gym.decoding.dex import dex
from sde_gym.decoding.dex.group import ExplorerGroup, ExplorersEndedError
from sde_gym.decoding.dex.timing import stage_seconds
from sde_gym.errors import InputError
from sde_gym.evaluation import bench_explorers as module
from sde_gym.evaluation.bench_explorers import ExplorerSettings
from sde_gym.models.loading import load_model
from tests.decoding.conftest import agreeing_model
from tests.pages import first_column, marked, read_page

TOKENS = 12


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_two_explorers(
    tiny_model_folder: Path, prompt_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, as processes take seconds to start."""
    with ExplorerGroup(str(tiny_model_folder), (2, 4), 4, timeout=30.0) as group:
        check_the_command(group, tiny_model_folder, prompt_files[1], tmp_path, monkeypatch)
        with pytest.raises(InputError, match="the prompt has no tokens"):
            group.explore([], TOKENS)
        processes = list(group.processes)
        processes[1].kill()
        started = time.monotonic()
        with pytest.raises(ExplorersEndedError, match="the explorer of stage 1 has ended with status -9"):
            group.explore([5, 6, 7], TOKENS)
        assert time.monotonic() - started < 25.0  # it does not wait for the timeout
        assert all(process.poll() is not None for process in processes)
        with pytest.raises(ExplorersEndedError, match="start a new group"):
            group.explore([5, 6, 7], TOKENS)


def check_the_command(
    group: ExplorerGroup, model_folder: Path, prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def this_group(*_: Any, **__: Any) -> Iterator[ExplorerGroup]:
        yield group

    monkeypatch.setattr(module, "ExplorerGroup", this_group)
    arguments = [
        "bench", "explorers", "--model", str(model_folder), "--prompts", str(prompts), "--limit", "2",
        "--max-new-tokens", str(TOKENS), "--repeats", "2", "--stage-repeats", "2", "--out", str(out),
    ]  # fmt: skip
    threads: list[int] = []

    def plain(*request: Any) -> DecodeResult:
        threads.append(torch.get_num_threads())
        return autoregressive(*request)

    monkeypatch.setattr(module, "autoregressive", plain)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "| `explorers` | 2 × 1 |" in done.output
    assert {*threads} == {2}  # as many as the explorers have together
    results = json.loads((out / "results.json").read_text())
    assert (out / "table.md").read_text() in done.output
    for row in results["rows"]:
        assert (row["identical_prompts"], row["prompts"], row["identical_to_ar"]) == (2, 2, True)
        assert row["tokens_per_second"] > 0
        assert row["processes"] * row["threads"] == 2
    assert len(results["measurements"]) == 2 * 2 * 2

    # The lattice is the one of a single process, and so are the ticks that were predicted from.
    model = load_model(model_folder)
    ids = {tuple(row["output"]) for row in results["measurements"]}
    alone = [
        dex(model, model.encode(json.loads(line)["prompt"]), (2, 4), TOKENS, record=True)
        for line in prompts.read_text().splitlines()[:2]
    ]
    assert {tuple(result.tokens) for result in alone} == ids
    ticks = sum(result.ticks - 2 for result in alone)  # without prefill's
    stages = results["stages"]
    for stage in (0, 1):
        assert sum(row["ticks"] for row in stages if row["stage"] == stage) <= ticks
    assert results["ticks"]["ticks_per_token"] == sum(r.ticks for r in alone) / sum(
        len(r.tokens) for r in alone
    )
    page = read_page("dex")
    assert first_column(marked(page, "explorers")) == list(results)
    for each in results["passes"]:
        assert first_column(marked(page, "passes")) == list(each)
        assert each["speedup"] == each["ar_seconds"] / each["explorers_seconds"]
        assert each["overhead_seconds"] == each["explorers_seconds"] - each["predicted_seconds"]
        assert each["overhead_per_tick"] == pytest.approx(each["overhead_seconds"] / ticks)
        assert 0 < each["busiest_stage_seconds"] < each["explorers_seconds"]
        assert each["predicted_seconds"] > 0


def test_a_recorded_lattice_tells_who_was_in_which_stage() -> None:
    result = dex(agreeing_model(), [5, 35, 3], (1, 2, 4, 6), 24, record=True)
    loads = result.stage_tokens()
    assert [sum(tick) for tick in loads] == result.tick_tokens
    assert {tick[-1] for tick in loads} <= {0, 1}  # only the anchor gets as far as the last stage
    assert max(max(tick) for tick in loads) > 1
    assert len(result.stage_seconds) == 4
    assert 0 < sum(result.stage_seconds) <= result.decode_seconds


def test_a_stage_alone() -> None:
    model = agreeing_model()
    for stage in range(3):
        found = stage_seconds(model, (1, 4, 6), stage, [5, 35, 3, 8], 2, 3)
        assert len(found) == 3
        assert min(found) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"explorers": 3, "exploration_set": (2, 4)}, "3 were asked for, but the exploration set has 2"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"threads": 1.5}, "threads is 1.5; it must be a whole number"),
        ({"timeout": 0.0}, "timeout must be at least 1 second"),
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExplorerSettings(**changes)


def test_sets_that_do_not_fit_are_refused_before_anything_starts(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    settings = ExplorerSettings(model=str(tiny_model_folder), exploration_set=(2, 3))
    with pytest.raises(InputError, match="must end at the last layer, 4"):
        module.bench_explorers(settings, tmp_path / "out")
    with pytest.raises(InputError, match="threads must be at least 1"):
        ExplorerGroup(str(tiny_model_folder), (2, 4), 4, threads=0)
    assert not (tmp_path / "out").exists()
