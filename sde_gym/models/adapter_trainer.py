"""Training of one depth's adapter: its examples, the loss, the steps, held-out agreement, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path
from sde_gym.models.adapter_settings import HELD_OUT, AdapterSettings
from sde_gym.models.adapters import ResidualAdapter, new_adapter
from sde_gym.models.layered import LayeredModel
from sde_gym.models.own_states import load_own_states


@dataclass(frozen=True, eq=False)
class Examples:
    """What one depth learns from: n positions.

    Attributes:
        hidden: bfloat16 (n, hidden_size).
        columns: int64 (n, k), columns of the compact head, best first; -1 where it has none for the token.
        share: float32 (n, k), the last layer's probabilities among these k.
        greedy: bool (n,), whether the position is in front of a greedy token.
    """

    hidden: Tensor
    columns: Tensor
    share: Tensor
    greedy: Tensor

    def __len__(self) -> int:
        return len(self.hidden)


def examples(
    files: Sequence[Path], depth: int, column_of: Tensor, settings: AdapterSettings
) -> tuple[Examples, Examples]:
    """Training and held-out examples of one depth.

    Args:
        files: of `write_own_states`.
        depth: which.
        column_of: int64 (vocab_size,), the compact head's column of every token, or -1.
        settings: `drawn` decides which positions the first part has; the second has greedy ones only.
    """
    parts: tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]] = ([], [])
    for path in files:
        block = load_own_states(path, (depth,))
        out = block.text % HELD_OUT == HELD_OUT - 1
        share = block.logits.float().softmax(-1)
        for part, rows in zip(
            parts, (~out & (block.greedy | settings.drawn), out & block.greedy), strict=True
        ):
            part.append(
                (
                    block.hidden[depth][rows],
                    column_of[block.ids[rows].long()],
                    share[rows],
                    block.greedy[rows],
                )
            )
    train, held = (Examples(*(torch.cat(column) for column in zip(*part, strict=True))) for part in parts)
    if not len(train) or not len(held):
        raise InputError(
            "the text is too short to train on and to hold a part out; give more tokens or texts"
        )
    return train, held


def loss_of(logits: Tensor, columns: Tensor, share: Tensor, hard: float) -> Tensor:
    """Mean over positions of the cross-entropy against the last layer's best tokens.

    Tokens that the head does not offer are left out: their share teaches nothing.

    Args:
        logits: float32 (n, columns of the head).
        columns, share: as in `Examples`.
        hard: weight of the best token alone; 1 - hard is that of the shares.
    """
    known = columns >= 0
    target = share * (1 - hard)
    target[:, 0] += hard
    target = target * known
    log_probs = logits.gather(1, columns.clamp_min(0)) - torch.logsumexp(logits, -1, keepdim=True)
    return -(target * log_probs).sum(-1).mean()


class DepthTrainer:
    """Trains the adapter of one depth.

    Args:
        model: in bfloat16, with the compact vocabulary that the adapter is to speak through.
        depth: which.
        train, held: see `examples`.
        settings: how.
        seed: of initial weights and order.
    """

    def __init__(
        self, model: LayeredModel, depth: int, train: Examples, held: Examples, settings: AdapterSettings
    ) -> None:
        self.model, self.depth, self.train, self.held, self.settings = model, depth, train, held, settings
        seed = int(np.random.SeedSequence((settings.seed, depth)).generate_state(1)[0])
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.adapter: ResidualAdapter = new_adapter(settings.kind, model.hidden_size, settings.size)
        self.optimiser = torch.optim.Muon(
            self.adapter.parameters(), lr=settings.learning_rate, weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        per_pass = max(1, len(train) // settings.batch_tokens)
        self.steps = max(1, round(settings.passes * per_pass))
        self._per_pass, self._seed, self.step_number = per_pass, seed, 0

    def step(self) -> float:
        """One step; the loss."""
        settings = self.settings
        turn, place = divmod(self.step_number, self._per_pass)
        if place == 0 or not hasattr(self, "_order"):
            generator = torch.Generator().manual_seed(self._seed + turn)
            self._order = torch.randperm(len(self.train), generator=generator)
        rows = self._order[place * settings.batch_tokens : (place + 1) * settings.batch_tokens]
        loss = loss_of(
            self.logits(self.train.hidden[rows]), self.train.columns[rows], self.train.share[rows],
            settings.hard,
        )  # fmt: skip
        loss.backward()  # type: ignore[no-untyped-call]
        fraction = self.step_number / self.steps
        rise = (fraction + 1 / self.steps) / settings.warmup if settings.warmup else 1.0
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, rise, 1.0 - fraction)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step_number += 1
        return float(loss.detach())

    def logits(self, hidden: Tensor) -> Tensor:
        """What the compact head says of bfloat16 states (n, hidden_size): float32 (n, columns)."""
        heads = self.model.heads
        with torch.autocast("cpu", torch.bfloat16):
            adapted = self.adapter(hidden)
        return heads.project(heads.norm(adapted.to(heads.weight.dtype)), self.depth)

    @torch.inference_mode()
    def agreement(self, limit: int = 1 << 15) -> dict[str, float]:
        """On held-out greedy positions: how often the best token is the last layer's, and more.

        Args:
            limit: most positions looked at.

        Returns:
            `agreement`; `offered`, how often the head has the token at all; `sure`, the share of positions at
            which it gives its token more than 0.9; `sure_agreement`, agreement there (NaN without any).
        """
        right = sure = sure_right = offered = 0
        count = min(limit, len(self.held))
        for start in range(0, count, 2048):
            rows = slice(start, min(count, start + 2048))
            best = self.logits(self.held.hidden[rows]).softmax(-1).max(-1)
            match = best.indices == self.held.columns[rows, 0]
            right += int(match.sum())
            offered += int((self.held.columns[rows, 0] >= 0).sum())
            sure += int((best.values > 0.9).sum())
            sure_right += int((match & (best.values > 0.9)).sum())
        return {
            "agreement": right / count,
            "offered": offered / count,
            "sure": sure / count,
            "sure_agreement": sure_right / sure if sure else float("nan"),
        }

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        from safetensors.torch import save_file

        tensors = {f"weight.{name}": tensor for name, tensor in self.adapter.state_dict().items()}
        for index, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"step": str(self.step_number)})

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, if there is one.

        Raises:
            InputError: it is damaged.
        """
        from safetensors import SafetensorError, safe_open

        if not path.exists():
            return
        try:
            with safe_open(path, "pt") as stored:  # type: ignore[no-untyped-call]
                step = int(stored.metadata()["step"])
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(f"{path}: truncated or damaged ({error}); remove it") from None
        weights = {n.removeprefix("weight."): t for n, t in tensors.items() if n.startswith("weight.")}
        self.adapter.load_state_dict(weights)
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimiser."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = tensor
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state})
        self.step_number = step
