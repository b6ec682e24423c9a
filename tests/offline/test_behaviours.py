"""Behaviour policies: probabilities worked out by hand, and a schedule that covers what it should."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.player import SampledBehaviour
from sde_gym.offline.behaviours import (
    EpisodeMixture,
    EpsilonGreedy,
    StepMixture,
    UniformRandom,
    exploratory_schedule,
    select,
)
from sde_gym.offline.softmax import Softmax
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.observation import Phase
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController

DEPTHS = (2, 4, 8)


def select_view(depth_index: list[int], observation: list[list[float]]) -> View:
    n = len(depth_index)
    lanes = np.arange(10, 10 + n)
    zeros = np.zeros(n, dtype=np.int64)
    return View(
        phase=np.full(n, Phase.SELECT, dtype=np.int64), depth_index=np.array(depth_index), draft_length=zeros,
        observation=np.array(observation, dtype=np.float32), lanes=lanes, text=lanes, decision=zeros,
    )  # fmt: skip


def test_epsilon_greedy_and_uniform_by_hand() -> None:
    behaviour = EpsilonGreedy(StaticController(4, 3), 0.2)
    behaviour.bind(DEPTHS, 12, 6)
    view = select_view([0, 1], [[], []])
    np.testing.assert_allclose(behaviour.exit_probability(view), [0.1, 0.9])
    np.testing.assert_allclose(UniformRandom().exit_probability(view), [0.5, 0.5])
    np.testing.assert_allclose(UniformRandom(0.8).exit_probability(view), [0.8, 0.8])


def test_a_step_mixture_weighs_probabilities_and_gives_each_component_its_columns() -> None:
    mixture = StepMixture(
        [
            UniformRandom(),
            EpsilonGreedy(ThresholdController(0.7), 0.0),
            EpsilonGreedy(StaticController(2, 1), 0),
        ],
        weights=[2, 1, 1],
    )
    mixture.bind(DEPTHS, 12, 6)
    assert mixture.observation == ("top1",)
    view = select_view([0, 1, 0], [[0.9], [0.6], [0.1]])
    # uniform 1/4 always; threshold 1/4 where top-1 >= 0.7; static(2, .) 1/4 at depth index 0 and deeper
    np.testing.assert_allclose(mixture.exit_probability(view), [0.75, 0.5, 0.5])


def test_an_episode_mixture_gives_every_component_its_share_in_any_run_of_episodes() -> None:
    mixture = EpisodeMixture([UniformRandom(p) for p in (0.2, 0.4, 0.6)], weights=[1, 2, 5])
    for first in (0, 777):
        chosen = mixture.component_of(np.arange(first, first + 400), seed=3)
        np.testing.assert_allclose(np.bincount(chosen, minlength=3) / 400, [0.125, 0.25, 0.625], atol=0.02)
    a, b = (mixture.component_of(np.arange(50), seed) for seed in (0, 1))
    assert not np.array_equal(a, b)


def test_the_exploratory_schedule_spans_depths_lengths_and_thresholds() -> None:
    schedule = exploratory_schedule(DEPTHS, max_draft=12, epsilon=0.1)
    names = [component.name for component in schedule.components]
    assert len(set(names)) == len(names)
    for depth in DEPTHS:
        for length in (1, 2, 4, 8, 12):
            assert f"static({depth}, {length})+0.1" in names
    assert sum("threshold" in name for name in names) == 4
    shares = [
        sum(w for w, name in zip(schedule.weights, names, strict=True) if kind in name)
        for kind in ("uniform", "static", "threshold")
    ]
    np.testing.assert_allclose(shares, [0.2, 0.4, 0.4])
    present = np.unique(schedule.component_of(np.arange(200), seed=0))
    assert len(present) == len(names), "200 episodes reach every component"
    schedule.bind(DEPTHS, 24, 12)
    small = exploratory_schedule(DEPTHS, max_draft=2)
    small.bind(DEPTHS, 24, 2)
    assert len(small.components) == 1 + 3 * 2 + 4


def test_select_keeps_rows_and_columns_together() -> None:
    view = select_view([0, 1, 2], [[0.1, 1.0], [0.2, 2.0], [0.3, 3.0]])
    part = select(view, rows=np.array([2, 0]), columns=[1])
    assert part.observation.tolist() == [[3.0], [1.0]]
    assert part.depth_index.tolist() == [2, 0]
    assert part.lanes.tolist() == [12, 10]


def test_impossible_behaviours_are_refused() -> None:
    for build, message in [
        (lambda: UniformRandom(0.0), "exit_probability is 0.0"),
        (lambda: UniformRandom(1.0), "exit_probability is 1.0"),
        (lambda: EpsilonGreedy(StaticController(2, 1), 1.1), "epsilon is 1.1"),
        (lambda: EpsilonGreedy(RandomController(0.5), 0.1), r"'random\(0.5, 0.5\)' draws its actions"),
        (lambda: EpsilonGreedy(RandomController(1.0, p_draft=0.5), 0.1), "draws its actions"),
        (lambda: EpsilonGreedy(SampledBehaviour(UniformRandom()), 0.1), "'uniform' draws its actions"),
        (lambda: StepMixture([]), "mixture of 0 behaviours"),
        (lambda: StepMixture([UniformRandom()], [1, 2]), "positive weight for each"),
        (lambda: EpisodeMixture([UniformRandom()], [0]), "positive weight for each"),
    ]:
        with pytest.raises(InputError, match=message):
            build()
    EpsilonGreedy(RandomController(1.0, p_draft=0.0), 0.1)  # no coin at all
    with pytest.raises(InputError, match="depth"):
        EpsilonGreedy(StaticController(3, 1), 0.1).bind(DEPTHS, 12, 6)


def test_a_mixture_takes_k_and_window_of_its_members_who_must_agree() -> None:
    def reader(k: int | None, window: int | None) -> EpsilonGreedy:
        controller = ThresholdController(0.5)
        controller.k, controller.window = k, window
        return EpsilonGreedy(controller, 0.1)

    for mixture in (StepMixture, EpisodeMixture):
        agreed = mixture([UniformRandom(), reader(3, None), reader(3, 4)])
        assert (agreed.k, agreed.window) == (3, 4)
        assert (mixture([UniformRandom()]).k, mixture([UniformRandom()]).window) == (None, None)
        # The same name twice: it is the numbers that count.
        with pytest.raises(InputError, match=r"different values of k \(threshold.* 3, threshold.* 5\)"):
            mixture([reader(3, 4), reader(5, 4)])
        with pytest.raises(InputError, match="different values of window"):
            mixture([reader(3, 4), UniformRandom(), reader(3, 5)])


class ReadsOneDepth(BaseController):
    """Reads the head at the second depth only, in SELECT only."""

    name = "reads one depth"
    observation: tuple[str, ...] = ("top1", "stable", "depth")

    def __init__(self) -> None:
        self.shown: list[list[float]] = []

    def act(self, view: View) -> np.ndarray:
        self.shown += view.observation.tolist()
        return np.ones(len(view.lanes), dtype=np.int64)

    def reads(self, phase: int, depth_index: int) -> bool:
        return phase == Phase.SELECT and depth_index == 1


def test_a_controller_is_not_shown_heads_that_it_does_not_read() -> None:
    controller = ReadsOneDepth()
    behaviour = StepMixture([UniformRandom(), EpsilonGreedy(controller, 0.0)])
    behaviour.bind(DEPTHS, 12, 6)
    view = select_view([0, 1, 2], [[0.1, 1.0, 0.5], [0.2, 1.0, 0.25], [0.3, 1.0, 0.75]])
    before = view.observation.copy()
    behaviour.exit_probability(view)
    # `stable` also needs the head before, which is read at no depth but the second.
    expected = [[0, 0, 0.5], [0.2, 0, 0.25], [0, 0, 0.75]]
    np.testing.assert_allclose(controller.shown, expected, rtol=1e-6)
    np.testing.assert_array_equal(view.observation, before)


def q_controller(seed: int = 0, hidden: int = 16) -> QController:
    rng = np.random.default_rng(seed)
    sizes = [2, hidden, hidden, 2]
    layers = [
        (rng.normal(size=(a, b)).astype(np.float32), rng.normal(size=b).astype(np.float32))
        for a, b in pairwise(sizes)
    ]
    mean, std = np.array([0.5, 0.3], dtype=np.float32), np.array([0.2, 0.4], dtype=np.float32)
    return QController(QNetwork(layers, mean, std), ("top1", "entropy"), DEPTHS, 12, 6, k=3, window=4)


def test_softmax_is_that_of_the_networks_values() -> None:
    controller = q_controller()
    rows = np.random.default_rng(1).normal(size=(7, 2)).tolist()
    view = select_view([0] * 7, rows)
    values = controller.network(view.observation).astype(np.float64)
    for temperature in (0.01, 0.5, 20.0):
        behaviour = Softmax(controller, temperature)
        assert (behaviour.k, behaviour.window, behaviour.observation) == (3, 4, ("top1", "entropy"))
        behaviour.bind(DEPTHS, 12, 6)
        weights = np.exp((values - values.max(axis=1, keepdims=True)) / temperature)
        expected = weights[:, 1] / weights.sum(axis=1)
        np.testing.assert_allclose(behaviour.exit_probability(view), expected, rtol=0.02, atol=1e-6)
    nearly_greedy = Softmax(controller, 1e-12).exit_probability(view)
    np.testing.assert_array_equal(nearly_greedy > 0.5, values[:, 1] > values[:, 0])
    assert np.isfinite(nearly_greedy).all()
    with pytest.raises(InputError, match="was trained with max_draft 6"):
        Softmax(controller, 1.0).bind(DEPTHS, 12, 7)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="temperature is"):
            Softmax(controller, temperature)


def test_softmax_of_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    behaviour = Softmax(q_controller(hidden=64), 0.7)
    rows = np.random.default_rng(2).normal(size=(65, 2)).tolist()
    together = behaviour.exit_probability(select_view([0] * 65, rows))
    alone = [behaviour.exit_probability(select_view([0], [row]))[0] for row in rows]
    np.testing.assert_array_equal(together, alone)
