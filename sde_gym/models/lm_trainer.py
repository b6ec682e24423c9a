"""One training run of the language model: weights, optimisers and the order of the data, resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, read_json, write_json
from sde_gym.models.lm_network import LAYER_WEIGHTS, layer, losses
from sde_gym.models.lm_settings import LMTrainingSettings, parse_integers


class Trainer:
    """One training run: weights, optimisers, the order of the data, all resumable."""

    def __init__(
        self, settings: LMTrainingSettings, model: Any, stream: Tensor, own: Tensor | None = None
    ) -> None:
        self.settings = settings
        self.model = model
        self.stream = stream
        self.own = own
        self.step_number = 0
        parameters = dict(model.named_parameters())
        self.layers = [
            [parameters[f"model.layers.{i}.{name}.weight"] for name in LAYER_WEIGHTS]
            for i in range(settings.layers)
        ]
        self.embedding = parameters["model.embed_tokens.weight"]
        self.norm = parameters["model.norm.weight"]
        hidden = [p for n, p in parameters.items() if p.ndim == 2 and n != "model.embed_tokens.weight"]
        rest: list[dict[str, Any]] = [
            {"params": [self.embedding]},
            {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                hidden,
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            "adamw": torch.optim.AdamW(
                rest,
                lr=settings.learning_rate,
                betas=(0.9, 0.95),
                weight_decay=settings.weight_decay,
                fused=True,
            ),
        }
        dropout = [
            math.exp(i * math.log(2) / max(1, settings.layers - 1)) - 1 for i in range(settings.layers)
        ]
        self.dropout = [settings.layer_dropout * p for p in dropout]
        # One compiled layer serves all layers: their weights are arguments.
        self._layer: Callable[..., Tensor] = layer
        self._losses: Callable[..., tuple[Tensor, Tensor]] = losses
        if settings.compile:
            self._layer = torch.compile(layer, dynamic=False)
            self._losses = torch.compile(losses, dynamic=False)

    def step(self, fraction: float) -> dict[str, float]:
        """One optimiser step at `fraction` of the whole training."""
        started = time.perf_counter()
        settings = self.settings
        rng = np.random.default_rng((settings.seed, self.step_number))
        length = [n for start, n in settings.window_schedule() if fraction >= start][-1]
        batch = self._batch(length, settings.batch_tokens // length, rng)
        exits = (
            int(rng.choice(parse_integers(settings.shallow_exits))),
            int(rng.choice(parse_integers(settings.deep_exits))),
        )
        dropped = rng.random(settings.layers) < self.dropout
        final_loss, first_loss, second_loss = self._forward(batch, exits, dropped)
        loss = final_loss + settings.exit_weight * (first_loss + second_loss) / 2
        loss.backward()
        for optimiser in self.optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * _schedule(fraction, settings)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step_number += 1
        return {
            "loss": final_loss.item(),
            "shallow_exit_loss": first_loss.item(),
            "deep_exit_loss": second_loss.item(),
            "tokens": float(self.step_number * settings.batch_tokens),
            "tokens_per_second": batch.shape[0] * length / (time.perf_counter() - started),
        }

    def _batch(self, length: int, rows: int, rng: np.random.Generator) -> Tensor:
        """(rows, length + 1) int64: windows at random places of the stream, every second one own text."""
        starts = rng.integers(0, len(self.stream) - length, rows)
        batch = torch.stack([self.stream[s : s + length + 1] for s in starts]).long()
        if self.own is not None:
            batch[1::2] = self.own[rng.integers(0, len(self.own), rows // 2)]
        return batch

    def _forward(
        self, batch: Tensor, exits: tuple[int, int], dropped: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = self.settings
        ids, targets = batch[:, :-1], batch[:, 1:].contiguous()
        head_width = settings.width // settings.heads
        frequencies = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(ids.shape[1]), frequencies)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
        half = ids.shape[0] // 2
        hidden = F.embedding(ids, self.embedding).bfloat16()
        early: dict[int, Tensor] = {}
        for depth, weights in enumerate(self.layers, start=1):
            if not dropped[depth - 1]:
                hidden = self._layer(hidden, *weights, cos, sin, mask, settings.heads, settings.kv_heads)
            early[depth] = hidden if depth in exits else hidden[:0]
        mixed = torch.cat([early[exits[0]][:half], early[exits[1]][half:]])
        counted = torch.ones(targets.shape)
        if self.own is not None:  # an exit learns from what the model wrote, the last layer from the rest
            counted[1::2, : ids.shape[1] // 2 - 1] = 0.0
        final_rows, exit_rows = self._losses(
            hidden, mixed, self.norm, self.embedding, targets, counted, settings.distillation
        )
        final = final_rows if self.own is None else final_rows[::2]
        return final.mean(), exit_rows[:half].mean(), exit_rows[half:].mean()

    def save(self, folder: Path) -> None:
        """Write weights and optimiser states (float32 safetensors), then the step number."""
        from safetensors.torch import save_file

        tensors = {f"weight.{n}": p.detach() for n, p in self.model.named_parameters()}
        for name, optimiser in self.optimisers.items():
            for index, state in optimiser.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"{name}.{index}.{key}"] = torch.as_tensor(value)
        write_json(folder / "settings.json", asdict(self.settings))
        with atomic_path(folder / "state.safetensors") as temporary:
            save_file(tensors, temporary, metadata={"step": str(self.step_number)})

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint; what may differ are the length and shape of the schedule."""
        from safetensors import SafetensorError, safe_open

        if not (folder / "state.safetensors").exists():
            return
        saved = read_json(folder / "settings.json")
        free = {"tokens", "decay", "checkpoint_every", "windows", "compile"}
        for field in fields(self.settings):
            value = getattr(self.settings, field.name)
            if field.name not in free and saved.get(field.name) != value:
                raise InputError(
                    f"{folder} was trained with {field.name}={saved.get(field.name)}, not {value}; "
                    "use the same settings or another output folder"
                )
        try:
            with safe_open(folder / "state.safetensors", "pt") as stored:  # type: ignore[no-untyped-call]
                self.step_number = int(stored.metadata()["step"])
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(
                f"{folder / 'state.safetensors'}: truncated or damaged ({error}); "
                "remove the folder to start anew"
            ) from error
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
        for name, optimiser in self.optimisers.items():
            state: dict[int, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                if key.startswith(f"{name}."):
                    _, index, entry = key.split(".")
                    state.setdefault(int(index), {})[entry] = tensor
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def _schedule(fraction: float, settings: LMTrainingSettings) -> float:
    """Learning-rate factor: linear warm-up, constant, linear decay to zero."""
    rise = (fraction + 1e-3) / settings.warmup if settings.warmup else 1.0
    fall = (1 - fraction) / settings.decay if settings.decay else 1.0
    return min(1.0, rise, fall)
