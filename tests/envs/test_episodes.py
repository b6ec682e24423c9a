"""Episodes shorter than a text: by hand, and against the whole text.

The tables use L = 8, depths 2 and 4, window 2: the surprise at row t is (10 t + 1) / 100 at depth 2,
(10 t + 2) / 100 at depth 4 and 10 t / 100 at the last layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import COUNTERS, ReplayEngine
from sde_gym.envs.lede import LEDEEnv
from sde_gym.policies.observation import EXTENDED
from sde_gym.traces import TraceSet
from tests.builders import random_traces, written_traces

EXIT, CONTINUE = 1, 0
SELECT, DRAFT = 0, 1
GO_ON = None
WRONG = 9

# Action (or GO_ON), reward | phase, depth, draft length, trace, acceptance (None: the episode is over)
# | layer passes, sequential layers, heads, tokens so far, whether the text is complete.
Row = tuple[int | None, float, tuple[int, int, int, float, float] | None, tuple[int, int, int, int, bool]]


def play(episode: str, tokens: list[int], wrong: int, rows: list[Row]) -> None:
    """Check a table over a text whose proposals are right but at one position."""
    proposals = [[WRONG if t == wrong else token] * 2 for t, token in enumerate(tokens)]
    traces = written_traces(tokens, proposals, end="budget", depths=(2, 4), num_layers=8)
    names = ("phase", "depth", "draft_length", "trace", "acceptance")
    engine = ReplayEngine(traces, observation=names, window=2, episode=episode)
    observation, over = engine.reset_lanes([0], [0]), np.array([False])
    lane = np.array([0])
    for number, (action, reward, state, counted) in enumerate(rows):
        if action is GO_ON:
            assert over[0] == (number > 0)
            observation = engine.resume_lanes(lane) if number else observation
            over = np.array([False])
        else:
            observation, paid, over, outcome = engine.step([action])
            assert paid[0] == pytest.approx(reward), number
            assert bool(over[0]) == (state is None), number
            assert outcome.terminated[0] == counted[4], number
        phase, depth, length, trace, acceptance = state or (0, 0, 0, 0.0, 0.0)
        expected = [phase, depth / 8, length / 12, trace, acceptance]
        np.testing.assert_allclose(observation[0], expected, atol=1e-6, err_msg=str(number))
        counters = engine.counters()
        found = [int(counters[name][0]) for name in COUNTERS[:3] + ("tokens",)]
        assert (*found, bool(over[0] and not engine.resumable(lane)[0])) == counted, number


def test_rounds_by_hand() -> None:
    play(
        "round",
        [1, 2, 3, 4, 5],
        2,
        [
            (GO_ON, 0, (SELECT, 2, 0, 0.0, 1.0), (2, 2, 1, 0, False)),
            (EXIT, 1.75, (DRAFT, 2, 1, 0.055, 1.0), (4, 4, 2, 0, False)),  # (0.00 + 0.11) / 2
            # The wrong proposal 2, then 6 layers for 3 tokens; the next round is not opened yet.
            (EXIT, -1.25 + 1, None, (24, 12, 3, 2, False)),
            (GO_ON, 0, (SELECT, 2, 0, 0.155, 0.5), (26, 14, 4, 2, False)),  # (0.11 + 0.20) / 2
            (EXIT, 1.75, (DRAFT, 2, 1, 0.255, 0.5), (28, 16, 5, 2, False)),  # (0.20 + 0.31) / 2
            (CONTINUE, 0.99, None, (40, 22, 6, 4, True)),
        ],
    )


def test_walks_by_hand() -> None:
    """Depth 2 is left with the right token, depth 4 with a wrong one, the last walk goes on to L."""
    play(
        "token",
        [1, 2, 3, 4],
        2,
        [
            (GO_ON, 0, (SELECT, 2, 0, 0.0, 1.0), (2, 2, 1, 0, False)),
            (EXIT, 1.75, None, (2, 2, 1, 1, False)),
            (GO_ON, 0, (SELECT, 2, 0, 0.05, 1.0), (4, 4, 2, 1, False)),  # (0.00 + 0.10) / 2, both at L
            (CONTINUE, -0.01, (SELECT, 4, 0, 0.05, 1.0), (6, 6, 3, 1, False)),
            (EXIT, -1.5, None, (6, 6, 3, 2, False)),
            (GO_ON, 0, (SELECT, 2, 0, 0.15, 0.5), (8, 8, 4, 2, False)),  # (0.10 + 0.20) / 2
            (CONTINUE, -0.01, (SELECT, 4, 0, 0.15, 0.5), (10, 10, 5, 2, False)),
            (CONTINUE, 0.99, None, (14, 14, 6, 3, True)),
        ],
    )


@pytest.mark.parametrize("credit", ["immediate", "round"])
@pytest.mark.parametrize("overrun", [0, 11])
def test_rounds_add_up_to_the_text(credit: str, overrun: int) -> None:
    """One round after the other is the whole text, cut where rounds end."""
    traces = random_traces(3, 6, overrun=overrun)
    whole, rounds = (
        ReplayEngine(traces, observation=EXTENDED, credit=credit, episode=episode, lanes=6)
        for episode in ("generation", "round")
    )
    lanes = np.arange(6)
    rows = [engine.reset_lanes(lanes, lanes) for engine in (whole, rounds)]
    rng, cuts = np.random.default_rng(0), 0
    while lanes.size:
        np.testing.assert_array_equal(*rows)
        actions = rng.integers(0, 2, lanes.size)
        expected, pay, complete, _ = whole.step(actions, lanes)
        observation, same_pay, over, outcome = rounds.step(actions, lanes)
        np.testing.assert_array_equal(same_pay, pay)
        np.testing.assert_array_equal(over, outcome.ended)
        np.testing.assert_array_equal(outcome.terminated, complete)
        assert not observation[over].any()
        again = rounds.resumable(lanes)
        observation[again] = rounds.resume_lanes(lanes[again])
        cuts += int(again.sum())
        lanes, rows = lanes[~complete], [expected[~complete], observation[~complete]]
    assert cuts > 20
    for name, values in whole.counters().items():
        assert values.tolist() == rounds.counters()[name].tolist(), name


def test_a_walk_does_not_depend_on_those_before_it(toy_traces: TraceSet) -> None:
    """All but `acceptance` is the same whatever was done at earlier tokens: one walk for each token."""
    names = tuple(name for name in EXTENDED if name != "acceptance")
    seen = []
    for p_exit in (0.0, 0.5, 1.0):
        engine = ReplayEngine(toy_traces, observation=names, episode="token")
        rows, complete = [engine.reset_lanes([0], [1])], False
        rng = np.random.default_rng(0)
        while not complete:
            _, _, over, outcome = engine.step((rng.random(1) < p_exit).astype(int))
            complete = bool(outcome.terminated[0])
            if over[0] and not complete:
                rows.append(engine.resume_lanes([0]))
        seen.append(np.concatenate(rows))
    assert len(seen[0]) == toy_traces.lengths[1] - 1
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])
    assert not seen[0][:, names.index("phase")].any()


def test_walks_need_no_overrun_for_long_drafts() -> None:
    traces = random_traces(0, 3, overrun=2)
    assert ReplayEngine(traces, episode="token").max_draft == 12
    with pytest.raises(ValueError, match=r"max_draft: 12 is out of range \(1\.\.3\)"):
        ReplayEngine(traces, episode="round")


def texts_and_tokens(env: LEDEEnv, resets: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Text and tokens so far after each reset, with an exit and a `continue` between them."""
    seen = []
    for reset in resets:
        _, info = env.reset(**reset)
        seen.append((info["text"], info["tokens"]))
        over = False
        for action in (1, 0):
            over = over or env.step(action)[2]
        assert over
    return seen


def test_reset_goes_on_with_the_text(toy_traces: TraceSet) -> None:
    """After the last round or token comes the next text; a seed or an option starts one at once."""
    env = LEDEEnv(toy_traces, order="sequential", episode="token")
    lengths = toy_traces.lengths.tolist()
    expected = [(text, token) for text in (0, 1) for token in range(lengths[text] - 1)]
    assert texts_and_tokens(env, [{}] * len(expected)) == expected
    assert texts_and_tokens(env, [{}, {"options": {"text": 4}}, {}, {"seed": 3}, {}]) == [
        (2, 0), (4, 0), (4, 1), (0, 0), (0, 1),
    ]  # fmt: skip
    env = LEDEEnv(toy_traces, order="sequential", episode="round")
    seen = texts_and_tokens(env, [{}, {}, {}])
    assert [text for text, _ in seen] == [0, 0, 0]
    assert 0 == seen[0][1] < seen[1][1] < seen[2][1]
    env.reset()
    env.step(0)
    assert env.reset()[1]["text"] == 1  # a round that was left has no next one


def test_a_lane_without_more_text_cannot_go_on(toy_traces: TraceSet) -> None:
    engine = ReplayEngine(toy_traces, episode="round", lanes=2)
    with pytest.raises(RuntimeError, match="lane 0 has no text to go on with"):
        engine.resume_lanes([0])
    engine.reset_lanes([0, 1], [0, 1])
    with pytest.raises(RuntimeError, match="lane 1 has no text to go on with"):
        engine.resume_lanes([1])  # it is in the middle of a round
    engine.step([1, 1])
    engine.step([0, 0])
    engine.abandon(np.array([0]))
    engine.resume_lanes([1])
    with pytest.raises(RuntimeError, match="lane 0 has no text to go on with"):
        engine.resume_lanes([0])
