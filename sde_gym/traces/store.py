"""Trace sets on disk: a folder with `manifest.json` and shards of a few texts each.

A shard is a group of files, `texts-00000.parquet`, `positions-00000.parquet` and, where drafts behind
wrong proposals were recorded, `overrun-00000.parquet`; it counts once the manifest names them with
their checksums, so a killed recording leaves a valid, shorter set and is resumed
by text (`TraceWriter`). The columns are listed in `schema.py`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.traces.overrun import Overrun, check_overrun
from sde_gym.traces.schema import (
    TEXT_COLUMNS,
    TraceSettings,
    check_text,
    overrun_columns,
    position_columns,
)
from sde_gym.traces.shards import MANIFEST, SHARD_KINDS, read_manifest, read_shard
from sde_gym.traces.trace_set import PROBE_ARRAYS, TraceSet, frozen
from sde_gym.traces.writer import TraceWriter

__all__ = ["SHIPPED", "TraceSet", "TraceWriter", "load_traces"]

SHIPPED = Path(__file__).parent / "data"
"""Trace sets that come with the package, one folder each."""


def load_traces(name_or_path: str | Path) -> TraceSet:
    """Load a trace set that ships with the package, by name, or one in a folder.

    The same files are read only once in a process; the set is then shared.

    Raises:
        InputError: there is no such set, or a file of it is missing, damaged, of another schema
            version or no trace file; the message names the file.
    """
    shipped = sorted(path.parent.name for path in SHIPPED.glob(f"*/{MANIFEST}"))
    folder = SHIPPED / name_or_path if str(name_or_path) in shipped else Path(name_or_path)
    if not folder.exists():
        raise InputError(
            f"traces: {str(name_or_path)!r} is neither a folder nor a shipped trace set "
            f"({', '.join(shipped) or 'none is shipped'})"
        )
    if not folder.is_dir():
        raise InputError(f"traces: {folder} is a file; give the folder that holds {MANIFEST}")
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".parquet"))
    state = tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return _load(folder.resolve(), state)


@lru_cache(maxsize=4)
def _load(folder: Path, state: tuple[tuple[str, int, int], ...]) -> TraceSet:
    """Read and check a folder; `state` (names, sizes, times) makes a changed folder a new key."""
    manifest = read_manifest(folder)
    settings = TraceSettings.from_manifest(manifest, str(folder / MANIFEST))
    columns = {
        "texts": list(TEXT_COLUMNS),
        "positions": position_columns(settings.depths, settings.probe is not None),
        "overrun": overrun_columns(settings.probe is not None),
    }
    tables: dict[str, list[Any]] = {kind: [] for kind in SHARD_KINDS}
    for shard in manifest["shards"]:
        kind = shard["file"].split("-")[0]
        tables[kind].append(read_shard(folder, shard, columns[kind], settings.k))
    if not tables["texts"] or not tables["positions"]:
        raise InputError(f"{folder}: holds no text")
    if len(tables["overrun"]) != (len(tables["texts"]) if settings.overrun else 0):
        raise InputError(
            f"{folder}: {MANIFEST} names {len(tables['overrun'])} overrun files, which does not fit overrun "
            f"{settings.overrun} and {len(tables['texts'])} texts files"
        )
    return _assemble(folder, manifest, settings, tables)


def _assemble(
    folder: Path, manifest: dict[str, Any], settings: TraceSettings, tables: dict[str, list[Any]]
) -> TraceSet:
    """The set in memory out of its tables, checked to fit together."""
    import pyarrow as pa

    texts, positions = pa.concat_tables(tables["texts"]), pa.concat_tables(tables["positions"])
    k, depths = settings.k, settings.depths

    def rows(name: str) -> NDArray[Any]:
        return _values(positions, name)

    def lists(name: str) -> NDArray[Any]:
        return _lists(positions, name, k)

    lengths = texts.column("tokens").to_numpy().astype(np.int64)
    start = np.concatenate([[0], np.cumsum(lengths)])
    expected_text = np.repeat(np.arange(len(lengths)), lengths)
    if (
        not np.array_equal(texts.column("text").to_numpy(), np.arange(len(lengths)))
        or not np.array_equal(rows("text"), expected_text)
        or not np.array_equal(rows("position"), np.arange(start[-1]) - start[:-1][expected_text])
    ):
        raise InputError(f"{folder}: the rows of its texts and positions files do not belong together")
    arrays: dict[str, Any] = {
        "token": rows("token"),
        "top_ids": np.stack([lists(f"d{depth}_ids") for depth in depths], axis=1),
        "top_logprobs": np.stack([lists(f"d{depth}_logprobs") for depth in depths], axis=1),
        "entropy": np.stack([rows(f"d{depth}_entropy") for depth in depths], axis=1),
        "match": np.stack([rows(f"d{depth}_match") for depth in depths], axis=1),
        "final_ids": lists("final_ids"),
        "final_logprobs": lists("final_logprobs"),
        "final_gap": rows("final_gap"),
    }
    if settings.probe is not None:
        arrays["probe"] = np.stack([rows(f"d{depth}_probe") for depth in depths], axis=1)
    arrays |= _branches(folder, tables["overrun"], start, settings)
    for name in PROBE_ARRAYS:
        if name in arrays and not ((arrays[name] >= 0.0) & (arrays[name] <= 1.0)).all():
            raise InputError(f"{folder}: a probe column holds a value that is no probability")
    trace_set = TraceSet(
        manifest=manifest,
        depths=depths,
        num_layers=settings.num_layers,
        k=k,
        start=frozen(start.astype(np.int64)),
        text_ids=texts.column("id").to_pylist(),
        tasks=texts.column("task").to_pylist(),
        ends=texts.column("end").to_pylist(),
        prompt_tokens=[
            None if tokens is None else frozen(np.array(tokens, dtype=np.int32))
            for tokens in texts.column("prompt_tokens").to_pylist()
        ],
        prompt_lengths=texts.column("prompt_length").to_pylist(),
        prompts=texts.column("prompt").to_pylist(),
        sources=texts.column("source").to_pylist(),
        **{name: frozen(array) for name, array in arrays.items()},
    )
    if not np.array_equal(trace_set.match, trace_set.top_ids[:, :, 0] == trace_set.token[:, None]):
        raise InputError(f"{folder}: a match column contradicts the tokens")
    for number, (text_id, end) in enumerate(zip(trace_set.text_ids, trace_set.ends, strict=True)):
        where, length = f"{folder}: text {text_id!r}", trace_set.prompt_lengths[number]
        prompt = trace_set.prompt_tokens[number]
        if prompt is not None and len(prompt) != length:
            raise InputError(f"{where}: prompt_length is {length}, but it has {len(prompt)} prompt_tokens")
        check_text(where, trace_set.tokens_of(number), end, length, settings)
        if settings.overrun:
            _check_branches(where, trace_set, number, settings)
    return trace_set


def _values(table: Any, name: str) -> NDArray[Any]:
    """A column as an array (rows,)."""
    return table.column(name).combine_chunks().to_numpy(zero_copy_only=False)


def _lists(table: Any, name: str, k: int) -> NDArray[Any]:
    """A column of lists of k as an array (rows, k)."""
    return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, k)


def _branches(
    folder: Path, tables: list[Any], start: NDArray[np.int64], settings: TraceSettings
) -> dict[str, NDArray[Any]]:
    """The arrays of the overrun rows, checked to be in order."""
    import pyarrow as pa

    depths, k = settings.depths, settings.k
    entries = int(start[-1]) * len(depths)
    probe: dict[str, NDArray[Any]] = {}
    if not tables:
        if settings.probe is not None:
            probe["overrun_probe"] = np.zeros(0, np.float32)
        return {
            **probe,
            "branch_start": np.zeros(entries + 1, np.int64),
            "overrun_proposal": np.zeros(0, np.int32),
            "overrun_logprobs": np.zeros((0, k), np.float32),
            "overrun_entropy": np.zeros(0, np.float32),
        }
    table = pa.concat_tables(tables)
    text, position = _values(table, "text"), _values(table, "position").astype(np.int64)
    column = np.searchsorted(depths, _values(table, "depth"))
    step = _values(table, "step")
    known = (text >= 0) & (text < len(start) - 1) & (column < len(depths))
    known &= (position >= 0) & (position < np.diff(start)[np.where(known, text, 0)])
    if not known.all() or not np.isin(_values(table, "depth"), depths).all():
        raise InputError(f"{folder}: an overrun row names a text, position or depth that there is not")
    entry = (start[text] + position) * len(depths) + column
    branch_start = np.concatenate([[0], np.cumsum(np.bincount(entry, minlength=entries))]).astype(np.int64)
    if (np.diff(entry) < 0).any() or not np.array_equal(
        step, np.arange(len(entry)) - branch_start[entry] + 1
    ):
        raise InputError(f"{folder}: the overrun rows are not in order of text, position, depth and step")
    if settings.probe is not None:
        probe["overrun_probe"] = _values(table, "probe")
    return {
        **probe,
        "branch_start": branch_start,
        "overrun_proposal": _values(table, "proposal"),
        "overrun_logprobs": _lists(table, "logprobs", k),
        "overrun_entropy": _values(table, "entropy"),
    }


def _check_branches(where: str, traces: TraceSet, number: int, settings: TraceSettings) -> None:
    """Refuse a text whose overrun rows do not lie behind its wrong proposals."""
    rows = slice(traces.start[number], traces.start[number + 1])
    m = len(traces.depths)
    bounds = traces.branch_start[rows.start * m : rows.stop * m + 1]
    branches = slice(bounds[0], bounds[-1])
    overrun = Overrun(
        np.diff(bounds).reshape(-1, m),
        traces.overrun_proposal[branches],
        traces.overrun_logprobs[branches],
        traces.overrun_entropy[branches],
        None if traces.overrun_probe is None else traces.overrun_probe[branches],
    )
    check_overrun(
        where,
        overrun,
        traces.top_ids[rows, :, 0],
        traces.token[rows],
        traces.prompt_lengths[number],
        settings,
    )
