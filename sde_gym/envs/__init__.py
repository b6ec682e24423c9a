"""The decision problem: a batched replay engine over recorded traces, and its faces."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

#: Module of each name.
_HOMES = {
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
}

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


def __getattr__(name: str) -> Any:
    """Import what is asked for only then, so that `import sde_gym` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What there is, imported or not."""
    return sorted({*globals(), *__all__})
