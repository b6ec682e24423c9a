"""Offline reinforcement learning: exploratory data with propensities, and training on them with d3rlpy.

Importing this loads no learning library; the functions that need one import it when called.
"""

from sde_gym.offline.behaviours import exploratory_schedule
from sde_gym.offline.collect import collect
from sde_gym.offline.pipeline import TrainedPolicy, train_policy
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.training import train_dqn
from sde_gym.offline.transitions import Transitions, load_transitions, save_transitions

__all__ = [
    "DQNSettings",
    "TrainedPolicy",
    "Transitions",
    "collect",
    "exploratory_schedule",
    "load_transitions",
    "save_transitions",
    "train_dqn",
    "train_policy",
]
