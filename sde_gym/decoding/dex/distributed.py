"""Depth exploration by several processes, one stage each, on `torch.distributed`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sde_gym.decoding.dex.candidates import Proposer
from sde_gym.decoding.dex.exploration import exploration_set as checked_set
from sde_gym.decoding.dex.explorers import Work
from sde_gym.decoding.dex.lattice import Lattice
from sde_gym.decoding.dex.machine import Machine
from sde_gym.decoding.dex.noise import coupled
from sde_gym.decoding.dex.result import DexResult
from sde_gym.decoding.dex.stage import StageExplorer, lost_explorers
from sde_gym.decoding.result import check_request
from sde_gym.decoding.round import TokenRules
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel


@torch.inference_mode()
def explore(
    model: LayeredModel,
    prompt: Sequence[int],
    exploration_set: int | Sequence[int] | None,
    max_new_tokens: int,
    *,
    decs: bool = True,
    single_exit: bool = False,
    rules: TokenRules | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
    record: bool = False,
) -> DexResult:
    """`dex`, called in every process of the default group with the same arguments; the rank is the stage.

    Each process holds the whole model and runs the layers of its stage.

    Args:
        model, prompt, max_new_tokens, decs, single_exit, on_tokens, record: as for `dex`; `on_tokens` may
            differ between processes.
        exploration_set: as for `dex`; None = an even split between the processes.
        rules: as for `dex`. Sampling needs generators with the same seed, and criteria must answer by their
            arguments alone: every process decides for itself where the text ends.

    Returns:
        The same in every process, but for the times. Counters are summed over all of them.

    Raises:
        InputError: as `dex`; no group; a number of processes other than N; arguments that differ.
        ExplorerLostError: another process has ended, or does not answer within the group's timeout.
    """
    if not dist.is_initialized():
        raise InputError("explorers: there is no process group; call torch.distributed.init_process_group")
    processes = dist.get_world_size()
    depths = checked_set(processes if exploration_set is None else exploration_set, model.num_layers)
    if len(depths) != processes:
        raise InputError(
            f"exploration set: {depths} is for {len(depths)} explorers, but there are {processes} processes; "
            f"start {len(depths)} (torchrun --nproc-per-node {len(depths)}), or give {processes} depths"
        )
    budget = check_request(model, prompt, max_new_tokens)
    _check_agreement(model, (list(prompt), depths, budget, decs, single_exit, model.weights_hash()))
    result = DexResult(model.num_layers, exploration_set=depths)
    if budget == 0:
        return result
    rules = coupled(rules)
    ends = tuple(model.eos_token_ids if rules is None else rules.eos_token_ids)
    lattice = Lattice(prompt, processes, budget, ends, single_exit)
    explorer = StageExplorer(model, depths, Proposer(model, rules, decs), prompt)
    Machine(
        lattice, explorer, result, rules=rules, eos_token_ids=ends, on_tokens=on_tokens, record=record
    ).run()
    _sum_work(model, explorer.work, result)
    return result


def _check_agreement(model: LayeredModel, asked: object) -> None:
    """Refuse processes that were asked for different things: they would wait for each other forever."""
    digest = hashlib.sha256(repr(asked).encode()).digest()[:7]
    mine = torch.tensor([int.from_bytes(digest, "big")], device=model.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with lost_explorers("the first exchange"):
        dist.all_gather(found, mine)
    if any(int(other) != int(mine) for other in found):
        raise InputError(
            "explorers: the processes were given different models, prompts, exploration sets or options; "
            "start all of them with the same arguments"
        )


def _sum_work(model: LayeredModel, work: Work, result: DexResult) -> None:
    counts = torch.tensor([work.layer_passes, work.sequential_layers, work.head_calls], device=model.device)
    seconds = torch.tensor(result.stage_seconds, device=model.device)  # 0 where others run the stage
    with lost_explorers("the last exchange"):
        dist.all_reduce(counts)
        dist.all_reduce(seconds)
    result.stage_seconds = seconds.tolist()
    result.layer_passes, result.sequential_layers, result.head_calls = counts.tolist()
