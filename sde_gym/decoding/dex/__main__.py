"""`python -m torch.distributed.run --nproc-per-node N -m sde_gym.decoding.dex`: real explorers.

Every process loads the model and runs one stage of it; the first one prints the text.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from sde_gym.errors import InputError
from sde_gym.options import parse_list
from sde_gym.terminal import errors_as_sentences

if TYPE_CHECKING:
    from sde_gym.decoding.dex import DexResult
    from sde_gym.decoding.round import TokenRules
    from sde_gym.models.layered import LayeredModel

#: Exit status of an explorer that has lost another one.
EXPLORER_LOST = 3

#: Tokens decoded before the clock counts.
WARM_UP = 4


def main(
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    model: Annotated[str, typer.Option(help="A name from `sde-gym models list`, a folder, or a hub id.")] = (
        "stdlib-20m"
    ),
    depths: Annotated[
        str | None, typer.Option(help="The exploration set, such as 6,12,24; an even split if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens generated.")] = 96,
    decs: Annotated[bool, typer.Option(help="Whether stages avoid what shallower ones proposed.")] = True,
    single_exit: Annotated[bool, typer.Option(help="Only the first stage opens branches.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or on CUDA float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, or cuda: one GPU for each explorer.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each explorer.")] = 1,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for another explorer.")] = 60.0,
    compare: Annotated[
        bool, typer.Option(help="Decode plainly, too, with all explorers' threads, and compare.")
    ] = False,
) -> None:
    """Explore depths with one process a stage, and print the text and what it took."""
    from sde_gym.decoding.dex.stage import ExplorerLostError

    with errors_as_sentences():
        rank, processes = _place_in_the_group()
        import torch
        import torch.distributed as dist

        from sde_gym.decoding.dex.distributed import explore
        from sde_gym.models import load_model

        torch.set_num_threads(threads)
        here = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
        backend = "nccl" if here.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        loaded = load_model(model, dtype, here)
        given = None if depths is None else parse_list(depths, int, "depths")
        ids = loaded.encode(prompt)
        try:
            explore(loaded, ids, given, min(WARM_UP, max_new_tokens))  # a first run is slow
            result = explore(
                loaded, ids, given, max_new_tokens, decs=decs, single_exit=single_exit,
                rules=_rules(loaded, temperature, seed),
            )  # fmt: skip
        except ExplorerLostError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXPLORER_LOST) from None
        same = True
        if rank == 0:
            typer.echo(loaded.decode(result.tokens))
            typer.echo(
                f"{len(result.tokens)} tokens, {result.ticks} ticks of {processes} explorers "
                f"{result.exploration_set}, {result.seconds:.2f} s; "
                f"{result.lattice_tokens} lattice tokens, {result.useful_share:.0%} of use"
            )
            if compare:
                torch.set_num_threads(threads * processes)
                rules = _rules(loaded, temperature, seed)
                same = _compare(loaded, ids, rules, result, max_new_tokens)
        dist.destroy_process_group()
        if not same:
            raise typer.Exit(1)


def _place_in_the_group() -> tuple[int, int]:
    """Rank and number of processes, as torchrun tells them."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError:
        raise InputError(
            "explorers: this is one process of several; start it as `python -m torch.distributed.run "
            "--nproc-per-node N -m sde_gym.decoding.dex ...`"
        ) from None


def _rules(model: LayeredModel, temperature: float, seed: int) -> TokenRules | None:
    """What samples at a temperature; None for 0. The same in every process, and for plain decoding."""
    if temperature == 0:
        return None
    import torch
    from transformers import TemperatureLogitsWarper

    from sde_gym.decoding.dex import coupled
    from sde_gym.decoding.rules import GenerationRules

    source = torch.Generator().manual_seed(seed)
    warp = TemperatureLogitsWarper(temperature)
    return coupled(GenerationRules(model.vocab_size, model.eos_token_ids, warp, generator=source))


def _compare(
    model: LayeredModel, ids: list[int], rules: TokenRules | None, result: DexResult, max_new_tokens: int
) -> bool:
    """Decode plainly and say whether the tokens are the same, and what it took."""
    from sde_gym.decoding import autoregressive

    autoregressive(model, ids, min(WARM_UP, max_new_tokens))
    plain = autoregressive(model, ids, max_new_tokens, rules=rules)
    same = plain.tokens == result.tokens
    typer.echo(
        f"plain decoding: {'the same tokens' if same else 'OTHER TOKENS'}, "
        f"{plain.prefill_seconds + plain.decode_seconds:.2f} s"
    )
    return same


if __name__ == "__main__":
    typer.run(main)
