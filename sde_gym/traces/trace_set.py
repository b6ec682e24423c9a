"""A trace set in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError

ROW_ARRAYS = (
    "token",
    "top_ids",
    "top_logprobs",
    "entropy",
    "match",
    "final_ids",
    "final_logprobs",
    "final_gap",
)
OVERRUN_ARRAYS = ("overrun_proposal", "overrun_logprobs", "overrun_entropy")
PROBE_ARRAYS = ("probe", "overrun_probe")
"""Arrays that only sets recorded with an exit probe have."""
TEXT_LISTS = ("text_ids", "tasks", "ends", "prompt_tokens", "prompt_lengths", "prompts", "sources")


@dataclass(frozen=True, eq=False, repr=False)
class TraceSet:
    """Recorded texts in memory, flat over all P positions of all N texts; arrays are read-only.

    Attributes:
        manifest: the folder's manifest, or the same keys for a set made in memory.
        depths: the m recorded depths, rising.
        num_layers: L.
        k: most probable tokens stored a row.
        start: int64 (N + 1,), first row of each text; tokens of text n are
            `token[start[n]:start[n + 1]]`.
        token: int32 (P,), emitted tokens.
        top_ids: int32 (P, m, k), most probable tokens at each depth, best first; [..., 0] is
            the proposal.
        top_logprobs: float32 (P, m, k), nats.
        entropy: float32 (P, m), nats.
        match: bool (P, m), whether the proposal equals the emitted token.
        final_ids: int32 (P, k), the same for the last layer.
        final_logprobs: float32 (P, k), nats.
        final_gap: float32 (P,), difference of the two best final logits.
        branch_start: int64 (P m + 1,), first overrun row of each position and depth: those of
            row p and depth index i are branch_start[p m + i] to branch_start[p m + i + 1], none
            where the proposal is right.
        overrun_proposal: int32 (R,), what that depth proposes next behind its wrong proposal.
        overrun_logprobs: float32 (R, k), nats, best first.
        overrun_entropy: float32 (R,), nats.
        text_ids: N ids.
        tasks: N task names.
        ends: N of "eos", "budget", "context".
        prompt_tokens: N int32 arrays, None where they can be cut again from their source.
        prompt_lengths: N numbers of prompt tokens.
        prompts: N prompts, None where they can be cut again from their source.
        sources: N sources.
        probe: float32 (P, m), the exit probe's probability that the proposal equals the emitted
            token; None if the set was recorded without one.
        overrun_probe: float32 (R,), the same behind wrong proposals, as if what lies before were
            right; None likewise.
    """

    manifest: dict[str, Any]
    depths: tuple[int, ...]
    num_layers: int
    k: int
    start: NDArray[np.int64]
    token: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    match: NDArray[np.bool_]
    final_ids: NDArray[np.int32]
    final_logprobs: NDArray[np.float32]
    final_gap: NDArray[np.float32]
    branch_start: NDArray[np.int64]
    overrun_proposal: NDArray[np.int32]
    overrun_logprobs: NDArray[np.float32]
    overrun_entropy: NDArray[np.float32]
    text_ids: list[str]
    tasks: list[str]
    ends: list[str]
    prompt_tokens: list[NDArray[np.int32] | None]
    prompt_lengths: list[int]
    prompts: list[str | None]
    sources: list[str]
    probe: NDArray[np.float32] | None = None
    overrun_probe: NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        """What it is and how large, in a line."""
        return (
            f"TraceSet({self.manifest.get('model')!r}, {len(self)} texts, {len(self.token)} positions, "
            f"depths {list(self.depths)} of {self.num_layers}, overrun {self.overrun})"
        )

    def __len__(self) -> int:
        """N, the number of texts."""
        return len(self.text_ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (N,), emitted tokens of each text."""
        return np.diff(self.start)

    @property
    def overrun(self) -> int:
        """Most rows recorded behind a wrong proposal; 0 if none were."""
        return int(self.manifest["overrun"])

    def check_overrun(self, purpose: str) -> None:
        """Raise InputError unless what lies behind wrong proposals was recorded; `purpose` needs it."""
        if not self.overrun:
            raise InputError(
                "traces: recorded without overrun, which hides the cost of drafting on behind a wrong "
                f"proposal; {purpose} needs it: record the set again with overrun above 0"
            )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return tuple(self.manifest["eos_token_ids"])

    def tokens_of(self, text: int) -> NDArray[np.int32]:
        """int32 (T,), the emitted tokens of one text."""
        return self.token[self.start[text] : self.start[text + 1]]

    def texts_of(self, tasks: Iterable[str] | None) -> NDArray[np.int64]:
        """Indices of the texts of these tasks, int64; of all texts for None.

        Raises:
            InputError: a task that no text has; the message lists those there are.
        """
        return texts_of_tasks(self.tasks, tasks)

    def index_of(self, text_id: str) -> int:
        """Index of the text with this id; InputError if there is none."""
        try:
            return self.text_ids.index(text_id)
        except ValueError:
            raise InputError(
                f"text: no text has the id {text_id!r} (for instance {self.text_ids[:3]})"
            ) from None

    def subset(self, texts: Sequence[int] | NDArray[np.int64]) -> TraceSet:
        """A set of only these texts, in this order; their indices start from 0 again.

        Raises:
            InputError: no text, an index out of range, or one given twice.
        """
        chosen = [int(text) for text in texts]
        for text in chosen:
            if not 0 <= text < len(self):
                raise InputError(f"texts: {text} is outside 0..{len(self) - 1}")
        if not chosen or len(set(chosen)) != len(chosen):
            raise InputError("texts: give at least one index and none twice")
        rows = np.concatenate([np.arange(self.start[text], self.start[text + 1]) for text in chosen])
        arrays: dict[str, Any] = {name: frozen(getattr(self, name)[rows]) for name in ROW_ARRAYS}
        m = len(self.depths)
        entries = (rows[:, None] * m + np.arange(m)).ravel()
        first, counts = self.branch_start[entries], np.diff(self.branch_start)[entries]
        branch_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        branches = np.repeat(first - branch_start[:-1], counts) + np.arange(branch_start[-1])
        arrays |= {name: frozen(getattr(self, name)[branches]) for name in OVERRUN_ARRAYS}
        if self.probe is not None and self.overrun_probe is not None:
            arrays["probe"] = frozen(self.probe[rows])
            arrays["overrun_probe"] = frozen(self.overrun_probe[branches])
        arrays["branch_start"] = frozen(branch_start)
        lists: dict[str, Any] = {name: [getattr(self, name)[text] for text in chosen] for name in TEXT_LISTS}
        start = np.concatenate([[0], np.cumsum(self.lengths[chosen])]).astype(np.int64)
        manifest = {**self.manifest, "texts": len(chosen)}
        return replace(self, manifest=manifest, start=frozen(start), **arrays, **lists)


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The array, read-only: sets are shared between environments."""
    array.setflags(write=False)
    return array


def texts_of_tasks(tasks: Sequence[str], wanted: Iterable[str] | None) -> NDArray[np.int64]:
    """Indices of the texts of these tasks, int64; of all texts for None.

    Args:
        tasks: task of each text.
        wanted: names of tasks.

    Raises:
        InputError: a task that no text has; the message lists those there are.
    """
    if wanted is None:
        return np.arange(len(tasks), dtype=np.int64)
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise InputError(f"tasks: {wanted!r} is not a list of task names")
    chosen = list(wanted)
    known = sorted(set(tasks))
    if not chosen:
        raise InputError(f"tasks: empty; there are {', '.join(known)}")
    for task in chosen:
        if task not in known:
            raise InputError(f"tasks: no text has task {task!r}; there are {', '.join(known)}")
    return np.array([n for n, task in enumerate(tasks) if task in chosen], dtype=np.int64)
