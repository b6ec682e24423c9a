"""Q models of a target policy, fitted to logged transitions: what the direct method and doubly robust ask.

`FittedQ` is fitted Q evaluation (Le, Voloshin and Yue 2019) by d3rlpy's `DiscreteFQE`, fed with
mini-batches of our own. `LeastSquaresQ` is LSTD-Q (Lagoudakis and Parr 2003) on the features, their
products and their squares: one linear system, no d3rlpy, no seed.

Both learn from all logged transitions, the next action being the target's. Neither can see more than
the logged features, which need not be a Markov state: that error is part of what `judge` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.evaluation.logged import EvaluationProblem
from sde_gym.evaluation.targets import chosen_actions
from sde_gym.offline.backend import training_session
from sde_gym.offline.buffer import NStepBatches
from sde_gym.offline.learners import standardisation
from sde_gym.policies.qnetwork import NUM_ACTIONS
from sde_gym.settings import setting

FloatArray = NDArray[np.float64]
#: Called with (gradient steps done, gradient steps in all).
Progress = Callable[[int, int], None]

#: Gradients are clipped to this norm: early targets of a rough network can be far off.
CLIP_GRADIENT_NORM = 10.0
#: Gradient steps between calls of `progress`.
PROGRESS_EVERY = 50
#: Rows handled at a time, so that memory stays small however long the log.
_CHUNK = 1 << 16
#: d3rlpy's loss is Huber's, which is quadratic up to an error of 1 and bends the mean towards the
#: median beyond. Rewards are divided so that the largest is this much, and TD errors stay below 1.
_LARGEST_REWARD = 0.1


@dataclass(frozen=True)
class FQESettings:
    """How the network is fitted."""

    hidden: tuple[int, ...] = setting((64, 64), "widths of the hidden layers")
    learning_rate: float = setting(1e-3, "peak learning rate of Adam; it falls to 0 along a cosine")
    batch_size: int = setting(256, "transitions in one gradient step")
    gradient_steps: int = setting(4_000, "gradient steps in all")
    target_update_interval: int = setting(50, "gradient steps between copies to the target network")
    seed: int = setting(0, "seed of initial weights, mini-batches and a random target's actions")
    threads: int = setting(1, "torch threads; networks of this size are fastest on one")

    def __post_init__(self) -> None:
        """Raises InputError for a number out of range."""
        for name in ("batch_size", "gradient_steps", "target_update_interval", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.hidden or min(self.hidden) < 1:
            raise InputError(f"hidden is {self.hidden}; it needs at least one width, each at least 1")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate is {self.learning_rate}; it must be positive")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}; it must be at least 0")


class FittedQ:
    """Fitted Q evaluation: a network for each problem that it is asked about."""

    def __init__(self, settings: FQESettings | None = None, progress: Progress | None = None) -> None:
        """Args:
        settings: see `FQESettings`; the defaults if None.
        progress: see `Progress`.
        """
        self.settings = FQESettings() if settings is None else settings
        self._progress = progress

    def __call__(self, problem: EvaluationProblem) -> FloatArray:
        """Fit and say the values of both actions in every logged state, float64 (n, 2).

        Raises:
            InputError: d3rlpy missing, or a loss that is no longer finite.
        """
        settings, transitions = self.settings, problem.transitions
        mean, std = standardisation(transitions.observation)
        observation = ((transitions.observation - mean) / std).astype(np.float32)
        # One step: longer returns would hold actions of the behaviour policy behind the first.
        batches = NStepBatches(transitions, 1, problem.gamma, observation)
        scale = float(np.abs(transitions.reward).max()) / _LARGEST_REWARD or 1.0
        batches.reward = (batches.reward / scale).astype(np.float32)
        rng = np.random.default_rng(settings.seed)
        target = _NextActions()
        with training_session(settings.seed, settings.threads):
            fitted = _create(settings, target, problem.gamma, observation.shape[1])
            for step in range(1, settings.gradient_steps + 1):
                rows = rng.integers(len(batches), size=settings.batch_size)
                following = problem.exit_probability[batches.next_row[rows]]
                target.actions = chosen_actions(following, rng.random(len(rows)))
                loss = float(fitted.update(batches.batch(rows))["loss"])
                if not np.isfinite(loss):
                    raise InputError(
                        f"fitted Q evaluation of {problem.policy!r} diverged at step {step}: the loss is "
                        f"{loss}; lower learning_rate (now {settings.learning_rate}) or gamma (now "
                        f"{problem.gamma})"
                    )
                if self._progress is not None and (
                    step % PROGRESS_EVERY == 0 or step == settings.gradient_steps
                ):
                    self._progress(step, settings.gradient_steps)
            return _predicted(fitted, observation) * scale


class _NextActions:
    """Stands in for the algorithm that d3rlpy evaluates: says the actions it was told last.

    The target's action in a next state is known before the mini-batch is cut, and a controller may
    decide by more than the network's inputs, so it is not asked anew.
    """

    def __init__(self) -> None:
        self.actions: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def impl(self) -> _NextActions:
        """Where d3rlpy looks for `predict_best_action`."""
        return self

    def predict_best_action(self, x: Any) -> Any:
        """The actions of this mini-batch's next states, int64 tensor (b,)."""
        import torch

        return torch.from_numpy(self.actions).to(x.device)


def _create(settings: FQESettings, target: _NextActions, gamma: float, features: int) -> Any:
    """d3rlpy's `DiscreteFQE` with its network built, ready for `update`."""
    from d3rlpy.models.encoders import VectorEncoderFactory
    from d3rlpy.ope import DiscreteFQE, FQEConfig
    from d3rlpy.optimizers import AdamFactory
    from d3rlpy.optimizers.lr_schedulers import CosineAnnealingLRFactory

    stand_in: Any = target
    fitted = DiscreteFQE(
        algo=stand_in,
        config=FQEConfig(
            learning_rate=settings.learning_rate,
            optim_factory=AdamFactory(
                clip_grad_norm=CLIP_GRADIENT_NORM,
                lr_scheduler_factory=CosineAnnealingLRFactory(T_max=settings.gradient_steps),
            ),
            encoder_factory=VectorEncoderFactory(hidden_units=list(settings.hidden)),
            batch_size=settings.batch_size,
            gamma=gamma,
            target_update_interval=settings.target_update_interval,
        ),
        device=False,
    )
    fitted.create_impl((features,), NUM_ACTIONS)
    return fitted


def _predicted(fitted: Any, observation: NDArray[np.float32]) -> FloatArray:
    values = np.empty((len(observation), NUM_ACTIONS))
    for first in range(0, len(observation), _CHUNK):
        rows = observation[first : first + _CHUNK]
        for action in range(NUM_ACTIONS):
            values[first : first + _CHUNK, action] = fitted.predict_value(
                rows, np.full((len(rows), 1), action)
            )
    return values


class LeastSquaresQ:
    """LSTD-Q: Q linear in products of features, where its expected TD error vanishes.

    Solves (A + ridge n I) theta = b for A = sum phi(s, a) (phi(s, a) - gamma sum_a' pi(a'|s') phi(s', a'))^T
    and b = sum phi(s, a) r over the n logged decisions, phi being 1, the standardised features and
    their products two by two, once for each action.
    """

    def __init__(self, ridge: float = 1e-3) -> None:
        """Args:
            ridge: keeps the system regular, > 0.

        Raises:
            InputError: a ridge that is not positive.
        """
        if not ridge > 0:
            raise InputError(f"ridge is {ridge}; it must be positive")
        self.ridge = ridge

    def __call__(self, problem: EvaluationProblem) -> FloatArray:
        """The values of both actions in every logged state, float64 (n, 2).

        Raises:
            InputError: a system without a finite solution.
        """
        transitions = problem.transitions
        count, features = transitions.observation.shape
        mean, std = standardisation(transitions.observation)
        pairs = np.triu_indices(features)
        width = 1 + features + len(pairs[0])

        def basis(rows: NDArray[np.int64]) -> FloatArray:
            scaled = (transitions.observation[rows] - mean).astype(np.float64) / std
            return np.concatenate(
                [np.ones((len(rows), 1)), scaled, scaled[:, pairs[0]] * scaled[:, pairs[1]]], axis=1
            )

        system = self.ridge * count * np.eye(NUM_ACTIONS * width)
        right = np.zeros(NUM_ACTIONS * width)
        for first in range(0, count, _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, count))
            taken = _by_action(basis(rows), np.eye(NUM_ACTIONS)[transitions.action[rows]])
            goes_on = ~transitions.terminal[rows]
            next_rows = np.where(goes_on, rows + 1, rows)
            share = problem.probabilities[next_rows] * goes_on[:, None]
            expected = _by_action(basis(next_rows), share)
            system += taken.T @ (taken - problem.gamma * expected)
            right += taken.T @ transitions.reward[rows].astype(np.float64)
        solution = np.linalg.lstsq(system, right, rcond=None)[0].reshape(NUM_ACTIONS, width)
        if not np.isfinite(solution).all():
            raise InputError(
                f"LSTD-Q has no finite solution for {problem.policy!r}; raise ridge (now {self.ridge})"
            )
        values = np.empty((count, NUM_ACTIONS))
        for first in range(0, count, _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, count))
            values[rows] = basis(rows) @ solution.T
        return values


def _by_action(basis: FloatArray, share: FloatArray) -> FloatArray:
    """phi weighted by actions: (n, w), (n, 2) -> (n, 2 w)."""
    product: FloatArray = (share[:, :, None] * basis[:, None, :]).reshape(len(basis), -1)
    return product
