"""From traces to a policy file: it learns what can be learned, and leaves a usable folder."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from sde_gym.envs.ranking import reward_ranking
from sde_gym.envs.rewards import StepOutcome
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.offline import DQNSettings, collect, load_transitions, train_policy
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.offline.selection import environment_of, settings_of
from sde_gym.policies.files import load_policy
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.traces import TraceSet
from tests.builders import random_traces

SMALL = DQNSettings(episodes=12, gradient_steps=20, evaluate_every=10, hidden=(8,), batch_size=32)


def telling_traces(seed: int, texts: int) -> TraceSet:
    """Texts on which the best token's probability is 0.9 where the proposal is right, and else 0.2.

    Half of the proposals are right, so exiting blindly loses and never exiting gains nothing.
    """
    traces = random_traces(seed, texts, max_new_tokens=30, p_match=0.5, overrun=11)
    logprobs, behind = traces.top_logprobs.copy(), traces.overrun_logprobs.copy()
    logprobs[:, :, 0] = np.log(np.where(traces.match, 0.9, 0.2))
    behind[:, 0] = np.log(0.2)
    logprobs[:, :, 1:] = behind[:, 1:] = np.log(0.01)
    return dataclasses.replace(traces, top_logprobs=logprobs, overrun_logprobs=behind)


def test_it_learns_to_exit_where_the_model_is_sure(tmp_path: Path) -> None:
    settings = DQNSettings(
        episodes=100, gradient_steps=900, evaluate_every=300, hidden=(32, 32), gamma=0.9, learning_rate=3e-3
    )
    held_out = telling_traces(seed=1, texts=30)
    policy = train_policy(telling_traces(seed=0, texts=30), tmp_path, settings).policy

    def value(controller: object) -> float:
        return float(run_controller(held_out, controller).returns.mean())  # type: ignore[arg-type]

    learned = value(policy)
    assert learned > value(RandomController(0.0)) + 3, "better than never exiting"
    assert learned > value(RandomController(0.5)) + 3
    for depth in held_out.depths:
        for length in (1, 2, 4):
            assert learned > value(StaticController(depth, length)) + 3
    best = value(ThresholdController(0.5))  # exits at the first depth that is right: the rule to be found
    assert learned > value(RandomController(0.0)) + 0.8 * (best - value(RandomController(0.0)))
    assert run_controller(held_out, policy).acceptance_rate > 0.95


def test_the_folder_holds_everything_and_says_what_it_is(toy_traces: TraceSet, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "folder"
    calls: list[tuple[int, int]] = []
    trained = train_policy(toy_traces, out, SMALL, lambda done, total, _: calls.append((done, total)))
    assert sorted(path.name for path in out.iterdir()) == [
        "policy.json", "policy.safetensors", "settings.json", "training_log.jsonl", "transitions.npz",
    ]  # fmt: skip
    assert calls[-1] == (20, 20)
    saved = json.loads((out / "settings.json").read_text())
    assert DQNSettings.from_json(saved["settings"]) == SMALL
    log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert log == trained.log
    assert [row["step"] for row in log] == [10, 20]
    policy = load_policy(out)
    assert policy.observation == SMALL.features
    assert (policy.depths, policy.num_layers, policy.max_draft) == (toy_traces.depths, 8, 12)
    assert policy.meta["model"] == {"name": "toy", "weights_hash": "0" * 64}
    assert policy.meta["traces"] == saved["traces"]
    assert policy.meta["training"] == saved["settings"]
    best = max(log, key=lambda row: row["return"])
    assert policy.meta["provenance"]["checkpoint"] == best
    assert policy.meta["provenance"]["reward_speed_rank_correlation"] == reward_ranking(toy_traces)
    assert policy.meta["provenance"]["transitions"] == len(load_transitions(out / "transitions.npz"))
    for controller in (policy, trained.policy):
        assert run_controller(toy_traces, controller).returns.mean() == pytest.approx(best["return"])


def test_transitions_are_reused_exactly_when_they_would_be_the_same(
    toy_traces: TraceSet, tmp_path: Path
) -> None:
    assert not train_policy(toy_traces, tmp_path, SMALL).reused
    path = tmp_path / "transitions.npz"
    before = path.read_bytes()
    learning = dataclasses.replace(SMALL, gradient_steps=10, gamma=0.8)
    assert train_policy(toy_traces, tmp_path, learning).reused
    assert path.read_bytes() == before
    for changes in (
        {"episodes": 11},
        {"seed": 1},
        {"observation": "paper"},
        {"max_draft": 4},
        {"depths": (2, 6)},
    ):
        assert not train_policy(toy_traces, tmp_path, dataclasses.replace(SMALL, **changes)).reused, changes
        assert not train_policy(toy_traces, tmp_path, SMALL).reused
    assert not train_policy(toy_traces.subset([0, 1, 2]), tmp_path, SMALL).reused
    path.write_bytes(before[:100])
    assert not train_policy(toy_traces, tmp_path, SMALL).reused
    assert path.read_bytes() == before, "same seed, same file"


class Stop(KeyboardInterrupt):
    """What a user's Ctrl-C raises, in the middle of training."""


def test_an_interrupt_leaves_the_best_policy_so_far(toy_traces: TraceSet, tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, gradient_steps=200, evaluate_every=50)

    def stop(done: int, total: int, metrics: Mapping[str, float]) -> None:
        if done == 100:
            raise Stop

    with pytest.raises(Stop):
        train_policy(toy_traces, tmp_path, settings, stop)
    log = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    best = max(log, key=lambda row: row["return"])
    policy = load_policy(tmp_path)
    assert run_controller(toy_traces, policy).returns.mean() == pytest.approx(best["return"])
    assert train_policy(toy_traces, tmp_path, settings).reused


def test_another_run_does_not_keep_the_policy_of_the_one_before(toy_traces: TraceSet, tmp_path: Path) -> None:
    def stop(done: int, total: int, metrics: Mapping[str, float]) -> None:
        raise Stop

    train_policy(toy_traces, tmp_path, SMALL)
    long = dataclasses.replace(SMALL, gradient_steps=100, evaluate_every=100)
    with pytest.raises(Stop):
        train_policy(toy_traces, tmp_path, long, stop)
    with pytest.raises(InputError, match="no such file"):
        load_policy(tmp_path)
    assert not (tmp_path / "training_log.jsonl").exists()


def test_depths_and_features_of_the_settings_reach_the_policy(toy_traces: TraceSet, tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, depths=(2, 6), observation="top1,depth", max_draft=3, k=4, window=5)
    policy = train_policy(toy_traces, tmp_path, settings).policy
    assert (policy.depths, policy.observation, policy.max_draft) == ((2, 6), ("top1", "depth"), 3)
    assert (policy.k, policy.window) == (4, 5)
    with pytest.raises(InputError, match=r"trained with depths \(2, 6\)"):
        run_controller(toy_traces, policy)
    run_controller(toy_traces, policy, depths=(2, 6), max_draft=3)


@pytest.mark.parametrize("changes", [{"depths": (5,)}, {"reward": "fame"}, {"k": 9}, {"n_steps": 0}])
def test_a_run_that_cannot_start_leaves_what_was_there(
    toy_traces: TraceSet, tmp_path: Path, changes: dict
) -> None:
    train_policy(toy_traces, tmp_path, SMALL)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError):
        train_policy(toy_traces, tmp_path, dataclasses.replace(SMALL, **changes))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_policy_survives_missing_d3rlpy(
    toy_traces: TraceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_policy(toy_traces, tmp_path, SMALL)
    monkeypatch.setitem(sys.modules, "d3rlpy", None)
    with pytest.raises(InputError, match="needs d3rlpy"):
        train_policy(toy_traces, tmp_path, dataclasses.replace(SMALL, gamma=0.5))
    assert load_policy(tmp_path).meta["training"] == SMALL.to_json()


def exits_cost_nothing(outcome: StepOutcome) -> np.ndarray:
    """A reward by name."""
    return outcome.emitted.astype(np.float64)


def test_transitions_of_an_imported_reward_are_never_reused(toy_traces: TraceSet, tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, reward=f"{__name__}:exits_cost_nothing")
    train_policy(toy_traces, tmp_path, settings)
    trained = train_policy(toy_traces, tmp_path, settings)
    assert not trained.reused
    assert load_policy(tmp_path).meta["provenance"]["reward_speed_rank_correlation"] is None


def test_another_budget_is_another_request(tmp_path: Path) -> None:
    traces = random_traces()
    ended = traces.subset([n for n, end in enumerate(traces.ends) if end == "eos"])
    train_policy(ended, tmp_path, SMALL)
    for name in ("max_new_tokens", "context_limit"):
        manifest = {**ended.manifest, name: ended.manifest[name] + 1}
        other = dataclasses.replace(ended, manifest=manifest)
        assert not train_policy(other, tmp_path, SMALL).reused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_steps": 0}, "gradient_steps is 0"),
        ({"depths": (5,)}, "5 was not recorded"),
        ({"reward": "fame"}, "fame"),
        ({"k": 9}, "k: 9"),
        ({"observation": "mood"}, "mood"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    toy_traces: TraceSet, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train_policy(toy_traces, tmp_path / "out", dataclasses.replace(SMALL, **changes))
    assert not (tmp_path / "out" / "policy.json").exists()


def test_a_file_in_the_way_is_named(toy_traces: TraceSet, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out: is a file; give a folder"):
        train_policy(toy_traces, tmp_path / "out", SMALL)


def test_checkpoints_are_played_in_the_environment_of_the_given_transitions(
    toy_traces: TraceSet, tmp_path: Path
) -> None:
    """`rho` is no setting of a run; 0 counts as said, and makes time free."""
    collected = collect(toy_traces, UniformRandom(), 12, seed=0, reward="speed")
    data = dataclasses.replace(collected, settings={**collected.settings, "rho": 0.0})
    environment = environment_of(data)
    assert environment["rho"] == 0.0
    trained = train_policy(toy_traces, tmp_path, settings_of(data, SMALL), transitions=data)
    played = run_controller(toy_traces, trained.policy, **environment)
    assert max(row["return"] for row in trained.log) == pytest.approx(played.returns.mean())
