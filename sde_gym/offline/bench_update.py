"""Gradient steps a second: d3rlpy's `fit` beside our mini-batches, and whether both learn alike.

    python -m sde_gym.offline.bench_update
    sde-gym bench train

Both train the same algorithm on the same transitions, in turns within one process, `repeats` times
over. The runs of one repeat start from the same weights; they differ in the order of their
mini-batches, as two seeds do. So the curves are compared as samples: at every checkpoint the mean
loss and the exact return in replay, averaged over repeats, beside the spread over repeats.
Checkpoints are outside the time.
"""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sde_gym.errors import InputError
from sde_gym.files import write_json
from sde_gym.offline.algorithms import algorithm_factory, create_algorithm
from sde_gym.offline.backend import training_session
from sde_gym.offline.behaviours import exploratory_schedule
from sde_gym.offline.buffer import to_replay_buffer
from sde_gym.offline.collect import collect
from sde_gym.offline.learners import StepLearner, standardised
from sde_gym.offline.selection import environment_of, replay_metrics
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.transitions import Transitions
from sde_gym.traces import TraceSet, load_traces

#: The two ways: d3rlpy's own loop with its sampler, and mini-batches by array indexing.
WAYS = ("fit", "ours")

#: Called with (runs done, runs in all, what runs next).
BenchProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        way: one of `WAYS`.
        seed: of its weights and mini-batches.
        seconds: that its gradient steps took, checkpoints left out.
        steps: gradient steps.
        loss: mean loss since the checkpoint before, of each checkpoint.
        returns: mean return a text of each checkpoint, exact.
    """

    way: str
    seed: int
    seconds: float
    steps: int
    loss: tuple[float, ...]
    returns: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Gradient steps a second."""
        return self.steps / self.seconds


@dataclass(frozen=True)
class UpdateBenchmark:
    """All runs, and what they were.

    Attributes:
        curves: of both ways, in the order in which they ran.
        checkpoints: gradient steps made at each.
        settings: of the run.
        machine: processor, cores, versions.
    """

    curves: tuple[Curve, ...]
    checkpoints: tuple[int, ...]
    settings: dict[str, Any]
    machine: dict[str, Any]

    def rates(self, way: str) -> list[float]:
        """Gradient steps a second of each repeat."""
        return [curve.rate for curve in self.curves if curve.way == way]

    @property
    def speedup(self) -> float:
        """Our mean rate over that of `fit`."""
        return statistics.fmean(self.rates("ours")) / statistics.fmean(self.rates("fit"))

    def mean_and_spread(self, way: str, quantity: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation over repeats, float64 (checkpoints,) each.

        Args:
            way: one of `WAYS`.
            quantity: "loss" or "returns".
        """
        rows = np.array([getattr(curve, quantity) for curve in self.curves if curve.way == way])
        spread = rows.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros(rows.shape[1])
        return rows.mean(axis=0), spread

    def differences(self, quantity: str) -> np.ndarray:
        """Difference of the two ways' means at every checkpoint, in standard errors of that difference.

        Welch's t; where both ways learn alike, mostly within 2 (the 95 % limit of a single one is between
        2.8 and 4.3 at three repeats, 2.1 at ten). Checkpoints of one run are alike, so one chance
        difference shows in several of them. NaN for a single repeat.
        """
        (ours, spread), (fit, other) = (self.mean_and_spread(way, quantity) for way in ("ours", "fit"))
        repeats = len(self.curves) // len(WAYS)
        error = np.sqrt((spread**2 + other**2) / repeats)
        found: np.ndarray = np.where(error > 0, (ours - fit) / np.where(error > 0, error, 1.0), np.nan)
        return found

    def save(self, path: Path) -> None:
        """Write every run as JSON."""
        rows = [{**asdict(curve), "rate": curve.rate} for curve in self.curves]
        write_json(path, {**asdict(self), "curves": rows, "speedup": self.speedup})


def bench_update(
    traces: str | Path | TraceSet = "stdlib-20m",
    settings: DQNSettings | None = None,
    *,
    algorithm: str = "double_dqn",
    repeats: int = 3,
    progress: BenchProgress | None = None,
) -> UpdateBenchmark:
    """Measure both ways in turns.

    Args:
        traces: explored once, by the settings.
        settings: of exploration and learning, its `threads` of the measurement;
            `DQNSettings(gradient_steps=4000, evaluate_every=500)` if not given.
        algorithm: a name out of `algorithm_names()`, but decision_transformer.
        repeats: times that both run.
        progress: see `BenchProgress`.

    Raises:
        InputError: fewer than one repeat, gradient steps that are no multiple of `evaluate_every`, an
            algorithm that learns from sequences, or d3rlpy missing.
    """
    chosen = settings or DQNSettings(gradient_steps=4000, evaluate_every=500)
    if repeats < 1:
        raise InputError(f"repeats is {repeats}; it must be at least 1")
    if chosen.gradient_steps % chosen.evaluate_every:
        raise InputError(
            f"gradient_steps is {chosen.gradient_steps}; d3rlpy's fit drops what is no multiple of "
            f"evaluate_every ({chosen.evaluate_every}), so give one"
        )
    factory = algorithm_factory(algorithm)
    recorded = traces if isinstance(traces, TraceSet) else load_traces(traces)
    data = collect(
        recorded, exploratory_schedule(chosen.depths or recorded.depths, chosen.max_draft, chosen.epsilon),
        chosen.episodes, chosen.seed, observation=chosen.features, depths=chosen.depths,
        reward=chosen.reward, final_token_reward=chosen.final_token_reward, k=chosen.k,
        window=chosen.window, max_draft=chosen.max_draft,
    )  # fmt: skip
    _, _, observation = standardised(data)
    # Making a buffer draws from it once.
    with _quiet_session(chosen.seed, chosen.threads), _numpy_seeded(chosen.seed):
        buffer = to_replay_buffer(data, chosen.n_steps, chosen.gamma, observation)
    curves: list[Curve] = []
    for repeat in range(repeats):
        # Alternating who goes first keeps a drift of the machine from favouring one.
        for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
            if progress is not None:
                progress(len(curves), repeats * len(WAYS), way)
            seed = chosen.seed + repeat
            with _quiet_session(seed, chosen.threads) as d3rlpy:
                made = create_algorithm(d3rlpy, factory, chosen, len(data.names))
                if hasattr(made.config, "context_size"):
                    raise InputError(
                        f"{algorithm} learns from sequences; give one that learns from transitions"
                    )
                run = _Run(made, data, recorded, chosen, seed)
                if way == "fit":
                    run.fit(d3rlpy, buffer)
                else:
                    run.ours()
            curves.append(Curve(way, seed, run.seconds, chosen.gradient_steps, *run.curve()))
    return UpdateBenchmark(
        curves=tuple(curves),
        checkpoints=tuple(range(chosen.evaluate_every, chosen.gradient_steps + 1, chosen.evaluate_every)),
        settings={**chosen.to_json(), "algorithm": algorithm, "repeats": repeats, "transitions": len(data)},
        machine=_machine(),
    )


class _Run:
    """One run of either way: its clock and its checkpoints."""

    def __init__(
        self, algorithm: Any, data: Transitions, traces: TraceSet, settings: DQNSettings, seed: int
    ) -> None:
        self._algorithm, self._traces, self._settings, self._seed = algorithm, traces, settings, seed
        self._environment = environment_of(data)
        rng = np.random.default_rng(seed)
        states = data.observation[rng.integers(len(data), size=64)]
        self._learner = StepLearner(algorithm, data, settings, states, "measured")
        self._rows, self._rng = len(data), rng
        self._losses: list[float] = []
        self._loss: list[float] = []
        self._returns: list[float] = []
        self.seconds = 0.0

    def curve(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Losses and returns of all checkpoints."""
        return tuple(self._loss), tuple(self._returns)

    def ours(self) -> None:
        """All gradient steps by array indexing."""
        settings = self._settings
        for _ in range(settings.gradient_steps // settings.evaluate_every):
            started = time.perf_counter()
            for _ in range(settings.evaluate_every):
                losses = self._learner.update(self._rng.integers(self._rows, size=settings.batch_size))
                self._losses.append(_loss(losses))
            self.seconds += time.perf_counter() - started
            self._checkpoint()

    def fit(self, d3rlpy: ModuleType, buffer: Any) -> None:
        """All gradient steps by d3rlpy's `fit`, without progress bar, files and logging."""
        settings, algorithm = self._settings, self._algorithm
        update = algorithm.update

        def noted(batch: Any) -> Any:
            losses = update(batch)
            self._losses.append(_loss(losses))
            return losses

        algorithm.update = noted
        with _numpy_seeded(self._seed):
            started = time.perf_counter()
            epochs = algorithm.fitter(
                buffer, n_steps=settings.gradient_steps, n_steps_per_epoch=settings.evaluate_every,
                show_progress=False, logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
                save_interval=settings.gradient_steps + 1,
            )  # fmt: skip
            for _ in epochs:
                self.seconds += time.perf_counter() - started
                self._checkpoint()
                started = time.perf_counter()

    def _checkpoint(self) -> None:
        self._loss.append(float(np.mean(self._losses)))
        self._losses.clear()
        metrics = replay_metrics(self._traces, self._learner.policy(), **self._environment)
        self._returns.append(metrics["return"])


@contextmanager
def _quiet_session(seed: int, threads: int) -> Iterator[ModuleType]:
    """`training_session` without d3rlpy's warning that its networks are built already."""
    import structlog

    with training_session(seed, threads) as d3rlpy:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        yield d3rlpy


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """numpy's global generator, which d3rlpy samples with, seeded; put back at the end."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


def _loss(losses: Any) -> float:
    return float(losses["loss"] if "loss" in losses else losses["critic_loss"])


def _machine() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("d3rlpy", "torch", "numpy")},
    }


def report(found: UpdateBenchmark) -> str:
    """The result in words and two small tables."""
    lines = [f"{'way':<6}{'steps/s':>10}{'spread':>9}"]
    for way in WAYS:
        rates = found.rates(way)
        spread = statistics.stdev(rates) if len(rates) > 1 else 0.0
        lines.append(f"{way:<6}{statistics.fmean(rates):>10.0f}{spread:>9.0f}")
    lines += [
        f"speed-up {found.speedup:.2f}x at batch {found.settings['batch_size']}, "
        f"{found.settings['threads']} thread, {found.settings['repeats']} repeats",
        "",
        f"{'step':>7}{'loss, fit':>18}{'loss, ours':>18}{'t':>7}"
        f"{'return, fit':>18}{'return, ours':>18}{'t':>7}",
    ]
    columns = []
    for quantity in ("loss", "returns"):
        for way in WAYS:
            pairs = zip(*found.mean_and_spread(way, quantity), strict=True)
            columns.append([f"{mean:.3f} ± {by:.3f}".rjust(18) for mean, by in pairs])
        columns.append([f"{value:.1f}".rjust(7) for value in found.differences(quantity)])
    for number, step in enumerate(found.checkpoints):
        lines.append(f"{step:>7}" + "".join(column[number] for column in columns))
    return "\n".join(lines)


def main() -> None:
    """Measure on the shipped traces and print."""
    from rich.console import Console

    from sde_gym.terminal import progress_bars

    with progress_bars() as advance:
        found = bench_update(progress=lambda done, total, way: advance("measure", done, total, way))
    Console(highlight=False).print(report(found), soft_wrap=True)


if __name__ == "__main__":
    main()
