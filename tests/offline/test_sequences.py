"""Decision Transformer: its slices are d3rlpy's, and its controller decides as d3rlpy's own wrapper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.offline import DQNSettings, Transitions, collect, exploratory_schedule, train
from sde_gym.offline.algorithms import create_algorithm, decision_transformer
from sde_gym.offline.backend import training_session
from sde_gym.offline.buffer import to_replay_buffer
from sde_gym.offline.learners import standardised
from sde_gym.offline.selection import environment_of
from sde_gym.offline.sequences import SequenceController, TrajectoryBatches
from sde_gym.policies.files import save_policy
from sde_gym.traces import TraceSet
from tests.builders import random_traces

SETTINGS = DQNSettings(gradient_steps=10, evaluate_every=5, hidden=(8, 8), batch_size=60)


@pytest.fixture(scope="module")
def data(toy_traces: TraceSet) -> Transitions:
    return collect(toy_traces, exploratory_schedule(toy_traces.depths, 12), 10, seed=0)


@pytest.fixture(scope="module")
def policy(data: Transitions, toy_traces: TraceSet) -> SequenceController:
    found = train(data, "decision_transformer", SETTINGS, traces=toy_traces)
    assert isinstance(found, SequenceController)
    return found


@pytest.mark.parametrize("context", [1, 3, 20])
def test_slices_equal_d3rlpys_own(make_transitions: Callable[..., Transitions], context: int) -> None:
    from d3rlpy.dataset import BasicTrajectorySlicer, TrajectoryMiniBatch

    transitions = make_transitions()
    buffer = to_replay_buffer(transitions, 1, 1.0)
    slicer = BasicTrajectorySlicer()
    slow = TrajectoryMiniBatch.from_partial_trajectories(
        [
            slicer(episode, index, context)
            for episode in buffer.episodes
            for index in range(episode.transition_count)
        ]
    )
    batches = TrajectoryBatches(transitions, transitions.observation, context, max_timestep=1000)
    order = np.random.default_rng(0).permutation(len(transitions))
    fast = batches.batch(order)
    for name in ("observations", "actions", "rewards", "terminals", "timesteps", "masks"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name)[order], err_msg=name)
    np.testing.assert_allclose(fast.returns_to_go * batches.scale, slow.returns_to_go[order], atol=1e-5)
    assert fast.length == context
    assert batches.target * batches.scale == pytest.approx(transitions.returns().max())


def test_late_decisions_share_the_last_number(make_transitions: Callable[..., Transitions]) -> None:
    transitions = make_transitions((6,))
    batches = TrajectoryBatches(transitions, transitions.observation, 6, max_timestep=4)
    assert batches.batch(np.array([5])).timesteps.tolist() == [[1, 2, 3, 4, 4, 4]]


def test_it_decides_as_d3rlpys_stateful_wrapper(data: Transitions, toy_traces: TraceSet) -> None:
    from d3rlpy.algos import GreedyTransformerActionSampler

    settings = dataclasses.replace(SETTINGS, gradient_steps=30)
    mean, std, observation = standardised(data)
    environment = environment_of(data)
    with training_session(0, 1) as d3rlpy:
        algorithm = create_algorithm(
            d3rlpy, lambda *given: decision_transformer(*given, context=5, max_timestep=12), settings, 11
        )
        batches = TrajectoryBatches(data, observation, 5, 12)
        rng = np.random.default_rng(0)
        for _ in range(30):
            algorithm.update(batches.batch(rng.integers(len(data), size=12)))
        theirs = algorithm.as_stateful_wrapper(batches.target, GreedyTransformerActionSampler())
        engine = ReplayEngine(toy_traces, observation=data.names, **environment)
        expected = []
        for text in range(len(toy_traces)):
            theirs.reset()
            (row,), reward, done = engine.reset_lanes([0], [text]), 0.0, False
            while not done:
                action = theirs.predict(((row - mean) / std).astype(np.float32), reward / batches.scale)
                expected.append((text, action))
                (row,), (paid,), (done,), _ = engine.step(np.array([action]))
                reward = float(paid)
    ours = SequenceController(
        algorithm.impl.modules.transformer, toy_traces, data.names, mean, std, batches.scale, batches.target,
        5, 12, environment,
    )  # fmt: skip
    taken: list[tuple[int, int]] = []
    act = ours.act

    def noted(view: Any) -> Any:
        actions = act(view)
        taken.extend(zip(view.text.tolist(), actions.tolist(), strict=True))
        return actions

    ours.act = noted  # type: ignore[method-assign]
    run_controller(toy_traces, ours)
    assert sorted(taken, key=lambda item: item[0]) == expected
    assert len({action for _, action in expected}) == 2, "both actions occur"


def test_lanes_do_not_disturb_one_another(policy: SequenceController, toy_traces: TraceSet) -> None:
    together = run_controller(toy_traces, policy)
    for text in range(len(toy_traces)):
        alone = run_controller(toy_traces, policy, texts=[text])
        assert alone.returns[0] == together.returns[text]
        assert alone.decisions[0] == together.decisions[text]


def test_other_texts_need_an_engine_of_their_own(policy: SequenceController) -> None:
    other = random_traces(seed=9, overrun=11)
    with pytest.raises(InputError, match=r"policy.on\(traces\)"):
        run_controller(other, policy)
    assert run_controller(other, policy.on(other)).tokens.sum() > 0


def test_other_settings_are_refused(policy: SequenceController, toy_traces: TraceSet) -> None:
    for changes in ({"depths": (2, 6)}, {"max_draft": 3}):
        with pytest.raises(InputError, match="was trained with"):
            run_controller(toy_traces, policy, **changes)


def test_no_policy_file_holds_it(policy: SequenceController, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'decision_transformer' decides by history"):
        save_policy(tmp_path / "policy", policy)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_round_episodes_are_refused(data: Transitions, toy_traces: TraceSet) -> None:
    rounds = dataclasses.replace(data, settings={**data.settings, "episode": "round"})
    with pytest.raises(InputError, match="these episodes are a round each"):
        train(rounds, "decision_transformer", SETTINGS, traces=toy_traces)
