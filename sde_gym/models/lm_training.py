"""Train a small decoder so that its shallow layers already predict well.

The recipe is LayerSkip's (Elhoushi et al. 2024): layer dropout that grows with depth, and
a loss at early exits through the shared final norm and head. Numbered departures:

1. A dropped layer is dropped for the whole batch, which saves its time on a CPU.
2. Two exits a step, each on half of the batch, one drawn from the shallow ones and one
   from the deeper ones, with equal weight: the shallow exits are what speculation uses.
3. Half of an early exit's target is the final layer's own distribution (self-distillation):
   a draft is accepted when it agrees with the final layer, not when it is true.
4. Hidden matrices are trained with Muon, the rest with AdamW.

Reads the running interpreter's standard library; writes a folder that `load_model` reads.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sde_gym.errors import InputError
from sde_gym.files import atomic_path, read_json, write_json
from sde_gym.models import corpus
from sde_gym.models.card import STUBS, write_card
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.models.own_text import own_windows
from sde_gym.models.threads import torch_threads
from sde_gym.prompts.reference import library_root
from sde_gym.settings import setting

Progress = Callable[[dict[str, float]], None]

#: Entries of a model's configuration that the settings determine.
_ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
    "eos_token_id", "rms_norm_eps",
)  # fmt: skip

#: Weights of one layer in the order in which `_layer` takes them.
_LAYER_WEIGHTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True)
class LMTrainingSettings:
    """Everything that determines the trained weights, apart from the corpus."""

    init: str = setting("", "trained model to continue from: name or folder (empty: random weights)")
    layers: int = setting(24, "number of decoder layers L")
    width: int = setting(256, "hidden size")
    heads: int = setting(4, "query heads")
    kv_heads: int = setting(2, "key/value heads (grouped-query attention)")
    mlp_width: int = setting(768, "width of the gated MLP")
    vocabulary: int = setting(4096, "byte-level BPE entries, the end-of-text token included")
    positions: int = setting(2048, "context limit written into the configuration")
    tokens: int = setting(12_050_000, "training tokens in all")
    batch_tokens: int = setting(6144, "tokens in one step")
    windows: str = setting("0:256,0.85:512", "window length from each fraction on")
    learning_rate: float = setting(2e-3, "peak learning rate, for Muon (RMS-matched) and AdamW alike")
    warmup: float = setting(0.03, "fraction of training spent warming up")
    decay: float = setting(0.4, "last fraction of training, over which the rate falls to zero")
    weight_decay: float = setting(0.1, "weight decay, on matrices only")
    shallow_exits: str = setting("1,2,3,4", "depths of the first early exit of a step")
    deep_exits: str = setting("6,8,12,16", "depths of the second, deeper early exit")
    exit_weight: float = setting(1.0, "weight of the mean early-exit loss beside the final loss")
    distillation: float = setting(0.5, "share of the final layer's distribution in an exit's target")
    own_tokens: int = setting(0, "tokens of the initial model's own text for the early exits (needs init)")
    layer_dropout: float = setting(0.2, "p_max: probability of dropping the deepest layer")
    checkpoint_every: int = setting(100, "steps between resumable checkpoints")
    compile: bool = setting(True, "compile the layer with torch.compile (needs a C++ compiler)")
    seed: int = setting(0, "initial weights, order of windows, exits and dropped layers")

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary", "positions",
                     "tokens", "batch_tokens", "checkpoint_every"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("warmup", "decay", "distillation", "layer_dropout"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} must lie in [0, 1], not {getattr(self, name)}")
        if not 0.0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate must be positive and finite, not {self.learning_rate}")
        if self.own_tokens < 0:
            raise InputError(f"own_tokens must be at least 0, not {self.own_tokens}")
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise InputError(
                f"width {self.width} must be an even multiple of heads {self.heads} (rotary positions turn "
                f"pairs), and heads a multiple of kv_heads {self.kv_heads}"
            )
        for depth in self.exit_depths():
            if not 1 <= depth < self.layers:
                raise InputError(f"exit depth {depth} must lie in 1..{self.layers - 1}")
        if self.vocabulary < 257:
            raise InputError("vocabulary must be at least 257 (256 bytes and the end of text)")
        if self.window_schedule()[0][0] != 0:
            raise InputError(f"windows must begin at fraction 0, not {self.windows!r}")
        for _, length in self.window_schedule():
            if not 2 <= length <= min(self.positions, self.batch_tokens // 2):
                raise InputError(
                    f"window length {length} must lie in 2..{min(self.positions, self.batch_tokens // 2)} "
                    "(at most `positions`, and two windows a step)"
                )
            if self.batch_tokens % length:
                raise InputError(
                    f"batch_tokens {self.batch_tokens} must be a multiple of the window {length}"
                )

        if self.own_tokens and (not self.init or len(self.window_schedule()) > 1):
            raise InputError("own_tokens needs init (whose text it is) and windows of a single length")

    def exit_depths(self) -> tuple[int, ...]:
        """All early exits that are trained, shallow first."""
        return _integers(self.shallow_exits) + _integers(self.deep_exits)

    def window_schedule(self) -> list[tuple[float, int]]:
        """[(fraction of training, window length from there on)]."""
        try:
            return [(float(a), int(b)) for a, b in (part.split(":") for part in self.windows.split(","))]
        except ValueError:
            raise InputError(f"windows must look like '0:256,0.75:512', not {self.windows!r}") from None


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"expected depths like '1,2,3', not {text!r}") from None


def train_lm(
    settings: LMTrainingSettings,
    out: Path,
    threads: int = 2,
    progress: Progress | None = None,
    root: Path | None = None,
) -> dict[str, Any]:
    """Train, resuming from `out/checkpoint` if it holds one, and save the model in `out`.

    Args:
        settings: the recipe; must equal the checkpoint's, except for `tokens`, `decay`, `windows`,
            `checkpoint_every` and `compile`.
        out: folder for `model.safetensors` (bfloat16), `config.json`, the tokenizer,
            `training.json` and `checkpoint/`.
        threads: torch threads.
        progress: called after every step with step, tokens, loss, exit losses, tokens/s.
        root: folder of the library to train on; the running interpreter's if None.

    Returns:
        The held-out measurements of `measure_lm`, also written to `training.json`.
    """
    with torch_threads(threads):
        return _train(settings, out, progress, root)


def _train(
    settings: LMTrainingSettings, out: Path, progress: Progress | None, root: Path | None
) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    train_texts, test_texts = corpus.split_library(root)
    if not train_texts or not test_texts:
        raise InputError(f"{root or library_root()} holds no module to train on, or none that is held out")
    initial = _initial_model(settings) if settings.init else None
    tokenizer = _tokenizer(settings, out, train_texts, initial)
    stream = torch.from_numpy(corpus.tokenize(tokenizer, train_texts))
    test_stream = torch.from_numpy(corpus.tokenize(tokenizer, test_texts))

    torch.manual_seed(settings.seed)
    model = _new_model(settings)
    if initial is not None:
        model.load_state_dict(initial.hf.state_dict())
    own = None
    if initial is not None and settings.own_tokens:
        length = settings.window_schedule()[0][1]
        count = math.ceil(settings.own_tokens / (length - length // 2))
        own = own_windows(initial.hf, stream, count, length, settings.seed, out)
    trainer = _Trainer(settings, model, stream, own)
    trainer.resume(out / "checkpoint")
    steps = max(1, settings.tokens // settings.batch_tokens)
    while trainer.step_number < steps:
        record = trainer.step(trainer.step_number / steps)
        if not math.isfinite(record["loss"]):
            raise RuntimeError(f"loss is {record['loss']} at step {trainer.step_number}")
        if progress is not None:
            progress({**record, "step": trainer.step_number, "steps": steps})
        if trainer.step_number % settings.checkpoint_every == 0 or trainer.step_number == steps:
            trainer.save(out / "checkpoint")
            save_lm(model, out)
    save_lm(model, out)
    with torch.no_grad():  # what is measured and sampled are the weights as stored
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    measured = measure_lm(model, tokenizer, test_stream, settings.exit_depths())
    measured |= {
        "trained_tokens": trainer.step_number * settings.batch_tokens,
        "corpus_tokens": len(stream),
        "interpreter": f"{platform.python_implementation()} {platform.python_version()}",
        "settings": asdict(settings),
    }
    write_json(out / "training.json", measured)
    write_card(out, out.name, measured, _samples(model, tokenizer))
    return measured


def _samples(model: Any, tokenizer: Any) -> dict[str, str]:
    """What the model makes of the card's beginnings, greedily."""
    layered = LayeredModel(model.eval())
    prompts = [tokenizer.encode(stub).ids for stub in STUBS]
    budget = min(80, layered.context_limit - max(map(len, prompts)))
    texts = generate_greedy(layered, prompts, max(1, budget))
    return {stub: tokenizer.decode(text) for stub, text in zip(STUBS, texts, strict=True)}


def save_lm(model: Any, out: Path) -> None:
    """Save weights as bfloat16 safetensors plus the configuration, each atomically."""
    from safetensors.torch import save_file

    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    with atomic_path(out / "model.safetensors") as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
    configuration = model.config.to_dict()
    configuration["architectures"] = ["LlamaForCausalLM"]
    configuration["dtype"] = "float32"
    write_json(out / "config.json", configuration)


@torch.no_grad()
def measure_lm(
    model: Any, tokenizer: Any, stream: Tensor, depths: tuple[int, ...], windows: int = 64
) -> dict[str, Any]:
    """Held-out quality, teacher-forced, over `windows` windows of 256 tokens spread evenly.

    Returns:
        loss (nats per token), bits_per_byte, and agreement: share of positions at which the
        argmax at a depth equals the final layer's, by depth.
    """
    length = 256
    windows = min(windows, (len(stream) - 1) // length)
    if windows < 1:
        raise InputError(f"the held-out text has {len(stream)} tokens; at least {length + 1} are needed")
    starts = np.linspace(0, len(stream) - length - 1, windows).astype(int)
    batch = torch.stack([stream[s : s + length + 1] for s in starts]).long()
    byte_length = torch.tensor([len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())])
    byte_length[corpus.END_OF_TEXT_ID] = 1
    model.eval()
    loss, matches, count = 0.0, dict.fromkeys(depths, 0), 0
    for ids in batch.split(8):
        hidden = model.model(ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states
        logits = model.lm_head(hidden[-1])  # the last entry is already normalised
        loss += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        final = logits.argmax(-1)
        for depth in depths:
            early = model.lm_head(model.model.norm(hidden[depth])).argmax(-1)
            matches[depth] += int((early == final).sum())
        count += final.numel()
    total_bytes = int(byte_length[batch[:, 1:]].sum())
    model.train()
    return {
        "loss": loss / count,
        "bits_per_byte": loss / math.log(2) / total_bytes,
        "agreement": {str(depth): matches[depth] / count for depth in depths},
    }


def _initial_model(settings: LMTrainingSettings) -> LayeredModel:
    """The model to continue from; its architecture must be the one of the settings."""
    model = load_model(settings.init)
    expected = _configuration(settings).to_dict()
    given = model.hf.config.to_dict()
    for key in _ARCHITECTURE:
        if given.get(key) != expected[key]:
            raise InputError(
                f"{settings.init} has {key}={given.get(key)}, the settings say {expected[key]}; "
                "give the settings of the model to continue from"
            )
    if model.tokenizer is None:
        raise InputError(f"{settings.init} has no tokenizer; a model to continue from needs its own")
    return model


def _tokenizer(
    settings: LMTrainingSettings, out: Path, texts: list[str], initial: LayeredModel | None
) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    path = out / "tokenizer.json"
    if path.exists() and (out / "checkpoint" / "state.safetensors").exists():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InputError(f"{path}: not a tokenizer ({error}); remove the file or the folder") from error
        return tokenizer
    if initial is not None:
        initial.tokenizer.save_pretrained(out)
        return Tokenizer.from_file(str(path))
    tokenizer = corpus.train_tokenizer(texts, settings.vocabulary)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=corpus.END_OF_TEXT,
        model_max_length=settings.positions,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    return tokenizer


def _configuration(settings: LMTrainingSettings) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.mlp_width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        bos_token_id=corpus.END_OF_TEXT_ID,
        eos_token_id=corpus.END_OF_TEXT_ID,
        rms_norm_eps=1e-5,
    )


def _new_model(settings: LMTrainingSettings) -> Any:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_configuration(settings))
    with torch.no_grad():  # residual branches start small, so that deep stacks train stably
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_((2 * settings.layers) ** -0.5)
    return model


class _Trainer:
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
            [parameters[f"model.layers.{i}.{name}.weight"] for name in _LAYER_WEIGHTS]
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
        self._layer: Callable[..., Tensor] = _layer
        self._losses: Callable[..., tuple[Tensor, Tensor]] = _losses
        if settings.compile:
            self._layer = torch.compile(_layer, dynamic=False)
            self._losses = torch.compile(_losses, dynamic=False)

    def step(self, fraction: float) -> dict[str, float]:
        """One optimiser step at `fraction` of the whole training."""
        started = time.perf_counter()
        settings = self.settings
        rng = np.random.default_rng((settings.seed, self.step_number))
        length = [n for start, n in settings.window_schedule() if fraction >= start][-1]
        batch = self._batch(length, settings.batch_tokens // length, rng)
        exits = (
            int(rng.choice(_integers(settings.shallow_exits))),
            int(rng.choice(_integers(settings.deep_exits))),
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


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).bfloat16()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Written on halves: torch 2.13's inductor gives NaN gradients for the usual
    # `x * cos + cat([-right, left]) * sin` followed by the repeat of grouped heads.
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _layer(  # the nine weights of `_LAYER_WEIGHTS`, float32, cast inside the compiled graph
    hidden: Tensor, norm1: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, norm2: Tensor,
    gate: Tensor, up: Tensor, down: Tensor, cos: Tensor, sin: Tensor, mask: Tensor,
    heads: int, kv_heads: int,
) -> Tensor:  # fmt: skip
    """One Llama layer in bfloat16. Attention is spelled out: at these lengths the compiled
    softmax is faster on CPUs than the fused kernel's backward pass."""
    rows, length, _ = hidden.shape
    x = _rms_norm(hidden, norm1)
    query = F.linear(x, q.bfloat16()).view(rows, length, heads, -1).transpose(1, 2)
    key = F.linear(x, k.bfloat16()).view(rows, length, kv_heads, -1).transpose(1, 2)
    value = F.linear(x, v.bfloat16()).view(rows, length, kv_heads, -1).transpose(1, 2)
    query = _rotate(query, cos, sin) * query.shape[-1] ** -0.5
    key = _rotate(key, cos, sin).repeat_interleave(heads // kv_heads, 1)
    value = value.repeat_interleave(heads // kv_heads, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() + mask
    mixed = torch.matmul(torch.softmax(scores, -1).bfloat16(), value)
    hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), o.bfloat16())
    x = _rms_norm(hidden, norm2)
    x = F.silu(F.linear(x, gate.bfloat16())) * F.linear(x, up.bfloat16())
    return hidden + F.linear(x, down.bfloat16())


def _losses(
    final: Tensor, early: Tensor, norm: Tensor, head: Tensor, targets: Tensor, counted: Tensor,
    distillation: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(final losses, early-exit losses), one a row of the batch, nats per token.

    `counted` (rows, length) says with 1 which tokens an early exit is trained on.
    """
    weight = head.bfloat16()
    log_final = torch.log_softmax(F.linear(_rms_norm(final, norm), weight).float(), -1)
    log_early = torch.log_softmax(F.linear(_rms_norm(early, norm), weight).float(), -1)
    true_final = log_final.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    true_early = log_early.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    soft = (log_final.detach().exp() * log_early).sum(-1)
    early_loss = -(1 - distillation) * true_early - distillation * soft
    return -true_final.mean(-1), (early_loss * counted).sum(-1) / counted.sum(-1)


def jsonl_logger(path: Path) -> Progress:
    """A progress callback that appends every record to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def log(record: dict[str, float]) -> None:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    return log
