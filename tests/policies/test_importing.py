"""Policies of other libraries: the copy decides as the original, and what cannot be copied is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sde_gym.envs.run import run_controller
from sde_gym.envs.sb3 import sb3_vec_env
from sde_gym.errors import InputError
from sde_gym.offline.backend import import_d3rlpy
from sde_gym.policies.extraction import (
    NotPerceptronError,
    average_outputs,
    ensemble_mean,
    masked,
    perceptron,
    side_by_side,
)
from sde_gym.policies.importing import export_torchscript, from_d3rlpy, from_sb3, random_states
from sde_gym.policies.observation import EXTENDED
from sde_gym.policies.qnetwork import QController, QNetwork
from sde_gym.traces import TraceSet

SETTING: dict[str, Any] = {"observation": "extended", "depths": (2, 3, 6), "num_layers": 8}
STATES = random_states(EXTENDED, 300, seed=3)
NARROW = {"net_arch": [8, 8], "activation_fn": nn.ReLU}


def values(layers: Any, rows: np.ndarray) -> np.ndarray:
    """Outputs of layers with ReLU between them, however many they are."""
    for number, (weight, bias) in enumerate(layers):
        rows = (np.maximum(rows, 0) if number else rows) @ weight + bias
    return rows


def random_layers(seed: int, *sizes: int) -> Any:
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=pair).astype(np.float32), rng.normal(size=pair[1]).astype(np.float32))
        for pair in pairwise(sizes)
    ]


def test_joins_are_exact() -> None:
    rows = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    one, two = random_layers(1, 3, 5, 4, 2), random_layers(2, 3, 6, 7, 2)
    first, second = values(one, rows), values(two, rows)
    np.testing.assert_allclose(
        values(side_by_side([one, two]), rows), np.hstack([first, second]), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        values(ensemble_mean([one, two]), rows), (first + second) / 2, rtol=1e-5, atol=1e-5
    )
    quantiles = random_layers(3, 3, 5, 8)
    expected = values(quantiles, rows).reshape(-1, 2, 4).mean(axis=2)
    np.testing.assert_allclose(values(average_outputs(quantiles, 4), rows), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotPerceptronError, match="different depth"):
        side_by_side([one, quantiles])


@pytest.mark.parametrize("flexibility", [0.05, 0.3, 0.9])
def test_the_mask_forbids_what_was_hardly_ever_taken(flexibility: float) -> None:
    rows = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    q, imitator = random_layers(1, 3, 5, 4, 2), random_layers(2, 3, 6, 7, 2)
    logits = values(imitator, rows).astype(np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    allowed = probability > flexibility * probability.max(axis=1, keepdims=True)
    expected = np.where(allowed, values(q, rows), -np.inf).argmax(axis=1)
    found = values(masked(q, imitator, flexibility), rows).argmax(axis=1)
    np.testing.assert_array_equal(found, expected)
    assert 0 < (allowed.sum(axis=1) == 1).mean() < 1, "some are masked, some are not"


def test_a_network_is_read_as_it_runs() -> None:
    relu = nn.ReLU()  # one object in two places
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), relu, nn.Linear(4, 5), relu, nn.Linear(5, 2))
    rows = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        values(perceptron(module), rows.numpy()), module(rows).detach().numpy(), rtol=1e-5, atol=1e-6
    )
    for wrong, message in [
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "a layer Tanh"),
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "without a ReLU"),
        (nn.Sequential(nn.Linear(3, 2), nn.ReLU()), "does not end with a linear layer"),
        (nn.Sequential(nn.Flatten()), "does not end with a linear layer"),
    ]:
        with pytest.raises(NotPerceptronError, match=message):
            perceptron(wrong)


def d3rlpy_algorithm(name: str, **options: Any) -> Any:
    d3rlpy = import_d3rlpy()
    from d3rlpy.models.encoders import VectorEncoderFactory

    torch.manual_seed(1)
    encoder = VectorEncoderFactory(hidden_units=[16, 8])
    where = ("actor_encoder_factory", "critic_encoder_factory") if "SAC" in name else ("encoder_factory",)
    algorithm = getattr(d3rlpy.algos, f"{name}Config")(**dict.fromkeys(where, encoder), **options).create(
        device=False
    )
    algorithm.create_impl((len(EXTENDED),), 2)
    return algorithm


def spread(algorithm: Any, scaled: bool) -> None:
    """Make untrained networks prefer different actions in different states."""
    mean, std = torch.from_numpy(STATES.mean(axis=0)), torch.from_numpy(STATES.std(axis=0))
    for module in algorithm.impl.modules.__dict__.values():
        if isinstance(module, nn.Module):
            for part in module.modules():
                if isinstance(part, nn.Linear):
                    nn.init.normal_(part.weight, std=0.5)
                    if part.in_features == len(EXTENDED) and not scaled:
                        with torch.no_grad():
                            part.weight /= std
                            part.bias.copy_(-part.weight @ mean)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DQN", {}),
        ("DoubleDQN", {"n_critics": 3}),
        ("NFQ", {}),
        ("DiscreteCQL", {}),
        ("DiscreteBC", {}),
        ("DiscreteSAC", {}),
        ("DiscreteBCQ", {"share_encoder": True}),
        ("DiscreteBCQ", {"share_encoder": False, "action_flexibility": 0.7}),
    ],
)
@pytest.mark.parametrize("scaler", [None, "standard", "min_max"])
def test_d3rlpys_decisions_are_kept(name: str, options: dict, scaler: str | None) -> None:
    import_d3rlpy()
    from d3rlpy.preprocessing import MinMaxObservationScaler, StandardObservationScaler

    made = {
        None: None,
        "standard": StandardObservationScaler(mean=STATES.mean(axis=0), std=STATES.std(axis=0)),
        "min_max": MinMaxObservationScaler(minimum=STATES.min(axis=0), maximum=STATES.max(axis=0)),
    }[scaler]
    algorithm = d3rlpy_algorithm(name, observation_scaler=made, **options)
    spread(algorithm, scaler is not None)
    policy = from_d3rlpy(algorithm, **SETTING)
    ours = policy.network(STATES)
    theirs = algorithm.predict(STATES)
    assert (ours.argmax(axis=1) == theirs).mean() > 0.99  # the rest are ties within rounding
    assert 0 < theirs.mean() < 1, "both actions occur"


def test_quantiles_become_their_mean() -> None:
    import_d3rlpy()
    from d3rlpy.models.q_functions import IQNQFunctionFactory, QRQFunctionFactory

    algorithm = d3rlpy_algorithm("DQN", q_func_factory=QRQFunctionFactory(n_quantiles=7))
    policy = from_d3rlpy(algorithm, **SETTING)
    for action in (0, 1):
        theirs = algorithm.predict_value(STATES, np.full((len(STATES), 1), action)).reshape(-1)
        np.testing.assert_allclose(policy.network(STATES)[:, action], theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="DiscreteIQNQFunction is not one network"):
        from_d3rlpy(d3rlpy_algorithm("DQN", q_func_factory=IQNQFunctionFactory()), **SETTING)


def test_a_standardisation_of_ones_own_goes_in() -> None:
    algorithm = d3rlpy_algorithm("DQN")
    mean, std = STATES.mean(axis=0), STATES.std(axis=0)
    policy = from_d3rlpy(algorithm, mean=mean, std=std, **SETTING)
    np.testing.assert_array_equal(
        policy.network(STATES).argmax(axis=1), algorithm.predict(((STATES - mean) / std).astype(np.float32))
    )


def test_d3rlpys_misfits_are_named() -> None:
    d3rlpy = import_d3rlpy()
    with pytest.raises(InputError, match="DQN has no networks yet"):
        from_d3rlpy(d3rlpy.algos.DQNConfig().create(device=False), **SETTING)
    algorithm = d3rlpy_algorithm("DQN")
    with pytest.raises(InputError, match=r"takes observations \(11,\).*there are 3 features"):
        from_d3rlpy(algorithm, **{**SETTING, "observation": "paper"})
    with pytest.raises(InputError, match=r"depths \(6, 2\) must be ascending"):
        from_d3rlpy(algorithm, **{**SETTING, "depths": (6, 2)})
    with pytest.raises(InputError, match=r"mean has shape \(2,\)"):
        from_d3rlpy(algorithm, mean=np.zeros(2), **SETTING)
    transformer = d3rlpy.algos.DiscreteDecisionTransformerConfig(num_heads=1).create(device=False)
    transformer.create_impl((11,), 2)
    with pytest.raises(InputError, match="DiscreteDecisionTransformer decides by history"):
        from_d3rlpy(transformer, **SETTING)


@pytest.mark.parametrize("kind", ["DQN", "PPO", "A2C"])
@pytest.mark.parametrize("normalised", [False, True])
def test_sb3s_decisions_are_kept(kind: str, normalised: bool, toy_traces: TraceSet) -> None:
    import stable_baselines3
    from stable_baselines3.common.vec_env import VecNormalize

    env = sb3_vec_env(4, toy_traces, observation="extended")
    if normalised:
        env = VecNormalize(env, norm_reward=False, clip_obs=1e6)
    options: dict[str, Any] = {"DQN": {"learning_starts": 20}, "PPO": {"n_steps": 16, "batch_size": 64}}.get(
        kind, {}
    )
    model = getattr(stable_baselines3, kind)(
        "MlpPolicy", env, policy_kwargs=NARROW, seed=0, device="cpu", **options
    )
    model.learn(200)
    policy = from_sb3(model, **SETTING)
    rows = env.normalize_obs(STATES) if normalised else STATES
    theirs, _ = model.predict(rows, deterministic=True)
    assert (policy.network(STATES).argmax(axis=1) == theirs).mean() > 0.99
    assert run_controller(toy_traces, policy).decisions.sum() > 0


def test_what_is_not_given_comes_from_vecnormalize(toy_traces: TraceSet) -> None:
    from stable_baselines3 import DQN
    from stable_baselines3.common.vec_env import VecNormalize

    env: Any = VecNormalize(sb3_vec_env(2, toy_traces, observation="extended"), clip_obs=1e6)
    model = DQN("MlpPolicy", env, policy_kwargs=NARROW, device="cpu")
    env.obs_rms.mean[:], env.obs_rms.var[:] = STATES.mean(axis=0), STATES.var(axis=0)
    own = np.linspace(1, 2, len(EXTENDED), dtype=np.float32)
    mean, std = env.obs_rms.mean, np.sqrt(env.obs_rms.var + env.epsilon)
    shifted = from_sb3(model, mean=own, **SETTING).network
    np.testing.assert_allclose((shifted.mean, shifted.std), (own, std), rtol=1e-6)
    scaled = from_sb3(model, std=own, **SETTING).network
    np.testing.assert_allclose((scaled.mean, scaled.std), (mean, own), rtol=1e-6)
    both = from_sb3(model, mean=own, std=own, **SETTING).network
    np.testing.assert_array_equal((both.mean, both.std), (own, own))


def test_sb3s_misfits_are_named(toy_traces: TraceSet) -> None:
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.vec_env import VecNormalize

    env = sb3_vec_env(2, toy_traces, observation="extended")
    with pytest.raises(InputError, match=r"a layer Tanh.*train with ReLU"):
        from_sb3(PPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu"), **SETTING)
    model = DQN("MlpPolicy", env, policy_kwargs=NARROW, device="cpu")
    with pytest.raises(InputError, match=r"takes observations \(11,\)"):
        from_sb3(model, **{**SETTING, "observation": "paper"})
    shuffled = tuple(reversed(EXTENDED))
    with pytest.raises(InputError, match="name its own features"):
        from_sb3(model, **{**SETTING, "observation": shuffled})
    clipped = VecNormalize(env, clip_obs=10.0)
    model = DQN("MlpPolicy", clipped, policy_kwargs=NARROW, device="cpu")
    clipped.obs_rms.var[:] = 1e-4
    with pytest.raises(InputError, match=r"VecNormalize clips at 10\.0"):
        from_sb3(model, **SETTING)


def test_torchscript_gives_the_same_scores(tmp_path: Path) -> None:
    mean, std = STATES.mean(axis=0), STATES.std(axis=0)
    network = QNetwork(random_layers(0, len(EXTENDED), 6, 5, 2), mean, std)
    path = export_torchscript(tmp_path / "policy.pt", QController(network, "extended", (2, 3), 8, 12))
    names = {"observation.json": ""}
    module = torch.jit.load(str(path), _extra_files=names)
    found = module(torch.from_numpy(STATES)).detach().numpy()
    np.testing.assert_allclose(found, network(STATES), rtol=1e-4, atol=1e-4)
    assert tuple(json.loads(names["observation.json"])) == EXTENDED
