"""The files of a trace set: its manifest and its Parquet shards, read with every check, written whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, read_json, sha256
from sde_gym.traces.schema import SCHEMA_VERSION, Column, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.json"

SHARD_KINDS = ("texts", "positions", "overrun")
"""A shard is one file of each kind; overrun only where the set has it."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, its version checked before anything else."""
    path = folder / MANIFEST
    if not path.exists():
        raise InputError(f"{path}: no such file, so {folder} is not a trace set")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "schema_version" not in manifest:
        raise InputError(f"{path}: not the manifest of a trace set, schema_version missing")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema version {manifest['schema_version']!r}, this package reads {SCHEMA_VERSION}; "
            "record the set again"
        )
    for name, kind in (("texts", int), ("skipped", list), ("shards", list)):
        if not isinstance(manifest.get(name), kind):
            raise InputError(f"{path}: {name} missing or not of type {kind.__name__}")
    for shard in manifest["shards"]:
        if not isinstance(shard, dict) or not {"file", "sha256", "rows"} <= shard.keys():
            raise InputError(f"{path}: a shard without file, sha256 and rows")
        if str(shard["file"]).split("-")[0] not in SHARD_KINDS:
            raise InputError(f"{path}: shard {shard['file']!r} is none of {', '.join(SHARD_KINDS)}")
    return manifest


def check_shard(folder: Path, shard: dict[str, Any]) -> Path:
    """The path of a shard's file, which is there and has the manifest's checksum."""
    path = folder / shard["file"]
    if not path.is_file():
        raise InputError(f"{path}: no such file, but {MANIFEST} names it")
    if sha256(path) != shard["sha256"]:
        raise InputError(f"{path}: damaged, its checksum is not that in {MANIFEST}; record the set again")
    return path


def read_shard(folder: Path, shard: dict[str, Any], columns: Sequence[Column], k: int) -> pa.Table:
    """One Parquet file, checked: there, intact, readable, the right columns and row count."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = check_shard(folder, shard)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a Parquet file ({error})") from None
    nullable = {column.name for column in columns if column.nullable}
    for field in arrow_schema(list(columns), k):
        if field.name not in table.column_names:
            raise InputError(f"{path}: column {field.name!r} is missing, so this is no such trace file")
        found = table.schema.field(field.name).type
        if found != field.type:
            raise InputError(f"{path}: column {field.name!r} is {found}, expected {field.type}")
        if table.column(field.name).null_count and field.name not in nullable:
            raise InputError(f"{path}: column {field.name!r} has missing values")
    if table.num_rows != shard["rows"]:
        raise InputError(f"{path}: {table.num_rows} rows, {MANIFEST} says {shard['rows']}")
    return table.select([column.name for column in columns])


def parquet_table(values: dict[str, NDArray[Any]], schema: pa.Schema) -> pa.Table:
    """A table out of arrays (rows,) or, for lists of k, (rows, k)."""
    import pyarrow as pa

    arrays = []
    for field in schema:
        flat = np.ascontiguousarray(values[field.name]).reshape(-1)
        if pa.types.is_fixed_size_list(field.type):
            elements = pa.array(flat, type=field.type.value_type)
            arrays.append(pa.FixedSizeListArray.from_arrays(elements, type=field.type))
        else:
            arrays.append(pa.array(flat, type=field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def write_parquet(path: Path, table: pa.Table) -> None:
    """zstd; floats split into byte planes, which is what makes log-probabilities compress."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    floats: list[str] = []
    others: list[str] = []
    for field in table.schema:
        nested = pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
        element = field.type.value_type if nested else field.type
        column = f"{field.name}.list.element" if nested else field.name
        (floats if pa.types.is_floating(element) else others).append(column)
    with atomic_path(path) as temporary:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=9,
            use_dictionary=others,
            use_byte_stream_split=floats,
        )
