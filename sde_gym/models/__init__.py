"""Load a causal language model and run any range of its layers, at any depth.

`load_model` gives a `LayeredModel`; its `sequence()` is the depth frontier that every
decoder and recorder of this package drives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sde_gym.models.layered import LayeredModel
    from sde_gym.models.loading import load_model
    from sde_gym.models.sequence import Sequence

__all__ = ["LayeredModel", "Sequence", "load_model"]

_HOMES = {
    "LayeredModel": "sde_gym.models.layered",
    "Sequence": "sde_gym.models.sequence",
    "load_model": "sde_gym.models.loading",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import sde_gym` does not pull in torch and transformers."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
