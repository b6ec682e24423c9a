"""Drive a controller over recorded texts, all at once, and count what it cost.

The numbers are since prefill. `speedup` is simulated under a cost model (`sde_gym.models.cost`),
`layer_speedup` always by counting layers: one costs 1 however many tokens pass it together, heads and
controllers cost nothing. The wall clock of the real decoder is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.arguments import indices
from sde_gym.envs.engine import COUNTERS, ReplayEngine
from sde_gym.envs.shadow import check_replayable, ended_rounds, shadow_costs, wants_shadows
from sde_gym.errors import InputError
from sde_gym.models.cost import CostModel
from sde_gym.policies.controller import Controller, feature_settings
from sde_gym.policies.observation import HEAD_FEATURES, Action, Phase
from sde_gym.traces import TraceSet


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a controller did to n texts; arrays over them, int64 (n,) unless said otherwise.

    Attributes:
        controller: its name.
        depths: the m candidate depths.
        num_layers: L.
        texts: index of each text in the trace set.
        returns: float64 (n,), undiscounted sum of rewards.
        tokens: tokens emitted after prefill.
        rounds: verifications, plain steps of the last layer included.
        drafted: proposals made.
        accepted: proposals accepted.
        decisions: actions taken.
        layer_passes: layers times tokens.
        sequential_layers: layers run one after the other.
        head_calls: exit heads that were read or proposed from, plus one final head a round, and m more
            for the shadow tokens of a controller that asks for them.
        exits: int64 (n, m + 1), rounds that ended at each depth, the last column those without a
            proposal.
        cost: float64 (n,), of all steps, in the cost model's unit. Heads are charged where the
            controller reads them or proposes from them, and at every depth for its shadow tokens. The
            latter are no part of a step, so no reward charges them.
        cost_model: what the parts cost.
    """

    controller: str
    depths: tuple[int, ...]
    num_layers: int
    texts: NDArray[np.int64]
    returns: NDArray[np.float64]
    tokens: NDArray[np.int64]
    rounds: NDArray[np.int64]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    decisions: NDArray[np.int64]
    layer_passes: NDArray[np.int64]
    sequential_layers: NDArray[np.int64]
    head_calls: NDArray[np.int64]
    exits: NDArray[np.int64]
    cost: NDArray[np.float64]
    cost_model: CostModel

    @property
    def speedup(self) -> float:
        """Simulated: plain decoding's cost over this one's, for all texts together."""
        return self.cost_model.speedup(float(self.tokens.sum()), float(self.cost.sum()))

    @property
    def layer_speedup(self) -> float:
        """Layers that plain decoding runs one after the other over those run here, all texts together."""
        return float(self.num_layers * self.tokens.sum() / self.sequential_layers.sum())

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed, 1.0 if nothing was proposed."""
        return float(self.accepted.sum() / self.drafted.sum()) if self.drafted.any() else 1.0

    @property
    def mean_exit_depth(self) -> float:
        """Mean of l* over rounds, L where nothing was proposed."""
        depths = np.array([*self.depths, self.num_layers])
        return float(self.exits.sum(axis=0) @ depths / self.rounds.sum())

    @property
    def mean_draft_length(self) -> float:
        """Proposals a round."""
        return float(self.drafted.sum() / self.rounds.sum())

    def totals(self) -> dict[str, Any]:
        """Sums and means over all texts, plain JSON values."""
        return {
            "controller": self.controller,
            "texts": len(self.texts),
            "return": float(self.returns.sum()),
            **{name: int(getattr(self, name).sum()) for name in COUNTERS},
            "cost": float(self.cost.sum()),
            "cost_model": self.cost_model.name,
            "speedup": self.speedup,
            "layer_speedup": self.layer_speedup,
            "acceptance_rate": self.acceptance_rate,
            "mean_exit_depth": self.mean_exit_depth,
            "mean_draft_length": self.mean_draft_length,
        }


def run_controller(
    traces: TraceSet,
    controller: Controller,
    texts: Sequence[int] | NDArray[np.int64] | None = None,
    **settings: Any,
) -> RunResult:
    """Decode texts under a controller, in replay, one lane a text.

    Args:
        traces: recorded texts.
        controller: bound and reset here; its features are the observation.
        texts: indices, none twice; all that are episodes if not given.
        **settings: of `ReplayEngine`, but `observation`, `reads` and `lanes`, which follow from
            the controller and the texts, and `episode`, which is the whole text. `k` and `window`
            are the controller's own if not given.

    Raises:
        InputError: no text, a text that there is not, a setting out of range, or a controller
            that does not fit or cannot be replayed.
    """
    check_replayable(controller)
    settings["k"], settings["window"] = feature_settings(
        controller, settings.get("k"), settings.get("window")
    )
    probe = ReplayEngine(traces, observation=(), **settings)
    if probe.episode != "generation":
        raise InputError(f"episode: {probe.episode!r} was given, but texts are run as a whole; leave it out")
    chosen = chosen_texts(probe, texts)
    controller.bind(probe.depths, probe.num_layers, probe.max_draft)
    m = len(probe.depths)
    reads = heads_read(controller, m)
    engine = ReplayEngine(
        traces, observation=controller.observation, lanes=chosen.size, reads=reads, **settings
    )

    hidden = hidden_columns(controller.observation, reads)
    shadows = wants_shadows(controller)
    shadow_cost = shadow_costs(engine.cost, m)

    lanes = np.arange(chosen.size, dtype=np.int64)
    returns, cost = np.zeros(chosen.size), np.zeros(chosen.size)
    heads = np.zeros(chosen.size, dtype=np.int64)
    exits = np.zeros((chosen.size, m + 1), dtype=np.int64)
    observation = engine.reset_lanes(lanes, chosen)
    controller.reset(lanes)
    while lanes.size:
        view = engine.view(lanes, observation)
        observation[hidden[view.phase, view.depth_index]] = 0.0
        actions = np.asarray(controller.act(view))
        observation, reward, terminated, outcome = engine.step(actions, lanes)
        returns[lanes] += reward
        cost[lanes] += engine.step_costs(outcome)
        heads[lanes] += reads[outcome.phase, outcome.depth_index] | (actions == Action.EXIT)
        told = ended_rounds(engine, lanes, outcome, shadows)
        if told is not None:
            exits[told.lanes, told.depth_index] += 1
            if shadows:
                cost[lanes] += shadow_cost[outcome.emitted]
            controller.feedback(told)
        lanes, observation = lanes[~terminated], observation[~terminated]
    counters = engine.counters()
    counters["head_calls"] = heads + counters["rounds"] * (1 + m * shadows)
    return RunResult(
        controller=controller.name,
        depths=engine.depths,
        num_layers=engine.num_layers,
        texts=chosen,
        returns=returns,
        exits=exits,
        cost=cost,
        cost_model=engine.cost,
        **counters,
    )


def heads_read(controller: Controller, depths: int) -> NDArray[np.bool_]:
    """Where a controller reads the exit head, bool (2, m), by `Phase` and index of the m depths."""
    read = [[controller.reads(phase, index) for index in range(depths)] for phase in Phase]
    return np.array(read, dtype=bool)


def hidden_columns(names: tuple[str, ...], reads: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Columns that are 0 for want of a head, bool (2, m, f); `reads`, bool (2, m), says which are read."""
    hidden = np.zeros((*reads.shape, len(names)), dtype=bool)
    for column, name in enumerate(names):
        if name in HEAD_FEATURES:
            hidden[:, :, column] = ~reads
        if name == "stable":
            hidden[Phase.SELECT, 1:, column] |= ~reads[Phase.SELECT, :-1]
    return hidden


def chosen_texts(engine: ReplayEngine, texts: Sequence[int] | NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The texts to run, int64 (n,): all that are episodes if not given; InputError if none."""
    if texts is None:
        chosen = np.flatnonzero(engine.tables.playable)
    else:
        chosen = indices("texts", texts, len(engine.traces))
    if not chosen.size or len(np.unique(chosen)) != chosen.size:
        raise InputError("texts: give at least one index of a text, and none twice")
    return chosen
