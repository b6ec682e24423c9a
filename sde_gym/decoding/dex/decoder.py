"""Depth exploration of one text in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sde_gym.checks import token_ids
from sde_gym.decoding.dex.candidates import Proposer
from sde_gym.decoding.dex.exploration import exploration_set as checked_set
from sde_gym.decoding.dex.explorers import LocalExplorers
from sde_gym.decoding.dex.lattice import Lattice
from sde_gym.decoding.dex.machine import Machine
from sde_gym.decoding.dex.noise import coupled
from sde_gym.decoding.dex.result import DexResult
from sde_gym.decoding.result import check_model, check_request
from sde_gym.decoding.round import TokenRules
from sde_gym.models.layered import LayeredModel


@torch.inference_mode()
def dex(
    model: LayeredModel,
    prompt: Sequence[int],
    exploration_set: int | Sequence[int],
    max_new_tokens: int,
    *,
    decs: bool = True,
    single_exit: bool = False,
    rules: TokenRules | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
    record: bool = False,
    count_near_ties: bool = False,
) -> DexResult:
    """Explore several depths at once, lossless.

    All stages of a tick run here one after the other, so that this is slower than plain decoding: what it
    shows is the lattice and its ticks. Explorers that run side by side have a process each
    (`python -m sde_gym.decoding.dex`).

    Args:
        model: any `LayeredModel`.
        prompt: token ids, at least one. It goes through the stages together with its last token.
        exploration_set: depths d_0 < ... < d_{N-1} = L, or N for an even split.
        max_new_tokens: budget, at least 0; less is generated if the text or the context ends.
        decs: stages do not repeat what shallower ones proposed for the same position and parent. Without it a
            repeated candidate opens no branch.
        single_exit: only the first stage opens branches (the ablation).
        rules: how tokens are chosen, and what ends the text; None = the most probable one. `GenerationRules`
            that sample get noise that all depths share (`sde_gym.decoding.dex.noise`). What DECS
            excludes is set to -inf before processors see an exit head's scores.
        on_tokens: given each token, in a list of one, as soon as it is emitted.
        record: keep every lattice token in the result's `nodes`.
        count_near_ties: fill `near_ties`.

    Returns:
        Tokens equal to `autoregressive`'s in float32; with sampling rules, distributed like its.

    Raises:
        InputError: an exploration set that does not fit the model or its lattice no memory
            (`exploration.exploration_set`), or a request that does not fit (`check_request`).
    """
    check_model(model)
    depths = checked_set(exploration_set, model.num_layers)
    budget = check_request(model, prompt, max_new_tokens)
    prompt = token_ids("prompt", prompt)
    result = DexResult(model.num_layers, exploration_set=depths)
    if budget == 0:
        return result
    rules = coupled(rules)
    ends = tuple(model.eos_token_ids if rules is None else rules.eos_token_ids)
    lattice = Lattice(prompt, len(depths), budget, ends, single_exit)
    proposer = Proposer(model, rules, decs, count_near_ties)
    explorers = LocalExplorers(model, depths, proposer, prompt)
    Machine(
        lattice, explorers, result, rules=rules, eos_token_ids=ends, on_tokens=on_tokens, record=record
    ).run()
    result.near_ties = proposer.near_ties
    return result
