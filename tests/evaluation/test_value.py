"""Values of policies: known answers, single environments, and how they are told."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from sde_gym.envs.hindsight import best_return, best_speedup
from sde_gym.envs.lede import LEDEEnv
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.player import SampledBehaviour, is_stochastic
from sde_gym.evaluation.summary import Summary
from sde_gym.evaluation.value import compare, policy_value, value_table
from sde_gym.offline.behaviours import EpisodeMixture, EpsilonGreedy, StepMixture, UniformRandom
from sde_gym.policies.ablation import keeps_state
from sde_gym.policies.controller import BaseController
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.builders import random_traces, written_traces
from tests.costs import uneven_cost


def test_a_case_on_paper() -> None:
    """Depth 2 of 8, always one token: right and bonus (1.75 - .01 + 1), then right (1.75); best is two."""
    traces = written_traces(
        range(1, 5), [[1], [2], [3], [4]], end="budget", depths=(2,), num_layers=8, overrun=11
    )
    found = policy_value(StaticController(2, 1), traces, gammas=(1.0, 0.5))
    undiscounted, halved = found.total.values
    assert undiscounted.mean == found.total.undiscounted.mean == pytest.approx(1.75 + 0.99 + 1.75)
    assert halved.mean == pytest.approx(1.75 + 0.99 / 2 + 1.75 / 4)
    assert undiscounted.standard_error is None  # a single text
    assert undiscounted.seed_error is None
    # Layers: 2 + 2 + 6 for two tokens, then 2 + 6 for the last; at best 2 for the walk, 2 for each of two
    # tokens fed, 6 for all.
    assert found.total.layer_speedup == found.total.speedup == 24 / 18
    assert found.total.best_layer_speedup == 24 / 12
    assert found.total.layer_speedup_fraction == pytest.approx(12 / 18)
    assert found.total.best_return == pytest.approx(3 * 1.75)
    assert found.total.return_fraction == pytest.approx(4.49 / 5.25)
    assert (found.total.acceptance_rate, found.total.mean_exit_depth) == (1.0, 2.0)
    assert found.total.mean_draft_length == 1.0
    assert not found.stochastic


def test_discounts_are_per_decision(toy_traces: TraceSet) -> None:
    """Against one environment after the other, with rewards that wait for the end of a round."""
    controller = ThresholdController(0.6)
    gammas = (0.9, 1.0, 0.5)
    settings: dict[str, Any] = {"credit": "round", "max_draft": 4, "depths": (2, 6)}
    found = policy_value(controller, toy_traces, gammas=gammas, texts=[3, 0, 5], **settings)
    assert found.returns.shape == (3, 1, 3)
    assert found.texts.tolist() == [3, 0, 5]
    env = LEDEEnv(toy_traces, observation=("top1",), **settings)
    for column, text in enumerate((3, 0, 5)):
        row, _ = env.reset(options={"text": text})
        rewards, over = [], False
        while not over:
            view = env.engine.view(np.zeros(1, np.int64), row[None])
            row, reward, over, _, _ = env.step(int(controller.act(view)[0]))
            rewards.append(reward)
        expected = [sum(gamma**t * reward for t, reward in enumerate(rewards)) for gamma in gammas]
        np.testing.assert_allclose(found.returns[:, 0, column], expected)
    for gamma, value, returns in zip(gammas, found.total.values, found.returns, strict=True):
        assert value.gamma == gamma
        assert value.mean == pytest.approx(returns.mean())
        assert value.standard_error == pytest.approx(returns[0].std(ddof=1) / np.sqrt(3))
    assert found.total.undiscounted == found.total.values[1]


def test_the_numbers_are_those_of_the_run(toy_traces: TraceSet) -> None:
    cost = uneven_cost(toy_traces.num_layers)
    controller = ThresholdController(0.5)
    found = policy_value(controller, toy_traces, cost=cost, reward="speed")
    result = run_controller(toy_traces, controller, cost=cost, reward="speed")
    totals = result.totals()
    for name in (
        "acceptance_rate", "mean_exit_depth", "mean_draft_length", "layer_speedup", "speedup",
    ):  # fmt: skip
        assert getattr(found.total, name) == totals[name], name
    assert found.total.undiscounted.mean == pytest.approx(result.returns.mean())
    assert found.cost_model == "uneven"
    assert found.total.best_speedup == pytest.approx(best_speedup(toy_traces, cost=cost))
    assert found.total.best_layer_speedup == pytest.approx(best_speedup(toy_traces))
    best = best_return(toy_traces, cost=cost, reward="speed").values.mean()
    assert found.total.best_return == pytest.approx(best)
    assert found.total.speedup_fraction < 1
    assert found.overrun == 11


def test_tasks_share_out_the_texts(toy_traces: TraceSet) -> None:
    controller = StaticController(3, 2)
    found = policy_value(controller, toy_traces, gammas=(0.9,))
    assert [summary.task for summary in found.tasks] == sorted(set(toy_traces.tasks))
    assert sum(summary.texts for summary in found.tasks) == found.total.texts == len(toy_traces)
    for summary in found.tasks:
        texts = toy_traces.texts_of([summary.task])
        alone = policy_value(controller, toy_traces, gammas=(0.9,), texts=texts).total
        for field in dataclasses.fields(Summary):
            if field.name != "task":
                assert getattr(summary, field.name) == getattr(alone, field.name), field.name


def test_the_planned_optimum_reaches_all_of_it(toy_traces: TraceSet) -> None:
    found = policy_value(best_return(toy_traces).controller(), toy_traces)
    assert found.total.return_fraction == pytest.approx(1.0)


def test_drawn_actions_are_averaged_over_seeds(toy_traces: TraceSet) -> None:
    policy = RandomController(0.4, seed=99, p_draft=0.7)
    found = policy_value(policy, toy_traces, repeats=5, seed=3, gammas=(1.0, 0.9))
    assert found.stochastic
    assert found.seeds == (3, 4, 5, 6, 7)
    assert policy.seed == 99
    single = [run_controller(toy_traces, RandomController(0.4, seed, 0.7)) for seed in found.seeds]
    np.testing.assert_allclose(found.returns[0], [run.returns for run in single])
    means = found.returns[0].mean(axis=1)
    assert len(set(means.tolist())) == 5
    assert found.total.undiscounted.mean == pytest.approx(means.mean())
    assert found.total.undiscounted.seed_error == pytest.approx(means.std(ddof=1) / np.sqrt(5))
    by_text = found.returns[0].mean(axis=0)
    assert found.total.undiscounted.standard_error == pytest.approx(by_text.std(ddof=1) / np.sqrt(6))
    drafted, accepted = (sum(getattr(run, name).sum() for run in single) for name in ("drafted", "accepted"))
    assert found.total.acceptance_rate == pytest.approx(accepted / drafted)
    assert found.total.texts == 6
    sure = policy_value(RandomController(1.0), toy_traces, repeats=5)
    assert sure.seeds == ()
    assert sure.returns.shape == (1, 1, 6)


def test_behaviour_policies_have_values_too() -> None:
    """The mean over seeds of fair coins is that of the paper case, worked out by hand."""
    traces = written_traces([1, 2], [[1], [2]], end="budget", depths=(2,), num_layers=8, overrun=11)
    found = policy_value(UniformRandom(0.25), traces, repeats=800)
    # One decision: exit earns 1.75, plain decoding 0.99.
    expected = 0.25 * 1.75 + 0.75 * 0.99
    error = found.total.undiscounted.seed_error
    assert error is not None
    assert error == pytest.approx(0.76 * np.sqrt(0.25 * 0.75 / 800), rel=0.1)
    assert abs(found.total.undiscounted.mean - expected) < 4 * error


def test_a_behaviour_without_chance_is_its_controller(toy_traces: TraceSet) -> None:
    controller = ThresholdController(0.5)
    for behaviour in (EpsilonGreedy(controller, 0.0), StepMixture([EpsilonGreedy(controller, 0.0)])):
        found = policy_value(behaviour, toy_traces, gammas=(0.9,))
        np.testing.assert_array_equal(
            found.returns, policy_value(controller, toy_traces, gammas=(0.9,)).returns
        )


def test_comparing_is_evaluating_one_after_the_other(toy_traces: TraceSet) -> None:
    policies = {"short": StaticController(3, 1), "sure": ThresholdController(0.5), "coins": UniformRandom()}
    together = compare(policies, toy_traces, gammas=(0.95,), repeats=2)
    assert [value.policy for value in together] == list(policies)
    for value, policy in zip(together, policies.values(), strict=True):
        alone = policy_value(policy, toy_traces, gammas=(0.95,), repeats=2)
        assert {**alone.to_json(), "policy": value.policy} == value.to_json()


def test_what_is_told_is_plain_json(toy_traces: TraceSet) -> None:
    values = compare(
        {"a|b": StaticController(3, 1), "coins": UniformRandom()}, toy_traces, gammas=(0.95, 1.0), repeats=2
    )
    for value in values:
        told = value.to_json()
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        rows = value.rows()
        assert json.loads(json.dumps(rows, allow_nan=False)) == rows
        assert [row["task"] for row in rows] == ["all", *sorted(set(toy_traces.tasks))]
        assert rows[0]["return"] == told["total"]["undiscounted"]["mean"]
        assert rows[0]["value@0.95"] == told["total"]["values"][0]["mean"]
        assert "value@1" not in rows[0]
    assert values[0].rows()[0]["return_error"] == values[0].total.undiscounted.standard_error
    assert values[1].rows()[0]["return_error"] == values[1].total.undiscounted.seed_error
    table = value_table(values).splitlines()
    assert len(table) == 4
    assert table[2].startswith("| a\\|b | 6 | ")
    assert f" {values[1].total.undiscounted.mean:.3f} " in table[3]
    assert len(value_table(values, "test").splitlines()) == 4
    with pytest.raises(InputError, match="task: 'prose' is none of"):
        value_table(values, "prose")


def test_a_worthless_optimum_has_no_fractions() -> None:
    traces = random_traces(1, overrun=11)
    found = policy_value(StaticController(3, 1), traces, reward="speed", rho=10.0)
    assert found.total.best_return < 0
    assert found.total.return_fraction is None
    assert "–" in value_table([found])


class Drawing(BaseController):
    name = "drawing"
    stochastic = True


def test_which_policies_draw_and_which_remember() -> None:
    for policy in (RandomController(), UniformRandom(), SampledBehaviour(UniformRandom()), Drawing()):
        assert is_stochastic(policy)
    for controller in (StaticController(2, 1), ThresholdController(0.5), RandomController(0.0)):
        assert not is_stochastic(controller)
        assert not keeps_state(controller)
    assert keeps_state(SampledBehaviour(UniformRandom()))


def test_what_cannot_be_valued_is_refused(toy_traces: TraceSet) -> None:
    policy = StaticController(3, 1)
    for wrong, arguments, message in (
        (Drawing(), {}, "'drawing': its actions are drawn, but"),
        (EpisodeMixture([UniformRandom()]), {}, "take one of its components"),
        (policy, {"gammas": (0.0,)}, "gamma is"),
        (policy, {"repeats": 0}, "repeats: 0"),
        (policy, {"seed": -1}, "seed: -1"),
        (policy, {"texts": []}, "texts: "),
        (policy, {"episode": "round"}, "episode: 'round'"),
        (StaticController(4, 1), {}, "exit_depth: 4"),
    ):
        with pytest.raises(InputError, match=message):
            policy_value(wrong, toy_traces, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="policies: none was given"):
        compare({}, toy_traces)
    named = dataclasses.replace(toy_traces, tasks=["all", *toy_traces.tasks[1:]])
    with pytest.raises(InputError, match="a task is named 'all'"):
        policy_value(policy, named)


def test_layers_and_heads_are_two_bounds(toy_traces: TraceSet) -> None:
    """Where the unit cost model charges heads, the bound by layers is another, and none is passed."""
    manifest = {**toy_traces.manifest, "exit_head": 0.8, "final_head": 1.5}
    traces = dataclasses.replace(toy_traces, manifest=manifest)
    total = policy_value(StaticController(3, 4), traces).total
    assert total.layer_speedup != pytest.approx(total.speedup)
    assert total.best_layer_speedup != pytest.approx(total.best_speedup)
    assert total.layer_speedup <= total.best_layer_speedup
    assert total.speedup <= total.best_speedup
