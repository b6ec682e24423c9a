"""The settings of a language-model training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sde_gym.errors import InputError
from sde_gym.settings import at_least_one, check_settings, setting

_COUNTS = (
    "layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary", "positions", "tokens", "batch_tokens",
    "checkpoint_every",
)  # fmt: skip
_SHARES = ("warmup", "decay", "distillation", "layer_dropout")


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
        check_settings(self, _COUNTS, at_least_one, "{name} must be at least 1, not {value}")
        check_settings(self, _SHARES, _is_share, "{name} must lie in [0, 1], not {value}")
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
        return parse_integers(self.shallow_exits) + parse_integers(self.deep_exits)

    def window_schedule(self) -> list[tuple[float, int]]:
        """[(fraction of training, window length from there on)]."""
        try:
            return [(float(a), int(b)) for a, b in (part.split(":") for part in self.windows.split(","))]
        except ValueError:
            raise InputError(f"windows must look like '0:256,0.75:512', not {self.windows!r}") from None


def _is_share(value: float) -> bool:
    return 0.0 <= value <= 1.0


def parse_integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"expected depths like '1,2,3', not {text!r}") from None
