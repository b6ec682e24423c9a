"""The hindsight optimum: what a controller could earn that knows every match beforehand.

For a recorded text it is known where each depth is right, so the best sequence of actions is a
backward dynamic program. Its state is the position at which a round starts, its choice the
depth to exit at (or none) and the length of the draft; how many tokens that emits follows from the
matches, and so does every reward that is a function of the step (`StepOutcome`). The
program is exact under the engine's rules, and what it finds bounds every policy from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.rewards import Reward, StepOutcome
from sde_gym.envs.run import chosen_texts
from sde_gym.errors import InputError
from sde_gym.models.cost import CostModel
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.observation import Action, Phase
from sde_gym.traces import TraceSet
from sde_gym.traces.schema import text_budget

_NEVER = np.iinfo(np.int64).max // 2
"""A number of proposals that no draft has."""


@dataclass(frozen=True, eq=False)
class Hindsight:
    """The optimum of n texts.

    Attributes:
        texts: int64 (n,), index of each text in the trace set.
        values: float64 (n,), the highest sum of rewards, or the least cost.
        tokens: int64 (n,), tokens emitted after prefill.
        actions: an optimal sequence of `Action` for each text, int64.
        cost_model: behind the costs.
    """

    texts: NDArray[np.int64]
    values: NDArray[np.float64]
    tokens: NDArray[np.int64]
    actions: list[NDArray[np.int64]]
    cost_model: CostModel

    def controller(self) -> PlannedController:
        """A controller that plays these actions, for `run_controller` with the same texts and settings."""
        return PlannedController(dict(zip(self.texts.tolist(), self.actions, strict=True)))


class PlannedController(BaseController):
    """Plays an action sequence that was fixed beforehand for each text; it looks at nothing.

    Args:
        plans: by index of the text, int64 actions in order.
    """

    name = "hindsight"

    def __init__(self, plans: dict[int, NDArray[np.int64]]) -> None:
        self.plans = plans

    def act(self, view: View) -> NDArray[np.int64]:
        """The action of each text's plan at its decision number."""
        pairs = zip(view.text.tolist(), view.decision.tolist(), strict=True)
        return np.array([self.plans[text][decision] for text, decision in pairs], dtype=np.int64)

    def reads(self, phase: int, depth_index: int) -> bool:
        """Never."""
        return False


def best_return(
    traces: TraceSet, texts: Sequence[int] | NDArray[np.int64] | None = None, **settings: Any
) -> Hindsight:
    """The highest undiscounted return of each text, and actions that reach it.

    Args:
        traces: recorded texts.
        texts: indices, none twice; all that are episodes if not given.
        **settings: of `ReplayEngine`, as for the policies to be compared; the reward is among them.
            Nothing has to be read to know what is recorded, so the "speed" reward and costs
            charge no head that nothing is proposed from, unless `reads` says otherwise.

    Raises:
        InputError: no text, a text that there is not, a setting out of range, or an episode other
            than "generation".
    """
    engine = _engine(traces, settings)
    return _solve(engine, engine.reward, chosen_texts(engine, texts))


def least_cost(
    traces: TraceSet, texts: Sequence[int] | NDArray[np.int64] | None = None, **settings: Any
) -> Hindsight:
    """The least cost of each text under the cost model: `best_return`'s arguments, whatever the reward.

    `best_speedup` makes a simulated speed-up of it.
    """
    engine = _engine(traces, settings)
    found = _solve(engine, lambda outcome: -engine.step_costs(outcome), chosen_texts(engine, texts))
    return Hindsight(found.texts, -found.values, found.tokens, found.actions, found.cost_model)


def best_speedup(
    traces: TraceSet, texts: Sequence[int] | NDArray[np.int64] | None = None, **settings: Any
) -> float:
    """The highest simulated speed-up of all these texts together, as `RunResult.speedup` counts it."""
    found = least_cost(traces, texts, **settings)
    return found.cost_model.speedup(float(found.tokens.sum()), float(found.values.sum()))


def headroom(value: float, baseline: float, optimum: float) -> float:
    """The share of what lies between baseline and optimum that a value has reached.

    Args:
        value: of a policy: a return or a speed-up.
        baseline: of what it has to beat, such as the best static setting, on the same texts.
        optimum: in hindsight, on the same texts.

    Returns:
        At most 1; negative below the baseline. NaN where the baseline is the optimum.
    """
    return (value - baseline) / (optimum - baseline) if optimum != baseline else float("nan")


def _engine(traces: TraceSet, settings: dict[str, Any]) -> ReplayEngine:
    engine = ReplayEngine(traces, **{"observation": (), **settings})
    if engine.episode != "generation":
        raise InputError(f"episode: {engine.episode!r} has no hindsight optimum, only 'generation' has")
    return engine


@dataclass(frozen=True, eq=False)
class _Drafts:
    """All drafts of a text: from each round start (s of them), at each depth (m), of k = 1..K tokens.

    Attributes:
        opening: int64 (s,), position of each round start, 1..s.
        right: int64 (s, m), leading proposals that are right.
        forced: int64 (s, m), proposals after which verification is forced.
        unfed: bool (s, m), whether the last of these is not fed.
    """

    opening: NDArray[np.int64]
    right: NDArray[np.int64]
    forced: NDArray[np.int64]
    unfed: NDArray[np.bool_]


def _solve(engine: ReplayEngine, reward: Reward, texts: NDArray[np.int64]) -> Hindsight:
    lengths = np.minimum(engine.traces.lengths, engine.max_new_tokens)[texts]
    solved = [_solve_text(engine, reward, text) for text in texts.tolist()]
    return Hindsight(
        texts=texts,
        values=np.array([value for value, _ in solved]),
        tokens=lengths - 1,
        actions=[actions for _, actions in solved],
        cost_model=engine.cost,
    )


def _solve_text(engine: ReplayEngine, reward: Reward, text: int) -> tuple[float, NDArray[np.int64]]:
    """The optimum of one text and its actions."""
    drafts = _drafts(engine, text)
    plain, draft, emitted = _round_rewards(engine, reward, drafts)
    starts, m, longest = draft.shape
    # value[p] is that of what follows when row p is the next to be predicted; the text ends at s + 1.
    value = np.zeros(starts + 2)
    choice = np.zeros(starts + 2, dtype=np.int64)
    options, steps = draft.reshape(starts, -1), emitted.reshape(starts, -1)
    for start in range(starts, 0, -1):
        totals = options[start - 1] + value[start + steps[start - 1]]
        best = int(totals.argmax())
        alone = plain[start - 1] + value[start + 1]
        choice[start], value[start] = (-1, alone) if alone >= totals[best] else (best, totals[best])

    actions: list[int] = []
    start = 1
    while start <= starts:
        if choice[start] < 0:
            actions += [int(Action.CONTINUE)] * m
            start += 1
            continue
        index, length = divmod(int(choice[start]), longest)
        actions += [int(Action.CONTINUE)] * index + [int(Action.EXIT)] * (length + 1)
        if length + 1 < drafts.forced[start - 1, index]:
            actions.append(int(Action.CONTINUE))
        start += int(steps[start - 1, choice[start]])
    return float(value[1]), np.array(actions, dtype=np.int64)


def _drafts(engine: ReplayEngine, text: int) -> _Drafts:
    """What becomes of each draft of a text, from the trace alone."""
    traces, m = engine.traces, len(engine.depths)
    columns = [traces.depths.index(depth) for depth in engine.depths]
    first = int(traces.start[text])
    limit = int(min(traces.lengths[text], engine.max_new_tokens))
    budget = int(
        text_budget(engine.max_new_tokens, traces.manifest["context_limit"], traces.prompt_lengths[text])
    )
    rows = np.arange(first, first + limit)
    match = traces.match[rows][:, columns]
    ends_text = np.isin(traces.top_ids[rows][:, columns, 0], traces.eos_token_ids)
    right = np.zeros((limit + 1, m), dtype=np.int64)
    for row in range(limit - 1, -1, -1):
        right[row] = np.where(match[row], right[row + 1] + 1, 0)

    # Behind a wrong proposal: after how many more an end-of-text one comes, if it ever does.
    entries = rows[:, None] * len(traces.depths) + np.array(columns)
    behind = np.zeros(entries.shape, dtype=np.int64)  # not recorded: verified at once, the wrong one fed
    if traces.overrun:
        behind[:] = _NEVER
        ends = traces.branch_start[entries + 1]
        branches = ends > traces.branch_start[entries]
        # Only the last row of a branch can be end-of-text.
        last = np.isin(traces.overrun_proposal[ends[branches] - 1], traces.eos_token_ids)
        behind[branches] = np.where(last, (ends - traces.branch_start[entries])[branches], _NEVER)

    opening = np.arange(1, limit)
    run = right[1:limit]
    wrong = opening[:, None] + run  # row of the first wrong proposal, or the text's length
    at = np.minimum(wrong, limit - 1)
    index = np.arange(m)
    eos = np.where(ends_text[at, index], run + (wrong < limit), _NEVER)
    stopped = np.where((wrong < limit) & ~ends_text[at, index], run + 1 + behind[at, index], _NEVER)
    eos_behind = stopped if traces.overrun else np.full_like(stopped, _NEVER)
    room = np.broadcast_to(budget - opening[:, None], run.shape)
    forced = np.minimum(np.minimum(eos, stopped), np.minimum(room, engine.max_draft))
    unfed = (forced == eos) | (forced == eos_behind) | (forced == room)
    return _Drafts(opening, run, forced, unfed)


def _round_rewards(
    engine: ReplayEngine, reward: Reward, drafts: _Drafts
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Sums of rewards over whole rounds.

    Returns:
        float64 (s,), of a round without a draft from each start;
        float64 (s, m, K), of a round with k proposals, -inf where there is no such draft;
        int64 (s, m, K), tokens that it emits, 0 there.
    """
    starts, m = drafts.right.shape
    end = starts + 1
    depth = np.array(engine.depths, dtype=np.int64)
    gap = np.diff(np.append(depth, engine.num_layers))
    index = np.arange(m)

    def paid(shape: tuple[int, ...], **columns: Any) -> NDArray[np.float64]:
        """Rewards of an outcome given by the columns that are not all zero, in any shape that fits."""
        full = {name: np.broadcast_to(column, shape).ravel() for name, column in columns.items()}
        count = int(np.prod(shape))
        for entry in fields(StepOutcome):
            if entry.name not in full and entry.name != "num_layers":
                kind = bool if "bool" in str(entry.type) else np.int64
                full[entry.name] = np.zeros(count, dtype=kind)
        outcome = StepOutcome(num_layers=engine.num_layers, **full)
        return np.asarray(reward(outcome), dtype=np.float64).reshape(shape)

    opened = np.where(index == 0, depth[0], 0)  # the walk to the first depth, in the round's first step
    deeper = paid((m,), depth=depth, depth_index=index, layers=gap + opened)[:-1]
    selected = np.concatenate([[0.0], np.cumsum(deeper)])  # before the exit at each depth

    complete = drafts.opening + 1 == end
    plain = selected[-1] + paid(
        (starts,), depth=depth[-1], depth_index=m - 1, ended=True, final=True, emitted=1,
        layers=gap[-1] + opened[-1], terminated=complete,
    )  # fmt: skip

    # Of shape (s, m, K), k proposals having been made.
    k = np.arange(1, engine.max_draft + 1)
    right, forced, unfed = (array[:, :, None] for array in (drafts.right, drafts.forced, drafts.unfed))
    shape = (starts, m, len(k))
    exists, ends = k <= forced, k == forced
    accepted = np.minimum(k, right)
    rest = (engine.num_layers - depth)[:, None]
    fed = ~(ends & unfed)
    final = ~(ends & unfed & (k <= right))
    emitted = np.where(exists, accepted + final, 0)
    terminated = drafts.opening[:, None, None] + emitted == end
    common = {"depth": depth[:, None], "depth_index": index[:, None]}
    exits = paid(
        shape, **common, action=int(Action.EXIT), proposed=True, accepted=k <= right, fed=fed,
        phase=np.where(k == 1, int(Phase.SELECT), int(Phase.DRAFT)),
        ended=ends, drafted=ends * k, round_accepted=ends * accepted, final=ends & final,
        emitted=ends * emitted, verified=ends * (k + fed),
        layers=fed * depth[:, None] + ends * rest + (k == 1) * opened[:, None],
        terminated=ends & terminated,
    )  # fmt: skip
    stops = paid(
        shape, **common, phase=int(Phase.DRAFT), ended=True, drafted=k, round_accepted=accepted,
        final=True, emitted=accepted + 1, verified=k + 1, layers=rest,
        terminated=terminated,
    )  # fmt: skip
    total = selected[:, None] + np.cumsum(exits, axis=2) + np.where(ends, 0.0, stops)
    return plain, np.where(exists, total, -np.inf), emitted
