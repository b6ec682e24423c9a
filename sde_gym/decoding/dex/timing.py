"""How long a stage takes by itself: what the tick model of depth exploration needs to know of a machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from sde_gym.decoding.dex.stage import StageSequence
from sde_gym.models.layered import LayeredModel

#: Steps before the clock counts.
_WARM_UP = 3


@torch.inference_mode()
def stage_seconds(
    model: LayeredModel,
    depths: Sequence[int],
    stage: int,
    context: Sequence[int],
    tokens: int,
    repeats: int,
) -> list[float]:
    """Seconds of one stage of a tick: its layers and its head, on some lattice tokens at once.

    The keys and values of the context are there, as in the middle of a text; the tokens are branches behind
    its last token, and come with the states of the stage before.

    Args:
        model: any `LayeredModel`; torch's current number of threads is used.
        depths: the exploration set, checked.
        stage: 0..N-1.
        context: token ids, at least one.
        tokens: at least 1.
        repeats: times that it is measured, at least 1.

    Returns:
        One for each repeat, in order.
    """
    low, depth = (0, *depths)[stage], depths[stage]
    above = model.sequence(len(context))
    above.append(context)
    if low:
        above.advance(low)
    states = above.hidden(low, rows=len(context)).clone()
    sequence = StageSequence(model, len(context) + tokens + 64)

    def enter(ids: Sequence[int], parent: int) -> range:
        slots = sequence.append(ids, parent)
        if low:
            sequence.receive(states[-len(ids) :], low, slots)
        return slots

    enter(context, -1)
    sequence.advance(depth)
    last = len(context) - 1
    for _ in range(2):  # siblings: from here on it is a tree, as it always is while decoding
        sequence.advance(depth, enter(context[-1:], last))
    length = len(sequence)
    found = []
    for _ in range(_WARM_UP + repeats):
        started = time.perf_counter()
        slots = [enter(context[-1:], last)[0] for _ in range(tokens)]
        sequence.advance(depth, slots)
        sequence.score(depth, slots=slots).argmax(-1).tolist()
        found.append(time.perf_counter() - started)
        sequence.rollback(length)
    return found[_WARM_UP:]
