"""Tables worked on paper, as tests write them, and how they are checked in every way to take a step."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.traces import TraceSet

EXIT, CONTINUE = 1, 0
SELECT, DRAFT = 0, 1
OVER = None
WRONG = 9

State = tuple[int, int, int, *tuple[float, ...]]
"""Phase, depth, draft length, then the features that are worked out."""

Step = tuple[int, float, State | None, tuple[int, int, int, int]]
"""One row a step: action, reward | then the state, `OVER` where the text is complete
| layer passes, sequential layers, heads, tokens so far."""

COUNTED = ("layer_passes", "sequential_layers", "head_calls", "tokens")
STANDING = ("depth", "phase", "draft_length")

WAYS = [("numpy", 1), ("numpy", 2), ("python", 1)]
if importlib.util.find_spec("numba") is not None:
    WAYS += [("numba", 1), ("numba", 2)]


def check_table(
    traces: TraceSet, start: State, steps: Sequence[Step], features: tuple[str, ...], **settings: object
) -> None:
    """Play a table of the set's only text by each accelerator, in one lane and in two.

    The second lane is a step behind the first, so that the two are never in the same state.
    """
    for accelerator, lanes in WAYS:
        engine = ReplayEngine(
            traces,
            observation=(*features, *STANDING),
            lanes=lanes,
            accelerator=accelerator,
            **settings,  # type: ignore[arg-type]
        )
        _play(engine, start, steps)


def _play(engine: ReplayEngine, start: State, steps: Sequence[Step]) -> None:
    lanes = np.arange(engine.lanes)
    observation = engine.begin(lanes, np.zeros_like(lanes))
    way = f"{engine.accelerator}, {engine.lanes} lanes"
    for lane in lanes:
        _check_state(observation[lane], start, engine, f"{way}, reset, lane {lane}")
    for now in range(len(steps) + engine.lanes - 1):
        rows = [now - lane for lane in range(engine.lanes)]  # of the table, by lane
        playing = np.array([0 <= row < len(steps) for row in rows])
        actions = np.array([steps[max(0, min(row, len(steps) - 1))][0] for row in rows])
        observation, paid, terminated = engine.advance(actions, None if playing.all() else ~playing)
        counted = engine.columns()
        for lane in lanes[playing]:
            _, reward, state, counters = steps[rows[lane]]
            where = f"{way}, step {rows[lane]}, lane {lane}"
            assert paid[lane] == pytest.approx(reward), where
            assert bool(terminated[lane]) == (state is OVER), where
            _check_state(observation[lane], state, engine, where)
            assert tuple(int(counted[name][lane]) for name in COUNTED) == counters, where
    assert steps[-1][2] is OVER, "a table goes on to the end of the text"


def _check_state(row: np.ndarray, state: State | None, engine: ReplayEngine, where: str) -> None:
    if state is OVER:
        assert not row.any(), where
        return
    phase, depth, draft_length, *features = state
    expected = [*features, depth / engine.num_layers, phase, draft_length / engine.max_draft]
    np.testing.assert_allclose(row, expected, atol=1e-6, err_msg=where)
