"""Algorithms by name: what makes a d3rlpy algorithm out of our settings, and a place for one's own.

A factory takes the d3rlpy module, the settings and the number of features f, and returns a d3rlpy
algorithm for two discrete actions, untrained. Registering it is all that a new algorithm needs:

    from functools import partial
    from sde_gym.offline.algorithms import cql, register

    register("cautious", partial(cql, alpha=4.0))

`train(transitions, "cautious", settings)` then trains it. A factory uses the settings that its
algorithm has a use for and leaves the others; what only one algorithm knows is an argument of its
factory. Its observations are standardised before it sees them, so it needs no scaler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from sde_gym.errors import InputError
from sde_gym.offline.settings import DQNSettings
from sde_gym.policies.qnetwork import NUM_ACTIONS

#: (the d3rlpy module, settings, number of features) -> an algorithm, untrained.
Factory = Callable[[ModuleType, DQNSettings, int], Any]

#: Gradients are clipped to this norm: early targets of a rough network can be far off.
CLIP_GRADIENT_NORM = 10.0

#: Attention heads of the Decision Transformer, or the largest of them that divides its width.
_HEADS = (4, 2, 1)


def register(name: str, factory: Factory) -> None:
    """Add an algorithm, or replace one.

    Args:
        name: a word in lower case, by which `train` and the scripts know it.
        factory: see the module.

    Raises:
        InputError: a name with other characters than a-z, 0-9 and _, or a factory that cannot be called.
    """
    if not (isinstance(name, str) and name.isidentifier() and name.islower()):
        raise InputError(f"algorithm {name!r}: a name has lower-case letters, digits and _ only")
    if not callable(factory):
        raise InputError(f"algorithm {name!r}: {factory!r} cannot be called; give a function")
    _FACTORIES[name] = factory


def algorithm_names() -> tuple[str, ...]:
    """Names of all algorithms, own ones last."""
    return tuple(_FACTORIES)


def algorithm_factory(name: str) -> Factory:
    """The factory behind a name.

    Raises:
        InputError: there is none.
    """
    if name not in _FACTORIES:
        raise InputError(
            f"algorithm {name!r} is not registered; there are {', '.join(_FACTORIES)}, and "
            "sde_gym.offline.algorithms.register adds others"
        )
    return _FACTORIES[name]


def create_algorithm(d3rlpy: ModuleType, factory: Factory, settings: DQNSettings, features: int) -> Any:
    """An algorithm with its networks built, ready for `update`.

    Raises:
        InputError: the factory returned something else, or an algorithm with an observation scaler.
    """
    algorithm = factory(d3rlpy, settings, features)
    for needed in ("create_impl", "update", "config"):
        if not hasattr(algorithm, needed):
            raise InputError(
                f"the factory returned {algorithm!r}, which has no {needed}; return a d3rlpy algorithm, as "
                "`...Config(...).create(device=False)` gives it"
            )
    if algorithm.config.observation_scaler is not None:
        raise InputError(
            "the algorithm has an observation scaler, but observations are standardised before it sees them; "
            "leave the scaler out"
        )
    if algorithm.impl is None:
        algorithm.create_impl((features,), NUM_ACTIONS)
    return algorithm


def dqn(d3rlpy: ModuleType, settings: DQNSettings, features: int) -> Any:
    """Deep Q-learning with a target network (Mnih et al. 2015)."""
    return d3rlpy.algos.DQNConfig(**_q_learning(settings)).create(device=False)


def double_dqn(d3rlpy: ModuleType, settings: DQNSettings, features: int) -> Any:
    """DQN whose target action is chosen by the online network (van Hasselt et al. 2016)."""
    return d3rlpy.algos.DoubleDQNConfig(**_q_learning(settings)).create(device=False)


def nfq(d3rlpy: ModuleType, settings: DQNSettings, features: int) -> Any:
    """Neural fitted Q-iteration (Riedmiller 2005): the target network follows at every step."""
    shared = _q_learning(settings)
    del shared["target_update_interval"]
    return d3rlpy.algos.NFQConfig(**shared).create(device=False)


def qr_dqn(d3rlpy: ModuleType, settings: DQNSettings, features: int, *, quantiles: int = 32) -> Any:
    """Double DQN over quantiles of the return (Dabney et al. 2018)."""
    from d3rlpy.models.q_functions import QRQFunctionFactory

    return d3rlpy.algos.DoubleDQNConfig(
        **_q_learning(settings), q_func_factory=QRQFunctionFactory(n_quantiles=quantiles)
    ).create(device=False)


def cql(d3rlpy: ModuleType, settings: DQNSettings, features: int, *, alpha: float = 1.0) -> Any:
    """Conservative Q-learning (Kumar et al. 2020): double DQN that pushes down what was not taken.

    Args:
        d3rlpy: see the module, as for the next two.
        settings: of learning.
        features: f.
        alpha: weight of the conservative loss.
    """
    return d3rlpy.algos.DiscreteCQLConfig(**_q_learning(settings), alpha=alpha).create(device=False)


def bcq(
    d3rlpy: ModuleType,
    settings: DQNSettings,
    features: int,
    *,
    flexibility: float = 0.3,
    beta: float = 0.01,
) -> Any:
    """Batch-constrained Q-learning for discrete actions (Fujimoto et al. 2019, arXiv 1910.01708).

    Args:
        d3rlpy: see the module, as for the next two.
        settings: of learning.
        features: f.
        flexibility: an action is allowed from this share of the likelier one's probability on.
        beta: weight of the imitator's squared logits, the paper's 0.01.
    """
    return d3rlpy.algos.DiscreteBCQConfig(
        **_q_learning(settings), action_flexibility=flexibility, beta=beta, share_encoder=False
    ).create(device=False)


def bc(d3rlpy: ModuleType, settings: DQNSettings, features: int, *, beta: float = 0.01) -> Any:
    """Behaviour cloning: the action that the data take more often.

    Args:
        d3rlpy: see the module, as for the next two.
        settings: of learning.
        features: f.
        beta: weight of the squared logits.
    """
    shared = _learning(settings)
    del shared["gamma"]
    return d3rlpy.algos.DiscreteBCConfig(**shared, beta=beta).create(device=False)


def sac(
    d3rlpy: ModuleType,
    settings: DQNSettings,
    features: int,
    *,
    temperature: float = 0.1,
    temperature_learning_rate: float = 0.0,
) -> Any:
    """Soft actor-critic for discrete actions (Christodoulou 2019), two critics.

    d3rlpy aims at 98 % of the largest entropy, which for two actions is all but a coin flip; so the
    temperature stays where it starts, unless it is given a learning rate.

    Args:
        d3rlpy: see the module, as for the next two.
        settings: of learning.
        features: f.
        temperature: reward of a nat of entropy.
        temperature_learning_rate: of Adam.
    """
    optimizer, encoder = _optimizer(settings), _encoder(settings)
    return d3rlpy.algos.DiscreteSACConfig(
        batch_size=settings.batch_size,
        gamma=settings.gamma,
        actor_learning_rate=settings.learning_rate,
        critic_learning_rate=settings.learning_rate,
        temp_learning_rate=temperature_learning_rate,
        actor_optim_factory=optimizer,
        critic_optim_factory=optimizer,
        actor_encoder_factory=encoder,
        critic_encoder_factory=encoder,
        initial_temperature=temperature,
        target_update_interval=settings.target_update_interval,
    ).create(device=False)


def decision_transformer(
    d3rlpy: ModuleType,
    settings: DQNSettings,
    features: int,
    *,
    context: int = 20,
    layers: int = 2,
    dropout: float = 0.1,
    max_timestep: int = 1000,
) -> Any:
    """Decision Transformer (Chen et al. 2021): actions from history and the return still to come.

    A mini-batch holds as many decisions as that of other algorithms: `batch_size // context` slices of
    them. The learning rate rises over the first tenth of the training and falls along a cosine to a tenth.

    Args:
        d3rlpy: see the module, as for the next two.
        settings: of learning; its last hidden width is the transformer's.
        features: f.
        context: decisions that it looks back on, the present one included.
        layers: attention blocks.
        dropout: everywhere.
        max_timestep: decisions of an episode that are told apart; later ones share the last number.
    """
    from d3rlpy.optimizers import AdamFactory

    slices = max(1, settings.batch_size // context)
    tokens = settings.gradient_steps * slices * context
    return d3rlpy.algos.DiscreteDecisionTransformerConfig(
        batch_size=slices,
        learning_rate=settings.learning_rate,
        optim_factory=AdamFactory(clip_grad_norm=CLIP_GRADIENT_NORM),
        encoder_factory=_encoder(settings),
        context_size=context,
        max_timestep=max_timestep,
        num_heads=next(heads for heads in _HEADS if settings.hidden[-1] % heads == 0),
        num_layers=layers,
        attn_dropout=dropout,
        resid_dropout=dropout,
        embed_dropout=dropout,
        warmup_tokens=max(1, tokens // 10),
        final_tokens=tokens,
    ).create(device=False)


def _q_learning(settings: DQNSettings) -> dict[str, Any]:
    """Arguments that all Q-learners share."""
    return {**_learning(settings), "target_update_interval": settings.target_update_interval}


def _learning(settings: DQNSettings) -> dict[str, Any]:
    return {
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "optim_factory": _optimizer(settings),
        "encoder_factory": _encoder(settings),
        "gamma": settings.gamma,
    }


def _optimizer(settings: DQNSettings) -> Any:
    from d3rlpy.optimizers import AdamFactory
    from d3rlpy.optimizers.lr_schedulers import CosineAnnealingLRFactory

    return AdamFactory(
        clip_grad_norm=CLIP_GRADIENT_NORM,
        lr_scheduler_factory=CosineAnnealingLRFactory(T_max=settings.gradient_steps),
    )


def _encoder(settings: DQNSettings) -> Any:
    from d3rlpy.models.encoders import VectorEncoderFactory

    return VectorEncoderFactory(hidden_units=list(settings.hidden))


_FACTORIES: dict[str, Factory] = {
    "dqn": dqn,
    "double_dqn": double_dqn,
    "cql": cql,
    "bcq": bcq,
    "sac": sac,
    "bc": bc,
    "nfq": nfq,
    "qr_dqn": qr_dqn,
    "decision_transformer": decision_transformer,
}
