"""Measure what decoding costs on this machine: the numbers of a `CostModel`.

Nothing is timed by itself, because what a layer costs depends on what ran before it: the real
decoder runs, under controllers that draft 0, 1, ... max_draft tokens in turn at one depth, and the
passes and heads inside it are timed where they happen. What is left of a round is Python: divided
among rounds and proposals by a line through its average for each draft length, and among the decisions
of a controller that reads heads. Everything takes turns, rounds of plain decoding included, so that a
machine that slows down does so for all.

Averages are of the middle four fifths: unlike medians they add up, and a decoder's time is a sum.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import sde_gym
from sde_gym.decoding import autoregressive, speculative
from sde_gym.decoding.result import DecodeResult
from sde_gym.errors import InputError
from sde_gym.evaluation.stopwatch import Event, Stopwatch, watched
from sde_gym.models.cost import CostModel
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import BaseController, Controller, RoundOutcome, View
from sde_gym.policies.observation import EXTENDED, Action, Phase
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import StaticController
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS

HIDDEN = (64, 64)
"""Hidden layers of the Q-network whose decisions are timed if no controller is given."""

DEFAULT_REPEATS = 6


def calibrate(
    model: LayeredModel,
    prompts: Sequence[Sequence[int]],
    depths: Sequence[int],
    *,
    max_draft: int = DEFAULT_MAX_DRAFT,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    repeats: int = DEFAULT_REPEATS,
    controller: Controller | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CostModel:
    """Measure the costs of a language model's decoding, in seconds.

    Args:
        model: whose layers and heads are timed; with torch's current number of threads.
        prompts: token ids; the repeats take one after the other, and start over at the end.
        depths: candidate depths, rising: those at which draft passes are timed.
        max_draft: longest draft.
        max_new_tokens: tokens generated in each run, at least 2.
        repeats: times that everything is run.
        controller: its decisions are timed (nothing is done about them), bound to these depths and
            max_draft; a Q-network of two hidden layers on the extended features if not given.
        seed: of the order in which runs take turns.
        progress: called with runs done and runs in all.

    Returns:
        Averages; `provenance` tells their quartiles and number of samples, the machine and the model.

    Raises:
        InputError: a number out of range, or texts too short to time every part once.
    """
    candidates = model.check_depths(depths)
    if not prompts or repeats < 1 or max_draft < 1 or max_new_tokens < 2:
        raise InputError(
            f"prompts, repeats and max_draft must be at least 1 and max_new_tokens at least 2; got "
            f"{len(prompts)}, {repeats}, {max_draft} and {max_new_tokens}"
        )
    if controller is None:
        controller = _any_network(candidates, model.num_layers, max_draft)
    samples = _Samples()
    clock = Stopwatch(model.device)
    timed = watched(model, clock)
    rng = np.random.default_rng(seed)
    autoregressive(model, list(prompts[0]), min(max_new_tokens, 8))  # the first run of a process is slow
    for repeat in range(repeats):
        prompt = list(prompts[repeat % len(prompts)])
        # Plain decoding, every depth without reading a head, and one of the depths with.
        reading = candidates[repeat % len(candidates)]
        runs = [(0, False), *((depth, False) for depth in candidates), (reading, True)]
        for done, turn in enumerate(rng.permutation(len(runs)), start=1):
            depth, reads = runs[turn]
            if depth == 0:
                clock.clear()
                autoregressive(timed, prompt, max_new_tokens)
                _collect_plain(samples, clock, model.num_layers)
            else:
                inner = controller if reads else StaticController(depth, max_draft)
                # Plain rounds three times: all other costs are compared with theirs.
                lengths = rng.permutation([0, 0, *range(max_draft + 1)]).tolist()
                cycle = _Cycle(depth, lengths, inner, clock)
                clock.clear()
                found = speculative(timed, prompt, cycle, candidates, max_new_tokens, max_draft=max_draft)
                _collect(samples, clock, found, depth, model.num_layers, reads)
            if progress is not None:
                progress(repeat * len(runs) + done, repeats * len(runs))
    return _fitted(samples, model, candidates, max_draft, repeats, len(prompts))


def _any_network(depths: tuple[int, ...], num_layers: int, max_draft: int) -> QController:
    """A Q-network with random weights: its decisions take as long as a trained one's."""
    rng = np.random.default_rng(0)
    sizes = (len(EXTENDED), *HIDDEN, len(Action))
    layers = [
        (rng.normal(size=(a, b)).astype(np.float32), rng.normal(size=b).astype(np.float32))
        for a, b in pairwise(sizes)
    ]
    return QController(QNetwork(layers), EXTENDED, depths, num_layers, max_draft)


class _Cycle(BaseController):
    """Exits at one depth and drafts a number of tokens that changes round by round.

    The inner controller is asked for every decision and its answer dropped: it is here to take its time.
    """

    name = "calibration"

    def __init__(self, depth: int, lengths: Sequence[int], inner: Controller, clock: Stopwatch) -> None:
        self.depth, self.lengths, self.inner, self.clock = depth, lengths, inner, clock
        self.observation, self.k, self.window = inner.observation, inner.k, inner.window
        self._round = 0

    def bind(self, depths: tuple[int, ...], num_layers: int, max_draft: int) -> None:
        super().bind(depths, num_layers, max_draft)
        self.inner.bind(depths, num_layers, max_draft)

    def reset(self, lanes: NDArray[np.int64]) -> None:
        self.inner.reset(lanes)
        self._round = 0

    def act(self, view: View) -> NDArray[np.int64]:
        self.clock.decisions.append(time.perf_counter())
        self.inner.act(view)
        length = self.lengths[self._round % len(self.lengths)]
        drafting = view.phase[0] == Phase.DRAFT
        here = view.draft_length[0] < length if drafting else self.depths[view.depth_index[0]] == self.depth
        return np.array([Action.EXIT if here and length else Action.CONTINUE], dtype=np.int64)

    def feedback(self, outcome: RoundOutcome) -> None:
        self.inner.feedback(outcome)
        self._round += 1

    def reads(self, phase: int, depth_index: int) -> bool:
        return self.inner.reads(phase, depth_index)


class _Samples:
    """Seconds by what was timed."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.reading: list[tuple[float, int, int]] = []  # rest of a round, its decisions and proposals

    def add(self, name: str, seconds: float, number: int = 0) -> None:
        self.values[name, number].append(seconds)

    def average(self, name: str, number: int = 0) -> float:
        """Mean without the fastest and the slowest tenth; InputError if there is no sample."""
        found = self.values.get((name, number))
        if not found:
            raise InputError(
                f"not once could {name!r} be timed: the texts end too soon; give longer prompts, more of "
                "them, or a larger max_new_tokens"
            )
        cut = len(found) // 10
        return float(np.sort(found)[cut : len(found) - cut].mean())

    def row_averages(self, name: str, most: int) -> tuple[float, ...]:
        """Averages for 1..most tokens, those that never occurred interpolated."""
        known = [n for n in range(1, most + 1) if self.values.get((name, n))]
        if not known:
            self.average(name, 1)
        averages = [self.average(name, n) for n in known]
        return tuple(np.interp(np.arange(1, most + 1), known, averages).tolist())


def _rounds(events: Sequence[Event], num_layers: int) -> Iterator[list[Event]]:
    """The events of each round, which ends with the last layer's head; those of prefill are left out."""
    current: list[Event] = []
    prefill = True
    for event in events:
        current.append(event)
        if event.stop == 0 and event.first == num_layers:
            if not prefill:
                yield current
            current, prefill = [], False


def _collect_plain(samples: _Samples, clock: Stopwatch, num_layers: int) -> None:
    """Of plain decoding only what is neither layer nor head: those are timed beside all others."""
    steps = list(_rounds(clock.events, num_layers))
    for events, following in pairwise(steps):
        span = following[0].start - events[0].start
        samples.add("rest of a plain step", span - sum(event.seconds for event in events))


def _collect(
    samples: _Samples, clock: Stopwatch, result: DecodeResult, depth: int, num_layers: int, reads: bool
) -> None:
    """Sort what happened in one run into the samples."""
    rounds = list(_rounds(clock.events, num_layers))
    decision = result.controller_seconds / max(1, result.decisions)
    if not reads and result.decisions:
        samples.add("blind decision", decision)
    for number, events in enumerate(rounds):
        drafted = 0
        for event in events:
            if event.stop == 0 and event.first == num_layers:
                samples.add("final head", event.seconds, event.rows)
            elif event.stop == 0:
                samples.add("exit head", event.seconds)
            elif event.stop == num_layers:
                samples.add("layer", event.seconds / (num_layers - event.first), event.rows)
            elif not reads and (event.first, event.stop) == (0, depth):
                # Not where heads are read on the way: there the first pass comes in pieces.
                samples.add("later draft pass" if drafted else "first draft pass", event.seconds, depth)
                drafted += 1
        if number + 1 == len(rounds):
            continue  # the end of the last round cannot be told
        start, end = events[0].start, rounds[number + 1][0].start
        left = end - start - sum(event.seconds for event in events)
        decisions = bisect_left(clock.decisions, end) - bisect_left(clock.decisions, start)
        proposals = result.rounds[number].drafted
        if reads:
            samples.reading.append((left, decisions, proposals))
        elif proposals:
            samples.add("rest of a round", left - decisions * decision, proposals)


def _fitted(
    samples: _Samples,
    model: LayeredModel,
    depths: tuple[int, ...],
    max_draft: int,
    repeats: int,
    prompts: int,
) -> CostModel:
    """The averages as a cost model."""
    # What is left of a round grows with its proposals: a line through the averages.
    lengths = sorted(n for name, n in samples.values if name == "rest of a round")
    if not lengths:
        samples.average("rest of a round")
    rest = [samples.average("rest of a round", n) for n in lengths]
    weights = [len(samples.values["rest of a round", n]) ** 0.5 for n in lengths]
    slope, intercept = np.polyfit(lengths, rest, 1, w=weights) if len(lengths) > 1 else (0.0, rest[0])
    proposal = max(0.0, float(slope))
    fixed_round = max(0.0, float(intercept if slope >= 0 else np.average(rest, weights=weights)))
    for left, decisions, proposals in samples.reading:
        samples.add("decision", (left - fixed_round - proposals * proposal) / max(1, decisions))
    blind = samples.average("blind decision")
    layer = samples.row_averages("layer", max_draft + 1)
    final_head = samples.row_averages("final head", max_draft + 1)

    def passes(name: str) -> tuple[float, ...]:
        # A deeper pass contains the shallower one: whatever says otherwise is noise.
        return tuple(np.maximum.accumulate([samples.average(name, depth) for depth in depths]).tolist())

    return CostModel(
        name=model.name,
        unit="seconds",
        num_layers=model.num_layers,
        layer=layer,
        draft_depths=depths,
        first_draft=passes("first draft pass"),
        later_draft=passes("later draft pass"),
        exit_head=samples.average("exit head"),
        final_head=final_head,
        fixed_proposal=proposal,
        fixed_decision=max(blind, samples.average("decision")),
        fixed_blind_decision=blind,
        fixed_round=fixed_round,
        plain_token=model.num_layers * layer[0] + final_head[0] + samples.average("rest of a plain step"),
        provenance=_provenance(samples, model, repeats, prompts),
    )


_MEASURED = {
    "layer": "tokens",
    "first draft pass": "depth",
    "later draft pass": "depth",
    "exit head": "",
    "final head": "tokens",
    "blind decision": "",
    "decision": "",
    "rest of a round": "proposals",
    "rest of a plain step": "",
}
"""What is reported of the samples, and what their number means."""


def _provenance(samples: _Samples, model: LayeredModel, repeats: int, prompts: int) -> dict[str, Any]:
    """How the numbers came about, plain JSON."""
    from sde_gym.evaluation.demo import hardware

    measured = []
    for name, meaning in _MEASURED.items():
        for number in sorted(n for other, n in samples.values if other == name):
            values = samples.values[name, number]
            row: dict[str, Any] = {"part": name, **({meaning: number} if meaning else {})}
            row["average"] = samples.average(name, number)
            row["quartiles"] = np.quantile(values, [0.25, 0.75]).tolist()
            measured.append({**row, "samples": len(values)})
    return {
        "model": model.name,
        "weights_hash": model.weights_hash(),
        "head": model.head_hash(),
        "hardware": hardware(model, torch.get_num_threads()),
        "versions": {"sde_gym": sde_gym.__version__, "torch": torch.__version__},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "repeats": repeats,
        "prompts": min(prompts, repeats),
        "measured": measured,
    }


def cost_table(cost: CostModel) -> list[tuple[str, str, str, str]]:
    """A calibrated cost model to print: part, milliseconds, their quartiles, number of samples.

    Passes are per layer. What was computed from several averages has neither quartiles nor samples.
    """
    table = []
    for row in cost.provenance.get("measured", ()):
        part, scale = str(row["part"]), 1e3
        if part == "rest of a round":
            continue
        if "tokens" in row:
            part += f", {row['tokens']} token" + "s" * (row["tokens"] > 1)
        if "depth" in row:
            part, scale = f"{part} to depth {row['depth']}, a layer", 1e3 / row["depth"]
        middle, low, high = (f"{scale * value:.3f}" for value in (row["average"], *row["quartiles"]))
        table.append((part, middle, f"{low} to {high}", str(row["samples"])))
    for part, seconds in (
        ("fixed, a proposal", cost.fixed_proposal),
        ("fixed, a round", cost.fixed_round),
        ("plain token", cost.plain_token),
    ):
        table.append((part, f"{1e3 * seconds:.3f}", "", ""))
    return table
