"""How long `sde-gym tune` will take, told before it starts from small samples of its own work.

Each stage is run on a little of its input and scaled by what it grows with: recording by tokens, on top
of what a batch costs anyway; calibration by plain decoding of so many tokens; replay by the tokens of a
text (all texts run side by side); training by gradient steps.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sde_gym.decoding import autoregressive
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.calibration import DEFAULT_REPEATS
from sde_gym.evaluation.tuning_settings import TRACES_FOLDER, Prepared
from sde_gym.models.threads import torch_threads
from sde_gym.offline.pipeline import explore
from sde_gym.offline.training import dqn_name, train
from sde_gym.policies.rules import StaticController
from sde_gym.prompts import Prompt
from sde_gym.traces import TraceSet, load_traces
from sde_gym.traces.recorder import record

#: Prompts of a batch of the recorder, and tokens of the two samples of it.
_BATCH = 8
_FEW, _MORE = 4, 12

#: Exploratory episodes, and gradient steps of the two samples of training.
_EPISODES = 24
_FEW_STEPS, _MORE_STEPS = 20, 120


@dataclass(frozen=True)
class Estimate:
    """Expected time of each stage.

    Attributes:
        seconds: by stage of `tuning.STAGES`; texts are taken to use their whole budget.
    """

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Of all stages."""
        return sum(self.seconds.values())

    def lines(self) -> list[str]:
        """The estimate to print: the total, then its parts."""
        parts = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in self.seconds.items())
        return [f"this will take about {duration(self.total)}, less if texts end early: {parts}"]


def duration(seconds: float) -> str:
    """'40 s', '3 min', '1.5 h'."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def estimate(prepared: Prepared, out: Path) -> Estimate:
    """Time a few tokens of recording and a few gradient steps; nothing is written to `out`.

    Args:
        prepared: from `tuning.prepare`.
        out: the run's folder; texts that are recorded there already take no time.

    Raises:
        InputError: texts that all end with their first token.
    """
    with torch_threads(prepared.settings.threads), tempfile.TemporaryDirectory() as folder:
        return _estimate(prepared, out, Path(folder))


def _estimate(prepared: Prepared, out: Path, folder: Path) -> Estimate:
    settings = prepared.settings
    tokens = settings.max_new_tokens
    prompts = [*prepared.training, *prepared.held_out]
    batch, token, sample = _recording(prepared, prompts[:_BATCH], folder)
    left = len(prompts) - _recorded(out, prompts)
    seconds = {"record": math.ceil(left / _BATCH) * batch + left * tokens * token}
    if settings.cost:
        runs = DEFAULT_REPEATS * (2 + len(prepared.depths))
        seconds["calibrate"] = runs * tokens * _plain_token(prepared)
    longer = tokens / sample.manifest["max_new_tokens"]
    depth, length = sample.depths[-1], min(settings.max_draft, _FEW)

    def play() -> None:
        run_controller(sample, StaticController(depth, length), max_draft=settings.max_draft)

    play()  # the first run of a process is slow, here and below
    replay = longer * _elapsed(play)
    seconds["choose"] = len(prepared.depths) * settings.max_draft * replay
    training = settings.training()
    few = replace(training, episodes=_EPISODES, depths=(depth,))
    started = time.perf_counter()
    transitions = explore(sample, few)
    exploring = time.perf_counter() - started

    def steps(count: int) -> Callable[[], object]:
        short = replace(few, gradient_steps=count, evaluate_every=count)
        return lambda: train(transitions, dqn_name(short), short, evaluate=lambda _: {"return": 0.0})

    steps(_FEW_STEPS)()
    start, end = _elapsed(steps(_FEW_STEPS)), _elapsed(steps(_MORE_STEPS))
    step = max(0.0, end - start) / (_MORE_STEPS - _FEW_STEPS)
    checkpoints = training.gradient_steps / training.evaluate_every
    # Episodes run side by side, as many as the collector has lanes.
    rounds = math.ceil(training.episodes / 256)
    seconds["train"] = (
        start + training.gradient_steps * step + checkpoints * 2 * replay + rounds * longer * exploring
    )
    return Estimate({stage: round(value, 1) for stage, value in seconds.items()})


def _recording(prepared: Prepared, prompts: list[Prompt], folder: Path) -> tuple[float, float, TraceSet]:
    """Seconds of a batch before its first token, seconds a token, and what was recorded."""
    samples: list[tuple[float, int, TraceSet | None]] = []
    for number, most in enumerate((2, _FEW, _MORE)):  # the first is not counted
        started = time.perf_counter()
        try:
            traces: TraceSet | None = record(
                prepared.model,
                prompts,
                folder / str(number),
                prepared.depths,
                max_new_tokens=most,
                overrun=prepared.settings.max_draft - 1,
            )
        except InputError:
            traces = None
        count = 0 if traces is None else len(traces.token)
        samples.append((time.perf_counter() - started, count, traces))
    (few_seconds, few, _), (more_seconds, more, found) = samples[1:]
    if found is None or more == 0:
        raise InputError("the first texts all end with their first token; give other prompts")
    token = max(0.0, more_seconds - few_seconds) / (more - few) if more > few else more_seconds / more
    return max(0.0, few_seconds - few * token), token, found


def _recorded(out: Path, prompts: list[Prompt]) -> int:
    """How many of the prompts an earlier run has recorded."""
    try:
        done = set(load_traces(out / TRACES_FOLDER).text_ids)
    except InputError:  # none, or none that can be read: recording will say so
        return 0
    return sum(prompt.id in done for prompt in prompts)


def _plain_token(prepared: Prepared) -> float:
    """Seconds of one token of plain decoding."""
    ids = prepared.model.encode(prepared.training[0].text)
    result = autoregressive(prepared.model, ids, _MORE)
    return result.decode_seconds / max(1, len(result.tokens) - 1)


def _elapsed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
