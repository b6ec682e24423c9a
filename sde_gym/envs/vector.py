"""`sde_gym/LEDE-v0` as a vector environment: one engine with a lane for each environment, no copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium.vector
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.arguments import choice
from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.lanes import Lanes, lane_seeds
from sde_gym.envs.rewards import Reward, warn_if_raw
from sde_gym.errors import InputError
from sde_gym.traces import TraceSet

NEXT_STEP, SAME_STEP = "NextStep", "SameStep"
"""When an environment that is done starts again, by the values of gymnasium's `AutoresetMode`."""

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


class LEDEVectorEnv(gymnasium.vector.VectorEnv[Floats, NDArray[np.int64], NDArray[Any]]):
    """n texts of a language model, decoded side by side; `LEDEEnv` says what happens in each.

    `gymnasium.make_vec("sde_gym/LEDE-v0", num_envs=n)` makes one. Lane i of seed s is, bit for bit,
    the single environment of seed s + i. Everything that is returned is a copy.

    Autoreset: with "NextStep" the step after an episode's end starts the next one, whatever the
    action, with reward 0; do not learn from that step. With "SameStep" the step that ends an episode
    starts the next one: `infos["final_obs"]` (object (n,)) and `infos["final_info"]` hold the end of
    the last, `infos["_final_obs"]` and `infos["_final_info"]`, bool (n,), say where.

    Infos are those of `LEDEEnv`, an array (n,) for each key, and for each a mask "_key", bool (n,).

    Args:
        num_envs: n.
        traces: as in `LEDEEnv`; read once.
        max_episode_steps: steps after which an episode is truncated; never if not given.
        autoreset_mode: "NextStep", or, where gymnasium has `AutoresetMode` (1.1 on), "SameStep" or a
            member of that.
        render_mode: None; a single environment can be drawn.
        reward: as in `LEDEEnv`.
        threads: that share the lanes, at least 1, where numba does the steps: with "auto" from 256 lanes on.
        **options: the other arguments of `LEDEEnv`.

    Raises:
        InputError: an argument out of range; the message names it.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012, as gymnasium declares it

    def __init__(
        self,
        num_envs: int = 1,
        traces: str | Path | TraceSet = "stdlib-20m",
        *,
        max_episode_steps: int | None = None,
        autoreset_mode: Any = NEXT_STEP,
        render_mode: str | None = None,
        reward: str | Reward = "lede",
        threads: int = 1,
        **options: Any,
    ) -> None:
        if render_mode is not None:
            raise InputError(
                f"render_mode: {render_mode!r} is not supported here, only None is; "
                "draw a single environment, made with gymnasium.make"
            )
        self.num_envs = whole_number("num_envs", num_envs, 1)
        self._same_step, mode = _autoreset(autoreset_mode)
        if mode is not None:
            self.metadata = {**self.metadata, "autoreset_mode": mode}
        warn_if_raw(reward)
        self._lanes = Lanes(
            traces,
            self.num_envs,
            max_episode_steps=max_episode_steps,
            reward=reward,
            threads=threads,
            **options,
        )
        self.single_observation_space = self._lanes.observation_space
        self.single_action_space = self._lanes.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._done = np.zeros(self.num_envs, dtype=bool)  # lanes that the next step starts again

    @property
    def engine(self) -> ReplayEngine:
        """The engine, of n lanes."""
        return self._lanes.engine

    @property
    def traces(self) -> TraceSet:
        """The recorded texts."""
        return self.engine.traces

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """Start the next episode in every lane.

        Args:
            seed: of lane 0; lane i gets seed + i. Or one for each lane, None to go on with its order.
            options: {"text": index or id} plays that one, out of order, in all lanes; a list has
                one for each lane, None for the next in order.

        Raises:
            InputError: a wrong seed, an unknown option, or a text that there is not.
        """
        texts, seeds = self._lanes.chosen(options), lane_seeds(seed, self.num_envs)
        super().reset(seed=seeds[0])
        self._lanes.seed(seeds, self.np_random)
        self._done[:] = False
        return self._lanes.begin(self._lanes.all, texts), self._infos(self._lanes.info())

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Floats, NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """Take one `Action` in every lane.

        Returns:
            observations float32 (n, f), rewards float64 (n,), terminated and truncated bool (n,), infos.

        Raises:
            InputError: not one action out of 0 and 1 for each lane.
            RuntimeError: no episode was started.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,):
            raise InputError(f"actions: {actions!r} is not one action for each of {self.num_envs} lanes")
        return self._step_same(actions) if self._same_step else self._step_next(actions)

    def _step_next(
        self, actions: NDArray[Any]
    ) -> tuple[Floats, NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """A step in which lanes that were done start again."""
        lanes, done = self._lanes, np.flatnonzero(self._done)
        skip = self._done if done.size else None
        observation, reward, terminated, truncated = lanes.step(actions, skip)
        if done.size:
            observation[done] = lanes.begin(done)
        self._done = terminated | truncated
        return observation, reward, terminated, truncated, self._infos(lanes.info())

    def _step_same(
        self, actions: NDArray[Any]
    ) -> tuple[Floats, NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """A step after which lanes that are done start again."""
        lanes = self._lanes
        observation, reward, terminated, truncated = lanes.step(actions)
        done = np.flatnonzero(terminated | truncated)
        if not done.size:
            return observation, reward, terminated, truncated, self._infos(lanes.info())
        final_observation, final_info = np.full(self.num_envs, None, dtype=object), lanes.info(done)
        final_observation[done] = list(observation[done])
        observation[done] = lanes.begin(done)
        where = terminated | truncated
        infos = self._infos(lanes.info())
        infos |= {"final_obs": final_observation, "_final_obs": where}
        infos |= {"final_info": self._infos(final_info, where), "_final_info": where.copy()}
        return observation, reward, terminated, truncated, infos

    def _infos(self, info: dict[str, NDArray[Any]], where: Flags | None = None) -> dict[str, Any]:
        """Arrays over some lanes as gymnasium wants them: over all, each with its mask."""
        infos: dict[str, Any] = {}
        mask = np.ones(self.num_envs, dtype=bool) if where is None else where.copy()
        for name, values in info.items():
            if where is not None:
                blank = None if values.dtype == object else 0
                some, values = values, np.full(self.num_envs, blank, dtype=values.dtype)
                values[where] = some
            infos[name] = values
            infos[f"_{name}"] = mask  # one for all: making as many takes longer than a step
        return infos


def _autoreset(mode: Any) -> tuple[bool, Any]:
    """Whether to start again in the same step, and gymnasium's name for it, None where it has none."""
    modes = getattr(gymnasium.vector, "AutoresetMode", None)
    value = mode.value if modes is not None and isinstance(mode, modes) else mode
    same_step = choice("autoreset_mode", value, (NEXT_STEP, SAME_STEP)) == SAME_STEP
    if same_step and modes is None:
        raise InputError(
            f"autoreset_mode: {value!r} needs gymnasium 1.1 or newer, this is {gymnasium.__version__}, "
            f"which knows only {NEXT_STEP!r}"
        )
    return same_step, None if modes is None else modes(value)
