"""How the engine's steps are taken: in numpy, in plain Python for one lane, or compiled for many."""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.arguments import choice
from sde_gym.envs.rewards import (
    ACCEPTED_REWARD,
    CONTINUE_REWARD,
    REJECTED_REWARD,
    LEDEReward,
    Reward,
    SpeedReward,
)
from sde_gym.envs.state import TOLD
from sde_gym.errors import InputError
from sde_gym.policies.observation import bounds

if TYPE_CHECKING:
    from sde_gym.envs.engine import ReplayEngine
    from sde_gym.envs.tables import Tables
    from sde_gym.envs.timing import StepCosts

ACCELERATORS = ("auto", "numpy", "python", "numba")
"""Ways of stepping, all with the same results."""

MANY_LANES = 256
"""From so many lanes on, loading compiled code soon pays."""

PROPOSAL = np.dtype(
    [("surprise", np.float64), ("branch", np.int64), ("match", bool), ("ends_text", bool)], align=True
)
"""Entries of `Tables` about one proposal, side by side; no branch behind a wrong one."""


def resolve_accelerator(accelerator: str, lanes: int, reward: Reward, costs: StepCosts) -> str:
    """The way behind the argument: "numpy", "python" or "numba".

    Args:
        accelerator: one of `ACCELERATORS`.
        lanes: number of lanes.
        reward: compiled code knows those that ship with the package, "speed" at the engine's own `costs`.
        costs: of the engine's steps.

    Raises:
        InputError: there is no such way, or not for this many lanes or this reward, or numba is not
            installed.
    """
    built_in = type(reward) is LEDEReward or (type(reward) is SpeedReward and reward.costs is costs)
    there = importlib.util.find_spec("numba") is not None
    if choice("accelerator", accelerator, ACCELERATORS) == "auto":
        if lanes == 1:
            return "python"
        return "numba" if lanes >= MANY_LANES and built_in and there else "numpy"
    if accelerator == "python" and lanes != 1:
        raise InputError(f"accelerator: 'python' steps one lane, not {lanes}; use 'auto' or 'numpy'")
    if accelerator == "numba" and not built_in:
        raise InputError(
            f"accelerator: 'numba' knows the rewards 'lede' and 'speed', not {reward!r}; "
            "use 'auto' or 'numpy'"
        )
    if accelerator == "numba" and not there:
        raise InputError("accelerator: numba is not installed; pip install \"sde-gym[fast]\", or use 'auto'")
    return accelerator


class Kernel:
    """Steps all lanes of an engine in compiled code.

    Args:
        engine: whose arrays are read and written.
        threads: at least 1, each steps its share of the lanes.
    """

    def __init__(self, engine: ReplayEngine, threads: int) -> None:
        from sde_gym.envs import kernel

        tables, state, reward = engine.tables, engine.state, engine.reward
        costs = engine.step_costs
        low, high = bounds(engine.names)
        self._functions = kernel
        self._settings = kernel.Settings(
            num_layers=engine.num_layers,
            plain_token=engine.cost.plain_token,
            max_draft=engine.max_draft,
            overrun=engine.traces.overrun > 0,
            walks=engine.episode == "token",
            whole=engine.episode == "generation",
            by_round=engine.credit == "round",
            lede=isinstance(reward, LEDEReward),
            final_token_reward=reward.final_token_reward if isinstance(reward, LEDEReward) else 0.0,
            rho=reward.rho if isinstance(reward, SpeedReward) else 0.0,
            wrap=state.wrap,
            reach=state.reach,
            accepted=ACCEPTED_REWARD,
            rejected=REJECTED_REWARD,
            continued=CONTINUE_REWARD,
        )
        computed = {
            "trace": kernel.TRACE, "depth": kernel.DEPTH, "phase": kernel.PHASE,
            "draft_length": kernel.DRAFT_LENGTH, "acceptance": kernel.ACCEPTANCE, "chain": kernel.CHAIN,
        }  # fmt: skip
        recorded = {name: column for column, name in enumerate(tables.names)}
        sources = [computed[name] if name in computed else recorded[name] for name in engine.names]
        self._data = kernel.Data(
            lanes=np.arange(engine.lanes),
            depth=_read_only(tables.depth),
            gap=_read_only(tables.gap),
            proposals=_read_only(_proposals(tables)),
            final_surprise=_read_only(tables.final_surprise),
            start=_read_only(tables.start),
            limit=_read_only(tables.limit),
            budget=_read_only(tables.budget),
            features=_read_only(tables.features),
            action_cost=_read_only(costs.action),
            feed_cost=_read_only(costs.feed),
            verify_cost=_read_only(costs.verify),
            sources=_read_only(np.array(sources, dtype=np.int64)),
            stable=recorded.get("stable", -1),
            low=_read_only(low),
            high=_read_only(high),
        )
        self._state = kernel.Lanes(
            rows=state.rows,
            active=state.active,
            resumable=state.resumable,
            chain=state.chain,
            held=state.held,
            spent=state.spent,
            sums=state.sums,
        )
        self._playable = _read_only(tables.playable)
        self._lanes, self._width = engine.lanes, len(engine.names)
        # What is to be told is noted while a lane's row is at hand; elsewhere where nobody will ask for it.
        self._told: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None
        self._scratch = self._room()
        edges = np.linspace(0, self._lanes, min(threads, self._lanes) + 1).astype(int).tolist()
        self._shares = list(pairwise(edges))
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def first_wrong(self, actions: NDArray[Any], skip: NDArray[np.bool_]) -> int:
        """The first lane, of those not to skip, with a wrong action or no episode; -1 if there is none."""
        found: int = self._functions.first_wrong(actions, self._state.active, skip)
        return found

    def told(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What `state.TOLD` names, int64 (12, n), and cost and speed-up, float64 (2, n), of all lanes."""
        told, self._told = self._told, None
        if told is None:
            told = self._room()
            self._functions.tell(
                0, self._lanes, self._data.lanes, *told, self._settings, self._data, self._state
            )
        return told

    def forget(self) -> None:
        """Somebody else may write to the lanes: what was noted of them will not do."""
        self._told = None

    def _room(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        # A power of two between the columns would have them all compete for the same places of the cache.
        width = self._lanes + 8
        told = np.empty((len(TOLD), width), dtype=np.int64)[:, : self._lanes]
        return told, np.empty((2, width))[:, : self._lanes]

    def unfit(self, lanes: NDArray[np.int64], texts: NDArray[np.int64]) -> bool:
        """Whether `ReplayEngine.begin` has to refuse these."""
        found: bool = self._functions.unfit(lanes, texts, self._playable, self._state.resumable)
        return found

    def begin(self, lanes: NDArray[np.int64], texts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Begin episodes in these distinct lanes; see `ReplayEngine.begin`."""
        observation = np.empty((len(lanes), self._width), dtype=np.float32)
        told = self._told or self._scratch
        self._functions.open_lanes(lanes, texts, observation, *told, self._settings, self._data, self._state)
        return observation

    def step(
        self, actions: NDArray[np.int64], skip: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_]]:
        """Take one action in each lane but those to skip; see `ReplayEngine.advance`."""
        observation = np.zeros((self._lanes, self._width), dtype=np.float32)
        reward, terminated = np.zeros(self._lanes), np.zeros(self._lanes, dtype=bool)
        self._told = self._room()
        rest: tuple[Any, ...] = (actions, skip, observation, reward, terminated, *self._told)
        rest += (self._settings, self._data, self._state)
        step = self._functions.step_lanes
        waiting = [self._threads().submit(step, *share, *rest) for share in self._shares[1:]]
        step(*self._shares[0], *rest)
        for share in waiting:
            share.result()
        return observation, reward, terminated

    def _threads(self) -> ThreadPoolExecutor:
        """Threads for all shares but the caller's own; a forked process has to start its own."""
        if self._pool is None or self._pid != os.getpid():
            self._pool = ThreadPoolExecutor(len(self._shares) - 1, thread_name_prefix="sde-gym-lanes")
            self._pid = os.getpid()
        return self._pool


def _proposals(tables: Tables) -> NDArray[np.void]:
    """What the tables say of each proposal, `PROPOSAL` (P m + R,)."""
    found = np.zeros(len(tables.match), dtype=PROPOSAL)
    found["surprise"], found["match"], found["ends_text"] = tables.surprise, tables.match, tables.ends_text
    found["branch"][: len(tables.branch)] = tables.branch
    return found


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written to: for numba, arrays that can and that cannot be are two types."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view
