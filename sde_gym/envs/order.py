"""Which text an environment plays next: in an order drawn by its seed, as recorded, or as asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.arguments import choice
from sde_gym.errors import InputError
from sde_gym.policies.rules import counter_uniform

ORDERS = ("shuffled", "sequential")
"""Orders of the texts: drawn anew from the seed whenever all were played, or as recorded."""

_STREAM = 0x0D3  # keeps the draws apart from those of controllers
_CHUNK = 1 << 20  # draws made at a time, so that many lanes need no more memory than a few


class TextOrder:
    """Which text each of n lanes plays next.

    A shuffled order sorts the texts by random draws that depend on the lane's seed, on how many
    times all texts were played, and on the text: a lane among many plays what it would play alone.

    Args:
        texts: int64 (count,), count >= 1, indices of the texts to play.
        order: one of `ORDERS`.
        lanes: n.

    Raises:
        InputError: an unknown order.
    """

    def __init__(self, texts: NDArray[np.int64], order: str = "shuffled", lanes: int = 1) -> None:
        self.texts = texts
        self._seed = np.zeros(lanes, dtype=np.int64)
        self._played = np.zeros(lanes, dtype=np.int64)
        # Places in `texts`, as small as they fit: with many lanes this is all that a lane costs here.
        self._queue: NDArray[np.unsignedinteger[Any]] | None = None
        if choice("order", order, ORDERS) == "shuffled":
            self._queue = np.zeros((lanes, len(texts)), dtype=np.min_scalar_type(len(texts) - 1))

    def seed(self, lanes: NDArray[np.int64], seeds: Sequence[int]) -> None:
        """Start the order of these lanes over, with a seed for each of them (taken modulo 2**64)."""
        self._seed[lanes] = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64).view(np.int64)
        self._played[lanes] = 0

    def next(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The next text of each of these distinct lanes, int64 (n,)."""
        epoch, place = np.divmod(self._played[lanes], len(self.texts))
        self._played[lanes] += 1
        if self._queue is not None:
            first = place == 0
            if first.any():
                self._shuffle(self._queue, lanes[first], epoch[first])
            place = self._queue[lanes, place]
        texts: NDArray[np.int64] = self.texts[place]
        return texts

    def _shuffle(
        self, queue: NDArray[np.unsignedinteger[Any]], lanes: NDArray[np.int64], epoch: NDArray[np.int64]
    ) -> None:
        """Draw the order in which these lanes play all texts for the epoch-th time."""
        count = len(self.texts)
        together = max(_CHUNK // count, 1)
        for at in range(0, len(lanes), together):
            some = slice(at, at + together)
            turns = epoch[some, None] * count + np.arange(count)
            draws = counter_uniform(0, self._seed[lanes[some], None], turns, _STREAM)
            queue[lanes[some]] = np.argsort(draws, axis=1, kind="stable")


def text_option(options: Mapping[str, Any] | None) -> Any:
    """What `reset(options={"text": ...})` asks for, None without options; InputError on any other option."""
    if options is None or (isinstance(options, Mapping) and not options):
        return None
    if not isinstance(options, Mapping):
        raise InputError(f"options: {options!r} is not a dict like {{'text': 3}}")
    if set(options) != {"text"}:
        raise InputError(f"options: {sorted(map(str, options))} given, only 'text' is known")
    return options["text"]


def chosen_text(choice: Any, texts: NDArray[np.int64], ids: Sequence[str]) -> int:
    """Index of the text that is asked for by index or id.

    Args:
        choice: what was asked for.
        texts: int64 (count,), indices that may be.
        ids: id of every text there is, played or not.

    Raises:
        InputError: no such text among them.
    """
    if isinstance(choice, str):
        if choice not in ids:
            raise InputError(f"options: no text has the id {choice!r} (for instance {list(ids[:3])})")
        choice = ids.index(choice)
    if isinstance(choice, (bool, np.bool_)) or not isinstance(choice, (int, np.integer)):
        raise InputError(f"options: text {choice!r} is neither an index nor an id")
    if choice not in texts:
        raise InputError(
            f"options: text {choice} is not among the {len(texts)} texts of this environment "
            f"(0..{len(ids) - 1}, of the chosen tasks)"
        )
    return int(choice)
