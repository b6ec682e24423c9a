"""What a trace set holds, as data: one table of columns that writer, reader and documentation share.

Row t of a text holds everything about the prediction of its t-th emitted token y_t, made from
the state of the token before it (the last prompt token for t = 0), at every recorded depth and at
the last layer. All log-probabilities are at temperature 1, in nats, from raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sde_gym.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 3
"""Rises with every change that an older reader would misread; the reader refuses other versions.

The columns of `PROBE_COLUMNS` and `OVERRUN_PROBE_COLUMNS` came later: sets without them, and manifests
without the entry `probe`, are as valid as before."""

ENDS = ("eos", "budget", "context")
"""Why a text ended: an end-of-text token, max_new_tokens, or the model's context limit."""


@dataclass(frozen=True)
class Column:
    """One column of a Parquet file.

    Attributes:
        name: as stored; "{depth}" stands for each recorded depth.
        dtype: of one element: "int32", "float32", "bool" or "string".
        shape: "" for one value a row, "k" for a list of k, "*" for a list of any length.
        unit: of the numbers, "" where there is none.
        meaning: one sentence.
        nullable: whether a row may have no value.
    """

    name: str
    dtype: str
    shape: str
    unit: str
    meaning: str
    nullable: bool = False


TEXT_COLUMNS: tuple[Column, ...] = (
    Column("text", "int32", "", "", "Number of the text, from 0, in the order of recording."),
    Column("id", "string", "", "", "Id of the prompt, unique in the set."),
    Column("task", "string", "", "", "Kind of prompt."),
    Column("source", "string", "", "", "Where the prompt comes from: a file, or a reference it was cut by."),
    Column(
        "prompt", "string", "", "", "The prompt; null where it can be cut again from its reference.", True
    ),
    Column(
        "prompt_tokens",
        "int32",
        "*",
        "token id",
        "The prompt as the model read it; null where it can be cut again from its reference.",
        True,
    ),
    Column("prompt_length", "int32", "", "tokens", "Number of tokens of the prompt."),
    Column("tokens", "int32", "", "tokens", "T, the number of emitted tokens."),
    Column("end", "string", "", "", "Why the text ended: eos, budget or context."),
)
"""Columns of the files texts-*.parquet, one row a text."""

POSITION_COLUMNS: tuple[Column, ...] = (
    Column("text", "int32", "", "", "Number of the text."),
    Column("position", "int32", "", "tokens", "t, from 0, of the token this row predicts."),
    Column("token", "int32", "", "token id", "y_t, the emitted token."),
    Column("final_ids", "int32", "k", "token id", "Most probable tokens at the last layer, best first."),
    Column("final_logprobs", "float32", "k", "nats", "Their log-probabilities, over the full vocabulary."),
    Column("final_gap", "float32", "", "logits", "Difference of the two best logits at the last layer."),
)
"""Columns of the files positions-*.parquet, one row a text position."""

DEPTH_COLUMNS: tuple[Column, ...] = (
    Column(
        "d{depth}_ids",
        "int32",
        "k",
        "token id",
        "Most probable tokens at this depth, as ids of the full vocabulary, best first; [0] is the proposal.",
    ),
    Column(
        "d{depth}_logprobs", "float32", "k", "nats", "Their log-probabilities, over the head's vocabulary."
    ),
    Column("d{depth}_entropy", "float32", "", "nats", "Entropy over the head's vocabulary."),
    Column("d{depth}_match", "bool", "", "", "Whether the proposal equals the emitted token."),
)
"""Further columns of positions-*.parquet, for each recorded depth in turn."""

PROBE_COLUMNS: tuple[Column, ...] = (
    Column(
        "d{depth}_probe", "float32", "", "probability",
        "What the exit probe says: how probable it is that the proposal equals the emitted token.",
    ),
)  # fmt: skip
"""Columns behind those of a depth in sets recorded with an exit probe."""

OVERRUN_COLUMNS: tuple[Column, ...] = (
    Column("text", "int32", "", "", "Number of the text."),
    Column("position", "int32", "", "tokens", "t, the position at which the proposal was wrong."),
    Column("depth", "int32", "", "layers", "The depth that proposed it, and at which drafting went on."),
    Column("step", "int32", "", "tokens", "How many tokens behind the wrong one this row predicts, from 1."),
    Column("proposal", "int32", "", "token id", "Most probable token, as an id of the full vocabulary."),
    Column("logprobs", "float32", "k", "nats", "Log-probabilities of the most probable tokens, best first."),
    Column("entropy", "float32", "", "nats", "Entropy over the head's vocabulary."),
)
"""Columns of the files overrun-*.parquet, one row for each token drafted behind a wrong proposal.

Rows are ordered by text, position, depth and step. Positions start from 1: token 0 is prefill's."""

OVERRUN_PROBE_COLUMNS: tuple[Column, ...] = (
    Column(
        "probe", "float32", "", "probability",
        "What the exit probe says of the proposal, as if the tokens before it were right.",
    ),
)  # fmt: skip
"""Columns behind those of overrun-*.parquet in sets recorded with an exit probe."""


@dataclass(frozen=True)
class TraceSettings:
    """What determines the contents of a trace set; a resumed recording must have the same.

    Attributes:
        model: name or path of the model.
        model_hash: hash of its weights.
        num_layers: L.
        depths: recorded depths, rising, 1 <= depth < num_layers.
        eos_token_ids: ids that end a text.
        max_new_tokens: token budget of a text, token 0 of prefill included.
        context_limit: tokens that fit into the model's context; the last emitted one need not.
        head: which exit heads: "full" for the model's own over its whole vocabulary, else a hash
            of the compact vocabulary and adapters.
        dtype: of the model when it was recorded.
        k: how many most probable tokens are stored a row.
        overrun: most rows stored behind a wrong proposal, enough for drafts of overrun + 1; 0 = none.
        probe: hash of the exit probe whose probabilities are stored; None = none are.
        exit_head: parameters of an exit head over those of a layer; 0 where that is not known.
        final_head: the same of the last layer's head.
    """

    model: str
    model_hash: str
    num_layers: int
    depths: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    context_limit: int
    head: str = "full"
    dtype: str = "float32"
    k: int = 8
    overrun: int = 0
    probe: str | None = None
    exit_head: float = 0.0
    final_head: float = 0.0

    def __post_init__(self) -> None:
        """Make the tuples tuples of int and refuse values that cannot be."""
        object.__setattr__(self, "depths", tuple(int(depth) for depth in self.depths))
        object.__setattr__(self, "eos_token_ids", tuple(int(token) for token in self.eos_token_ids))
        check_depths(self.depths, self.num_layers)
        if self.k < 2:
            raise InputError(f"k: {self.k} is below 2, the two best tokens are needed")
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens: {self.max_new_tokens} is below 2, no decision would be left")
        if self.context_limit < 2:
            raise InputError(
                f"context_limit: {self.context_limit} is below 2, no text of two tokens would fit"
            )
        if self.overrun < 0:
            raise InputError(f"overrun: {self.overrun} is below 0")
        if not (self.probe is None or (isinstance(self.probe, str) and self.probe)):
            raise InputError(f"probe: {self.probe!r} is neither a hash nor null")
        if not (0 <= self.exit_head < math.inf and 0 <= self.final_head < math.inf):
            raise InputError(f"exit_head, final_head: {self.exit_head}, {self.final_head} are no sizes")

    def as_manifest(self) -> dict[str, Any]:
        """The settings as plain JSON types."""
        values = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], where: str) -> TraceSettings:
        """The settings in a manifest; `where` names its file in errors."""
        # Sets recorded before there were these do not name them.
        optional = {"probe", "exit_head", "final_head"}
        names = [field.name for field in fields(cls) if field.name in manifest or field.name not in optional]
        missing = [name for name in names if name not in manifest]
        if missing:
            raise InputError(f"{where}: not the manifest of a trace set, {', '.join(missing)} missing")
        try:
            return cls(**{name: manifest[name] for name in names})
        except (TypeError, ValueError, OverflowError, InputError) as error:
            raise InputError(f"{where}: {error}") from None


def check_depths(depths: tuple[int, ...], num_layers: int, name: str = "depths") -> None:
    """Raise InputError unless the depths rise strictly within 1..num_layers - 1."""
    if not depths:
        raise InputError(f"{name}: empty; give rising depths within 1..{num_layers - 1}")
    for depth in depths:
        if not 1 <= depth < num_layers:
            raise InputError(
                f"{name}: {depth} is outside 1..{num_layers - 1} (the model has {num_layers} layers)"
            )
    if any(deeper <= depth for depth, deeper in pairwise(depths)):
        raise InputError(f"{name}: {list(depths)} do not rise strictly")


def position_columns(depths: tuple[int, ...], probe: bool = False) -> list[Column]:
    """All columns of a positions file with these depths, with an exit probe or without, in order."""
    columns = list(POSITION_COLUMNS)
    for depth in depths:
        for column in DEPTH_COLUMNS + (PROBE_COLUMNS if probe else ()):
            name = column.name.format(depth=depth)
            columns.append(Column(name, column.dtype, column.shape, column.unit, column.meaning))
    return columns


def overrun_columns(probe: bool = False) -> list[Column]:
    """All columns of an overrun file, with an exit probe or without, in order."""
    return [*OVERRUN_COLUMNS, *(OVERRUN_PROBE_COLUMNS if probe else ())]


def arrow_schema(columns: list[Column] | tuple[Column, ...], k: int) -> pa.Schema:
    """The Arrow schema of a table with these columns and lists of k."""
    import pyarrow as pa

    scalars = {"int32": pa.int32(), "float32": pa.float32(), "bool": pa.bool_(), "string": pa.string()}

    def arrow_type(column: Column) -> pa.DataType:
        scalar = scalars[column.dtype]
        if column.shape == "k":
            return pa.list_(scalar, k)
        return pa.list_(scalar) if column.shape == "*" else scalar

    return pa.schema([(column.name, arrow_type(column)) for column in columns])


def text_budget(max_new_tokens: int, context_limit: int, prompt_length: ArrayLike) -> NDArray[np.int64]:
    """Tokens that texts may have, int64 (N,), from the lengths of their prompts, int (N,).

    The context limit counts as budget: every token but the last one emitted has to fit into the
    context behind the prompt.
    """
    room = context_limit - np.asarray(prompt_length, dtype=np.int64) + 1
    return np.minimum(max_new_tokens, room)


def check_text(
    where: str, token: NDArray[np.int32], end: str, prompt_length: int, settings: TraceSettings
) -> None:
    """Raise InputError unless tokens (T,), end and prompt length of a text agree with the settings."""
    if end not in ENDS:
        raise InputError(f"{where}: end {end!r} is not one of {', '.join(ENDS)}")
    ends_text = np.isin(token, settings.eos_token_ids)
    if ends_text[:-1].any():
        raise InputError(f"{where}: an end-of-text token stands before the last token")
    if bool(ends_text[-1]) != (end == "eos"):
        raise InputError(f"{where}: end is {end!r}, but its last token is {int(token[-1])}")
    if prompt_length < 1:
        raise InputError(f"{where}: prompt_length {prompt_length} is below 1")
    budget = int(text_budget(settings.max_new_tokens, settings.context_limit, prompt_length))
    exact = {"eos": len(token), "budget": settings.max_new_tokens}
    # A text that fills budget and context at once may be called either.
    expected = exact.get(end, settings.context_limit - prompt_length + 1)
    if len(token) > budget or len(token) != expected:
        raise InputError(
            f"{where}: {len(token)} tokens, end {end!r}, max_new_tokens {settings.max_new_tokens}, "
            f"context_limit {settings.context_limit}, prompt_length {prompt_length}: these do not fit"
        )
