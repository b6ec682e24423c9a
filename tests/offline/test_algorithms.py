"""Every algorithm trains, gives a policy that plays, and learns a problem whose answer is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.offline import DQNSettings, Transitions, collect, exploratory_schedule, train, train_dqn
from sde_gym.offline import algorithms as registry
from sde_gym.offline.algorithms import algorithm_names, register
from sde_gym.offline.learners import PredictController
from sde_gym.offline.sequences import SequenceController
from sde_gym.policies.controller import View
from sde_gym.policies.files import load_policy, save_policy
from sde_gym.policies.qnetwork import QController
from sde_gym.traces import TraceSet
from tests.builders import random_traces
from tests.offline.test_training import FAST, STATES, two_step_problem

NAMES = ("dqn", "double_dqn", "cql", "bcq", "sac", "bc", "nfq", "qr_dqn", "decision_transformer")
TINY = DQNSettings(gradient_steps=12, evaluate_every=6, hidden=(8, 8), batch_size=32)


@pytest.fixture(scope="module")
def data(toy_traces: TraceSet) -> Transitions:
    return collect(toy_traces, exploratory_schedule(toy_traces.depths, 12), 12, seed=0)


@pytest.fixture
def own_names() -> Iterator[None]:
    """Algorithms registered in a test are gone after it."""
    before = dict(registry._FACTORIES)
    yield
    registry._FACTORIES.clear()
    registry._FACTORIES.update(before)


def decisions(rows: np.ndarray) -> View:
    zeros = np.zeros(len(rows), dtype=np.int64)
    lanes = np.arange(len(rows))
    return View(zeros, zeros, zeros, rows, lanes, zeros, zeros)


def test_the_names_are_promised() -> None:
    assert algorithm_names()[: len(NAMES)] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_and_its_policy_plays(
    name: str, data: Transitions, toy_traces: TraceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[dict[str, float]] = []
    policy = train(data, name, TINY, traces=toy_traces, on_checkpoint=lambda row: log.append(dict(row)))
    seen = []
    act = policy.act

    def noted(view: View) -> np.ndarray:
        seen.append(act(view))
        return seen[-1]

    monkeypatch.setattr(policy, "act", noted)
    result = run_controller(toy_traces, policy)
    actions = np.concatenate(seen)
    assert actions.dtype == np.int64
    assert set(actions.tolist()) <= {0, 1}
    assert len(actions) == result.decisions.sum()
    assert [row["step"] for row in log] == [6, 12]
    assert all(math.isfinite(value) for row in log for value in row.values())
    assert result.returns.mean() == pytest.approx(max(row["return"] for row in log)), "the best one"
    assert isinstance(policy, SequenceController if name == "decision_transformer" else QController)
    assert policy.name == name


@pytest.mark.parametrize("name", [name for name in NAMES if name != "decision_transformer"])
def test_a_policy_file_holds_it(name: str, data: Transitions, toy_traces: TraceSet, tmp_path: Any) -> None:
    policy = train(data, name, TINY)
    assert isinstance(policy, QController)
    save_policy(tmp_path / "policy", policy)
    view = decisions(data.observation)
    np.testing.assert_array_equal(load_policy(tmp_path).act(view), policy.act(view))
    assert (policy.depths, policy.num_layers, policy.max_draft) == ((2, 3, 6), 8, 12)
    with pytest.raises(InputError, match=r"trained with depths \(2, 3, 6\)"):
        run_controller(toy_traces, policy, depths=(2, 6))


@pytest.mark.parametrize("name", ["dqn", "double_dqn", "cql", "bcq", "sac", "nfq", "qr_dqn"])
def test_it_exits_where_exiting_pays(name: str) -> None:
    problem = with_environment(two_step_problem())
    settings = dataclasses.replace(FAST, gradient_steps=800, evaluate_every=800)
    policy = train(problem, name, settings)
    assert policy.act(decisions(STATES)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("name", ["bc", "bcq"])
def test_imitators_do_what_the_data_do(name: str) -> None:
    """Where the data exit on 9 of 10 occasions whatever it pays, BC exits, and BCQ has no other choice."""
    problem = with_environment(two_step_problem())
    rng = np.random.default_rng(1)
    action = (rng.random(len(problem)) < 0.9).astype(np.int64)
    pay = np.where(action == 1, 2 * problem.observation[:, 0] - 1, 0).astype(np.float32)
    problem = dataclasses.replace(problem, action=action, reward=pay)
    policy = train(problem, name, dataclasses.replace(FAST, gradient_steps=400, evaluate_every=400))
    assert policy.act(decisions(STATES)).tolist() == [1, 1, 1, 1]


def test_train_and_train_dqn_are_one_path() -> None:
    problem = with_environment(two_step_problem(100))
    for name, double in (("dqn", False), ("double_dqn", True)):
        settings = dataclasses.replace(FAST, gradient_steps=60, evaluate_every=30, double=double)
        network, log = train_dqn(problem, settings)
        rows: list[dict[str, float]] = []
        policy = train(problem, name, settings, on_checkpoint=lambda row, to=rows: to.append(dict(row)))  # type: ignore[misc]
        assert isinstance(policy, QController)
        np.testing.assert_array_equal(policy.network(STATES), network(STATES))
        assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in log]


@pytest.mark.parametrize("name", ["cql", "bcq", "sac", "bc", "qr_dqn", "decision_transformer"])
def test_a_diverging_loss_is_reported(name: str, data: Transitions, toy_traces: TraceSet) -> None:
    settings = dataclasses.replace(TINY, gradient_steps=40, learning_rate=1e30, gamma=1.0)
    huge = dataclasses.replace(data, reward=np.full(len(data), 1e37, dtype=np.float32))
    with pytest.raises(InputError, match="training diverged before step"):
        train(huge, name, settings, traces=toy_traces, evaluate=lambda policy: {"return": 0.0})


def test_one_function_adds_an_algorithm(data: Transitions, toy_traces: TraceSet, own_names: None) -> None:
    seen = []

    def mine(d3rlpy: Any, settings: DQNSettings, features: int) -> Any:
        seen.append((settings, features))
        return d3rlpy.algos.DQNConfig(gamma=settings.gamma, batch_size=settings.batch_size).create(
            device=False
        )

    register("mine", mine)
    register("mine_too", partial(registry.cql, alpha=4.0))
    assert algorithm_names()[-2:] == ("mine", "mine_too")
    policy = train(data, "mine", TINY, traces=toy_traces)
    assert isinstance(policy, QController)
    assert policy.network.sizes == (11, 256, 256, 2)
    assert seen == [(TINY, 11)]
    assert isinstance(train(data, "mine_too", TINY), QController)


def test_what_no_file_can_hold_is_played_by_d3rlpy(
    data: Transitions, toy_traces: TraceSet, own_names: None
) -> None:
    def implicit(d3rlpy: Any, settings: DQNSettings, features: int) -> Any:
        from d3rlpy.models.encoders import VectorEncoderFactory

        encoder = VectorEncoderFactory(hidden_units=[8], use_layer_norm=True)
        return d3rlpy.algos.DQNConfig(encoder_factory=encoder).create(device=False)

    register("layer_norm", implicit)
    policies: list[Any] = []
    settings = dataclasses.replace(TINY, learning_rate=0.1)
    train(
        data, "layer_norm", settings, evaluate=lambda policy: {"return": float(len(policies))},
        on_best=lambda policy, _: policies.append(policy),
    )  # fmt: skip
    assert [type(policy) for policy in policies] == [PredictController] * 2
    assert run_controller(toy_traces, policies[0]).decisions.sum() > 0
    first, last = (policy._algorithm.impl.q_function[0]._fc.weight for policy in policies)
    assert not np.array_equal(first.detach().numpy(), last.detach().numpy()), "checkpoints stay as they were"
    with pytest.raises(InputError, match="trained with max_draft 12"):
        run_controller(toy_traces, policies[0], max_draft=3)
    with pytest.raises(InputError, match="trained with num_layers 8"):
        run_controller(random_traces(num_layers=9, overrun=11), policies[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: train(data, "fame", TINY), "'fame' is not registered; there are dqn"),
        (lambda data: register("Two Words", registry.dqn), "lower-case"),
        (lambda data: register("number", 3), "cannot be called"),  # type: ignore[arg-type]
        (
            lambda data: train(dataclasses.replace(data, settings={}), "dqn", TINY),
            "do not say under which depths, reward",
        ),
        (lambda data: train(data, "decision_transformer", TINY), "give traces="),
    ],
)
def test_what_cannot_be_trained_is_refused(
    call: Callable[[Transitions], object], message: str, data: Transitions
) -> None:
    with pytest.raises(InputError, match=message):
        call(data)


def test_factories_that_return_something_else_are_refused(data: Transitions, own_names: None) -> None:
    register("nothing", lambda d3rlpy, settings, features: None)
    with pytest.raises(InputError, match="has no create_impl"):
        train(data, "nothing", TINY)

    def scaled(d3rlpy: Any, settings: DQNSettings, features: int) -> Any:
        scaler = d3rlpy.preprocessing.StandardObservationScaler()
        return d3rlpy.algos.DQNConfig(observation_scaler=scaler).create(device=False)

    register("scaled", scaled)
    with pytest.raises(InputError, match="leave the scaler out"):
        train(data, "scaled", TINY)


def with_environment(transitions: Transitions) -> Transitions:
    """Transitions that were not collected in an environment, with the settings of one."""
    return dataclasses.replace(
        transitions,
        settings={
            "depths": [2], "num_layers": 4, "reward": "lede", "final_token_reward": 1.0, "k": 5, "window": 8,
            "max_draft": 12,
        },
    )  # fmt: skip
