"""The model card of a trained model: what it is, how it was made, how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sde_gym.files import write_text
from sde_gym.models.lm_settings import LMTrainingSettings

#: Beginnings that the samples of a card continue.
STUBS = (
    "def read_lines(path):\n",
    'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self):\n',
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_empty(self):\n",
)


def _recipe(measured: Mapping[str, Any]) -> str:
    """One run of training in a sentence, with the command that starts it."""
    settings = measured["settings"]
    own = settings.get("own_tokens", 0)
    text = (
        f"{measured['trained_tokens'] / 1e6:.1f} M training tokens, {settings['batch_tokens']} a step, "
        f"windows {settings['windows']}, early exits at {settings['shallow_exits']} and "
        f"{settings['deep_exits']} with weight {settings['exit_weight']}, self-distillation "
        f"{settings['distillation']}, layer dropout up to {settings['layer_dropout']}, peak learning rate "
        f"{settings['learning_rate']}, seed {settings['seed']}"
    )
    if own:
        text += f"; half of every batch out of {own / 1e6:.1f} M tokens that the model wrote itself"
    defaults = asdict(LMTrainingSettings())
    changed = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()
               if value != defaults.get(name, value) and not isinstance(value, bool)]  # fmt: skip
    return f"{text}. `{' '.join(['sde-gym train-lm --out FOLDER', *changed])}`"


def write_card(folder: Path, name: str, measured: Mapping[str, Any], samples: Mapping[str, str]) -> None:
    """Write `README.md` into a model's folder.

    Args:
        folder: of the model.
        name: of the model.
        measured: what `train_lm` returned.
        samples: greedy continuation by beginning.
    """
    settings = measured["settings"]
    initial = (measured["init"] or {}).get("training")
    depths = list(measured["agreement"])
    lines = [
        f"# {name}",
        "",
        f"A decoder of {settings['layers']} layers, width {settings['width']}, trained so that its shallow "
        "layers already predict well. It exists to give speculative decoding and exit policies something "
        "real to work on within seconds on a laptop; it is not a useful programmer.",
        "",
        "## Data",
        "",
        f"The standard library of {measured['interpreter']}, its tests included, without `site-packages`, "
        "generated tables and the modules listed in `sde_gym.models.corpus.HELD_OUT`: "
        f"{measured['corpus_tokens'] / 1e6:.1f} M tokens of a byte-level BPE with {settings['vocabulary']} "
        "entries. Python's standard library is distributed under the PSF licence.",
        "",
        "## Recipe",
        "",
        "LayerSkip's, with the departures listed in `sde_gym.models.lm_training`.",
        "",
        *([f"1. {_recipe(initial)}", f"2. {_recipe(measured)}"] if initial else [_recipe(measured)]),
        "",
        "Weights are stored in bfloat16.",
        "",
        "## Held-out quality",
        "",
        f"{measured['bits_per_byte']:.3f} bits per byte, {measured['loss']:.3f} nats per token "
        "(64 windows of 256 tokens, teacher-forced).",
        "",
        "| depth | " + " | ".join(depths) + " |",
        "|---|" + "---|" * len(depths),
        "| agrees with the final layer | "
        + " | ".join(f"{100 * measured['agreement'][d]:.1f} %" for d in depths)
        + " |",
        "",
        "## Samples (greedy)",
        "",
    ]
    for stub, text in samples.items():
        lines += ["```python", stub.rstrip("\n") + "\n" + text.strip("\n"), "```", ""]
    write_text(folder / "README.md", "\n".join(lines))
