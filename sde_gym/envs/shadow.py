"""What replay tells a controller of its rounds, and which controllers replay cannot serve.

A controller with `shadows` (DEL) learns after each round what every candidate depth says at the tokens
that the round emitted. On the true text that is recorded, so it is a look-up. It pays for m heads a
round, each for all these tokens at once, also for those that were computed before to decide or to
propose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.models.cost import CostModel
from sde_gym.policies.controller import RoundOutcome, Shadow

if TYPE_CHECKING:
    from sde_gym.envs.engine import ReplayEngine
    from sde_gym.envs.rewards import StepOutcome


def check_replayable(controller: Any) -> None:
    """Refuse a controller, or behaviour policy, whose rounds no trace set holds.

    Raises:
        InputError: it walks every token of a round down the depths anew; the message names it.
    """
    if getattr(controller, "walks_every_token", False):
        raise InputError(
            f"controller: {getattr(controller, 'name', controller)!r} walks every token of a round down the "
            "depths anew, so that one depth continues what another proposed; no trace set holds that. Run it "
            "in the real decoder (`sde_gym.decoding.speculative`), or give a controller that stays at one "
            "depth for a round"
        )


def wants_shadows(controller: Any) -> bool:
    """Whether a controller, or behaviour policy, asks for `RoundOutcome.shadow`."""
    return bool(getattr(controller, "shadows", False))


def ended_rounds(
    engine: ReplayEngine, lanes: NDArray[np.int64], outcome: StepOutcome, shadows: bool
) -> RoundOutcome | None:
    """What became of the rounds that a step has ended; None if it ended none.

    Args:
        engine: that took the step, and none after it in these lanes.
        lanes: int64 (n,), that it stepped.
        outcome: of the step.
        shadows: whether the controller is to be told what every depth says.
    """
    ended = np.flatnonzero(outcome.ended)
    if not ended.size:
        return None
    lane, drafted = lanes[ended], outcome.drafted[ended]
    return RoundOutcome(
        lanes=lane,
        depth_index=np.where(drafted > 0, outcome.depth_index[ended], len(engine.depths)),
        drafted=drafted,
        accepted=outcome.round_accepted[ended],
        shadow=shadows_of(engine, lane, outcome.emitted[ended]) if shadows else None,
    )


def some_rounds(told: RoundOutcome, at: NDArray[np.int64]) -> RoundOutcome:
    """Those rounds, by their numbers int64 (k,) in `told`."""
    return RoundOutcome(
        lanes=told.lanes[at],
        depth_index=told.depth_index[at],
        drafted=told.drafted[at],
        accepted=told.accepted[at],
        shadow=None if told.shadow is None else [told.shadow[number] for number in at],
    )


def shadows_of(engine: ReplayEngine, lanes: NDArray[np.int64], emitted: NDArray[np.int64]) -> list[Shadow]:
    """What every depth says at the tokens that came last in these lanes.

    Args:
        engine: in which these lanes have just ended a round.
        lanes: int64 (n,).
        emitted: int64 (n,), tokens of that round, at least 1.

    Returns:
        one for each lane.
    """
    tables, m = engine.tables, len(engine.depths)
    after = tables.start[engine.state.text[lanes]] + engine.state.opening[lanes]  # where the next round opens
    ends = np.cumsum(emitted)
    rows = np.arange(ends[-1]) + np.repeat(after - ends, emitted)
    entries = rows[:, None] * m + np.arange(m)
    probability = np.exp(-tables.surprise[entries]).astype(np.float32)
    cuts = ends[:-1]
    parts = zip(np.split(tables.match[entries], cuts), np.split(probability, cuts), strict=True)
    return [Shadow(right, said) for right, said in parts]


def shadow_costs(model: CostModel, depths: int) -> NDArray[np.float64]:
    """Cost of one round's shadow tokens by their number 0..N, float64 (N + 1,), N as in the cost model.

    An exit head for n tokens is taken to cost as many times its cost for one as the full head does.
    """
    full = np.array(model.final_head)
    growth = full / full[0] if full[0] > 0 else np.ones(len(full))
    return np.append(0.0, depths * model.exit_head * growth)
