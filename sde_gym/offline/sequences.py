"""Decision Transformer: its training slices by array indexing, and its controller.

It decides by the last decisions, their observations, and the return that is still to come. Rewards
reach no controller: in a real decoder a proposal's reward is known only once it is verified. So this
controller replays the run beside the driver, in an engine of its own that pays the reward it was
trained on. That ties it to one trace set in replay: it takes part in comparisons there, and can be
neither written as a policy file nor driven by a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.errors import InputError
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.controller import BaseController, View
from sde_gym.traces import TraceSet

if TYPE_CHECKING:
    from d3rlpy.dataset import TrajectoryMiniBatch

FloatArray = NDArray[np.float32]


class TrajectoryBatches:
    """Slices of the last decisions up to any row, ready to be cut into mini-batches by row numbers.

    Equal to d3rlpy's `BasicTrajectorySlicer` (earlier decisions of the same episode, zeros in front where
    there are none, undiscounted returns-to-go that include the present reward, time from 1), but that
    returns-to-go are divided by a scale and late decisions share the last number.

    Attributes:
        scale: the largest absolute return of an episode, by which returns-to-go are divided: around
            1, as the embedding's tanh wants them.
        target: the highest return of an episode in the data, on that scale.
    """

    def __init__(
        self, transitions: Transitions, observation: FloatArray, context: int, max_timestep: int
    ) -> None:
        """Prepare all rows.

        Args:
            transitions: the data.
            observation: float32 (n, f), the standardised observations.
            context: decisions in a slice, the present one included.
            max_timestep: largest time that is told apart.
        """
        returns = transitions.returns()
        self.scale = float(np.abs(returns).max()) or 1.0
        self.target = float(returns.max()) / self.scale
        self.context = context
        self._observation = observation
        self._action = transitions.action.astype(np.float32)[:, None]
        self._reward = transitions.reward[:, None]
        self._terminal = transitions.terminal.astype(np.float32)[:, None]
        paid = np.cumsum(transitions.reward, dtype=np.float64)
        ends = np.repeat(paid[transitions.start[1:] - 1], np.diff(transitions.start))
        to_go = (ends - paid + transitions.reward) / self.scale
        self._to_go = to_go.astype(np.float32)[:, None]
        self._time = np.minimum(transitions.step + 1, max_timestep).astype(np.float32)
        self._first = np.repeat(transitions.start[:-1], np.diff(transitions.start))

    def __len__(self) -> int:
        return len(self._time)

    def batch(self, rows: NDArray[np.int64]) -> TrajectoryMiniBatch:
        """The slices that end in these rows, for `algo.update`.

        Args:
            rows: int64 (b,), row numbers; repeats are allowed.

        Returns:
            Arrays (b, context, ...).
        """
        from d3rlpy.dataset import TrajectoryMiniBatch

        at = rows[:, None] + np.arange(1 - self.context, 1)
        there = at >= self._first[rows][:, None]
        at = np.where(there, at, 0)
        mask = there.astype(np.float32)
        wide = mask[:, :, None]
        return TrajectoryMiniBatch(
            observations=self._observation[at] * wide,
            actions=self._action[at] * wide,
            rewards=self._reward[at] * wide,
            returns_to_go=self._to_go[at] * wide,
            terminals=self._terminal[at] * wide,
            timesteps=self._time[at] * mask,
            masks=mask,
            length=self.context,
        )


class SequenceController(BaseController):
    """The likelier action of a Decision Transformer that is told to reach a return, in replay only.

    The return is what the best episode of its training data had; every reward is taken off it.

    Attributes:
        traces: what its own engine replays; see `on`.
    """

    def __init__(
        self,
        transformer: Any,
        traces: TraceSet,
        observation: tuple[str, ...],
        mean: FloatArray,
        std: FloatArray,
        scale: float,
        target: float,
        context: int,
        max_timestep: int,
        settings: Mapping[str, Any],
        name: str = "decision_transformer",
    ) -> None:
        """Join a transformer to the traces that it is run on.

        Args:
            transformer: the torch module of d3rlpy's DiscreteDecisionTransformer; not changed while in use.
            traces: replayed beside the run.
            observation: names of its inputs, in order.
            mean: float32 (f,), subtracted from every observation.
            std: float32 (f,), divides it afterwards.
            scale: of returns.
            target: return to reach, on that scale.
            context: decisions that it looks back on, the present one included.
            max_timestep: largest time that it tells apart.
            settings: of `ReplayEngine` (depths, reward, credit, k, window, max_draft, ...), as in training.
            name: how reports call it.
        """
        self.name = name
        self.observation = observation
        self.k, self.window = int(settings["k"]), int(settings["window"])
        self.traces = traces
        self._transformer, self._mean, self._std = transformer.eval(), mean, std
        self._scale, self._target, self._settings = scale, target, dict(settings)
        self._context, self._max_timestep = context, max_timestep
        self._engine: ReplayEngine | None = None
        self._forget(0)

    def on(self, traces: TraceSet) -> SequenceController:
        """The same policy for another trace set."""
        return SequenceController(
            self._transformer, traces, self.observation, self._mean, self._std, self._scale, self._target,
            self._context, self._max_timestep, self._settings, self.name,
        )  # fmt: skip

    @property
    def network(self) -> NoReturn:
        """There is none to write or to evaluate: it decides by history.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"policy {self.name!r} decides by history and return-to-go: no policy file can hold it, no "
            "decoder can run it, and fitted Q evaluation does not apply; compare it in replay, with "
            "run_controller"
        )

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        """Raises InputError for another setting than the one trained in."""
        super().bind(depths, num_layers, max_draft)
        found = {"depths": self.depths, "max_draft": self.max_draft}
        for label, value in found.items():
            trained = self._settings[label]
            trained = tuple(trained) if label == "depths" else trained
            if value != trained:
                raise InputError(
                    f"policy {self.name!r} was trained with {label} {trained} and cannot be used with "
                    f"{value}; choose {label} {trained} here, or train a policy for {value}"
                )
        self._engine = None

    def reset(self, lanes: NDArray[np.int64]) -> None:
        """Forget the history of these lanes."""
        count = int(lanes.max(initial=-1)) + 1
        if self._engine is None or self._engine.lanes < count:
            if self._engine is not None and self._open.any():
                raise InputError(f"policy {self.name!r}: reset all lanes at once first; {count} are new")
            self._engine = ReplayEngine(
                self.traces, observation=self.observation, lanes=max(count, 1), **self._settings
            )
            self._forget(count)
        self._open[lanes] = False
        for history in (self._seen, self._taken, self._to_go, self._mask):
            history[lanes] = 0.0
        self._rest[lanes] = self._target

    def _forget(self, count: int) -> None:
        """Empty histories of so many lanes."""
        context, features = self._context, len(self.observation)
        self._open = np.zeros(count, dtype=np.bool_)  # whether an episode is in progress
        self._seen = np.zeros((count, context, features), dtype=np.float32)
        self._taken = np.zeros((count, context), dtype=np.float32)
        self._to_go = np.zeros((count, context), dtype=np.float32)
        self._mask = np.zeros((count, context), dtype=np.float32)
        self._rest = np.zeros(count)  # the return still to come
        self._expected = np.zeros((count, features), dtype=np.float32)  # what the driver will show

    def act(self, view: View) -> NDArray[np.int64]:
        """The likelier action after the history of each lane, int64 (n,).

        Raises:
            InputError: the driver plays other texts, or by other rules, than the engine beside it.
        """
        engine, lanes = self._engine, view.lanes
        if engine is None:
            raise InputError(f"policy {self.name!r}: reset its lanes before it acts")
        fresh = np.flatnonzero(view.decision == 0)
        if fresh.size:
            self._expected[lanes[fresh]] = engine.reset_lanes(lanes[fresh], view.text[fresh])
            self._open[lanes[fresh]] = True
        same = np.allclose(self._expected[lanes], view.observation, atol=1e-5)
        if not same or not self._open[lanes].all():
            raise InputError(
                f"policy {self.name!r} replays its own trace set beside the run, and the two differ; give it "
                "the set that is run, policy.on(traces), and the settings it was trained with"
            )
        for history in (self._seen, self._taken, self._to_go, self._mask):
            history[lanes, :-1] = history[lanes, 1:]
        self._seen[lanes, -1] = (view.observation - self._mean) / self._std
        self._taken[lanes, -1] = 0.0
        self._to_go[lanes, -1] = self._rest[lanes]
        self._mask[lanes, -1] = 1.0
        actions = self._predict(lanes, view.decision)
        self._taken[lanes, -1] = actions
        observation, reward, terminated, _ = engine.step(actions, lanes)
        self._expected[lanes] = observation
        self._open[lanes] = ~terminated
        self._rest[lanes] -= reward / self._scale
        return actions

    def _predict(self, lanes: NDArray[np.int64], decision: NDArray[np.int64]) -> NDArray[np.int64]:
        """The likelier action of each lane: d3rlpy's own `predict`, for many histories at once."""
        import torch

        mask = self._mask[lanes]
        time = decision[:, None] + 1 + np.arange(1 - self._context, 1)
        time = np.where(mask > 0, np.minimum(time, self._max_timestep), 0)
        with torch.no_grad():
            _, logits = self._transformer(
                torch.from_numpy(self._seen[lanes]),
                torch.from_numpy(self._taken[lanes])[:, :, None],
                torch.from_numpy(self._to_go[lanes])[:, :, None],
                torch.from_numpy(time.astype(np.int64)),
                torch.from_numpy(1.0 - mask),
            )
        newest = logits[:, -1].numpy()
        return (newest[:, 1] > newest[:, 0]).astype(np.int64)
