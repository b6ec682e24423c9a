"""The suite fits the log it is made for."""

from __future__ import annotations

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.evaluation.logged import evaluation_problem, logged_view
from sde_gym.evaluation.policy_suite import policy_suite, random_network
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.policies.observation import PAPER
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet


@pytest.mark.parametrize("observation", ["extended", PAPER, ("trace",)])
def test_twenty_policies_that_differ_and_can_be_evaluated(toy_traces: TraceSet, observation: str) -> None:
    transitions = collect(toy_traces, UniformRandom(), 10, seed=0, observation=observation)
    suite = policy_suite(transitions)
    assert len(suite) >= 20
    assert len({policy.name for policy in suite}) == len(suite)
    view = logged_view(transitions, toy_traces)
    chosen = [evaluation_problem(policy, transitions, 0.9, view).exit_probability for policy in suite]
    assert len(np.unique(np.stack(chosen), axis=0)) > len(suite) // 2


def test_given_networks_join_and_the_seed_says_the_others(toy_traces: TraceSet) -> None:
    transitions = collect(toy_traces, UniformRandom(), 10, seed=0)
    given = random_network(transitions, 99)
    suite = policy_suite(transitions, [given], least=40, seed=5)
    assert given in suite
    assert len(suite) == 40
    again = policy_suite(transitions, [given], least=40, seed=5)
    assert [policy.name for policy in suite] == [policy.name for policy in again]
    exits = evaluation_problem(given, transitions, 0.9).exit_probability
    assert 0.4 < exits.mean() < 0.6
    with pytest.raises(InputError, match="seed: -1 is out of range"):
        policy_suite(transitions, seed=-1)
    with pytest.raises(InputError, match="2 are named"):
        policy_suite(transitions, [StaticController(2, 1)])
