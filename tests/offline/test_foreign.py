"""Foreign files are loaded on the user's word only, and decide as before."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from sde_gym.envs.sb3 import sb3_vec_env
from sde_gym.errors import InputError
from sde_gym.offline.backend import import_d3rlpy
from sde_gym.offline.foreign import load_foreign
from sde_gym.policies.importing import random_states
from sde_gym.policies.observation import EXTENDED
from sde_gym.traces import TraceSet

SETTING: dict[str, Any] = {"observation": "extended", "depths": (2, 3, 6), "num_layers": 8}
STATES = random_states(EXTENDED, 100, seed=1)


def test_a_d3_file_is_imported(tmp_path: Path) -> None:
    d3rlpy = import_d3rlpy()
    algorithm = d3rlpy.algos.DQNConfig().create(device=False)
    algorithm.create_impl((len(EXTENDED),), 2)
    path = tmp_path / "theirs.d3"
    algorithm.save(str(path))
    with pytest.raises(InputError, match=r"theirs\.d3: loading a \.d3 file runs whatever code it holds"):
        load_foreign(path, **SETTING)
    policy = load_foreign(path, trust=True, **SETTING)
    assert policy.name == "theirs"
    np.testing.assert_array_equal(policy.network(STATES).argmax(axis=1), algorithm.predict(STATES))


@pytest.mark.parametrize("kind", ["DQN", "PPO", "A2C"])
def test_a_zip_is_imported(kind: str, toy_traces: TraceSet, tmp_path: Path) -> None:
    import stable_baselines3

    env = sb3_vec_env(1, toy_traces, observation="extended")
    options = {"activation_fn": nn.ReLU, "net_arch": [8]}
    model = getattr(stable_baselines3, kind)("MlpPolicy", env, policy_kwargs=options, device="cpu")
    path = tmp_path / "model.zip"
    model.save(path)
    with pytest.raises(InputError, match="runs whatever code it holds"):
        load_foreign(path, **SETTING)
    policy = load_foreign(path, trust=True, **SETTING)
    theirs, _ = model.predict(STATES, deterministic=True)
    np.testing.assert_array_equal(policy.network(STATES).argmax(axis=1), theirs)


def test_nothing_runs_without_trust(tmp_path: Path) -> None:
    """A pickle that would leave a file behind leaves none; `trust` has to be True, not merely truthy."""
    path = tmp_path / "evil.d3"
    mark = tmp_path / "mark"
    path.write_bytes(b"cbuiltins\nopen\n(V" + str(mark).encode() + b"\nVw\ntR.")
    for trust in (False, 1, "yes"):
        with pytest.raises(InputError, match="pass trust=True only if you know who made it"):
            load_foreign(path, trust=trust, **SETTING)  # type: ignore[arg-type]
    assert not mark.exists()


def test_other_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"policy\.safetensors: neither a \.d3 file"):
        load_foreign(tmp_path / "policy.safetensors", trust=True, **SETTING)
    with pytest.raises(InputError, match="no such file"):
        load_foreign(tmp_path / "absent.d3", trust=True, **SETTING)
    for name in ("broken.d3", "broken.zip"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(InputError, match=r"broken\.\w+: not a"):
            load_foreign(tmp_path / name, trust=True, **SETTING)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("data", "{}")
    with pytest.raises(InputError, match="holds neither of DQN, PPO, A2C"):
        load_foreign(tmp_path / "other.zip", trust=True, **SETTING)
