"""Offline reinforcement learning: exploratory data with propensities, and training on them with d3rlpy.

Importing this loads no learning library; the functions that need one import it when called.
"""

from sde_gym.offline.behaviour_names import parse_behaviour, rebuild_behaviour
from sde_gym.offline.behaviours import UniformRandom, exploratory_schedule
from sde_gym.offline.collect import collect
from sde_gym.offline.minari_data import add_infos, save_minari
from sde_gym.offline.minari_read import dataset_to_transitions, read_info
from sde_gym.offline.pipeline import TrainedPolicy, train_policy
from sde_gym.offline.restricted import OnePhase, restricted
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.training import train, train_dqn
from sde_gym.offline.transitions import Transitions, load_transitions, save_transitions

__all__ = [
    "DQNSettings",
    "OnePhase",
    "TrainedPolicy",
    "Transitions",
    "UniformRandom",
    "add_infos",
    "collect",
    "dataset_to_transitions",
    "exploratory_schedule",
    "load_transitions",
    "parse_behaviour",
    "read_info",
    "rebuild_behaviour",
    "restricted",
    "save_minari",
    "save_transitions",
    "train",
    "train_dqn",
    "train_policy",
]
