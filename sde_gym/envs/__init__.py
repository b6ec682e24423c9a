"""The decision problem: a batched replay engine over recorded traces, and its faces."""

from typing import TYPE_CHECKING

from sde_gym.lazy import lazy_exports

if TYPE_CHECKING:
    from sde_gym.envs.engine import ReplayEngine
    from sde_gym.envs.hindsight import best_return, best_speedup, headroom, least_cost
    from sde_gym.envs.lede import LEDEEnv
    from sde_gym.envs.live import LEDELiveEnv
    from sde_gym.envs.ranking import ranking_table, reward_ranking
    from sde_gym.envs.run import RunResult, run_controller
    from sde_gym.envs.sb3 import sb3_vec_env
    from sde_gym.envs.vector import LEDEVectorEnv
    from sde_gym.envs.wallclock import LEDEWallClockEnv
    from sde_gym.envs.wrappers import DepthOnly, LengthOnly

__all__ = [
    "DepthOnly",
    "LEDEEnv",
    "LEDELiveEnv",
    "LEDEVectorEnv",
    "LEDEWallClockEnv",
    "LengthOnly",
    "ReplayEngine",
    "RunResult",
    "best_return",
    "best_speedup",
    "headroom",
    "least_cost",
    "ranking_table",
    "reward_ranking",
    "run_controller",
    "sb3_vec_env",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DepthOnly": "wrappers",
        "LEDEEnv": "lede",
        "LEDELiveEnv": "live",
        "LEDEVectorEnv": "vector",
        "LEDEWallClockEnv": "wallclock",
        "LengthOnly": "wrappers",
        "ReplayEngine": "engine",
        "RunResult": "run",
        "best_return": "hindsight",
        "best_speedup": "hindsight",
        "headroom": "hindsight",
        "least_cost": "hindsight",
        "ranking_table": "ranking",
        "reward_ranking": "ranking",
        "run_controller": "run",
        "sb3_vec_env": "sb3",
    },
)
