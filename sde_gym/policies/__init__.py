"""Who decides: the Controller protocol, the features it may read, and controllers."""

from typing import TYPE_CHECKING

from sde_gym.lazy import lazy_exports

if TYPE_CHECKING:
    from sde_gym.policies.ablation import DepthChoiceOnly, LengthChoiceOnly
    from sde_gym.policies.adadecode import AdaDecodeController
    from sde_gym.policies.controller import (
        BaseController,
        Controller,
        RoundOutcome,
        Shadow,
        View,
        feature_settings,
    )
    from sde_gym.policies.draft_verify import DraftVerifyController
    from sde_gym.policies.dynamic_exit_layer import DELController
    from sde_gym.policies.files import load_policy, save_policy
    from sde_gym.policies.lite import CALMController, LITEController, calibrated_thresholds
    from sde_gym.policies.qnetwork import QController, QNetwork
    from sde_gym.policies.rules import RandomController, StaticController, ThresholdController

__all__ = [
    "AdaDecodeController",
    "BaseController",
    "CALMController",
    "Controller",
    "DELController",
    "DepthChoiceOnly",
    "DraftVerifyController",
    "LITEController",
    "LengthChoiceOnly",
    "QController",
    "QNetwork",
    "RandomController",
    "RoundOutcome",
    "Shadow",
    "StaticController",
    "ThresholdController",
    "View",
    "calibrated_thresholds",
    "feature_settings",
    "load_policy",
    "save_policy",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AdaDecodeController": "adadecode",
        "BaseController": "controller",
        "CALMController": "lite",
        "Controller": "controller",
        "DELController": "dynamic_exit_layer",
        "DepthChoiceOnly": "ablation",
        "DraftVerifyController": "draft_verify",
        "LITEController": "lite",
        "LengthChoiceOnly": "ablation",
        "QController": "qnetwork",
        "QNetwork": "qnetwork",
        "RandomController": "rules",
        "RoundOutcome": "controller",
        "Shadow": "controller",
        "StaticController": "rules",
        "ThresholdController": "rules",
        "View": "controller",
        "calibrated_thresholds": "lite",
        "feature_settings": "controller",
        "load_policy": "files",
        "save_policy": "files",
    },
)
