"""Trace sets on disk: what is read is what was written, and nothing broken is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.files import sha256
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet, load_traces
from sde_gym.traces.overrun import no_overrun
from sde_gym.traces.schema import TEXT_COLUMNS, position_columns
from sde_gym.traces.store import SHIPPED
from tests.builders import open_writer, random_traces, store_traces, text_arguments

ARRAYS = (
    "start",
    "token",
    "top_ids",
    "top_logprobs",
    "entropy",
    "match",
    "final_ids",
    "final_logprobs",
    "final_gap",
    "branch_start",
    "overrun_proposal",
    "overrun_logprobs",
    "overrun_entropy",
)
LISTS = ("text_ids", "tasks", "ends", "prompt_lengths", "prompts", "sources")


def assert_equal(left: TraceSet, right: TraceSet) -> None:
    """Same texts, bit for bit."""
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
        assert getattr(left, name).dtype == getattr(right, name).dtype, name
    for name in LISTS:
        assert getattr(left, name) == getattr(right, name), name
    for mine, other in zip(left.prompt_tokens, right.prompt_tokens, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            np.testing.assert_array_equal(mine, other)
    assert (left.depths, left.num_layers, left.k) == (right.depths, right.num_layers, right.k)


def test_round_trip(toy_traces: TraceSet, toy_folder: Path) -> None:
    assert_equal(load_traces(toy_folder), toy_traces)


def test_a_set_is_read_once_and_is_read_only(toy_folder: Path) -> None:
    first, second = load_traces(toy_folder), load_traces(str(toy_folder))
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first.token[0] = 1


def test_files_are_plain_parquet_with_the_columns_of_the_schema(
    toy_traces: TraceSet, toy_folder: Path
) -> None:
    positions = pq.read_table(toy_folder / "positions-00001.parquet")
    assert positions.column_names == [column.name for column in position_columns(toy_traces.depths)]
    assert pq.read_table(toy_folder / "texts-00000.parquet").column_names == [c.name for c in TEXT_COLUMNS]
    assert positions.schema.field("d3_logprobs").type == pa.list_(pa.float32(), 8)
    assert positions.column("text").to_pylist() == [2] * toy_traces.lengths[2] + [3] * toy_traces.lengths[3]
    row = positions.slice(1, 1).to_pylist()[0]
    at = toy_traces.start[2] + 1
    assert row["position"] == 1
    assert row["d6_ids"] == toy_traces.top_ids[at, 2].tolist()
    assert row["d6_match"] == (row["d6_ids"][0] == row["token"])


def test_recording_resumes_by_text(tmp_path: Path, toy_traces: TraceSet) -> None:
    """A kill leaves a temporary file, shards without manifest entry and unwritten texts."""
    killed = open_writer(tmp_path / "set", toy_traces, texts_per_shard=2)
    for text in range(3):
        killed.add_text(**text_arguments(toy_traces, text))
    del killed  # the third text was never written
    (tmp_path / "set" / ".positions-00001.parquet.x.tmp").write_bytes(b"half")
    (tmp_path / "set" / "positions-00001.parquet").write_bytes(b"not in the manifest")
    assert load_traces(tmp_path / "set").text_ids == toy_traces.text_ids[:2]

    with open_writer(tmp_path / "set", toy_traces, texts_per_shard=2) as writer:
        assert writer.done == set(toy_traces.text_ids[:2])
        for text in range(2, len(toy_traces)):
            writer.add_text(**text_arguments(toy_traces, text))
    assert_equal(load_traces(tmp_path / "set"), toy_traces)


def test_an_exception_keeps_finished_texts(tmp_path: Path, toy_traces: TraceSet) -> None:
    def interrupted() -> None:
        with open_writer(tmp_path / "set", toy_traces) as writer:
            writer.add_text(**text_arguments(toy_traces, 0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert load_traces(tmp_path / "set").text_ids == toy_traces.text_ids[:1]


def test_short_texts_are_listed_not_stored(tmp_path: Path, toy_traces: TraceSet) -> None:
    short = text_arguments(toy_traces, 0)
    for name in ("token", "final_ids", "final_logprobs", "final_gap", "top_ids", "top_logprobs", "entropy"):
        short[name] = short[name][:1]
    with open_writer(tmp_path / "set", toy_traces) as writer:
        assert writer.add_text(**{**short, "text_id": "short"}) is False
        assert writer.add_text(**text_arguments(toy_traces, 0)) is True
    traces = load_traces(tmp_path / "set")
    assert traces.manifest["skipped"] == ["short"]
    assert traces.text_ids == toy_traces.text_ids[:1]
    assert open_writer(tmp_path / "set", toy_traces).done == {"short", toy_traces.text_ids[0]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "other"),
        ("model_hash", "f" * 64),
        ("depths", [2, 3]),
        ("k", 4),
        ("max_new_tokens", 21),
        ("context_limit", 31),
        ("head", "compact"),
        ("dtype", "bfloat16"),
        ("eos_token_ids", [0, 1]),
        ("overrun", 5),
    ],
)
def test_resuming_with_another_setting_is_refused(
    name: str, value: Any, toy_folder: Path, toy_traces: TraceSet
) -> None:
    with pytest.raises(InputError, match=f"recorded with {name} "):
        open_writer(toy_folder, toy_traces, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_id": "toy/0"}, "already in"),
        ({"end": "stop"}, "'stop' is not one of"),
        ({"end": "context"}, "end is 'context'"),
        ({"prompt_length": 5}, r"prompt_tokens has shape \(4,\), expected \(5,\)"),
        ({"prompt_tokens": None, "prompt_length": 0}, "prompt_length 0 is below 1"),
        ({"prompt_tokens": None, "prompt_length": 12}, "20 tokens, end 'budget', .* prompt_length 12"),
        ({"entropy": np.zeros((3, 3))}, r"entropy has shape \(3, 3\)"),
        ({"final_gap": np.full(20, np.nan)}, "final_gap holds a value that is not finite"),
        ({"token": np.zeros(20, np.int32)}, "before the last token"),
        ({"overrun": None}, "overrun rows are missing, but the set has overrun 11"),
        ({"overrun": no_overrun(20, 3, 8)}, "an overrun branch has the wrong length"),
        ({"overrun": no_overrun(19, 3, 8)}, "do not fit 20 tokens at 3 depths"),
    ],
)
def test_texts_that_cannot_be_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, toy_traces: TraceSet
) -> None:
    writer = open_writer(tmp_path, toy_traces)
    writer.add_text(**text_arguments(toy_traces, 0))
    arguments = {**text_arguments(toy_traces, 1), "text_id": "new"}  # a text of 20 tokens
    arguments["prompt_tokens"] = [1, 2, 3, 4]
    arguments |= {"end": "budget"} | changes
    if arguments["end"] == "context":
        arguments["token"] = np.append(arguments["token"][:-1], 0)
    with pytest.raises(InputError, match=message):
        writer.add_text(**arguments)


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del manifest[name]
        else:
            manifest[name] = value
    path.write_text(json.dumps(manifest))


def change_table(
    folder: Path, name: str, change: Callable[[pa.Table], pa.Table], rows: int | None = None
) -> None:
    """Replace a shard by a changed table with a correct checksum, and of `rows` rows if given."""
    pq.write_table(change(pq.read_table(folder / name)), folder / name)
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        if shard["file"] == name:
            shard["sha256"] = sha256(folder / name)
            shard["rows"] = shard["rows"] if rows is None else rows
    (folder / "manifest.json").write_text(json.dumps(manifest))


def set_column(name: str, make: Callable[[pa.ChunkedArray], Any]) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(
        table.column_names.index(name), name, make(table.column(name).combine_chunks())
    )


def shard_entry(folder: Path, name: str) -> dict[str, Any]:
    return {"file": name, "rows": 1, "sha256": sha256(folder / name)}


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated shard": (
        lambda folder: (folder / "positions-00001.parquet").write_bytes(
            (folder / "positions-00001.parquet").read_bytes()[:-100]
        ),
        "positions-00001.parquet: damaged",
    ),
    "foreign shard": (
        lambda folder: (
            (folder / "texts-00000.parquet").write_text("hello"),
            change_manifest(
                folder,
                shards=[
                    {
                        "file": "texts-00000.parquet",
                        "rows": 1,
                        "sha256": sha256(folder / "texts-00000.parquet"),
                    }
                ],
            ),
        ),
        "texts-00000.parquet: not a Parquet file",
    ),
    "missing shard": (
        lambda folder: (folder / "texts-00002.parquet").unlink(),
        "texts-00002.parquet: no such file",
    ),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: no such file"),
    "broken manifest": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        "manifest.json: not a JSON file",
    ),
    "foreign manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "manifest.json: not the manifest of a trace set",
    ),
    "old version": (
        lambda folder: change_manifest(folder, schema_version=0, depths=None),
        "manifest.json: schema version 0, this package reads",
    ),
    "no depths": (lambda folder: change_manifest(folder, depths=None), "manifest.json: .*depths missing"),
    "depth beyond the model": (
        lambda folder: change_manifest(folder, depths=[2, 8]),
        "manifest.json: depths: 8 is outside 1..7",
    ),
    "depths that are no numbers": (
        lambda folder: change_manifest(folder, depths=["a"]),
        "manifest.json: .*'a'",
    ),
    "no context limit": (
        lambda folder: change_manifest(folder, context_limit=None),
        "manifest.json: .*context_limit missing",
    ),
    "smaller context": (
        lambda folder: change_manifest(folder, context_limit=12),
        "text 'toy/.*context_limit 12",
    ),
    "other prompt": (
        lambda folder: change_table(
            folder,
            "texts-00000.parquet",
            set_column("prompt_length", lambda column: pa.array([2] * len(column), pa.int32())),
        ),
        "prompt_length is 2, but it has",
    ),
    "depth not stored": (
        lambda folder: change_manifest(folder, depths=[2, 4]),
        "positions-00000.parquet: column 'd4_ids' is missing",
    ),
    "wrong k": (lambda folder: change_manifest(folder, k=4), "column 'final_ids' is .*8.*, expected .*4"),
    "wrong dtype": (
        lambda folder: change_table(
            folder, "positions-00000.parquet", set_column("d2_entropy", lambda column: column.cast("float64"))
        ),
        "positions-00000.parquet: column 'd2_entropy' is double, expected float",
    ),
    "missing values": (
        lambda folder: change_table(
            folder,
            "positions-00000.parquet",
            set_column("final_gap", lambda column: pa.nulls(len(column), pa.float32())),
        ),
        "positions-00000.parquet: column 'final_gap' has missing values",
    ),
    "rows cut off": (
        lambda folder: change_table(folder, "positions-00000.parquet", lambda table: table.slice(1)),
        "positions-00000.parquet: .* rows",
    ),
    "rows shuffled": (
        lambda folder: change_table(folder, "positions-00000.parquet", lambda table: table.sort_by("token")),
        "do not belong together",
    ),
    "other tokens": (
        lambda folder: change_table(
            folder,
            "positions-00000.parquet",
            set_column("token", lambda column: pa.array([1] * len(column), pa.int32())),
        ),
        "contradicts the tokens",
    ),
    "overrun forgotten": (
        lambda folder: change_manifest(
            folder,
            shards=[
                shard
                for shard in json.loads((folder / "manifest.json").read_text())["shards"]
                if shard["file"] != "overrun-00001.parquet"
            ],
        ),
        "names 2 overrun files, which does not fit overrun 11 and 3 texts files",
    ),
    "less overrun": (lambda folder: change_manifest(folder, overrun=3), "branch has the wrong length"),
    "more overrun": (lambda folder: change_manifest(folder, overrun=12), "branch has the wrong length"),
    "overrun cut off": (
        lambda folder: change_table(folder, "overrun-00002.parquet", lambda table: table.slice(0, 9), rows=9),
        "branch has the wrong length",
    ),
    "overrun shuffled": (
        lambda folder: change_table(folder, "overrun-00000.parquet", lambda table: table.sort_by("proposal")),
        "overrun rows are not in order",
    ),
    "overrun of another depth": (
        lambda folder: change_table(
            folder,
            "overrun-00000.parquet",
            set_column("depth", lambda column: pa.array([4] * len(column), pa.int32())),
        ),
        "an overrun row names a text, position or depth that there is not",
    ),
    "overrun of another text": (
        lambda folder: change_table(
            folder,
            "overrun-00000.parquet",
            set_column("text", lambda column: pa.array([-1] * len(column), pa.int32())),
        ),
        "an overrun row names a text, position or depth that there is not",
    ),
    "shards forgotten": (lambda folder: change_manifest(folder, shards=[]), "holds no text"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_set_is_named(breakage: str, tmp_path: Path, toy_folder: Path) -> None:
    shutil.copytree(toy_folder, tmp_path / "set")
    change, message = BREAKAGES[breakage]
    change(tmp_path / "set")
    with pytest.raises(InputError, match=message) as caught:
        load_traces(tmp_path / "set")
    assert str(tmp_path / "set") in str(caught.value)


def test_damage_after_loading_is_noticed(tmp_path: Path, toy_folder: Path, toy_traces: TraceSet) -> None:
    folder = tmp_path / "set"
    shutil.copytree(toy_folder, folder)
    load_traces(folder)
    damaged = bytearray((folder / "texts-00000.parquet").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / "texts-00000.parquet").write_bytes(damaged)
    with pytest.raises(InputError, match="texts-00000"):
        load_traces(folder)
    with pytest.raises(InputError, match="texts-00000"):
        open_writer(folder, toy_traces)


def test_unknown_names_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'nowhere' is neither a folder nor a shipped trace set"):
        load_traces("nowhere")
    (tmp_path / "file.parquet").write_text("")
    with pytest.raises(InputError, match=r"file.parquet is a file; give the folder"):
        load_traces(tmp_path / "file.parquet")
    with pytest.raises(InputError, match="not a folder"):
        open_writer(tmp_path / "file.parquet", random_traces())


def test_subset_renumbers(toy_traces: TraceSet) -> None:
    part = toy_traces.subset([4, 1])
    assert part.text_ids == ["toy/4", "toy/1"]
    assert part.manifest["texts"] == 2
    np.testing.assert_array_equal(part.tokens_of(0), toy_traces.tokens_of(4))
    np.testing.assert_array_equal(part.tokens_of(1), toy_traces.tokens_of(1))
    rows = slice(toy_traces.start[1], toy_traces.start[2])
    np.testing.assert_array_equal(part.top_logprobs[part.start[1] :], toy_traces.top_logprobs[rows])
    for n, text in enumerate((4, 1)):
        mine, other = text_arguments(part, n)["overrun"], text_arguments(toy_traces, text)["overrun"]
        assert mine.lengths.sum() > 0
        for name in ("lengths", "proposal", "logprobs", "entropy"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
    for wrong in ([], [6], [-1], [0, 0]):
        with pytest.raises(InputError, match="texts: "):
            toy_traces.subset(wrong)


def test_task_filter(toy_traces: TraceSet) -> None:
    np.testing.assert_array_equal(toy_traces.texts_of(["test", "function"]), [0, 2, 3, 5])
    assert len(toy_traces.texts_of(None)) == 6
    with pytest.raises(InputError, match="no text has task 'poem'; there are docstring, function, test"):
        toy_traces.texts_of(["poem"])
    for wrong in ([], "test", 3):
        with pytest.raises(InputError, match="tasks: "):
            toy_traces.texts_of(wrong)  # type: ignore[arg-type]


def test_text_ids(toy_traces: TraceSet) -> None:
    assert toy_traces.index_of("toy/3") == 3
    with pytest.raises(InputError, match="no text has the id 'toy/9'"):
        toy_traces.index_of("toy/9")


def test_store_traces_with_any_shard_size_is_the_same(tmp_path: Path, toy_traces: TraceSet) -> None:
    assert_equal(load_traces(store_traces(tmp_path / "one", toy_traces, texts_per_shard=100)), toy_traces)


def test_a_prompt_kept_as_a_reference_is_stored_neither_as_text_nor_as_tokens(
    toy_traces: TraceSet, toy_folder: Path
) -> None:
    texts = pq.read_table(toy_folder / "texts-00000.parquet").to_pylist()
    assert texts[1]["prompt"] is None
    assert texts[1]["prompt_tokens"] is None
    assert texts[1]["prompt_length"] == toy_traces.prompt_lengths[1]
    part = load_traces(toy_folder).subset([1, 0])
    assert part.prompt_tokens[0] is None
    assert part.prompt_tokens[1] is not None
    assert part.prompt_lengths == [toy_traces.prompt_lengths[1], toy_traces.prompt_lengths[0]]


def test_a_set_says_what_it_is_in_a_line(toy_traces: TraceSet) -> None:
    assert repr(toy_traces) == (
        f"TraceSet('toy', 6 texts, {len(toy_traces.token)} positions, depths [2, 3, 6] of 8, overrun 11)"
    )


@pytest.mark.parametrize("name", sorted(path.name for path in SHIPPED.iterdir() if path.is_dir()))
def test_every_shipped_set_is_whole_and_can_be_played(name: str) -> None:
    """Checksums, columns and counts are checked by reading; then a few texts are played."""
    traces = load_traces(name)
    assert traces.overrun > 0
    result = run_controller(traces, StaticController(traces.depths[-1], 2), [0, 1])
    assert (result.tokens == traces.lengths[:2] - 1).all()
