"""`sde_gym/LEDE-v0` as a vector environment of stable-baselines3, which is imported only when one is made.

stable-baselines3 takes no vector environments of gymnasium, and its own run one environment after the
other; this one steps all lanes of one engine together.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.lanes import Lanes, lane_seeds
from sde_gym.envs.order import text_option
from sde_gym.errors import InputError
from sde_gym.traces import TraceSet

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv
else:
    VecEnv = object

Infos = list[dict[str, Any]]
Indices = int | Iterable[int] | None


def sb3_vec_env(
    num_envs: int = 1,
    traces: str | Path | TraceSet = "stdlib-20m",
    *,
    max_episode_steps: int | None = None,
    step_infos: bool = True,
    **options: Any,
) -> VecEnv:
    """A stable-baselines3 `VecEnv` of n lanes that `PPO`, `DQN` and others train on directly.

    Lane i of seed s is the single environment of seed s + i. A lane that is done starts again in the
    same step; its info then has `terminal_observation`, and `episode` with return `r`, length `l` and
    seconds `t`, as `Monitor` writes them: `VecMonitor` is not needed, but works. The info of every
    step has `TimeLimit.truncated`.

    Args:
        num_envs: n.
        traces: as in `LEDEEnv`; read once.
        max_episode_steps: steps after which an episode is truncated; never if not given.
        step_infos: whether infos of all steps have the keys of `LEDEEnv`'s, or only those that end
            an episode: with very many lanes, making dicts is what takes the time.
        **options: the other arguments of `LEDEEnv`, but `render_mode`.

    Raises:
        InputError: stable-baselines3 is not installed, or an argument is out of range.
    """
    return _vec_env_class()(num_envs, traces, max_episode_steps, step_infos, options)


@cache
def _vec_env_class() -> type[_LEDEVecEnv]:
    """`LEDEVecEnv`: the class below, on stable-baselines3's base class."""
    try:
        # Where an old gym is installed, it is imported, too, and prints that nobody maintains it.
        with contextlib.redirect_stderr(io.StringIO()):
            from stable_baselines3.common.vec_env import VecEnv
    except ImportError as error:
        raise InputError(
            f'stable-baselines3 is not installed ({error}); pip install "sde-gym[online]"'
        ) from None
    namespace = {"__module__": __name__, "__doc__": _LEDEVecEnv.__doc__}
    return type("LEDEVecEnv", (_LEDEVecEnv, VecEnv), namespace)


def __getattr__(name: str) -> Any:
    """`LEDEVecEnv`, made when it is first asked for; unpickling asks."""
    if name != "LEDEVecEnv":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _vec_env_class()


class _LEDEVecEnv(VecEnv):
    """See `sb3_vec_env`. The lanes are one environment: they share every attribute and method."""

    def __init__(
        self,
        num_envs: int,
        traces: str | Path | TraceSet,
        max_episode_steps: int | None,
        step_infos: bool,
        options: dict[str, Any],
    ) -> None:
        lanes = whole_number("num_envs", num_envs, 1)
        self.render_mode = None
        self._lanes = Lanes(traces, lanes, max_episode_steps=max_episode_steps, **options)
        self.step_infos = step_infos
        self._actions: NDArray[Any] | None = None
        self._return = np.zeros(lanes)
        self._length = np.zeros(lanes, dtype=np.int64)
        self._made = time.time()
        super().__init__(lanes, self._lanes.observation_space, self._lanes.action_space)

    @property
    def engine(self) -> ReplayEngine:
        """The engine, of n lanes."""
        return self._lanes.engine

    @property
    def traces(self) -> TraceSet:
        """The recorded texts."""
        return self.engine.traces

    def reset(self) -> NDArray[np.float32]:
        """Start the next episode in every lane, with what `seed` and `set_options` said last."""
        lanes = self._lanes
        asked = [text_option(options) for options in self._options]
        if len(asked) != self.num_envs:
            raise InputError(f"options: {len(asked)} of them for {self.num_envs} lanes")
        texts = lanes.chosen({"text": asked})
        lanes.seed(lane_seeds(self._seeds, self.num_envs), np.random.default_rng())
        self._reset_seeds()
        self._reset_options()
        self._return[:] = self._length[:] = 0
        observation = lanes.begin(lanes.all, texts)
        self.reset_infos = _dicts(lanes.info(lanes.all))
        return observation

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep one `Action` for each lane until `step_wait`."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], Infos]:
        """Take the actions: observations float32 (n, f), rewards float32 (n,), dones bool (n,), infos.

        Raises:
            InputError: not one action out of 0 and 1 for each lane.
            RuntimeError: no actions were given, or no episode was started.
        """
        if self._actions is None:
            raise RuntimeError("no actions to take; call step_async first")
        lanes, (actions, self._actions) = self._lanes, (self._actions, None)
        observation, reward, terminated, truncated = lanes.step(actions)
        self._return += reward
        self._length += 1
        ended = terminated | truncated
        done = np.flatnonzero(ended)
        infos: Infos
        if self.step_infos:
            infos = _dicts(lanes.info(lanes.all))
        else:
            infos = [{} for _ in range(self.num_envs)]
            for lane, info in zip(done, _dicts(lanes.info(done)), strict=True):
                infos[lane] = info
        for info, cut in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = cut
        if done.size:
            self._finish(done, observation, infos)
        return observation, reward.astype(np.float32), ended, infos

    def _finish(self, done: NDArray[np.int64], observation: NDArray[np.float32], infos: Infos) -> None:
        """Note the end of these lanes' episodes in their infos, and start the next."""
        seconds = round(time.time() - self._made, 6)
        for lane in done.tolist():
            infos[lane]["terminal_observation"] = observation[lane].copy()
            infos[lane]["episode"] = {
                "r": round(float(self._return[lane]), 6),
                "l": int(self._length[lane]),
                "t": seconds,
            }
        self._return[done] = self._length[done] = 0
        observation[done] = self._lanes.begin(done)
        for lane, info in zip(done.tolist(), _dicts(self._lanes.info(done)), strict=True):
            self.reset_infos[lane] = info

    def close(self) -> None:
        """Nothing is open."""

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """For each lane, its entry in `info` of that name, or else the environment's attribute.

        Raises:
            AttributeError: there is no such name.
        """
        chosen = self._chosen(indices)
        info = self._lanes.info(chosen)
        if attr_name in info:
            values: list[Any] = info[attr_name].tolist()
            return values
        return [getattr(self, attr_name)] * len(chosen)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the environment, for all lanes at once.

        Raises:
            AttributeError: there is no such attribute, or it cannot be set.
            InputError: only some of the lanes were named.
        """
        self._check_all(indices, f"set_attr({attr_name!r})")
        getattr(self, attr_name)
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the environment once, for all lanes; each gets what it returned.

        Raises:
            AttributeError: there is no such method.
            InputError: only some of the lanes were named.
        """
        self._check_all(indices, f"env_method({method_name!r})")
        return [getattr(self, method_name)(*method_args, **method_kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """False for each lane: no gymnasium wrapper is around any."""
        return [False] * len(self._chosen(indices))

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """None for each lane: only single environments can be drawn."""
        return [None] * self.num_envs

    def _chosen(self, indices: Indices) -> NDArray[np.int64]:
        return np.array(list(self._get_indices(indices)), dtype=np.int64)

    def _check_all(self, indices: Indices, what: str) -> None:
        if sorted(self._chosen(indices)) != list(range(self.num_envs)):
            raise InputError(f"indices: {indices!r}; the lanes are one environment, leave them out of {what}")


def _dicts(info: Mapping[str, NDArray[Any]]) -> Infos:
    """Arrays over lanes as one dict of plain Python values for each."""
    return [
        dict(zip(info, values, strict=True))
        for values in zip(*(column.tolist() for column in info.values()), strict=True)
    ]
