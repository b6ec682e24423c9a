"""Where each lane of the replay engine stands: arrays over lanes, which every way of stepping works on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.policies.observation import Phase

COUNTERS = (
    "layer_passes",
    "sequential_layers",
    "head_calls",
    "decisions",
    "drafted",
    "accepted",
    "rounds",
    "tokens",
)
"""Counted for each text since prefill, whose own costs and token do not count.

`layer_passes` are layers times tokens; `sequential_layers` counts a layer once however many tokens
pass it together; `head_calls` counts a head once however many tokens it scores, the last layer's
at each end of a round included. Work behind the observation just returned is already counted.
With episode "token" a walk counts as a round that emits one token, whoever it comes from, and
verification, which there is none of, costs nothing.
"""


ROUND = ("text", "position", "opening", "index", "phase", "proposals", "right", "branch")
"""What a row of `LaneState.rows` begins with; `COUNTERS` follow."""

TOLD = ("text", "depth", "phase", "proposals", *COUNTERS)
"""Whole numbers that an environment tells of: columns of it, and the depth reached instead of its index."""

ARRAYS = ("active", "resumable", "rows", "chain", "held", "spent", "sums")
"""Everything that a lane is: arrays whose first axis are the lanes."""


class LaneState:
    """State of n lanes; arrays (n,), int64 unless said otherwise. They are written to, never replaced.

    What compiled code reads and writes together lies together: the whole numbers of a lane are a row of
    one array, and most of the arrays below are columns of it.

    Args:
        lanes: n.
        window: tokens averaged by `trace`.
        max_draft: cap on the proposals of a round.
        longest: tokens of the longest text that its budget allows.

    Attributes:
        rows: int64 (n, 16), whose columns are those of `ROUND` and `COUNTERS`.
        active: bool, whether an episode is in progress.
        resumable: bool, whether the episode is over, but its text is not.
        text: index of the text.
        position: row of the text whose token is being predicted.
        opening: position at the start of the round.
        index: of the depth reached.
        phase: `Phase`.
        drafted: proposals of the round.
        right: proposals of the round before its first wrong one.
        branch: entry of `Tables` behind a wrong proposal, else -1.
        chain: float64, surprises of the round's proposals, summed, nats.
        held: float64, rewards that credit "round" still owes.
        spent: float64, what the text has cost since prefill, in the cost model's unit.
        counters: `COUNTERS`, by name.
        sums: float64 (n, size); entry x modulo `size` is the sum of the surprises of the hypothesis'
            first x tokens, so that a window's mean is one difference and a rollback is nothing but
            overwriting.
        wrap: size - 1, the size being a power of 2.
        reach: tokens that the window ever covers.
    """

    def __init__(self, lanes: int, window: int, max_draft: int, longest: int) -> None:
        self.active = np.zeros(lanes, dtype=bool)
        self.resumable = np.zeros(lanes, dtype=bool)
        self.rows = np.zeros((lanes, len(ROUND) + len(COUNTERS)), dtype=np.int64)
        self.chain = np.zeros(lanes, dtype=np.float64)
        self.held = np.zeros(lanes, dtype=np.float64)
        self.spent = np.zeros(lanes, dtype=np.float64)
        # The size covers a window behind the opening of a round and the longest draft after it, and
        # needs to cover no more than the longest text.
        size = 1 << (min(window + max_draft, longest) + 2).bit_length()
        self.sums = np.zeros((lanes, size), dtype=np.float64)
        self.wrap = size - 1
        self.reach = min(window, longest + 1)
        self._name_columns()
        self.position[:] = self.opening[:] = 1
        self.branch[:] = -1

    def _name_columns(self) -> None:
        """Make the columns of `rows` attributes."""
        columns = dict(zip((*ROUND, *COUNTERS), self.rows.T, strict=True))
        self.text, self.position, self.opening = columns["text"], columns["position"], columns["opening"]
        self.index, self.phase, self.branch = columns["index"], columns["phase"], columns["branch"]
        self.drafted, self.right = columns["proposals"], columns["right"]
        self.counters = {name: columns[name] for name in COUNTERS}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs: no column, which would be an array of its own there."""
        kept = (*ARRAYS, "wrap", "reach")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        self._name_columns()

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Make lanes, int64 (n,), distinct, what these other lanes are."""
        for name in ARRAYS:
            array = getattr(self, name)
            array[target] = array[source]

    def start(
        self, lane: NDArray[np.int64], text: NDArray[np.int64], first_surprise: NDArray[np.float64]
    ) -> None:
        """Put these texts at their beginning, with the surprises of their token 0, which prefill emitted."""
        self.text[lane] = text
        self.position[lane] = self.opening[lane] = 1
        self.index[lane] = 0
        self.phase[lane] = int(Phase.SELECT)
        self.drafted[lane] = self.right[lane] = 0
        self.branch[lane] = -1
        self.chain[lane] = self.held[lane] = self.spent[lane] = 0.0
        for counter in self.counters.values():
            counter[lane] = 0
        self.sums[lane, 0] = 0.0
        self.sums[lane, 1] = first_surprise
