"""Batched greedy generation: the text that a model emits, for recording and counting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel


@torch.inference_mode()
def generate_greedy(
    model: LayeredModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """Greedy continuations of several prompts at once.

    The prompts are the roots of one `Sequence`, so the batch may be ragged and a text that
    has ended costs nothing more.

    Args:
        model: any `LayeredModel`.
        prompts: token ids; each needs at least one.
        max_new_tokens: most tokens per prompt, at least 1; fewer where the context ends.

    Returns:
        Per prompt its tokens, the end-of-text token included if it was reached.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    top = model.num_layers
    sequence = model.sequence(sum(len(p) for p in prompts) + len(prompts) * max_new_tokens)
    newest: list[int] = []
    for prompt in prompts:
        if not len(prompt):
            raise InputError("a prompt has no tokens; at least one is needed")
        newest.append(sequence.append(prompt, parent=-1)[-1])
    sequence.advance(top)
    texts: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    while active:
        slots = [newest[i] for i in active]
        best = sequence.score(top, slots=slots).argmax(-1).tolist()
        going: list[int] = []
        for index, token in zip(active, best, strict=True):
            texts[index].append(token)
            full = len(prompts[index]) + len(texts[index]) > model.context_limit
            if token not in model.eos_token_ids and len(texts[index]) < max_new_tokens and not full:
                newest[index] = sequence.append([token], parent=newest[index])[0]
                going.append(index)
        active = going
        if active:
            sequence.advance(top, slots=[newest[i] for i in active])
    return texts
