"""The engine against an independent slow implementation, against itself with many lanes, and its laws."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import COUNTERS, ReplayEngine
from sde_gym.envs.rewards import StepOutcome
from sde_gym.errors import InputError
from sde_gym.policies.observation import EXTENDED
from sde_gym.traces import TraceSet
from tests.builders import random_traces
from tests.envs.reference import NAMES, ReferenceEpisode

SETTINGS: list[dict[str, Any]] = [
    {},
    {"window": 1, "k": 1, "max_draft": 1},
    {"window": 3, "k": 8, "max_draft": 3, "max_new_tokens": 11, "credit": "round"},
    {"window": 8, "max_draft": 5, "depths": [3], "final_token_reward": 0.0},
    {"window": 50, "max_draft": 40, "depths": [2, 6], "credit": "round"},
    {"window": 2, "max_draft": 2, "max_new_tokens": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings) or "default")
@pytest.mark.parametrize(
    ("seed", "p_match", "p_eos"), [(0, 0.7, 0.1), (1, 0.95, 0.3), (2, 0.3, 0.0), (3, 1.0, 0)]
)
@pytest.mark.parametrize("overrun", [0, 39])
def test_equals_the_reference(
    settings: dict[str, Any], seed: int, p_match: float, p_eos: float, overrun: int
) -> None:
    """Every observation, reward, end and counter of random episodes; 48 times 12 of them."""
    compare(random_traces(seed, 12, p_match=p_match, p_eos=p_eos, overrun=overrun), seed, settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings) or "default")
@pytest.mark.parametrize("episode", ["round", "token"])
@pytest.mark.parametrize("overrun", [0, 39])
def test_shorter_episodes_equal_the_reference(settings: dict[str, Any], episode: str, overrun: int) -> None:
    """The same, and how the next episode of a text begins."""
    compare(random_traces(5, 12, overrun=overrun), 5, {**settings, "episode": episode})


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_the_context_limit_counts_as_budget(spare: int) -> None:
    """Texts that end by end of text with room for only `spare` tokens more."""
    traces = random_traces(4, 12, p_match=0.9)
    limit = int(traces.manifest["context_limit"])
    lengths = [
        limit - int(traces.lengths[text]) + 1 - spare * (end == "eos") for text, end in enumerate(traces.ends)
    ]
    engine = compare(dataclasses.replace(traces, prompt_lengths=lengths), 4, {})
    ended = np.array(traces.ends) == "eos"
    expected = np.minimum(traces.lengths + spare * ended, 20)
    assert engine.tables.budget.tolist() == expected.tolist()


def compare(traces: TraceSet, seed: int, settings: dict[str, Any]) -> ReplayEngine:
    """Play 12 texts in engine and reference with the same random actions; everything has to agree."""
    engine = ReplayEngine(traces, observation=NAMES, lanes=12, **settings)
    reference_settings = {
        "depths": engine.depths,
        "k": engine.k,
        "window": engine.window,
        "max_draft": engine.max_draft,
        "max_new_tokens": engine.max_new_tokens,
        "final_token_reward": settings.get("final_token_reward", 1.0),
        "credit": engine.credit,
        "episode": engine.episode,
    }
    episodes = [ReferenceEpisode(traces, text, **reference_settings) for text in range(12)]
    rng = np.random.default_rng(seed)
    p_exit = rng.uniform(0.2, 0.95, 12)
    lanes = np.arange(12)
    observation = engine.reset_lanes(lanes, lanes)
    steps = 0
    while lanes.size:
        expected = [list(episodes[lane].observe().values()) for lane in lanes]
        np.testing.assert_allclose(observation, expected, rtol=2e-6, atol=2e-6)
        for name, values in engine.counters(lanes).items():
            assert values.tolist() == [episodes[lane].counters[name] for lane in lanes], name
        actions = (rng.random(lanes.size) < p_exit[lanes]).astype(int)
        observation, reward, terminated, outcome = engine.step(actions, lanes)
        expected = [episodes[lane].step(int(action)) for lane, action in zip(lanes, actions, strict=True)]
        np.testing.assert_allclose(reward, expected, rtol=0, atol=1e-9)
        assert terminated.tolist() == [episodes[lane].over for lane in lanes]
        assert outcome.terminated.tolist() == [episodes[lane].complete for lane in lanes]
        assert not observation[terminated].any()
        again = engine.resumable(lanes)
        assert again.tolist() == (terminated & ~outcome.terminated).tolist()
        if again.any():
            for lane in lanes[again]:
                episodes[lane].go_on()
            observation[again] = engine.resume_lanes(lanes[again])
        lanes, observation = lanes[~outcome.terminated], observation[~outcome.terminated]
        steps += 1
    for name, values in engine.counters().items():
        assert values.tolist() == [episode.counters[name] for episode in episodes], name
    for text, episode in enumerate(episodes):
        assert episode.emitted == traces.tokens_of(text)[: engine.max_new_tokens].tolist()
    assert steps > 2
    return engine


def test_lanes_do_not_touch_each_other(toy_traces: TraceSet) -> None:
    """A text alone in one lane equals, bit for bit, the same text among others that come and go."""
    many = ReplayEngine(toy_traces, observation=EXTENDED, lanes=5)
    alone = {lane: ReplayEngine(toy_traces, observation=EXTENDED) for lane in range(5)}
    rng = np.random.default_rng(7)
    rows = np.zeros((5, len(EXTENDED)), dtype=np.float32)
    running = np.zeros(5, dtype=bool)
    finished = 0
    while finished < 15:
        idle = np.flatnonzero(~running)
        if idle.size:
            texts = rng.integers(0, len(toy_traces), idle.size)
            rows[idle] = many.reset_lanes(idle, texts)
            for lane, text in zip(idle, texts, strict=True):
                np.testing.assert_array_equal(alone[lane].reset_lanes([0], [text])[0], rows[lane])
            running[idle] = True
        lanes = rng.permutation(5)[: rng.integers(1, 6)]
        actions = rng.integers(0, 2, lanes.size)
        observation, reward, terminated, outcome = many.step(actions, lanes)
        for at, lane in enumerate(lanes):
            single, pay, end, what = alone[lane].step([actions[at]])
            np.testing.assert_array_equal(single[0], observation[at])
            assert (pay[0], end[0]) == (reward[at], terminated[at])
            assert (what.emitted[0], what.layers[0]) == (outcome.emitted[at], outcome.layers[at])
            mine, others = alone[lane].counters(), many.counters(np.array([lane]))
            assert {n: v[0] for n, v in mine.items()} == {n: v[0] for n, v in others.items()}
        running[lanes[terminated]] = False
        finished += int(terminated.sum())


def test_the_last_depth_alone_is_plain_decoding(toy_traces: TraceSet) -> None:
    engine = ReplayEngine(toy_traces, lanes=6)
    engine.reset_lanes(np.arange(6), np.arange(6))
    lanes, total = np.arange(6), np.zeros(6)
    while lanes.size:
        _, reward, terminated, _ = engine.step(np.zeros(lanes.size, int), lanes)
        total[lanes] += reward
        lanes = lanes[~terminated]
    tokens = toy_traces.lengths - 1
    counters = engine.counters()
    assert counters["tokens"].tolist() == counters["rounds"].tolist() == tokens.tolist()
    assert (
        counters["layer_passes"].tolist() == counters["sequential_layers"].tolist() == (8 * tokens).tolist()
    )
    assert counters["decisions"].tolist() == (3 * tokens).tolist()
    assert counters["head_calls"].tolist() == (4 * tokens).tolist()
    np.testing.assert_allclose(total, tokens * (1.0 - 3 * 0.01))


@pytest.mark.parametrize("reward", ["lede", "speed"])
def test_credit_changes_when_but_not_how_much(toy_traces: TraceSet, reward: str) -> None:
    """Within each round the sums agree; with credit "round", drafting on pays nothing yet."""
    engines = [
        ReplayEngine(toy_traces, reward=reward, credit=credit, lanes=6) for credit in ("immediate", "round")
    ]
    for engine in engines:
        engine.reset_lanes(np.arange(6), np.arange(6))
    rng = np.random.default_rng(0)
    lanes, open_sums = np.arange(6), np.zeros((2, 6))
    while lanes.size:
        actions = (rng.random(lanes.size) < 0.7).astype(int)
        results = [engine.step(actions, lanes) for engine in engines]
        outcome = results[0][3]
        for number, (_, pay, _, _) in enumerate(results):
            open_sums[number, lanes] += pay
        assert not results[1][1][outcome.proposed & ~outcome.ended].any()
        ended = lanes[outcome.ended]
        np.testing.assert_allclose(open_sums[0, ended], open_sums[1, ended], atol=1e-9)
        lanes = lanes[~results[0][2]]


def test_speed_reward_is_tokens_less_time(toy_traces: TraceSet) -> None:
    engine = ReplayEngine(toy_traces, reward="speed", rho=0.25, lanes=6)
    engine.reset_lanes(np.arange(6), np.arange(6))
    rng = np.random.default_rng(0)
    lanes, total = np.arange(6), np.zeros(6)
    while lanes.size:
        _, reward, terminated, _ = engine.step(rng.integers(0, 2, lanes.size), lanes)
        total[lanes] += reward
        lanes = lanes[~terminated]
    counters = engine.counters()
    np.testing.assert_allclose(total, counters["tokens"] - 0.25 * counters["sequential_layers"])


def test_steps_add_up_to_the_counters(toy_traces: TraceSet) -> None:
    engine = ReplayEngine(toy_traces, lanes=6)
    engine.reset_lanes(np.arange(6), np.arange(6))
    rng = np.random.default_rng(3)
    lanes = np.arange(6)
    sums = {
        name: np.zeros(6, int) for name in ("sequential_layers", "tokens", "drafted", "accepted", "rounds")
    }
    while lanes.size:
        _, _, terminated, outcome = engine.step((rng.random(lanes.size) < 0.6).astype(int), lanes)
        assert outcome.terminated.tolist() == terminated.tolist()
        sums["sequential_layers"][lanes] += outcome.layers
        sums["tokens"][lanes] += outcome.emitted
        sums["drafted"][lanes] += outcome.drafted
        sums["accepted"][lanes] += outcome.round_accepted
        sums["rounds"][lanes] += outcome.ended
        lanes = lanes[~terminated]
    counters = engine.counters()
    assert list(counters) == list(COUNTERS)
    for name, values in sums.items():
        assert values.tolist() == counters[name].tolist(), name


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings) or "default")
def test_a_copied_lane_goes_on_like_the_original(settings: dict[str, Any]) -> None:
    """Lanes are copied in the middle of their texts, go on, are set back, and go on as the copies do."""
    engine = ReplayEngine(random_traces(5, 4, overrun=39), observation=EXTENDED, lanes=8, **settings)
    engine.reset_lanes(np.arange(8), [0, 1, 2, 3, 3, 2, 1, 0])
    rng = np.random.default_rng(0)
    for moment in range(12):
        running = np.arange(4)[engine.state.active[:4]]
        engine.step((rng.random(running.size) < 0.7).astype(int), running)
        if moment == 5:
            engine.copy_lanes(np.arange(4), np.arange(4, 8))
            originals = running[engine.state.active[running]]
    engine.copy_lanes(np.arange(4, 8), np.arange(4))  # back to where they were then
    assert originals.size or settings.get("max_new_tokens") == 2  # texts of one step
    running = originals
    while running.size:
        action = (rng.random(running.size) < 0.7).astype(int)
        found = engine.step(action, running)
        copied = engine.step(action, running + 4)
        for ours, theirs in zip(found[:3], copied[:3], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        running = running[~found[2]]
    for name, values in engine.counters().items():
        np.testing.assert_array_equal(values[originals], values[originals + 4], err_msg=name)
    with pytest.raises(InputError, match="target: 2 lanes for 1 sources"):
        engine.copy_lanes([0], [1, 2])
    with pytest.raises(InputError, match="none twice"):
        engine.copy_lanes([0, 1], [2, 2])


def test_texts_that_ended_can_be_given_more_budget() -> None:
    traces = random_traces(0, 3)
    ended = traces.subset([n for n, end in enumerate(traces.ends) if end != "budget"])
    # The context limit counts as budget: 30 tokens fit behind and with a prompt of 3, the last need not.
    assert ReplayEngine(ended, max_new_tokens=500).tables.budget.tolist() == [28, ended.lengths[1]]
    assert ReplayEngine(ended, max_new_tokens=25).tables.budget.tolist() == [25, ended.lengths[1]]
    with pytest.raises(InputError, match=r"max_new_tokens: 21 is out of range \(2..20\)"):
        ReplayEngine(traces, max_new_tokens=21)


def test_custom_rewards_see_the_outcome(toy_traces: TraceSet) -> None:
    def tokens(outcome: StepOutcome) -> np.ndarray:
        return outcome.emitted.astype(float)

    engine = ReplayEngine(toy_traces, reward=tokens)
    engine.reset_lanes([0], [0])
    total, terminated = 0.0, False
    while not terminated:
        _, reward, (terminated,), _ = engine.step([1])
        total += reward[0]
    assert total == toy_traces.lengths[0] - 1

    engine = ReplayEngine(toy_traces, reward=lambda outcome: np.zeros(3))
    engine.reset_lanes([0], [0])
    with pytest.raises(InputError, match=r"reward: .* returned shape \(3,\), expected \(1,\)"):
        engine.step([1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depths": [4]}, r"depths: 4 was not recorded; this trace set has \[2, 3, 6\]"),
        ({"depths": [3, 2]}, "depths: .* do not rise"),
        ({"depths": [2, 8]}, r"depths: 8 is out of range \(1..7\)"),
        ({"depths": []}, "depths: empty"),
        ({"depths": "2"}, "depths: '2' is not a list"),
        ({"depths": [2.0]}, "depths: 2.0 is not a whole number"),
        ({"observation": "papers"}, "observation: 'papers' is not a feature set"),
        ({"observation": ["trace", "odd"]}, "observation: 'odd' is not a feature; there are confidence"),
        ({"observation": ["trace", "trace"]}, "observation: a feature is named twice"),
        ({"reward": "speedy"}, "reward: 'speedy' is none of lede, speed"),
        ({"reward": "no_such_module:f"}, "reward: 'no_such_module:f' cannot be imported"),
        ({"reward": "math:pi"}, "reward: 'math:pi' is not callable"),
        ({"reward": "speed", "final_token_reward": 0.0}, "final_token_reward: 0.0 only means something"),
        ({"rho": 1.0}, "rho: 1.0 only means something"),
        ({"reward": "speed", "rho": -1.0}, "rho: -1.0 is not a finite number of at least 0"),
        ({"final_token_reward": float("nan")}, "final_token_reward: nan is not a finite number"),
        ({"credit": "later"}, "credit: 'later' is not one of immediate, round"),
        ({"k": 9}, r"k: 9 is out of range \(1..8\)"),
        ({"k": 0}, r"k: 0 is out of range \(1..8\)"),
        ({"window": 0}, r"window: 0 is out of range \(at least 1\)"),
        ({"max_draft": 0}, r"max_draft: 0 is out of range \(1\.\.12\)"),
        ({"max_draft": True}, "max_draft: True is not a whole number"),
        ({"max_new_tokens": 1}, r"max_new_tokens: 1 is out of range \(2..20\)"),
        ({"lanes": 0}, "lanes: 0 is out of range"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str, toy_traces: TraceSet) -> None:
    with pytest.raises(InputError, match=message):
        ReplayEngine(toy_traces, **settings)


def test_wrong_calls_are_named(toy_traces: TraceSet) -> None:
    engine = ReplayEngine(toy_traces, lanes=2)
    with pytest.raises(RuntimeError, match="lane 0 has no text in progress"):
        engine.step([0, 0])
    with pytest.raises(InputError, match=r"texts: .* goes outside 0..5"):
        engine.reset_lanes([0], [6])
    with pytest.raises(InputError, match=r"lanes: .* goes outside 0..1"):
        engine.reset_lanes([2], [0])
    with pytest.raises(InputError, match="texts: 1 texts for 2 lanes"):
        engine.reset_lanes([0, 1], [0])
    engine.reset_lanes([0, 1], [0, 1])
    for wrong in ([0], [0, 2], [0.5, 0], [[0, 1]]):
        with pytest.raises(InputError, match="actions: "):
            engine.step(wrong)


def test_texts_too_short_are_no_episodes(toy_traces: TraceSet) -> None:
    from dataclasses import replace

    start = toy_traces.start.copy()
    start[1] = 1  # the first text keeps one token, the second gets the rest
    engine = ReplayEngine(replace(toy_traces, start=start))
    assert engine.tables.playable.tolist() == [False] + [True] * 5
    with pytest.raises(InputError, match="texts: 0 is no episode: 1 tokens"):
        engine.reset_lanes([0], [0])
