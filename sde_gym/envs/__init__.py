"""The decision problem: a batched replay engine over recorded traces, and its gymnasium face."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sde_gym.envs.engine import ReplayEngine
    from sde_gym.envs.lede import LEDEEnv
    from sde_gym.envs.ranking import reward_ranking
    from sde_gym.envs.run import RunResult, run_controller

#: Module of each name.
_HOMES = {
    "LEDEEnv": "lede",
    "ReplayEngine": "engine",
    "RunResult": "run",
    "reward_ranking": "ranking",
    "run_controller": "run",
}

__all__ = [
    "LEDEEnv",
    "ReplayEngine",
    "RunResult",
    "reward_ranking",
    "run_controller",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then, so that `import sde_gym` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What there is, imported or not."""
    return sorted({*globals(), *__all__})
