"""Who decides: the Controller protocol, the features it may read, and controllers."""

from typing import TYPE_CHECKING

from sde_gym.lazy import lazy_exports

if TYPE_CHECKING:
    from sde_gym.policies.ablation import DepthChoiceOnly, LengthChoiceOnly
    from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View, feature_settings
    from sde_gym.policies.files import load_policy, save_policy
    from sde_gym.policies.qnetwork import QController, QNetwork
    from sde_gym.policies.rules import RandomController, StaticController, ThresholdController

__all__ = [
    "BaseController",
    "Controller",
    "DepthChoiceOnly",
    "LengthChoiceOnly",
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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "BaseController": "controller",
        "Controller": "controller",
        "DepthChoiceOnly": "ablation",
        "LengthChoiceOnly": "ablation",
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
    },
)
