"""Policies that other libraries trained, as a `QController`: from d3rlpy and stable-baselines3, in memory.

The network is copied into plain numpy and compared with the library's own predictions before it is
handed out. Files of those libraries are another matter, see `sde_gym.offline.foreign`: loading one
runs whatever code it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.files import atomic_path
from sde_gym.policies.controller import DEFAULT_K, DEFAULT_WINDOW
from sde_gym.policies.extraction import (
    Layers,
    NotPerceptronError,
    average_outputs,
    check_actions,
    check_scores,
    ensemble_mean,
    masked,
    perceptron,
    score_tolerance,
)
from sde_gym.policies.observation import bounds, resolve_observation
from sde_gym.policies.qnetwork import NUM_ACTIONS, QController, QNetwork
from sde_gym.settings import DEFAULT_MAX_DRAFT

FloatArray = NDArray[np.float32]

#: Random observations on which a copy is compared with the original.
CHECKED_STATES = 512


def from_d3rlpy(
    algorithm: Any,
    *,
    observation: str | Sequence[str],
    depths: Sequence[int],
    num_layers: int,
    max_draft: int = DEFAULT_MAX_DRAFT,
    k: int = DEFAULT_K,
    window: int = DEFAULT_WINDOW,
    mean: FloatArray | None = None,
    std: FloatArray | None = None,
    name: str = "d3rlpy",
    meta: Mapping[str, Any] | None = None,
) -> QController:
    """The greedy policy of a d3rlpy algorithm for discrete actions.

    Of Q-learners (DQN, DoubleDQN, NFQ, DiscreteCQL; one critic or several; mean or QR Q-functions) the
    network gives the action values; of DiscreteBC and DiscreteSAC the policy's logits; of DiscreteBCQ
    scores that put the imitator's mask on the values. The algorithm's observation scaler, if it has
    one, goes into the network.

    Args:
        algorithm: with its networks built (`fit`, `build_with_dataset` or `create_impl`).
        observation: names of its inputs, in order.
        depths: candidate depths that it was trained for.
        num_layers: L of the model.
        max_draft: cap on proposals a round.
        k: tokens behind the feature `confidence`.
        window: tokens behind the feature `trace`.
        mean: float32 (f,), subtracted from observations before the algorithm saw them; 0 if not given.
        std: float32 (f,), that divided them afterwards; 1 if not given.
        name: how reports call this policy.
        meta: kept with it.

    Raises:
        InputError: an algorithm without networks, for other observations or actions, that is not built of
            linear layers and ReLU, or that needs a history (Decision Transformer).
        RuntimeError: the copy differs from the original.
    """
    features = resolve_observation(observation)
    mean, std = _standardisation(mean, std, len(features))
    network = d3rlpy_network(algorithm, mean, std, random_states(features))
    return QController(
        network, features, depths, num_layers, max_draft, k=k, window=window, name=name, meta=meta
    )


def d3rlpy_network(algorithm: Any, mean: FloatArray, std: FloatArray, states: FloatArray) -> QNetwork:
    """Copy the greedy policy's network out of a d3rlpy algorithm and prove that the copy agrees with it.

    Args:
        algorithm: see `from_d3rlpy`.
        mean: float32 (f,), the standardisation that its inputs went through.
        std: float32 (f,).
        states: float32 (n, f), raw observations on which the two are compared.

    Raises:
        InputError: see `from_d3rlpy`; a `NotPerceptronError` where the network has another form.
        RuntimeError: values or logits differ by more than 1e-5 (relative, above 1), or greedy actions
            where they do not hang on rounding: a fault of this copy, not of the input.
    """
    import torch

    impl = algorithm.impl
    if impl is None:
        raise InputError(f"{type(algorithm).__name__} has no networks yet; train it, or call create_impl")
    if tuple(impl.observation_shape) != mean.shape or impl.action_size != NUM_ACTIONS:
        raise InputError(
            f"{type(algorithm).__name__} takes observations {tuple(impl.observation_shape)} and has "
            f"{impl.action_size} actions; there are {len(mean)} features and "
            f"{NUM_ACTIONS} actions here"
        )
    modules = impl.modules
    kind = _kind(algorithm, modules)
    shift, scale = _scaler(algorithm.config.observation_scaler, len(mean))
    inputs = ((states - mean) / std).astype(np.float32)
    if kind == "values":
        layers = ensemble_mean([_q_function(part) for part in modules.q_funcs])
    elif kind == "bcq":
        values = ensemble_mean([_q_function(part) for part in modules.q_funcs])
        layers = masked(values, _categorical(modules.imitator), algorithm.config.action_flexibility)
    else:
        layers = _categorical(getattr(modules, kind))
    network = QNetwork(layers, mean + std * shift, std * scale)
    clear = None
    if kind == "values":
        theirs = [
            np.asarray(algorithm.predict_value(inputs, np.full((len(states), 1), action))).reshape(-1)
            for action in range(NUM_ACTIONS)
        ]
        check_scores(network, states, np.stack(theirs, axis=1), "d3rlpy")
    else:
        policy = modules.imitator if kind == "bcq" else getattr(modules, kind)
        with torch.no_grad():
            scaled = torch.from_numpy(((inputs - shift) / scale).astype(np.float32))
            logits = policy(scaled.to(next(policy.parameters()).device)).logits.cpu().numpy()
        preference = logits[:, 1] - logits[:, 0]
        if kind == "bcq":
            limit = -np.log(algorithm.config.action_flexibility)
            clear = np.abs(np.abs(preference) - limit) > 1e-4
            scores = network(states)
            clear &= np.abs(scores[:, 1] - scores[:, 0]) > 2e-5
        else:
            own = network(states)
            difference = np.abs(own[:, 1] - own[:, 0] - preference).max()
            if not difference <= 2 * score_tolerance(own):
                raise RuntimeError(f"the exported network differs from d3rlpy's: logits by {difference:.2e}")
    check_actions(network, states, np.asarray(algorithm.predict(inputs)), "d3rlpy", clear)
    return network


def decides_by_values(algorithm: Any) -> bool:
    """Whether the scores of `d3rlpy_network` are this algorithm's action values."""
    return _kind(algorithm, algorithm.impl.modules) == "values"


def _kind(algorithm: Any, modules: Any) -> str:
    """What decides in this algorithm: "values", "bcq", or the name of a module with logits."""
    if hasattr(modules, "transformer"):
        raise NotPerceptronError(
            f"{type(algorithm).__name__} decides by history and return-to-go; it runs in replay comparisons, "
            "but no policy file can hold it"
        )
    if hasattr(modules, "imitator"):
        return "bcq" if hasattr(modules, "q_funcs") else "imitator"
    if hasattr(modules, "policy"):
        return "policy"
    if hasattr(modules, "q_funcs"):
        return "values"
    raise NotPerceptronError(f"{type(algorithm).__name__}: neither a Q-function nor a policy was found in it")


def _q_function(function: Any) -> Layers:
    kind = type(function).__name__
    if kind not in ("DiscreteMeanQFunction", "DiscreteQRQFunction"):
        raise NotPerceptronError(
            f"the Q-function {kind} is not one network; use the mean or the QR Q-function"
        )
    layers = perceptron(function.encoder, function._fc)
    return average_outputs(layers, layers[-1][0].shape[1] // NUM_ACTIONS)


def _categorical(policy: Any) -> Layers:
    if not (hasattr(policy, "_encoder") and hasattr(policy, "_fc")):
        raise NotPerceptronError(f"{type(policy).__name__} is not a policy over discrete actions")
    return perceptron(policy._encoder, policy._fc)


def _scaler(scaler: Any, features: int) -> tuple[FloatArray, FloatArray]:
    """What a d3rlpy observation scaler subtracts and divides by."""
    if scaler is None:
        return np.zeros(features, dtype=np.float32), np.ones(features, dtype=np.float32)
    if not scaler.built:
        raise InputError(
            "the algorithm's observation scaler was never fitted; train with `fit`, or leave it out"
        )
    if scaler.get_type() == "standard":
        return np.asarray(scaler.mean, np.float32), np.asarray(scaler.std + scaler.eps, np.float32)
    if scaler.get_type() == "min_max":
        low, high = np.asarray(scaler.minimum, np.float32), np.asarray(scaler.maximum, np.float32)
        half = np.float32(0.5)
        return half * (low + high), half * (high - low)
    raise InputError(
        f"the observation scaler {scaler.get_type()!r} cannot go into a policy; use 'standard' or 'min_max'"
    )


def from_sb3(
    model: Any,
    *,
    observation: str | Sequence[str],
    depths: Sequence[int],
    num_layers: int,
    max_draft: int = DEFAULT_MAX_DRAFT,
    k: int = DEFAULT_K,
    window: int = DEFAULT_WINDOW,
    mean: FloatArray | None = None,
    std: FloatArray | None = None,
    name: str = "sb3",
    meta: Mapping[str, Any] | None = None,
) -> QController:
    """The deterministic policy of a stable-baselines3 DQN, PPO or A2C with an `MlpPolicy` of ReLU layers.

    PPO and A2C use tanh unless told otherwise: give them `policy_kwargs={"activation_fn": torch.nn.ReLU}`.
    If the model's environment is a `VecNormalize`, its normalisation goes into the network.

    Args:
        model: trained.
        observation: names of its inputs, in order.
        depths: candidate depths that it was trained for.
        num_layers: L of the model.
        max_draft: cap on proposals a round.
        k: tokens behind the feature `confidence`.
        window: tokens behind the feature `trace`.
        mean: float32 (f,), subtracted from observations before the model saw them; that of its
            `VecNormalize`, else 0, if not given.
        std: float32 (f,), that divided them afterwards; likewise, else 1.
        name: how reports call this policy.
        meta: kept with it.

    Raises:
        InputError: a model of another kind, for other observations or actions, with another activation,
            or behind a `VecNormalize` that clips values that occur.
        RuntimeError: the copy differs from the original.
    """
    import torch

    features = resolve_observation(observation)
    low, high = bounds(features)
    space = model.observation_space
    if space.shape != low.shape or getattr(model.action_space, "n", None) != NUM_ACTIONS:
        raise InputError(
            f"the model takes observations {space.shape} and actions {model.action_space}; expected "
            f"({len(features)},), one for each of {', '.join(features)}, and {NUM_ACTIONS} actions"
        )
    normaliser = model.get_vec_normalize_env()
    given = [values is not None for values in (mean, std)]
    if not all(given) and normaliser is not None and normaliser.norm_obs:
        mean, std = _standardisation(
            normaliser.obs_rms.mean if mean is None else mean,
            np.sqrt(normaliser.obs_rms.var + normaliser.epsilon) if std is None else std,
            len(features),
        )
        reached = float((np.maximum(np.abs(low - mean), np.abs(high - mean)) / std).max())
        if reached > normaliser.clip_obs:
            raise InputError(
                f"VecNormalize clips at {normaliser.clip_obs}, but features reach {reached:.1f} deviations; "
                "a policy cannot hold the clipping: give VecNormalize a larger clip_obs"
            )
    elif not any(given) and not (np.array_equal(space.low, low) and np.array_equal(space.high, high)):
        raise InputError(
            f"the model was trained on a space from {space.low.tolist()} to {space.high.tolist()}, but the "
            f"features {', '.join(features)} go from {low.tolist()} to {high.tolist()}; name its own "
            "features, or give mean and std of what was done to them"
        )
    mean, std = _standardisation(mean, std, len(features))
    policy = model.policy
    if hasattr(policy, "q_net"):
        layers = perceptron(policy.q_net.features_extractor, policy.q_net.q_net)
    elif hasattr(policy, "mlp_extractor"):
        extractor = getattr(policy, "pi_features_extractor", policy.features_extractor)
        layers = perceptron(extractor, policy.mlp_extractor.policy_net, policy.action_net)
    else:
        raise InputError(f"{type(model).__name__} cannot be imported; DQN, PPO and A2C can")
    network = QNetwork(layers, mean, std)
    states = random_states(features)
    inputs = ((states - mean) / std).astype(np.float32)
    with torch.no_grad():
        tensor = torch.from_numpy(inputs).to(model.device)
        if hasattr(policy, "q_net"):
            check_scores(network, states, policy.q_net(tensor).cpu().numpy(), "stable-baselines3")
        else:
            logits = policy.action_net(policy.mlp_extractor.policy_net(extractor(tensor))).cpu().numpy()
            check_scores(network, states, logits, "stable-baselines3")
    actions, _ = model.predict(inputs, deterministic=True)
    check_actions(network, states, actions, "stable-baselines3")
    return QController(
        network, features, depths, num_layers, max_draft, k=k, window=window, name=name, meta=meta
    )


def random_states(features: tuple[str, ...], count: int = CHECKED_STATES, seed: int = 0) -> FloatArray:
    """Observations drawn uniformly within the bounds of these features, float32 (count, f)."""
    low, high = bounds(features)
    return np.random.default_rng(seed).uniform(low, high, size=(count, len(features))).astype(np.float32)


def _standardisation(
    mean: NDArray[Any] | None, std: NDArray[Any] | None, features: int
) -> tuple[FloatArray, FloatArray]:
    """Both as float32 (f,), where given."""
    found = []
    for label, values, default in (("mean", mean, 0.0), ("std", std, 1.0)):
        array = (
            np.full(features, default, dtype=np.float32)
            if values is None
            else np.asarray(values, dtype=np.float32)
        )
        if array.shape != (features,):
            raise InputError(
                f"{label} has shape {array.shape}; expected ({features},), one number per feature"
            )
        found.append(array)
    return found[0], found[1]


def export_torchscript(path: str | Path, controller: QController) -> Path:
    """Write a policy's network as TorchScript: observations float32 (n, f) in, scores float32 (n, 2) out.

    The standardisation is inside; the greedy action is the larger score, continue where they are equal.
    The names of the features are in the extra file `observation.json`.

    Args:
        path: target, replaced as a whole.
        controller: the policy.

    Returns:
        The path written.
    """
    import warnings

    import torch

    network = controller.network
    parts: list[torch.nn.Module] = []
    for number, (weight, bias) in enumerate(network.layers):
        linear = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight.T.copy()))
            linear.bias.copy_(torch.from_numpy(bias.copy()))
        parts += [linear] if number == 0 else [torch.nn.ReLU(), linear]

    class Standardised(torch.nn.Module):
        """The network behind its standardisation."""

        def __init__(self) -> None:
            super().__init__()
            self.mean: torch.Tensor
            self.std: torch.Tensor
            self.register_buffer("mean", torch.from_numpy(network.mean.copy()))
            self.register_buffer("std", torch.from_numpy(network.std.copy()))
            self.layers = torch.nn.Sequential(*parts)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.layers((observation - self.mean) / self.std)

    target = Path(path)
    with warnings.catch_warnings(), atomic_path(target) as temporary:
        warnings.simplefilter("ignore")  # torch says that TorchScript is not developed further
        example = torch.zeros(1, network.sizes[0])
        traced = torch.jit.trace(Standardised().eval(), example)
        names = {"observation.json": json.dumps(list(controller.observation))}
        torch.jit.save(traced, str(temporary), _extra_files=names)
    return target
