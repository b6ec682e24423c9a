"""What the decoder shows at a decision: the features of one text, kept up while it is decoded."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.errors import InputError
from sde_gym.models.heads import row_summary
from sde_gym.models.layered import LayeredModel
from sde_gym.models.probe import ExitProbe
from sde_gym.policies.observation import HEAD_FEATURES, Phase, observation_row
from sde_gym.settings import LONGEST_DRAFT


def check_features(
    model: LayeredModel, names: tuple[str, ...], max_draft: int, k: int, window: int
) -> tuple[int, int, int]:  # fmt: skip
    """`max_draft`, `k` and `window` as ints; InputError unless in range, and the exit heads have k tokens."""
    max_draft = whole_number("max_draft", max_draft, 1, LONGEST_DRAFT)
    k, window = whole_number("k", k, 1), whole_number("window", window, 1)
    columns = model.vocab_size if model.compact_vocabulary is None else len(model.compact_vocabulary)
    if names and max(k, 2) > columns:
        raise InputError(
            f"k {k} exceeds the {columns} tokens of the exit heads; use a smaller k (at least 2)"
        )
    return max_draft, k, window


def checked_probe(model: LayeredModel, names: tuple[str, ...], depths: Sequence_[int]) -> ExitProbe | None:
    """The model's exit probe if the features `names` need one.

    Raises:
        InputError: they do, and the model has none, or none that knows these depths.
    """
    if "probe" not in names:
        return None
    if model.probe is None:
        raise InputError(
            f"observation: the feature 'probe' was asked for, but {model.name!r} has no exit probe; leave it "
            "out, or train one (`sde-gym train-probe`)"
        )
    unknown = sorted(set(depths) - set(model.probe.depths))
    if unknown:
        raise InputError(
            f"observation: the exit probe of {model.name!r} knows the depths {list(model.probe.depths)}, not "
            f"{unknown}; choose among them, leave 'probe' out, or train another"
        )
    return model.probe


class TextFeatures:
    """The features of one text: what the exit head says, and what happened before.

    Args:
        model: any `LayeredModel`.
        depths: candidate exit depths.
        names: features of the observation.
        max_draft: most proposals in a round.
        k: tokens averaged by `confidence`.
        window: tokens averaged by `trace`.

    Raises:
        InputError: the feature `probe` without an exit probe for these depths.

    Attributes:
        needs_trace: whether the surprise of every token is wanted.
        needs_surprise: whether that of every proposal is.
        probe: the exit probe, if its feature is wanted.
        states: what the head saw at this decision, for the probe.
        newest: -log p of the newest proposal, nats.
    """

    def __init__(
        self, model: LayeredModel, depths: tuple[int, ...], names: tuple[str, ...],
        *, max_draft: int, k: int, window: int,
    ) -> None:  # fmt: skip
        self.names = names
        self.depths = depths
        self.num_layers = model.num_layers
        self.max_draft = max_draft
        self.k = k
        self.window = window
        self.needs_trace = "trace" in names
        self.needs_surprise = self.needs_trace or "chain" in names
        self.probe = checked_probe(model, names, depths)
        self.states: torch.Tensor | None = None
        self.newest = 0.0
        if not HEAD_FEATURES.isdisjoint(names):
            row_summary()  # made ready now, not at the first token
        self._free_columns = [n for n, name in enumerate(names) if name not in HEAD_FEATURES]
        self._free_names = tuple(names[column] for column in self._free_columns)
        # -log p(top-1) of every token of the hypothesis, by text position, each at its depth
        self._surprise: list[float] = []
        self._chain = 0.0

    def open_round(self) -> None:
        """A round begins."""
        self._chain = 0.0

    def proposed(self, logits: torch.Tensor | None) -> None:
        """A proposal was made; `logits` of its head if nobody has looked at them."""
        if logits is not None and self.needs_surprise:
            self.newest = surprise(logits)[0]

    def fed(self) -> None:
        """The newest proposal is part of the hypothesis now."""
        if self.needs_surprise:
            self._chain += self.newest
            self._surprise.append(self.newest)

    def emitted(self, logits: torch.Tensor) -> None:
        """The final layer's own token is part of the text; its logits, float32 (1, V)."""
        if self.needs_trace:
            self._surprise.append(surprise(logits)[0])

    def verified(self, fed: int, accepted: int) -> None:
        """Of `fed` proposals in the hypothesis the first `accepted` stay, each with the surprise of the
        depth that proposed it; one more than was fed may be accepted."""
        if not self.needs_trace:
            return
        if accepted > fed:
            self._surprise.append(self.newest)
        else:
            del self._surprise[len(self._surprise) - fed + accepted :]

    def read(
        self, logits: torch.Tensor, phase: Phase, index: int, drafted: int, acceptance: float,
        column_before: int | None,
    ) -> tuple[NDArray[np.float32], int]:  # fmt: skip
        """The observation at a decision whose head was read.

        Args:
            logits: float32 (1, C), of the exit head.
            phase: of the decision.
            index: of its depth.
            drafted: proposals of the round so far.
            acceptance: accepted over proposed in the finished rounds.
            column_before: the head's best column at the candidate depth before, None if it was not read.

        Returns:
            float32 (1, f), and the head's best column.
        """
        column, best, entropy = row_summary()(logits.numpy(force=True)[0], max(self.k, 2))
        self.newest = -best[0]
        stable = phase == Phase.SELECT and column_before == column
        probe = 0.0
        if self.probe is not None and self.states is not None:
            states = self.states.float().cpu().numpy()
            logprobs, entropies = np.array([best], np.float32), np.array([entropy], np.float32)
            probe = float(self.probe(self.depths[index], states, logprobs, entropies)[0])
        row = self._row(self.names, phase, index, drafted, acceptance, best, entropy, stable, probe)
        return row, column

    def unread(self, phase: Phase, index: int, drafted: int, acceptance: float) -> NDArray[np.float32]:
        """The observation where the head was not read, float32 (1, f): what needs it is 0."""
        rows = np.zeros((1, len(self.names)), np.float32)
        if self._free_columns:
            rows[:, self._free_columns] = self._row(self._free_names, phase, index, drafted, acceptance)
        return rows

    def _row(
        self, names: tuple[str, ...], phase: Phase, index: int, drafted: int, acceptance: float,
        top_logprobs: Sequence_[float] = (), entropy: float = 0.0, stable: bool = False, probe: float = 0.0,
    ) -> NDArray[np.float32]:  # fmt: skip
        recent = self._surprise[-self.window :]
        return observation_row(
            names,
            top_logprobs=top_logprobs,
            entropy=entropy,
            trace=sum(recent) / len(recent) if recent else 0.0,
            depth=self.depths[index],
            num_layers=self.num_layers,
            phase=phase,
            draft_length=drafted,
            max_draft=self.max_draft,
            stable=stable,
            acceptance=acceptance,
            chain=self._chain,
            probe=probe,
            k=self.k,
        )


def surprise(logits: torch.Tensor) -> list[float]:
    """-log p of the most probable token of each row, nats."""
    values: list[float] = (torch.logsumexp(logits, -1) - logits.amax(-1)).tolist()
    return values
