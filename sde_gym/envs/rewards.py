"""Rewards: functions of what a step did, over all lanes at once.

| event | `lede` |
|---|---|
| exit, proposal accepted | 1 + (L - l*) / L |
| exit, proposal rejected (it or an earlier one of the round is wrong) | -2 + (L - l*) / L |
| continue, in either phase | -0.01 |
| a token of the last layer (plain, correction or bonus) | + final_token_reward, to the action causing it |

LEDE (arXiv 2606.03113) gives the first three rows. The last one is departure 1: the paper's
summaries do not say what the last layer's own tokens earn. Paying +1, which is the first row at
l* = L, for every such token makes the return rank policies by speed in our checks; paying only
for some would make plain autoregression optimal. `final_token_reward=0` is the literal variant.

`speed` pays tokens less time: +1 for each emitted token and -rho for each unit of what the step
costs under a cost model (`sde_gym.models.cost`).
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.timing import StepCosts
from sde_gym.errors import InputError

REWARDS = ("lede", "speed")
"""Rewards that ship with the package, by name."""

CONTINUE_REWARD = -0.01
ACCEPTED_REWARD = 1.0
REJECTED_REWARD = -2.0


@dataclass(frozen=True)
class StepOutcome:
    """What one step did in each of n lanes.

    Attributes:
        num_layers: L.
        phase: int64 (n,), `Phase` in which the action was taken.
        action: int64 (n,), `Action`.
        depth: int64 (n,), layers that the newest token had been run through; l* if it exits.
        depth_index: int64 (n,), the same as an index into the depths.
        proposed: bool (n,), whether the action made a proposal.
        accepted: bool (n,), whether that proposal equals the last layer's token, all proposals
            before it in the round, too. Known at once in replay, in a live run only after
            verification.
        ended: bool (n,), whether the round ended in this step.
        drafted: int64 (n,), proposals of the round that ended; 0 elsewhere.
        round_accepted: int64 (n,), accepted ones among them; 0 elsewhere.
        final: bool (n,), whether the last layer emitted a token of its own.
        emitted: int64 (n,), tokens emitted: round_accepted + final. With episode "token" the one
            token by which the text goes on, also where the proposal was wrong.
        fed: bool (n,), whether the action's proposal was fed and run to l*.
        verified: int64 (n,), tokens that went on from l* to L together to end the round; 0 where
            the round goes on or ended without a draft.
        layers: int64 (n,), layers run one after the other, a batch of tokens counted once. The
            walk to the first depth counts in the round's first step.
        terminated: bool (n,), whether the text is complete.
    """

    num_layers: int
    phase: NDArray[np.int64]
    action: NDArray[np.int64]
    depth: NDArray[np.int64]
    depth_index: NDArray[np.int64]
    proposed: NDArray[np.bool_]
    accepted: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    drafted: NDArray[np.int64]
    round_accepted: NDArray[np.int64]
    final: NDArray[np.bool_]
    emitted: NDArray[np.int64]
    fed: NDArray[np.bool_]
    verified: NDArray[np.int64]
    layers: NDArray[np.int64]
    terminated: NDArray[np.bool_]


Reward = Callable[[StepOutcome], NDArray[np.float64]]
"""A reward: n lanes' outcome to float64 (n,)."""


@dataclass(frozen=True)
class LEDEReward:
    """The paper's reward; see the table above.

    Attributes:
        final_token_reward: for a token of the last layer.
    """

    final_token_reward: float = 1.0

    def __call__(self, outcome: StepOutcome) -> NDArray[np.float64]:
        """float64 (n,)."""
        saved = (outcome.num_layers - outcome.depth) / outcome.num_layers
        proposal = np.where(outcome.accepted, ACCEPTED_REWARD, REJECTED_REWARD) + saved
        own = np.where(outcome.proposed, proposal, CONTINUE_REWARD)
        return own + self.final_token_reward * outcome.final


@dataclass(frozen=True, eq=False)
class SpeedReward:
    """Tokens less rho times time, time being what `costs` says.

    Over a whole text the token count is fixed, so the optimum there is least time, whatever rho.

    Attributes:
        costs: of steps.
        rho: price in tokens of one unit of cost. At plain decoding's rate, tokens per unit, it
            earns 0.
    """

    costs: StepCosts
    rho: float

    def __call__(self, outcome: StepOutcome) -> NDArray[np.float64]:
        """float64 (n,). An accepted proposal is paid to the action that made it."""
        return outcome.accepted.astype(np.float64) + outcome.final - self.rho * self.costs(outcome)


def resolve_reward(
    reward: str | Reward, costs: StepCosts, final_token_reward: float = 1.0, rho: float | None = None
) -> Reward:
    """The reward behind the arguments of an environment.

    Args:
        reward: "lede", "speed", "module:function" or a callable.
        costs: of steps, for "speed".
        final_token_reward: of "lede" only.
        rho: of "speed" only; plain decoding's tokens per unit of cost if not given.

    Raises:
        InputError: there is no such reward, or an argument that it does not have.
    """
    if not _is_finite(final_token_reward):
        raise InputError(f"final_token_reward: {final_token_reward!r} is not a finite number")
    if final_token_reward != 1.0 and reward != "lede":
        raise InputError(
            f"final_token_reward: {final_token_reward} only means something for reward 'lede', not {reward!r}"
        )
    if rho is not None and reward != "speed":
        raise InputError(f"rho: {rho} only means something for reward 'speed', not {reward!r}")
    if rho is not None and not (_is_finite(rho) and rho >= 0):
        raise InputError(f"rho: {rho!r} is not a finite number of at least 0")
    if callable(reward):
        return reward
    if reward == "lede":
        return LEDEReward(float(final_token_reward))
    if reward == "speed":
        return SpeedReward(costs, 1.0 / costs.model.plain_token if rho is None else float(rho))
    if isinstance(reward, str) and reward.count(":") == 1:
        return _imported(reward)
    raise InputError(f"reward: {reward!r} is none of {', '.join(REWARDS)}, 'module:function' or a callable")


def checked_reward(reward: Reward, outcome: StepOutcome) -> NDArray[np.float64]:
    """What a reward pays for this outcome, float64 (n,).

    Raises:
        InputError: it does not take a `StepOutcome`, or returns anything but n numbers.
    """
    try:
        paid = np.asarray(reward(outcome), dtype=np.float64)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(
            f"reward: {reward!r} failed on a step ({type(error).__name__}: {error}); it has to take a "
            "StepOutcome of n steps and to return n numbers"
        ) from error
    if paid.shape != outcome.action.shape:
        raise InputError(f"reward: {reward!r} returned shape {paid.shape}, expected {outcome.action.shape}")
    return paid


def warn_if_raw(reward: str | Reward) -> None:
    """Warn of a callable given as such to an environment, on behalf of the environment's caller."""
    if callable(reward):
        warnings.warn(
            f"reward: the callable {reward!r} cannot be stored in the environment's spec; "
            "name it as 'module:function' instead",
            stacklevel=3,
        )


def _imported(reference: str) -> Reward:
    """The callable that "module:function" names."""
    module_name, name = reference.split(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = _remedy(module_name, error)
        raise InputError(f"reward: {reference!r} cannot be imported ({error}){remedy}") from None
    if not callable(function):
        raise InputError(f"reward: {reference!r} is not callable")
    return function


def _remedy(module_name: str, error: Exception) -> str:
    """What to do about a module that Python does not find.

    A program that was installed, as `sde-gym` is, does not look into the working directory.
    """
    package = module_name.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != package:
        return ""
    for path in (Path(f"{package}.py"), Path(package)):
        if path.exists():
            return f"; {path} is in the working directory, where Python did not look: set PYTHONPATH=."
    return "; the folder that it lies in has to be on PYTHONPATH"


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and math.isfinite(value)
