"""`python -m sde_gym.decoding.dex.serve`: one explorer of an `ExplorerGroup`, told what to do line by line.

Requests come on stdin and answers go to stdout, one JSON object a line. It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Annotated, Any, TextIO

import typer

#: What an explorer tells of a text: these fields of `DexResult`.
RESULT_FIELDS = (
    "num_layers", "tokens", "depths", "fates", "prefill_seconds", "decode_seconds", "layer_passes",
    "sequential_layers", "head_calls", "exploration_set", "selected", "commit_ticks", "tick_tokens",
    "round_tokens", "stage_seconds",
)  # fmt: skip


def main(
    rank: Annotated[int, typer.Option(help="The stage.")],
    processes: Annotated[int, typer.Option(help="Explorers in all.")],
    meeting: Annotated[str, typer.Option(help="A file in which they find each other.")],
    model: Annotated[str, typer.Option(help="A name, a folder, or a hub id.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")],
    threads: Annotated[int, typer.Option(help="Of this explorer.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for another explorer.")],
) -> None:
    """Load the model, meet the others, and serve."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    import torch
    import torch.distributed as dist

    from sde_gym.errors import InputError
    from sde_gym.models import load_model

    try:
        torch.set_num_threads(threads)
        loaded = load_model(model, dtype)
        dist.init_process_group(
            "gloo", f"file://{meeting}", timedelta(seconds=timeout), world_size=processes, rank=rank
        )
    except (InputError, RuntimeError) as error:
        _tell(answers, _failure(error))
        return
    _tell(answers, {"threads": torch.get_num_threads()})
    for line in sys.stdin:
        try:
            answer = _answer(loaded, rank, json.loads(line))
        except (InputError, RuntimeError) as error:
            answer = _failure(error)
        _tell(answers, answer)
    dist.destroy_process_group()


def _answer(model: Any, rank: int, request: dict[str, Any]) -> dict[str, Any]:
    """What a request comes to."""
    from sde_gym.decoding.dex.distributed import explore
    from sde_gym.decoding.dex.timing import stage_seconds

    if "repeats" in request:
        return {"seconds": stage_seconds(model, stage=rank, **request)}
    first = rank == 0
    found = explore(
        model, request["prompt"], request["depths"], request["max_new_tokens"], record=first,
    )  # fmt: skip
    if not first:  # all of them know the same
        return {}
    return {
        "result": {name: getattr(found, name) for name in RESULT_FIELDS},
        "stage_tokens": found.stage_tokens(),
    }


def _failure(error: Exception) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error)}


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    typer.run(main)
