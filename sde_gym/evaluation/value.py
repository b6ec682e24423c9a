"""What a policy is worth, exactly, by replay; and how far it is from the hindsight optimum.

A deterministic policy is played once on each text: its value is a mean over texts without any error
of estimation, and the standard error says how much it would vary with other texts. A policy that
draws its actions is played once for each of several seeds; the second standard error says how much
its mean varies with them.

Values are returns, sums of rewards over a text, discounted per decision. Speed-ups are simulated:
plain decoding's cost over the policy's, for all texts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.envs.hindsight import Hindsight, best_return, least_cost
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.player import Player, Policy, is_stochastic, reseeded
from sde_gym.evaluation.summary import ALL, Summary, flat_row, part_of, plain, summarise
from sde_gym.models.cost import CostModel, unit_cost
from sde_gym.offline.buffer import check_returns
from sde_gym.policies.controller import Controller
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.traces import TraceSet


@dataclass(frozen=True, eq=False)
class PolicyValue:
    """What `policy_value` finds.

    Attributes:
        policy: its name.
        stochastic: whether it draws its actions.
        seeds: those it was played with; none if deterministic.
        texts: int64 (n,), index of each text in the trace set.
        gammas: discounts.
        returns: float64 (g, r, n), discounted return at each gamma, in each of the r runs, of each text.
        overrun: rows recorded behind wrong proposals. Where it is 0 a round ends at its first wrong
            proposal: the cost of drafting on in vain is hidden, and nothing here is to be compared with
            live runs.
        cost_model: name of what `speedup` is simulated with.
        total: on all texts.
        tasks: on the texts of each task, in order of name.
    """

    policy: str
    stochastic: bool
    seeds: tuple[int, ...]
    texts: NDArray[np.int64]
    gammas: tuple[float, ...]
    returns: NDArray[np.float64]
    overrun: int
    cost_model: str
    total: Summary
    tasks: tuple[Summary, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything but the single returns, plain JSON values; undefined numbers are None."""
        return {
            "policy": self.policy,
            "stochastic": self.stochastic,
            "seeds": list(self.seeds),
            "texts": len(self.texts),
            "overrun": self.overrun,
            "cost_model": self.cost_model,
            "total": plain(self.total),
            "tasks": [plain(summary) for summary in self.tasks],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat row for all texts, then one for each task; plain JSON values.

        Columns are `policy`, `task`, `texts`, `return`, `return_error` (over seeds where there are
        several, else over texts), `value@GAMMA` for each discount but 1, and the numbers of `Summary`.
        """
        return [{"policy": self.policy, **flat_row(summary)} for summary in (self.total, *self.tasks)]


def policy_value(
    policy: Policy,
    traces: TraceSet,
    *,
    texts: Sequence[int] | NDArray[np.int64] | None = None,
    repeats: int = 1,
    seed: int = 0,
    gammas: Sequence[float] = (1.0,),
    cost: str | Path | CostModel = "unit",
    **settings: Any,
) -> PolicyValue:
    """The value of a policy on recorded texts.

    Args:
        policy: a controller or a behaviour policy. One that draws its actions is played with seeds of
            its own here, whatever seed it has.
        traces: recorded texts.
        texts: indices, none twice; all that are episodes if not given.
        repeats: seeds that a policy which draws its actions is played with, at least 1; a deterministic
            one is played once.
        seed: the first of them; the others follow it.
        gammas: discounts per decision, each in (0, 1].
        cost: cost model behind `speedup`, and behind the "speed" reward.
        **settings: of `ReplayEngine`, as in `run_controller`.

    Raises:
        InputError: no text, a number out of range, or a policy that does not fit.
    """
    return compare(
        {getattr(policy, "name", repr(policy)): policy}, traces, texts=texts, repeats=repeats, seed=seed,
        gammas=gammas, cost=cost, **settings,
    )[0]  # fmt: skip


def compare(
    policies: Mapping[str, Policy],
    traces: TraceSet,
    *,
    texts: Sequence[int] | NDArray[np.int64] | None = None,
    repeats: int = 1,
    seed: int = 0,
    gammas: Sequence[float] = (1.0,),
    cost: str | Path | CostModel = "unit",
    **settings: Any,
) -> list[PolicyValue]:
    """`policy_value` of several policies, by name, on the same texts, in the order given.

    The hindsight optimum, which is the same for all, is computed once.

    Raises:
        InputError: no policy, a task that is named as all of them are together (`ALL`), or as
            `policy_value`.
    """
    if not policies:
        raise InputError("policies: none was given; give at least one by name")
    if ALL in traces.tasks:
        raise InputError(
            f"traces: a task is named {ALL!r}, which stands for all tasks together; name it otherwise in the "
            "prompts, and record them again"
        )
    whole_number("repeats", repeats, 1)
    whole_number("seed", seed, 0)
    for gamma in gammas:
        check_returns(1, gamma)
    optimum = _Optimum.of(traces, texts, cost, settings)
    seeds = tuple(range(seed, seed + repeats))
    shared = {**settings, "cost": cost}
    return [_value(name, policy, traces, optimum, seeds, gammas, shared) for name, policy in policies.items()]


def value_table(values: Sequence[PolicyValue], task: str = ALL) -> str:
    """Policies side by side as a Markdown table, to print: `PolicyValue.rows` of one task.

    Raises:
        InputError: nothing to show, or no texts of this task.
    """
    rows = [row for value in values for row in value.rows() if row["task"] == task]
    if not rows:
        known = sorted({row["task"] for value in values for row in value.rows()})
        raise InputError(f"task: {task!r} is none of {known}")
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "task"))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def discounted_returns(
    traces: TraceSet,
    controller: Controller,
    texts: NDArray[np.int64],
    gammas: Sequence[float],
    settings: Mapping[str, Any],
) -> NDArray[np.float64]:
    """Returns of whole texts at several discounts per decision, float64 (g, n).

    Args:
        traces: recorded texts.
        controller: bound and reset here.
        texts: int64 (n,).
        gammas: g discounts.
        settings: of `ReplayEngine`, as in `run_controller`.
    """
    player = Player(traces, controller, len(texts), settings)
    discount = np.array(gammas, dtype=np.float64)[:, None]
    total, weight = np.zeros((len(gammas), len(texts))), np.ones((len(gammas), 1))
    lanes = np.arange(len(texts), dtype=np.int64)
    player.begin(lanes, texts)
    while lanes.size:
        reward, over = player.step(lanes, player.act(lanes))
        total[:, lanes] += weight * reward
        weight *= discount
        lanes = lanes[~over]
    return total


@dataclass(frozen=True, eq=False)
class _Optimum:
    """The hindsight optimum of n texts: of the return, of layers, and of cost."""

    texts: NDArray[np.int64]
    returns: NDArray[np.float64]
    layers: Hindsight
    cost: Hindsight

    @staticmethod
    def of(
        traces: TraceSet,
        texts: Sequence[int] | NDArray[np.int64] | None,
        cost: str | Path | CostModel,
        settings: Mapping[str, Any],
    ) -> _Optimum:
        """Solve these texts."""
        returns = best_return(traces, texts, cost=cost, **settings)
        rules = {name: value for name, value in settings.items() if name not in ("reward", "rho")}
        rules.pop("final_token_reward", None)
        longest = rules.get("max_draft", DEFAULT_MAX_DRAFT)
        by_layers = unit_cost(traces.num_layers, max_draft=longest)  # heads are free
        layers = least_cost(traces, texts, cost=by_layers, **rules)
        dear = least_cost(traces, texts, cost=cost, **rules)
        return _Optimum(returns.texts, returns.values, layers, dear)

    def part(self, chosen: NDArray[np.bool_]) -> tuple[float, float, float]:
        """Mean return and the two speed-ups of some of the texts, bool (n,)."""
        layers, cost = (
            found.cost_model.speedup(float(found.tokens[chosen].sum()), float(found.values[chosen].sum()))
            for found in (self.layers, self.cost)
        )
        return float(self.returns[chosen].mean()), layers, cost


def _value(
    name: str,
    policy: Policy,
    traces: TraceSet,
    optimum: _Optimum,
    seeds: tuple[int, ...],
    gammas: Sequence[float],
    settings: dict[str, Any],
) -> PolicyValue:
    """One policy on the texts of the optimum."""
    stochastic = is_stochastic(policy)
    if not stochastic and not isinstance(policy, Controller):
        raise InputError(f"policy {name!r} is no controller: it lacks what the protocol `Controller` names")
    seeds = seeds if stochastic else ()
    runs, returns = [], []
    for number in seeds or (None,):
        player = cast("Controller", policy) if number is None else reseeded(policy, number)
        run = run_controller(traces, player, optimum.texts, **settings)
        runs.append(run)
        # Played again only where something is discounted.
        if all(gamma == 1.0 for gamma in gammas):
            returns.append(np.repeat(run.returns[None], len(gammas), axis=0))
        else:
            returns.append(discounted_returns(traces, player, run.texts, gammas, settings))
    by_gamma = np.stack(returns, axis=1)
    tasks = np.array([traces.tasks[text] for text in optimum.texts.tolist()])
    everything = np.ones(len(tasks), dtype=bool)
    parts = {ALL: everything, **{task: tasks == task for task in sorted(set(tasks.tolist()))}}
    total, *by_task = (
        summarise(
            task, [part_of(run, chosen) for run in runs], gammas, by_gamma[:, :, chosen], optimum.part(chosen)
        )
        for task, chosen in parts.items()
    )
    return PolicyValue(
        policy=name,
        stochastic=stochastic,
        seeds=seeds,
        texts=optimum.texts,
        gammas=tuple(float(gamma) for gamma in gammas),
        returns=by_gamma,
        overrun=traces.overrun,
        cost_model=runs[0].cost_model.name,
        total=total,
        tasks=tuple(by_task),
    )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
