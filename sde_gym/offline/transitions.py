"""Logged decisions as flat arrays, and their file.

One row is one decision. Rows are ordered by episode and step, so the next observation of a row is
the observation of the row after it, unless the row is terminal. Every row carries the probability
with which the behaviour policy took its action, which is what off-policy estimators need.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.files import atomic_path
from sde_gym.policies.observation import Action, resolve_observation

#: Version of the `.npz` layout; raised when a column changes.
FORMAT_VERSION = 1

#: Columns of the file, their dtype and meaning. All are (n,), but `observation` is (n, f).
COLUMNS: dict[str, tuple[str, str]] = {
    "observation": ("float32", "what the agent saw, features in the order of `names`"),
    "action": ("int64", "0 continue, 1 exit"),
    "reward": ("float32", "reward of this decision, undiscounted"),
    "terminal": ("bool", "true on the last decision of an episode"),
    "episode": ("int64", "episode number, 0 upwards"),
    "step": ("int64", "decision number within the episode, 0 upwards"),
    "propensity": ("float64", "probability of `action` under the behaviour policy, in (0, 1]"),
    "text": ("int64", "index of the text in the trace set"),
    "component": ("int64", "which member of a per-episode mixture acted; 0 if there is only one"),
}


#: Key of `Transitions.settings` that names the phase to which they were restricted.
RESTRICTED = "restricted"


@dataclass(frozen=True, eq=False)
class Transitions:
    """Decisions of whole episodes, n in all; see `COLUMNS` for the arrays.

    Attributes:
        names: names of the f observation features, in order.
        settings: how the data were made: behaviour, seed, environment, trace set; plain JSON.
    """

    observation: NDArray[np.float32]  # (n, f)
    action: NDArray[np.int64]  # (n,)
    reward: NDArray[np.float32]  # (n,)
    terminal: NDArray[np.bool_]  # (n,)
    episode: NDArray[np.int64]  # (n,)
    step: NDArray[np.int64]  # (n,)
    propensity: NDArray[np.float64]  # (n,)
    text: NDArray[np.int64]  # (n,)
    component: NDArray[np.int64]  # (n,)
    names: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no learner should be fed.

        Raises:
            InputError: no rows, a feature that there is not or that is named twice, a column of another
                length or dtype, NaN or infinite numbers, an action that is not 0 or 1, a propensity
                outside (0, 1], or rows that are not whole episodes in order.
        """
        resolve_observation(self.names)
        count = len(self.action)
        if count == 0:
            raise InputError("the buffer is empty: 0 transitions; collect at least one episode")
        for name, (dtype, _) in COLUMNS.items():
            array = getattr(self, name)
            shape = (count, len(self.names)) if name == "observation" else (count,)
            if array.dtype != np.dtype(dtype) or array.shape != shape:
                raise InputError(
                    f"transitions: {name} is {array.dtype} {array.shape}; expected {dtype} {shape}"
                )
        for name in ("observation", "reward"):
            finite = np.isfinite(getattr(self, name)).reshape(count, -1).all(axis=1)
            if not finite.all():
                raise InputError(
                    f"transitions: {name} holds NaN or infinity, first in row {int(np.argmin(finite))}"
                )
        wrong = ~np.isin(self.action, [int(action) for action in Action])
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"transitions: action {int(self.action[row])} in row {row}; expected 0 (continue) or 1 (exit)"
            )
        wrong = ~((self.propensity > 0) & (self.propensity <= 1))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"transitions: propensity {float(self.propensity[row])} in row {row}; expected a "
                "probability in (0, 1]"
            )
        last = np.append(self.episode[1:] != self.episode[:-1], True)
        step = np.arange(count) - np.repeat(self.start[:-1], np.diff(self.start))
        repeated = len(np.unique(self.episode)) != len(self.start) - 1
        if repeated or not np.array_equal(last, self.terminal) or not np.array_equal(step, self.step):
            raise InputError(
                "transitions: rows are not whole episodes in order; each episode must be one block with "
                "steps 0, 1, 2, ... and terminal true on its last row only"
            )

    def __len__(self) -> int:
        return len(self.action)

    @cached_property
    def start(self) -> NDArray[np.int64]:
        """First row of every episode and, last, the number of rows: int64 (episodes + 1,)."""
        first = np.flatnonzero(np.append(True, self.episode[1:] != self.episode[:-1]))
        return np.append(first, len(self.episode)).astype(np.int64)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.start) - 1

    def returns(self) -> NDArray[np.float64]:
        """Undiscounted return of every episode, float64 (episodes,)."""
        sums: NDArray[np.float64] = np.add.reduceat(self.reward.astype(np.float64), self.start[:-1])
        return sums


def refuse_restricted(transitions: Transitions, why: str) -> None:
    """Refuse transitions whose rows are not all decisions that were taken (`sde_gym.offline.restricted`).

    Args:
        transitions: any.
        why: what they do not allow, and the remedy, for the message.

    Raises:
        InputError: they are restricted to one phase.
    """
    phase = transitions.settings.get(RESTRICTED)
    if phase is not None:
        raise InputError(f"transitions: restricted to the phase {phase!r}, {why}")


def save_transitions(path: str | Path, transitions: Transitions) -> Path:
    """Write an `.npz` that is byte for byte the same for the same transitions.

    Args:
        path: target; replaced as a whole.
        transitions: what to write.

    Returns:
        The path written.
    """
    target = Path(path)
    arrays: dict[str, Any] = {name: getattr(transitions, name) for name in COLUMNS}
    header = {
        "format_version": FORMAT_VERSION,
        "names": list(transitions.names),
        "settings": dict(transitions.settings),
    }
    arrays["header"] = np.array(json.dumps(header, sort_keys=True, allow_nan=False))
    with atomic_path(target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            # A ZipInfo of our own: the default one would carry the time of day.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asanyarray(array), allow_pickle=False)
    return target


def load_transitions(path: str | Path) -> Transitions:
    """Read transitions back; nothing in the file is executed.

    Raises:
        InputError: the file is missing, cut, of another version, or holds what `Transitions` refuses.
    """
    source = Path(path)
    try:
        with np.load(source, allow_pickle=False) as archive:
            header = json.loads(str(archive["header"][()]))
            if header["format_version"] != FORMAT_VERSION:
                raise InputError(
                    f"{source}: transitions of format version {header['format_version']}; this package "
                    f"reads version {FORMAT_VERSION}; collect them again"
                )
            arrays = {name: archive[name] for name in COLUMNS}
            return Transitions(**arrays, names=tuple(header["names"]), settings=header["settings"])
    except FileNotFoundError:
        raise InputError(f"{source}: no such file; collect transitions first") from None
    except InputError as error:
        raise InputError(str(error) if str(source) in str(error) else f"{source}: {error}") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError,
            zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        raise InputError(f"{source}: not a transitions file, or a cut one ({error})") from None
