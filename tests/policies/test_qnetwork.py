"""The Q-network's arithmetic against one worked by hand, and the settings its controller refuses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.policies.controller import Controller, View
from sde_gym.policies.observation import EXTENDED, PAPER, Action, Phase
from sde_gym.policies.qnetwork import QController, QNetwork

DEPTHS = (2, 4, 8)


def random_network(sizes: tuple[int, ...], seed: int = 0) -> QNetwork:
    rng = np.random.default_rng(seed)
    layers = [(rng.normal(size=(a, b)) / np.sqrt(a), rng.normal(size=b)) for a, b in pairwise(sizes)]
    return QNetwork(layers, rng.normal(size=sizes[0]), rng.uniform(0.5, 2.0, size=sizes[0]))


def view(observation: np.ndarray) -> View:
    n = len(observation)
    index = np.arange(n, dtype=np.int64)
    zeros = np.zeros(n, dtype=np.int64)
    return View(
        phase=np.full(n, Phase.SELECT, dtype=np.int64), depth_index=zeros, draft_length=zeros,
        observation=observation, lanes=index, text=index, decision=zeros,
    )  # fmt: skip


def controller(**changes: object) -> QController:
    arguments: dict = {"observation": "paper", "depths": DEPTHS, "num_layers": 12, "max_draft": 6}
    return QController(random_network((3, 8, 2)), **{**arguments, **changes})


def test_a_network_worked_out_by_hand() -> None:
    network = QNetwork(
        [
            (np.array([[1.0, -1.0]]), np.array([0.0, 0.5])),
            (np.array([[2.0, 0.0], [0.0, 3.0]]), np.array([1.0, -1.0])),
        ],
        mean=np.array([10.0]),
        std=np.array([2.0]),
    )
    # x = 14 -> 2 -> relu(2, -1.5) = (2, 0) -> (5, -1); x = 8 -> -1 -> relu(-1, 1.5) = (0, 1.5) -> (1, 3.5)
    values = network(np.array([[14.0], [8.0]], dtype=np.float32))
    np.testing.assert_array_equal(values, [[5.0, -1.0], [1.0, 3.5]])
    assert values.dtype == np.float32


def test_rows_do_not_influence_each_other_and_the_input_survives() -> None:
    network = random_network((11, 64, 64, 2))
    rows = np.random.default_rng(1).normal(size=(50, 11)).astype(np.float32)
    before = rows.copy()
    together = network(rows)
    alone = np.concatenate([network(rows[i : i + 1]) for i in range(50)])
    np.testing.assert_allclose(alone, together, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rows, before)


def test_the_weights_are_copies_that_nobody_can_change() -> None:
    weight = np.ones((3, 2), dtype=np.float32)
    network = QNetwork([(weight, np.zeros(2, dtype=np.float32))])
    weight[:] = 7.0
    assert network(np.ones((1, 3), dtype=np.float32)).tolist() == [[3.0, 3.0]]
    with pytest.raises(ValueError, match="read-only"):
        network.layers[0][0][0, 0] = 1.0


@pytest.mark.parametrize(
    ("layers", "mean", "std", "message"),
    [
        ([], None, None, "at least one layer"),
        ([(np.ones((3, 2)), np.ones(3))], None, None, "do not fit"),
        ([(np.ones((3, 4)), np.ones(4)), (np.ones((5, 2)), np.ones(2))], None, None, "takes 5 inputs"),
        ([(np.ones((3, 3)), np.ones(3))], None, None, "one per action"),
        ([(np.full((3, 2), np.nan), np.ones(2))], None, None, "NaN"),
        ([(np.ones((3, 2)), np.ones(2))], np.ones(4), None, "mean has shape"),
        ([(np.ones((3, 2)), np.ones(2))], None, np.zeros(3), "must be positive"),
        ([(np.ones((3, 2)), np.ones(2))], np.full(3, np.inf), None, "NaN or infinite"),
    ],
)
def test_impossible_networks_are_refused(layers: list, mean: object, std: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        QNetwork(layers, mean, std)  # type: ignore[arg-type]


def test_greedy_actions_and_ties() -> None:
    identity = QNetwork([(np.eye(2), np.zeros(2))])
    policy = QController(identity, ("top1", "margin"), DEPTHS, 12, 6)
    actions = policy.act(view(np.array([[1, 0], [0, 1], [3, 3]], dtype=np.float32)))
    assert actions.tolist() == [Action.CONTINUE, Action.EXIT, Action.CONTINUE]
    assert actions.dtype == np.int64


def test_it_is_a_controller_that_reads_everywhere() -> None:
    policy = controller()
    assert isinstance(policy, Controller)
    assert policy.observation == PAPER
    assert all(policy.reads(phase, index) for phase in Phase for index in range(3))
    constant = QController(QNetwork([(np.ones((0, 2)), np.array([0.0, 1.0]))]), (), DEPTHS, 12, 6)
    assert not constant.reads(Phase.SELECT, 0)
    assert constant.act(view(np.zeros((4, 0), dtype=np.float32))).tolist() == [1, 1, 1, 1]


def test_bind_takes_the_setting_it_was_trained_in_and_no_other() -> None:
    policy = controller()
    policy.bind(DEPTHS, 12, 6)
    for setting, message in [
        (((2, 4), 12, 6), r"trained with depths \(2, 4, 8\).*\(2, 4\)"),
        ((DEPTHS, 24, 6), "num_layers 12.*24"),
        ((DEPTHS, 12, 12), "max_draft 6.*12"),
    ]:
        with pytest.raises(InputError, match=message):
            policy.bind(*setting)


def test_another_observation_is_refused() -> None:
    with pytest.raises(InputError, match="takes 3 inputs but the observation has 11"):
        controller(observation=EXTENDED)
    with pytest.raises(InputError, match="reads confidence, entropy, trace: 3 features, but it was given 11"):
        controller().act(view(np.zeros((2, 11), dtype=np.float32)))
    with pytest.raises(InputError, match="nonsense"):
        controller(observation=("nonsense", "entropy", "trace"))


@pytest.mark.parametrize(
    "changes",
    [{"depths": ()}, {"depths": (4, 2)}, {"depths": (0, 2)}, {"depths": (2, 12)},
     {"max_draft": 0}, {"k": 0}, {"window": 0}],
)  # fmt: skip
def test_impossible_settings_are_refused(changes: dict) -> None:
    with pytest.raises(InputError, match="policy 'lede'"):
        controller(**changes)
