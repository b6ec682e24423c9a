"""Networks of learning libraries as `QNetwork`: copied, joined, and proved equal.

A policy only has to say which of two actions scores higher. So whatever a library trains (action
values, quantiles of them, logits of a policy, values behind a mask) becomes one multilayer
perceptron with ReLU and one score an action, and every policy has the same file and the same cost
in the decoder. Joins are exact: they only rearrange the arithmetic.

Nothing here imports a learning library: modules are recognised by what they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.policies.qnetwork import NUM_ACTIONS, QNetwork

#: Weight (inputs, outputs) and bias (outputs,) of every layer, with ReLU between them.
Layers = list[tuple[NDArray[np.float32], NDArray[np.float32]]]

#: Weight of a forbidden action beside the values of both, see `masked`.
MASK_SCALE = 1e6


class NotPerceptronError(InputError):
    """A network that is no multilayer perceptron with ReLU."""


def perceptron(*modules: Any) -> Layers:
    """The layers of torch modules that run one after the other.

    Args:
        *modules: torch modules made of `Linear`, `ReLU` and what does nothing (`Flatten`, `Identity`).

    Returns:
        Copies, float32.

    Raises:
        NotPerceptronError: there is no linear layer, something else, or no ReLU between two.
    """
    from torch import nn

    parts = [part for module in modules for part in _leaves(module)]
    layers: Layers = []
    bent = True  # whether a ReLU stands behind the newest linear layer
    for part in parts:
        if isinstance(part, nn.Linear):
            if not bent:
                raise NotPerceptronError("two linear layers follow one another without a ReLU between them")
            weight = part.weight.detach().cpu().numpy().T.copy()
            bias = np.zeros(weight.shape[1]) if part.bias is None else part.bias.detach().cpu().numpy()
            layers.append((weight, bias.astype(np.float32)))
            bent = False
        elif isinstance(part, nn.ReLU):
            bent = True
        elif not isinstance(part, (nn.Flatten, nn.Identity)):
            raise NotPerceptronError(
                f"the network has a layer {type(part).__name__}; a policy file holds linear layers with "
                "ReLU only; train with ReLU, without normalisation layers and dropout"
            )
    if not layers or bent:
        raise NotPerceptronError("the network does not end with a linear layer")
    return layers


def _leaves(module: Any) -> list[Any]:
    """Modules without modules of their own, in order; one that stands there twice (a shared ReLU) twice."""
    children = [child for child in module._modules.values() if child is not None]
    return [leaf for child in children for leaf in _leaves(child)] if children else [module]


def average_outputs(layers: Layers, count: int) -> Layers:
    """The mean of every `count` neighbouring outputs: quantiles become expected values.

    Args:
        layers: the last has `count` outputs an action, those of the first action first.
        count: of them.
    """
    weight, bias = layers[-1]
    inputs, outputs = weight.shape
    return [
        *layers[:-1],
        (weight.reshape(inputs, outputs // count, count).mean(axis=2), bias.reshape(-1, count).mean(axis=1)),
    ]


def side_by_side(networks: Sequence[Layers]) -> Layers:
    """Networks of the same depth and input as one, with all their outputs.

    Raises:
        NotPerceptronError: they have different numbers of layers.
    """
    if len({len(layers) for layers in networks}) != 1:
        raise NotPerceptronError("networks of different depth cannot be joined into one")
    joined: Layers = []
    for number, parts in enumerate(zip(*networks, strict=True)):
        weights = [weight for weight, _ in parts]
        if number == 0:
            weight = np.concatenate(weights, axis=1)
        else:
            weight = np.zeros(tuple(np.sum([part.shape for part in weights], axis=0)), dtype=np.float32)
            row = column = 0
            for part in weights:
                weight[row : row + part.shape[0], column : column + part.shape[1]] = part
                row, column = row + part.shape[0], column + part.shape[1]
        joined.append((weight, np.concatenate([bias for _, bias in parts])))
    return joined


def ensemble_mean(networks: Sequence[Layers]) -> Layers:
    """The mean of several networks' outputs."""
    if len(networks) == 1:
        return networks[0]
    joined = side_by_side(networks)
    weight, bias = joined[-1]
    count = len(networks)
    outputs = weight.shape[1] // count
    return [
        *joined[:-1],
        (weight.reshape(-1, count, outputs).mean(axis=1), bias.reshape(count, outputs).mean(axis=0)),
    ]


def masked(values: Layers, imitator: Layers, flexibility: float) -> Layers:
    """Values of two actions, of which one is forbidden where the data hardly ever took it.

    Discrete BCQ (Fujimoto et al. 2019, arXiv 1910.01708): an action is allowed if the imitator's probability
    of it is more than `flexibility` times the larger one. For two actions that depends on the
    difference of logits g alone: with t = -log(flexibility), exit is forbidden where g <= -t, continue where
    g >= t. One more layer computes relu(+-d), d the difference of values, and relu(+-g - t); the
    second pair, scaled by `MASK_SCALE`, outweighs the first.

    Args:
        values: one output an action.
        imitator: logits of the behaviour, of as many layers.
        flexibility: in (0, 1).

    Returns:
        Layers whose larger output is BCQ's action; the outputs are no action values.
    """
    *before, last = side_by_side([values, imitator])
    weight, bias = (part.astype(np.float64) for part in last)
    # Columns: value of continue and exit, logit of continue and exit.
    difference = np.array([[-1, 1, 0, 0], [1, -1, 0, 0], [0, 0, -1, 1], [0, 0, 1, -1]], dtype=np.float64).T
    limit = np.array([0.0, 0.0, np.log(flexibility), np.log(flexibility)])
    decide = np.array([[0, 1], [1, 0], [0, MASK_SCALE], [MASK_SCALE, 0]])
    return [
        *before,
        ((weight @ difference).astype(np.float32), (bias @ difference + limit).astype(np.float32)),
        (decide.astype(np.float32), np.zeros(NUM_ACTIONS, dtype=np.float32)),
    ]


def greedy(scores: NDArray[Any]) -> NDArray[np.int64]:
    """The action of larger score, a tie continues: int64 (n,)."""
    return (scores[:, 1] > scores[:, 0]).astype(np.int64)


def check_scores(network: QNetwork, states: NDArray[np.float32], theirs: NDArray[Any], library: str) -> None:
    """Prove that a copied network gives the scores of the one it was copied from.

    Args:
        network: the copy.
        states: float32 (n, f), raw observations.
        theirs: float (n, 2), the library's own scores there.
        library: its name, for the message.

    Raises:
        RuntimeError: they differ by more than 1e-5 (relative, above 1): a fault of the copy.
    """
    error = float(np.abs(network(states) - theirs).max())
    tolerance = score_tolerance(theirs)
    if not error <= tolerance:
        raise RuntimeError(
            f"the exported network differs from {library}'s: values by {error:.2e} (allowed {tolerance:.2e})"
        )


def check_actions(
    network: QNetwork,
    states: NDArray[np.float32],
    theirs: NDArray[Any],
    library: str,
    clear: NDArray[np.bool_] | None = None,
) -> None:
    """Prove that a copied network chooses as the one it was copied from.

    Args:
        network: the copy.
        states: float32 (n, f), raw observations.
        theirs: int (n,), the library's greedy actions there.
        library: its name, for the message.
        clear: bool (n,), where the choice does not hang on rounding; where the scores are not as close as
            that if not given.

    Raises:
        RuntimeError: an action differs where it is clear: a fault of the copy.
    """
    scores = network(states)
    if clear is None:
        clear = np.abs(scores[:, 1] - scores[:, 0]) > 2 * score_tolerance(scores)
    differ = (greedy(scores) != theirs.reshape(-1)) & clear
    if differ.any():
        raise RuntimeError(
            f"the exported network differs from {library}'s: greedy actions in {int(differ.sum())} of "
            f"{len(states)} states"
        )


def score_tolerance(scores: NDArray[Any]) -> float:
    """What rounding may change in scores of this size."""
    return 1e-5 * max(1.0, float(np.abs(scores).max()))
