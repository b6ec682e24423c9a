"""Names of behaviours, and behaviours made again from their descriptions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.offline.behaviour_names import FORMS, parse_behaviour, rebuild_behaviour
from sde_gym.offline.behaviours import EpisodeMixture, EpsilonGreedy, StepMixture, UniformRandom
from sde_gym.offline.collect import collect
from sde_gym.offline.restricted import OnePhase
from sde_gym.offline.softmax import Softmax
from sde_gym.policies.controller import BaseController, View
from sde_gym.policies.files import save_policy
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.pages import read_page

DEPTHS = (2, 3, 6)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    """Path of a saved policy that fits the toy traces."""
    weight = np.array([[0.5, -0.5], [1.0, 0.25]], dtype=np.float32)
    network = QNetwork([(weight, np.zeros(2, dtype=np.float32))])
    save_policy(tmp_path / "policy", QController(network, ("top1", "entropy"), DEPTHS, 8, 12))
    return str(tmp_path / "policy.safetensors")


def test_names_say_what_is_made(policy: str) -> None:
    def parsed(name: str) -> object:
        return parse_behaviour(name, DEPTHS, 12)

    assert parsed("uniform").describe() == UniformRandom().describe()  # type: ignore[attr-defined]
    assert parsed("random:0.3").describe() == UniformRandom(0.3).describe()  # type: ignore[attr-defined]
    static = parsed("static:3,6+0.1")
    assert isinstance(static, EpsilonGreedy)
    assert isinstance(static.controller, StaticController)
    assert (static.controller.exit_depth, static.controller.draft_length, static.epsilon) == (3, 6, 0.1)
    threshold = parsed("threshold:0.5+0.2")
    assert isinstance(threshold, EpsilonGreedy)
    assert isinstance(threshold.controller, ThresholdController)
    assert (threshold.controller.threshold.tolist(), threshold.epsilon) == ([0.5], 0.2)
    softmax = parsed(f"softmax:{policy}@0.5")
    assert isinstance(softmax, Softmax)
    assert softmax.temperature == 0.5
    by_episode = parsed(f"mixture:uniform|static:3,6+0.1|softmax:{policy}@2")
    assert isinstance(by_episode, EpisodeMixture)
    assert [type(member) for member in by_episode.components] == [UniformRandom, EpsilonGreedy, Softmax]
    assert isinstance(parsed("step-mixture:uniform|random:0.9"), StepMixture)
    schedule = parsed("schedule")
    assert isinstance(schedule, EpisodeMixture)
    assert len(schedule.components) == 1 + 3 * 5 + 4


@pytest.mark.parametrize(
    "name",
    [
        "", "Uniform", "uniform:", "uniform:0.5", "random", "random:", "random:x", "static:4", "static:4,6",
        "static:4;6+0.1", "static:4,6.5+0.1", "static:4,6+", "threshold:+0.1", "threshold:0.5", "softmax:0.5",
        "softmax:@0.5", "softmax:x@", "schedule:", "mixture:", "mixture", "mixture:uniform|", "greedy:0.1",
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_a_sentence_that_lists_the_forms(name: str) -> None:
    with pytest.raises(InputError, match="behaviour") as refusal:
        parse_behaviour(name, DEPTHS, 12)
    if not name.startswith("softmax:x"):
        for form in FORMS:
            assert form in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random:1.5", "exit_probability is 1.5"),
        ("random:nan", "exit_probability is nan"),
        ("static:3,6+2", "epsilon is 2.0"),
        ("static:3,6+nan", "epsilon is nan"),
        ("static:3,0+0.1", "draft_length: 0"),
        ("threshold:1.5+0.1", "threshold: 1.5"),
        ("threshold:nan+0.1", "threshold: nan"),
        ("softmax:nowhere@0.5", "nowhere.safetensors: no such file"),
        ("mixture:uniform|schedule", "'schedule' is itself a mixture"),
        ("mixture:uniform|mixture:uniform", "'mixture:uniform' is itself a mixture"),
    ],
)
def test_impossible_numbers_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_behaviour(name, DEPTHS, 12)


def test_a_description_in_json_makes_the_same_data(toy_traces: TraceSet, policy: str) -> None:
    for name in (
        "uniform", "random:0.3", "static:3,6+0.1", "threshold:0.5+0.1", "schedule", f"softmax:{policy}@0.5",
        f"mixture:uniform|softmax:{policy}@2", "step-mixture:threshold:0.5+0.1|random:0.9",
    ):  # fmt: skip
        behaviour = parse_behaviour(name, DEPTHS, 12)
        again = rebuild_behaviour(json.loads(json.dumps(behaviour.describe())))
        assert again.describe() == behaviour.describe()
        one, other = (collect(toy_traces, each, 12, seed=0) for each in (behaviour, again))
        np.testing.assert_array_equal(one.action, other.action)
        np.testing.assert_array_equal(one.propensity, other.propensity)


@pytest.mark.parametrize("phase", ["select", "draft"])
def test_a_behaviour_of_one_phase_is_rebuilt(toy_traces: TraceSet, phase: str) -> None:
    behaviour = OnePhase(EpsilonGreedy(ThresholdController(0.5), 0.2), StaticController(3, 2), phase)
    again = rebuild_behaviour(json.loads(json.dumps(behaviour.describe())))
    assert again.describe() == behaviour.describe()
    one, other = (collect(toy_traces, each, 6, seed=0) for each in (behaviour, again))
    np.testing.assert_array_equal(one.action, other.action)
    np.testing.assert_array_equal(one.propensity, other.propensity)


def test_what_cannot_be_made_again_is_refused(policy: str) -> None:
    class Own(BaseController):
        name = "own"

        def act(self, view: View) -> np.ndarray:
            return np.ones(len(view.lanes), dtype=np.int64)

    softmax = Softmax.load(policy, 0.5).describe()
    for description, message in [
        (EpsilonGreedy(Own(), 0.1).describe(), "controller 'own' of .*Own is none of the package's rules"),
        ({**softmax, "weights_sha256": "0" * 64}, "other weights than the policy that made the data"),
        ({**softmax, "path": None}, "was never saved"),
        ({**softmax, "path": policy + "x"}, "no such file"),
        ({"kind": "oracle"}, "kind 'oracle' is not one of this package"),
        ({"kind": "random"}, "is no description"),
        ({}, "is no description"),
        (
            {"kind": "step_mixture", "weights": [1.0],
             "components": [EpisodeMixture([UniformRandom()]).describe()]},
            "cannot be a member",
        ),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            rebuild_behaviour(description)


def test_the_page_lists_every_form() -> None:
    page = read_page("data")
    for form, meaning in FORMS.items():
        assert f"`{form}`".replace("|", "\\|") in page
        assert meaning in page
