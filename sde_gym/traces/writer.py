"""Writing a trace set text by text."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.errors import InputError
from sde_gym.files import sha256, write_json
from sde_gym.traces.overrun import Overrun, check_overrun, no_overrun
from sde_gym.traces.schema import (
    SCHEMA_VERSION,
    TEXT_COLUMNS,
    TraceSettings,
    arrow_schema,
    check_text,
    overrun_columns,
    position_columns,
)
from sde_gym.traces.shards import (
    MANIFEST,
    check_shard,
    parquet_table,
    read_manifest,
    read_shard,
    write_parquet,
)
from sde_gym.traces.trace_set import OVERRUN_ARRAYS, PROBE_ARRAYS, ROW_ARRAYS

if TYPE_CHECKING:
    import pyarrow as pa


class TraceWriter:
    """Writes a trace set text by text, and takes up again where a killed recording stopped.

    Opening a folder that holds a set reads which texts are done; files that its manifest does
    not name are leftovers and get overwritten. The manifest is rewritten after each shard.
    Usable as a context manager: leaving the block closes it, after an exception too, so that
    finished texts are kept.

    Args:
        folder: of the set; made if missing.
        settings: what is recorded.
        texts_per_shard: texts in a shard of Parquet files, at least 1. At most this many finished
            texts are lost by a kill.

    Attributes:
        done: ids of the texts that need not be recorded again, the too short ones included.

    Raises:
        InputError: the folder holds a set with other settings; the message names the first
            that differs.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: TraceSettings,
        *,
        texts_per_shard: int = 16,
    ) -> None:
        if texts_per_shard < 1:
            raise InputError(f"texts_per_shard: {texts_per_shard} is below 1")
        self.folder = Path(folder)
        self.settings = settings
        self.texts_per_shard = texts_per_shard
        self.done: set[str] = set()
        self._pending: list[dict[str, Any]] = []
        if (self.folder / MANIFEST).exists():
            self._resume()
        else:
            if self.folder.exists() and not self.folder.is_dir():
                raise InputError(f"{self.folder}: not a folder")
            self._manifest = _new_manifest(self.settings)

    def _resume(self) -> None:
        manifest = read_manifest(self.folder)
        stored = TraceSettings.from_manifest(manifest, str(self.folder / MANIFEST)).as_manifest()
        for name, value in self.settings.as_manifest().items():
            if stored[name] != value:
                raise InputError(
                    f"{self.folder}: recorded with {name} {stored[name]!r}, cannot be resumed with "
                    f"{value!r}; use the same setting or another folder"
                )
        self._manifest = manifest
        self.done.update(manifest["skipped"])
        for shard in manifest["shards"]:
            check_shard(self.folder, shard)
            if shard["file"].startswith("texts-"):
                table = read_shard(self.folder, shard, TEXT_COLUMNS, self.settings.k)
                self.done.update(table.column("id").to_pylist())

    def __enter__(self) -> TraceWriter:
        """The writer itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close, whatever happened."""
        self.close()

    def add_text(
        self,
        *,
        text_id: str,
        task: str,
        source: str,
        prompt: str | None,
        prompt_tokens: ArrayLike | None,
        prompt_length: int,
        token: ArrayLike,
        end: str,
        final_ids: ArrayLike,
        final_logprobs: ArrayLike,
        final_gap: ArrayLike,
        top_ids: ArrayLike,
        top_logprobs: ArrayLike,
        entropy: ArrayLike,
        overrun: Overrun | None = None,
        probe: ArrayLike | None = None,
    ) -> bool:
        """Add one text of T emitted tokens; whether a proposal matches is computed here.

        Args:
            text_id: id of the prompt, new to this set.
            task: kind of prompt.
            source: where the prompt comes from.
            prompt: the prompt, or None if it can be cut again from its source.
            prompt_tokens: int (prompt_length,), or None likewise.
            prompt_length: tokens of the prompt, at least 1.
            token: int (T,), y_0 .. y_{T-1}.
            end: "eos", "budget" or "context".
            final_ids: int (T, k).
            final_logprobs: float (T, k), nats.
            final_gap: float (T,), logits.
            top_ids: int (T, m, k).
            top_logprobs: float (T, m, k), nats.
            entropy: float (T, m), nats.
            overrun: what was drafted behind wrong proposals; needed if and only if the set has it.
            probe: float (T, m), what the exit probe says; needed if and only if the set has one.

        Returns:
            Whether the text was stored: one with fewer than two tokens is no episode, it is only
            listed in the manifest under `skipped`.

        Raises:
            InputError: an id given before, or values of the wrong shape or that cannot be.
        """
        if text_id in self.done:
            raise InputError(f"text {text_id!r} is already in {self.folder}")
        tokens = np.asarray(token, dtype=np.int32)
        if tokens.ndim == 1 and tokens.size < 2:
            self._manifest["skipped"].append(text_id)
            self.done.add(text_id)
            return False
        text: dict[str, Any] = {
            "id": text_id,
            "task": task,
            "source": source,
            "prompt": prompt,
            "prompt_tokens": None if prompt_tokens is None else np.asarray(prompt_tokens, dtype=np.int32),
            "prompt_length": int(prompt_length),
            "end": end,
            "token": tokens,
            "final_ids": np.asarray(final_ids, dtype=np.int32),
            "final_logprobs": np.asarray(final_logprobs, dtype=np.float32),
            "final_gap": np.asarray(final_gap, dtype=np.float32),
            "top_ids": np.asarray(top_ids, dtype=np.int32),
            "top_logprobs": np.asarray(top_logprobs, dtype=np.float32),
            "entropy": np.asarray(entropy, dtype=np.float32),
        }
        if (probe is not None) != (self.settings.probe is not None):
            raise InputError(
                f"text {text_id!r}: what an exit probe says is {'missing' if probe is None else 'given'}, "
                f"but the set has probe {self.settings.probe!r}"
            )
        if probe is not None:
            text["probe"] = np.asarray(probe, dtype=np.float32)
        _check_shapes(text, self.settings)
        check_text(f"text {text_id!r}", tokens, end, text["prompt_length"], self.settings)
        if (overrun is not None) != (self.settings.overrun > 0):
            raise InputError(
                f"text {text_id!r}: overrun rows are {'missing' if overrun is None else 'given'}, but the "
                f"set has overrun {self.settings.overrun}"
            )
        branches = no_overrun(len(tokens), len(self.settings.depths), self.settings.k, probe is not None)
        if overrun is not None:
            check_overrun(f"text {text_id!r}", overrun, text["top_ids"][:, :, 0], tokens,
                          text["prompt_length"], self.settings)  # fmt: skip
            branches = overrun
        text["overrun_lengths"] = branches.lengths
        text |= {name: getattr(branches, name.removeprefix("overrun_")) for name in OVERRUN_ARRAYS}
        for name in ("final_logprobs", "final_gap", "top_logprobs", "entropy", *OVERRUN_ARRAYS[1:]):
            if not np.isfinite(text[name]).all():
                raise InputError(f"text {text_id!r}: {name} holds a value that is not finite")
        if probe is not None:
            text["overrun_probe"] = branches.probe
            for name in PROBE_ARRAYS:
                if not ((text[name] >= 0.0) & (text[name] <= 1.0)).all():
                    raise InputError(f"text {text_id!r}: {name} holds a value that is no probability")
        self._pending.append(text)
        self.done.add(text_id)
        if len(self._pending) >= self.texts_per_shard:
            self._write_shard()
        return True

    def close(self) -> None:
        """Write what is left; the folder is then a complete trace set."""
        if self._pending:
            self._write_shard()
        else:
            write_json(self.folder / MANIFEST, self._manifest)

    def _write_shard(self) -> None:
        number = sum(shard["file"].startswith("texts-") for shard in self._manifest["shards"])
        first = self._manifest["texts"]
        tables = {
            f"texts-{number:05d}.parquet": _texts_table(self._pending, first, self.settings),
            f"positions-{number:05d}.parquet": _positions_table(self._pending, first, self.settings),
        }
        if self.settings.overrun:
            tables[f"overrun-{number:05d}.parquet"] = _overrun_table(self._pending, first, self.settings)
        shards = []
        for name, table in tables.items():
            write_parquet(self.folder / name, table)
            shards.append({"file": name, "sha256": sha256(self.folder / name), "rows": table.num_rows})
        self._manifest["shards"] = self._manifest["shards"] + shards
        self._manifest["texts"] = first + len(self._pending)
        self._pending = []
        write_json(self.folder / MANIFEST, self._manifest)


def _check_shapes(text: dict[str, Any], settings: TraceSettings) -> None:
    length, m, k = len(text["token"]), len(settings.depths), settings.k
    shapes = {
        "token": (length,),
        "prompt_tokens": (text["prompt_length"],),
        "final_ids": (length, k),
        "final_logprobs": (length, k),
        "final_gap": (length,),
        "top_ids": (length, m, k),
        "top_logprobs": (length, m, k),
        "entropy": (length, m),
    }
    if "probe" in text:
        shapes["probe"] = (length, m)
    for name, shape in shapes.items():
        if text[name] is None:  # only prompt_tokens may be
            continue
        if text[name].shape != shape:
            raise InputError(f"text {text['id']!r}: {name} has shape {text[name].shape}, expected {shape}")


def _new_manifest(settings: TraceSettings) -> dict[str, Any]:
    from sde_gym import __version__

    return {
        "schema_version": SCHEMA_VERSION,
        **settings.as_manifest(),
        "package_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "texts": 0,
        "skipped": [],
        "shards": [],
    }


def _texts_table(texts: list[dict[str, Any]], first: int, settings: TraceSettings) -> pa.Table:
    import pyarrow as pa

    names = ("id", "task", "source", "prompt", "prompt_tokens", "prompt_length", "end")
    values = {
        "text": list(range(first, first + len(texts))),
        "tokens": [len(text["token"]) for text in texts],
        **{name: [text[name] for text in texts] for name in names},
    }
    return pa.table(values, schema=arrow_schema(TEXT_COLUMNS, settings.k))


def _positions_table(texts: list[dict[str, Any]], first: int, settings: TraceSettings) -> pa.Table:
    lengths = [len(text["token"]) for text in texts]
    joined = {name: np.concatenate([text[name] for text in texts]) for name in ROW_ARRAYS if name != "match"}
    values: dict[str, NDArray[Any]] = {
        "text": np.repeat(np.arange(first, first + len(texts)), lengths),
        "position": np.concatenate([np.arange(length) for length in lengths]),
        **{name: joined[name] for name in ("token", "final_ids", "final_logprobs", "final_gap")},
    }
    for index, depth in enumerate(settings.depths):
        values[f"d{depth}_ids"] = joined["top_ids"][:, index]
        values[f"d{depth}_logprobs"] = joined["top_logprobs"][:, index]
        values[f"d{depth}_entropy"] = joined["entropy"][:, index]
        values[f"d{depth}_match"] = joined["top_ids"][:, index, 0] == joined["token"]
        if settings.probe is not None:
            values[f"d{depth}_probe"] = np.concatenate([text["probe"][:, index] for text in texts])
    columns = position_columns(settings.depths, settings.probe is not None)
    return parquet_table(values, arrow_schema(columns, settings.k))


def _overrun_table(texts: list[dict[str, Any]], first: int, settings: TraceSettings) -> pa.Table:
    lengths = np.concatenate([text["overrun_lengths"] for text in texts])  # (rows, m)
    position = np.concatenate([np.arange(len(text["token"])) for text in texts])
    number = np.repeat(np.arange(first, first + len(texts)), [len(text["token"]) for text in texts])
    m = len(settings.depths)
    counts = lengths.ravel()
    ends = np.cumsum(counts)
    values: dict[str, NDArray[Any]] = {
        "text": np.repeat(np.repeat(number, m), counts),
        "position": np.repeat(np.repeat(position, m), counts),
        "depth": np.repeat(np.tile(settings.depths, len(position)), counts),
        "step": np.arange(counts.sum()) - np.repeat(ends - counts, counts) + 1,
        **{
            name.removeprefix("overrun_"): np.concatenate([text[name] for text in texts])
            for name in (*OVERRUN_ARRAYS, *(["overrun_probe"] if settings.probe is not None else []))
        },
    }
    return parquet_table(values, arrow_schema(overrun_columns(settings.probe is not None), settings.k))
