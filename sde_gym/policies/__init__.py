"""Who decides: the Controller protocol, the features it may read, and controllers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View, feature_settings
    from sde_gym.policies.files import load_policy, save_policy
    from sde_gym.policies.qnetwork import QController, QNetwork
    from sde_gym.policies.rules import RandomController, StaticController, ThresholdController

#: Module of each name.
_HOMES = {
    "BaseController": "controller",
    "Controller": "controller",
    "QController": "qnetwork",
    "QNetwork": "qnetwork",
    "RandomController": "rules",
    "RoundOutcome": "controller",
    "StaticController": "rules",
    "ThresholdController": "rules",
    "View": "controller",
    "feature_settings": "controller",
    "load_policy": "files",
    "save_policy": "files",
}

__all__ = [
    "BaseController",
    "Controller",
    "QController",
    "QNetwork",
    "RandomController",
    "RoundOutcome",
    "StaticController",
    "ThresholdController",
    "View",
    "feature_settings",
    "load_policy",
    "save_policy",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then, so that `import sde_gym` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What there is, imported or not."""
    return sorted({*globals(), *__all__})
