"""Load a causal language model and run any range of its layers, at any depth.

`load_model` gives a `LayeredModel`; its `sequence()` is the depth frontier that every
decoder and recorder of this package drives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sde_gym.lazy import lazy_exports

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel
    from sde_gym.models.loading import load_model
    from sde_gym.models.sequence import Sequence

__all__ = ["LayeredModel", "Sequence", "load_model"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"LayeredModel": "layered", "Sequence": "sequence", "load_model": "loading"}
)
