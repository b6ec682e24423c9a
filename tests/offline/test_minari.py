"""Minari data sets hold everything, are read back exactly, and are there whole or not at all."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from typer.testing import CliRunner

from sde_gym.cli import app
from sde_gym.envs.engine import ReplayEngine
from sde_gym.errors import InputError
from sde_gym.offline.behaviour_names import rebuild_behaviour
from sde_gym.offline.behaviours import UniformRandom, exploratory_schedule
from sde_gym.offline.buffer import to_replay_buffer
from sde_gym.offline.collect import collect
from sde_gym.offline.minari_data import add_infos, save_minari
from sde_gym.offline.minari_read import dataset_to_transitions, read_info
from sde_gym.offline.restricted import OnePhase, restricted
from sde_gym.offline.transitions import COLUMNS, Transitions, load_transitions
from sde_gym.policies.observation import PAPER
from sde_gym.policies.rules import StaticController
from sde_gym.traces import TraceSet, load_traces

minari = pytest.importorskip("minari")

ID = "sde_gym/toy/schedule-v0"


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Minari's folder during a test."""
    folder = tmp_path / "minari"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    return folder


@pytest.fixture
def data(toy_traces: TraceSet) -> Transitions:
    return collect(toy_traces, exploratory_schedule(toy_traces.depths, 12), 30, seed=2)


def assert_same(one: Transitions, other: Transitions) -> None:
    for name in COLUMNS:
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)
    assert one.names == other.names
    assert one.settings == other.settings


@pytest.mark.parametrize("episode", ["generation", "round"])
def test_what_is_read_is_what_was_written(toy_traces: TraceSet, toy_folder: Path, episode: str) -> None:
    written = collect(
        toy_traces, exploratory_schedule(toy_traces.depths, 12), 30, 2, observation=PAPER, episode=episode
    )
    dataset = save_minari(ID, written, toy_folder)
    assert_same(dataset_to_transitions(dataset), written)
    assert_same(dataset_to_transitions(ID), written)


def test_plain_minari_reads_it(data: Transitions, toy_folder: Path) -> None:
    save_minari(ID, data, toy_folder)
    dataset = minari.load_dataset(ID)
    assert (dataset.total_episodes, dataset.total_steps) == (30, len(data))
    assert dataset.action_space == gymnasium.spaces.Discrete(2)
    for number, episode in enumerate(dataset.iterate_episodes()):
        rows = slice(data.start[number], data.start[number + 1])
        steps = rows.stop - rows.start
        assert len(episode) == steps
        np.testing.assert_array_equal(episode.observations[:-1], data.observation[rows])
        assert episode.observations.shape == (steps + 1, len(data.names))
        assert (episode.observations[-1] == 0).all()
        assert all(dataset.observation_space.contains(row) for row in episode.observations)
        np.testing.assert_array_equal(episode.infos["propensity"][:-1], data.propensity[rows])
        assert np.isnan(episode.infos["propensity"][-1])
        for name in ("text", "component"):
            expected = getattr(data, name)[rows]
            np.testing.assert_array_equal(episode.infos[name], np.append(expected, expected[-1]))
        assert episode.terminations.tolist() == [False] * (steps - 1) + [True]
        assert not episode.truncations.any()
    assert minari.list_local_datasets() == {ID: dataset.storage.read_raw_metadata(dataset.spec.data_path)}


def test_provenance_rebuilds_the_data(data: Transitions, toy_folder: Path) -> None:
    save_minari(ID, data, toy_folder)
    metadata = minari.load_dataset(ID).storage.metadata
    settings = metadata["sde_gym"]["settings"]
    assert settings["model"] == {"name": "toy", "weights_hash": "0" * 64}
    env = minari.load_dataset(ID).recover_environment()
    again = collect(
        env.unwrapped.traces, rebuild_behaviour(settings["behaviour"]), settings["episodes"], settings["seed"]
    )
    assert_same(again, data)


@pytest.mark.parametrize("episode", ["generation", "round"])
def test_the_recovered_environment_plays_every_episode(
    toy_traces: TraceSet, toy_folder: Path, episode: str
) -> None:
    written = collect(
        toy_traces, UniformRandom(0.6), 40, 1, episode=episode, credit="round", depths=(2, 6), k=3, window=2,
        max_draft=4, final_token_reward=0.5,
    )  # fmt: skip
    dataset = save_minari(ID, written, toy_folder)
    env = dataset.recover_environment()
    resumed = 0
    for metadata, recorded in zip(
        dataset.storage.get_episode_metadata(range(40)), dataset.iterate_episodes(), strict=True
    ):
        resumed += "options" not in metadata  # a later round of its text, at which the environment is
        observation, info = env.reset(options=metadata.get("options"))
        assert info["text"] == recorded.infos["text"][0]
        np.testing.assert_array_equal(observation, recorded.observations[0])
        for step, action in enumerate(recorded.actions):
            observation, reward, terminated, truncated, _ = env.step(action)
            np.testing.assert_array_equal(observation, recorded.observations[step + 1])
            assert np.float32(reward) == recorded.rewards[step]
            assert (terminated, truncated) == (recorded.terminations[step], False)
    assert (resumed > 10) == (episode == "round")


def test_every_episode_of_the_d3rlpy_buffer_is_a_replay_of_the_environment(
    data: Transitions, toy_folder: Path
) -> None:
    pytest.importorskip("d3rlpy")
    save_minari(ID, data, toy_folder)
    episodes = to_replay_buffer(dataset_to_transitions(ID), n_steps=1, gamma=1.0).episodes
    assert len(episodes) == 30
    engine = ReplayEngine(load_traces(toy_folder), observation=data.names)
    texts = data.text[data.start[:-1]]
    for number in (0, 1, 2, 17, 29):
        observation = engine.reset_lanes([0], texts[number : number + 1])
        episode = episodes[number]
        terminated = np.array([False])
        for shown, action, reward in zip(episode.observations, episode.actions, episode.rewards, strict=True):
            assert not terminated[0]
            np.testing.assert_array_equal(shown, observation[0])
            observation, paid, terminated, _ = engine.step(action)
            assert reward[0] == np.float32(paid[0])
        assert terminated[0]


def test_exact_values_are_stored_at_once_or_later(data: Transitions, toy_folder: Path) -> None:
    q_true = np.asarray(np.random.default_rng(0).normal(size=(len(data), 2)), dtype=np.float64)
    save_minari("toy/at-once-v0", data, toy_folder, q_true=q_true)
    save_minari("toy/later-v0", data, toy_folder)
    add_infos("toy/later-v0", {"q_true": q_true})
    for name in ("at-once", "later"):
        dataset = minari.load_dataset(f"toy/{name}-v0")
        np.testing.assert_array_equal(read_info(f"toy/{name}-v0", "q_true"), q_true)
        for episode, (first, end) in zip(dataset, pairwise(data.start), strict=True):
            assert episode.infos["q_true"].shape == (end - first + 1, 2)
            np.testing.assert_array_equal(episode.infos["q_true"][:-1], q_true[first:end])
            assert np.isnan(episode.infos["q_true"][-1]).all()
        assert_same(dataset_to_transitions(dataset), data)
    with pytest.raises(InputError, match="has an info q_true already"):
        add_infos("toy/later-v0", {"q_true": q_true})
    np.testing.assert_array_equal(read_info("toy/later-v0", "q_true"), q_true)
    save_minari(ID, data, toy_folder)
    with pytest.raises(InputError, match="infos hold no q_true"):
        read_info(ID, "q_true")
    with pytest.raises(InputError, match="holds no episode"):
        read_info(minari.load_dataset("toy/later-v0").filter_episodes(lambda episode: False), "q_true")
    wrongs: list[Any] = [q_true[:-1], q_true[:, :1], q_true.astype(np.float32), q_true.tolist()]
    for wrong in wrongs:
        with pytest.raises(InputError, match=r"q_true: .*expected float64"):
            add_infos(ID, {"q_true": wrong})
    with pytest.raises(InputError, match="q_true: holds NaN or infinity, first in row 3"):
        add_infos(ID, {"q_true": np.where(np.arange(len(data))[:, None] == 3, np.nan, q_true)})


def test_a_part_of_the_episodes_is_read_with_their_numbers(data: Transitions, toy_folder: Path) -> None:
    dataset = save_minari(ID, data, toy_folder)
    part = dataset_to_transitions(dataset.filter_episodes(lambda episode: episode.id in (3, 4, 29)))
    rows = np.isin(data.episode, (3, 4, 29))
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(part, name), getattr(data, name)[rows])
    assert_same(dataset_to_transitions(save_minari("toy/part-v0", part, toy_folder)), part)
    with pytest.raises(InputError, match="holds no episode"):
        dataset_to_transitions(dataset.filter_episodes(lambda episode: False))


def test_the_same_seed_gives_the_same_bytes(data: Transitions, toy_folder: Path, datasets: Path) -> None:
    found = []
    for _ in range(2):
        save_minari(ID, data, toy_folder, overwrite=True)
        files = sorted((datasets / ID / "data").iterdir())
        found.append({path.name: path.read_bytes() for path in files})
    assert found[0] == found[1]
    assert set(found[0]) == {"main_data.hdf5", "metadata.json"}


def test_an_id_is_taken_until_it_is_overwritten(data: Transitions, toy_folder: Path, datasets: Path) -> None:
    save_minari(ID, data, toy_folder)
    with pytest.raises(InputError, match=r"already a data set in .*; choose another id"):
        save_minari(ID, data, toy_folder)
    other = dataclasses.replace(data, reward=data.reward + 1)
    save_minari(ID, other, toy_folder, overwrite=True)
    assert_same(dataset_to_transitions(ID), other)
    assert [path.name for path in datasets.iterdir()] == ["sde_gym"]
    save_minari("toy/space-v0/inner-v0", data, toy_folder)
    with pytest.raises(InputError, match="it may hold others; choose another id"):
        save_minari("toy/space-v0", data, toy_folder, overwrite=True)
    dataset_to_transitions("toy/space-v0/inner-v0")


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_what_was_there_stays_where_overwriting_fails(
    failure: type[BaseException],
    data: Transitions,
    toy_folder: Path,
    datasets: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_minari(ID, data, toy_folder)
    replace, calls = os.replace, []

    def failing(source: Any, target: Any) -> None:
        if Path(target) == datasets / ID:  # the new one comes, or the old one back
            calls.append(source)
            if len(calls) == 1:
                raise failure
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing)
        with pytest.raises(failure):
            save_minari(ID, dataclasses.replace(data, reward=data.reward + 1), toy_folder, overwrite=True)
    assert_same(dataset_to_transitions(ID), data)
    assert [path.name for path in datasets.iterdir()] == ["sde_gym"]


def test_transitions_of_one_phase_are_refused(toy_traces: TraceSet, toy_folder: Path, datasets: Path) -> None:
    whole = collect(toy_traces, OnePhase(UniformRandom(), StaticController(3, 2), "select"), 4, seed=0)
    with pytest.raises(InputError, match=r"restricted to the phase 'select', .*made from"):
        save_minari(ID, restricted(whole, "select"), toy_folder)
    assert not (datasets / ID).exists()


def test_a_failure_leaves_nothing_behind(
    data: Transitions, toy_folder: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    from minari.dataset._storages.hdf5_storage import HDF5Storage

    with monkeypatch.context() as patched:
        patched.setattr(HDF5Storage, "update_episodes", full)
        with pytest.raises(OSError, match="no space left"):
            save_minari(ID, data, toy_folder)
    assert list(datasets.iterdir()) == []
    assert os.environ["MINARI_DATASETS_PATH"] == str(datasets)
    save_minari(ID, data, toy_folder)


def test_a_killed_process_leaves_no_data_set(toy_folder: Path, datasets: Path) -> None:
    script = f"""
import os
import minari.dataset._storages.hdf5_storage as storage
from sde_gym.offline import collect
from sde_gym.offline.behaviours import UniformRandom
from sde_gym.offline.minari_data import save_minari
from sde_gym.traces import load_traces

write, episodes = storage._add_episode_to_group, []

def killed(buffer, group, spaces=None):
    episodes.append(group)
    if len(episodes) == 9:
        os._exit(9)
    write(buffer, group, spaces=spaces)

storage._add_episode_to_group = killed
save_minari({ID!r}, collect(load_traces({str(toy_folder)!r}), UniformRandom(), 20, 0), {str(toy_folder)!r})
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert not (datasets / ID).exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert minari.list_local_datasets() == {}
    data = collect(load_traces(toy_folder), UniformRandom(), 20, 0)
    assert_same(dataset_to_transitions(save_minari(ID, data, toy_folder)), data)


@pytest.mark.parametrize("name", ["", "uniform", "uniform-v", "a//b-v0", "../up-v0", "a b-v0", "a/b-vx"])
def test_malformed_ids_are_refused(data: Transitions, toy_folder: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not a Minari id; give one like"):
        save_minari(name, data, toy_folder)


def test_transitions_of_unknown_origin_are_refused(
    data: Transitions, toy_folder: Path, datasets: Path, make_transitions: Callable[..., Transitions]
) -> None:
    with pytest.raises(InputError, match="their settings lack depths, reward"):
        save_minari(ID, make_transitions(), toy_folder)
    with pytest.raises(InputError, match="name the trace set that they come from"):
        save_minari(ID, dataclasses.replace(data, settings={**data.settings, "traces": "0" * 16}), toy_folder)
    with pytest.raises(InputError, match="neither a folder nor a shipped trace set"):
        save_minari(ID, data, "nowhere")
    assert not (datasets / ID).exists()


def foreign(env: gymnasium.Env[Any, Any] | None, **changes: Any) -> str:
    """A data set of one episode of three steps that this package did not write."""
    from minari.data_collector import EpisodeBuffer

    columns: dict[str, Any] = {
        "observations": np.full((4, 3), 0.5, dtype=np.float32),
        "actions": np.array([0, 1, 1]),
        "rewards": np.array([0.0, 1.0, -1.0]),
        "terminations": np.array([False, False, True]),
        "truncations": np.zeros(3, dtype=bool),
        "infos": {"propensity": np.full(4, 0.5), "text": np.full(4, 2)},
    }
    columns |= changes
    spaces = {
        "observation_space": gymnasium.spaces.Box(0.0, 50.0, (3,), np.float32),
        "action_space": gymnasium.spaces.Discrete(2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minari.create_dataset_from_buffers("foreign-v0", [EpisodeBuffer(**columns)], env=env, **spaces)
    return "foreign-v0"


@pytest.fixture
def env(toy_folder: Path) -> Iterator[gymnasium.Env[Any, Any]]:
    made = gymnasium.make("sde_gym/LEDE-v0", traces=str(toy_folder))
    yield made
    made.close()


def test_other_data_with_all_that_is_needed_are_read(env: gymnasium.Env[Any, Any], toy_folder: Path) -> None:
    read = dataset_to_transitions(foreign(env))
    assert read.names == PAPER
    assert read.reward.tolist() == [0.0, 1.0, -1.0]
    assert read.text.tolist() == [2, 2, 2]
    assert read.settings["traces"] == str(toy_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"infos": {"text": np.full(4, 2)}}, "episode 0: its infos hold no propensity"),
        ({"infos": None}, "hold no propensity and no text"),
        ({"infos": {"propensity": np.full(2, 0.5), "text": np.full(4, 2)}}, "2 propensity for 3 rewards"),
        ({"infos": {"propensity": np.zeros(4), "text": np.full(4, 2)}}, "propensity 0.0 in row 0"),
        ({"infos": {"propensity": np.full(4, np.nan), "text": np.full(4, 2)}}, "propensity nan in row 0"),
        ({"infos": {"propensity": np.full(4, 0.5), "text": np.full(4, 0.5)}}, "text is float64"),
        ({"observations": np.zeros((3, 3), dtype=np.float32)}, r"shape \(3, 3\); expected \(4, 3\)"),
        ({"observations": np.zeros((4, 2), dtype=np.float32)}, r"shape \(4, 2\); expected \(4, 3\)"),
        ({"observations": np.full((4, 3), np.nan, dtype=np.float32)}, "observation holds NaN"),
        ({"actions": np.array([0, 2, 1])}, "action 2 in row 1"),
        ({"actions": np.array([0.0, 1.0, 1.0])}, "action is float64"),
        ({"actions": np.array([0, 1])}, "2 actions for 3 rewards"),
        ({"rewards": np.array([0.0, np.inf, 0.0])}, "reward holds NaN or infinity, first in row 1"),
        ({"terminations": np.zeros(3, dtype=bool)}, "not whole episodes"),
        ({"truncations": np.array([False, False, True])}, "was truncated"),
    ],
)
def test_other_data_that_lack_something_are_refused(
    env: gymnasium.Env[Any, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        dataset_to_transitions(foreign(env, **changes))


def test_data_of_other_environments_and_versions_are_refused(
    data: Transitions, toy_folder: Path, datasets: Path
) -> None:
    with pytest.raises(InputError, match="foreign-v0: made in an unknown environment"):
        dataset_to_transitions(foreign(None))
    with pytest.raises(InputError, match="nowhere-v0: no such Minari data set in"):
        dataset_to_transitions("nowhere-v0")
    save_minari(ID, data, toy_folder)
    metadata = datasets / ID / "data" / "metadata.json"
    text = metadata.read_text()
    metadata.write_text(text.replace('"sde_gym": {"format_version": 1', '"sde_gym": {"format_version": 9'))
    with pytest.raises(InputError, match="format version 9; this package reads version 1"):
        dataset_to_transitions(ID)
    metadata.write_text(text)
    file = datasets / ID / "data" / "main_data.hdf5"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InputError, match="a damaged data set"):
        dataset_to_transitions(ID)


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"need minari, h5py and pillow .*pip install 'sde_gym\[offline\]'"):
        dataset_to_transitions(ID)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_minari_or_a_file(toy_traces: TraceSet, toy_folder: Path, tmp_path: Path) -> None:
    options = ("--traces", toy_folder, "--behaviour", "threshold:0.5+0.2", "--episodes", 9, "--seed", 3)
    result = run("collect", *options, "--out", ID)
    assert result.exit_code == 0, result.output
    assert "in 9 episodes" in result.output
    file = tmp_path / "data.npz"
    assert run("collect", *options, "--out", file).exit_code == 0
    assert_same(dataset_to_transitions(ID), load_transitions(file))
    for out in (ID, file):
        again = run("collect", *options, "--out", out)
        assert again.exit_code == 2
        assert "already" in again.stderr
        assert run("collect", *options, "--out", out, "--overwrite").exit_code == 0
    rounds = ("--episode", "round", "--observation", "top1, depth", "--depths", "2,6", "--max-draft", 3)
    assert run("collect", *options, *rounds, "--out", "toy/rounds-v1").exit_code == 0
    read = dataset_to_transitions("toy/rounds-v1")
    assert (read.names, read.settings["depths"], read.settings["max_draft"]) == (("top1", "depth"), [2, 6], 3)
    assert (read.num_episodes, read.settings["episode"]) == (9, "round")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "no-version"), "is not a Minari id"),
        (("--behaviour", "greedy"), "'greedy' is none of the forms uniform, random:0.3"),
        (("--behaviour", "static:5,4+0.1"), "exit_depth: 5"),
        (("--observation", "mood"), "'mood' is not a feature"),
        (("--episode", "token"), "'token' is not one of generation, round"),
    ],
)
def test_the_command_refuses_nonsense(toy_folder: Path, options: tuple[str, ...], message: str) -> None:
    result = run("collect", "--traces", toy_folder, "--episodes", 2, "--out", ID, *options)
    assert result.exit_code == 2
    assert message in result.stderr
