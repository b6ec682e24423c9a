"""Leaving out attention and MLP sublayers anywhere in the stack: Draft & Verify's own drafter.

Zhang et al. (2023) draft with the model itself, some of its sublayers skipped. What is left out of a
layer is the residual branch, so the states pass unchanged. A skipped stack keeps no cache of its own:
it reads the exact keys and values of what was verified, and those of its drafts go into the slots
that the drafts have in the depth frontier, where the verification's pass through all layers
overwrites them. To the frontier the drafts are tokens that have not been run at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import read_json, write_json

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel
    from sde_gym.models.sequence import Sequence
    from sde_gym.models.slots import Rows

SKIP_SET_VERSION = 1
"""Version of the file format."""


@dataclass(frozen=True)
class SkipSet:
    """The sublayers that a draft leaves out; layers are counted from 0.

    Attributes:
        attention: layers whose attention is skipped, rising.
        mlp: layers whose MLP is skipped, rising.

    Raises:
        InputError: something that is not a layer, or one that is named twice.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            layers = getattr(self, name)
            if not isinstance(layers, tuple) or not all(
                type(layer) is int and layer >= 0 for layer in layers
            ):
                raise InputError(f"{name}: {layers!r} is not a tuple of layers, whole numbers from 0")
            if len(set(layers)) != len(layers):
                raise InputError(f"{name}: {layers} names a layer twice; name each once")
            object.__setattr__(self, name, tuple(sorted(layers)))

    @property
    def skipped(self) -> int:
        """Number of sublayers that are left out."""
        return len(self.attention) + len(self.mlp)

    def check(self, num_layers: int) -> None:
        """Raise InputError unless all layers are among the L of a model."""
        for name in ("attention", "mlp"):
            beyond = [layer for layer in getattr(self, name) if layer >= num_layers]
            if beyond:
                raise InputError(
                    f"{name}: layers {beyond} cannot be skipped, the model has the layers "
                    f"0..{num_layers - 1}; search a skip set for this model"
                )

    def kept(self, num_layers: int) -> int:
        """Sublayers that a draft runs through, of 2 L."""
        return 2 * num_layers - self.skipped

    def depth(self, num_layers: int) -> int:
        """The exit depth that costs about as much, 1..L-1: half the sublayers kept, rounded up.

        It is what a controller is told as its one candidate depth.
        """
        return max(1, min(num_layers - 1, (self.kept(num_layers) + 1) // 2))

    def save(self, path: Path | str, num_layers: int, facts: Mapping[str, Any] | None = None) -> None:
        """Write it as JSON, atomically.

        Args:
            path: the file.
            num_layers: L of the model it is for.
            facts: how it came about, plain JSON; kept under "facts".
        """
        self.check(num_layers)
        content = {
            "sde_gym_skip_set": SKIP_SET_VERSION,
            "num_layers": num_layers,
            "attention": list(self.attention),
            "mlp": list(self.mlp),
            "facts": dict(facts or {}),
        }
        write_json(Path(path), content)


def load_skip_set(path: Path | str, num_layers: int) -> SkipSet:
    """Read what `SkipSet.save` wrote.

    Args:
        path: the file.
        num_layers: L of the model it is to be used with.

    Raises:
        InputError: no such file, another version, an entry at fault, or a set for another number of
            layers; the message names the file.
    """
    where = Path(path)
    found = read_json(where)
    if not isinstance(found, dict) or "sde_gym_skip_set" not in found:
        raise InputError(f"{where}: not a skip set; `sde-gym search-skips` writes one")
    version = found["sde_gym_skip_set"]
    if version != SKIP_SET_VERSION:
        raise InputError(
            f"{where}: version {version!r} of the format, but this package reads {SKIP_SET_VERSION}; "
            "search again"
        )
    if found.get("num_layers") != num_layers:
        raise InputError(
            f"{where}: is for a model of {found.get('num_layers')} layers, not {num_layers}; "
            "search a skip set for this model"
        )
    layers = {}
    for name in ("attention", "mlp"):
        if not isinstance(found.get(name), list):
            raise InputError(f"{where}: {name} is missing or no list; search again")
        layers[name] = tuple(found[name])
    try:
        skip = SkipSet(**layers)
        skip.check(num_layers)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return skip


class SkippedStack:
    """One model's layers without a skip set, run on tokens that wait in a depth frontier.

    Args:
        model: any `LayeredModel`.
        skip: what to leave out.

    Raises:
        InputError: a layer that the model does not have, or a stack that can leave nothing out.
    """

    def __init__(self, model: LayeredModel, skip: SkipSet) -> None:
        skip.check(model.num_layers)
        without = getattr(model.stack, "without", None)
        if without is None:
            raise InputError(
                f"the layers of {model.name!r} ({type(model.stack).__name__}) cannot skip sublayers; "
                "draft by early exits instead"
            )
        self.model = model
        self.skip = skip
        self._stack = without(frozenset(skip.attention), frozenset(skip.mlp))

    @torch.inference_mode()
    def newest(self, sequence: Sequence) -> Tensor:
        """States at L of the newest token of a chain, (1, hidden_size), before the final norm.

        Args:
            sequence: a chain. Its newest token has not been run; those before it have been run to L,
                or by this stack since.

        The newest token's keys and values are stored in its slot; its depth stays 0.
        """
        total = len(sequence)
        rows = sequence._chain_rows(total - 1, total)
        return self._run(sequence, slice(total - 1, total), rows)

    @torch.inference_mode()
    def side_by_side(self, sequence: Sequence, slots: range, rows: Rows) -> Tensor:
        """The same for many tokens of a tree in one pass, (n, hidden_size).

        Args:
            sequence: a tree whose `slots` have not been run, their parents to L.
            slots: of the n tokens.
            rows: what `tree_rows` gave for them.
        """
        return self._run(sequence, slice(slots.start, slots.stop), rows)

    def logits(self, states: Tensor) -> Tensor:
        """What the final norm and the full head say of such states, float32 (n, V)."""
        return self.model.heads.logits(states, self.model.num_layers)

    def _run(self, sequence: Sequence, slots: slice, rows: Rows) -> Tensor:
        states: Tensor = self._stack.run(
            sequence._hidden[slots], 0, self.model.num_layers, rows, sequence._cache
        )
        return states


def tree_rows(sequence: Sequence, slots: range) -> Rows:
    """The mask and positions of a pass over these slots; good for any number of passes."""
    return sequence._tree_rows(torch.arange(slots.start, slots.stop, device=sequence.model.device))
