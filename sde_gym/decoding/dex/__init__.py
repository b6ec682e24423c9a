"""DEX: depth exploration (arXiv 2606.29223), lossless.

N explorers split the layers; after each stage a token's early candidate is already run as if it were right,
while the token itself goes on, and what the last layer says decides which branch stays.

- `exploration.py`: the depths at which explorers hand tokens on
- `lattice.py`: the tree of tokens, without any model
- `machine.py`: expand, commit, collapse
- `explorers.py`: who runs the stages, in one process
- `candidates.py`: what a stage proposes (DECS)
- `noise.py`: sampling whose depths agree
- `decoder.py`, `result.py`: one text, and what is told of it
- `stage.py`, `distributed.py`, `__main__.py`: one process a stage
- `group.py`, `serve.py`, `timing.py`: such processes kept for many prompts, and what a stage takes by itself
- `bridge.py`: inside transformers' `generate`
- `picture.py`: the lattice over the ticks
"""

from __future__ import annotations

from sde_gym.decoding.dex.bridge import huggingface
from sde_gym.decoding.dex.decoder import dex
from sde_gym.decoding.dex.exploration import even_exploration_set, exploration_set
from sde_gym.decoding.dex.lattice import Lattice, Node
from sde_gym.decoding.dex.noise import coupled
from sde_gym.decoding.dex.result import DexResult

__all__ = [
    "DexResult",
    "Lattice",
    "Node",
    "coupled",
    "dex",
    "even_exploration_set",
    "exploration_set",
    "huggingface",
]
