"""One of several explorers, for the tests: `python -m tests.decoding.dex.worker RANK PROCESSES FOLDER`.

Writes what each case came to into FOLDER/RANK.json. In the last case the last process dies on the way.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TemperatureLogitsWarper

from sde_gym.decoding.dex.distributed import explore
from sde_gym.decoding.dex.stage import ExplorerLostError
from sde_gym.decoding.rules import GenerationRules
from sde_gym.errors import InputError
from tests.decoding.conftest import agreeing_model

PROMPT = [5, 35, 3]

#: By name: the exploration set, the budget and the options of a run.
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "even": (None, 40, {}),
    "uneven, no decs": ((1, 2, 6), 30, {"decs": False}),
    "single exit": ((1, 3, 6), 20, {"single_exit": True}),
    "one token": (None, 1, {}),
    "none": (None, 0, {}),
    "sampled": ((1, 4, 6), 30, {"temperature": 0.9}),
    "ending": (None, 40, {"eos_token_id": [13, 21]}),
    "compact": ((2, 5, 6), 30, {"compact": list(range(0, 40, 3))}),
}


def run(decode: Any, name: str) -> Any:
    """A case, by `dex` or `explore`."""
    depths, budget, options = CASES[name]
    chosen = dict(options)
    model = agreeing_model(eos_token_id=chosen.pop("eos_token_id", None), compact=chosen.pop("compact", None))
    temperature = chosen.pop("temperature", None)
    if temperature is not None:
        source = torch.Generator().manual_seed(7)
        chosen["rules"] = GenerationRules(40, (), TemperatureLogitsWarper(temperature), generator=source)
    return decode(model, PROMPT, depths, budget, **chosen)


def summary(result: Any) -> dict[str, Any]:
    """What must be the same however it was run."""
    names = ("tokens", "selected", "commit_ticks", "tick_tokens", "layer_passes", "head_calls")
    return {name: getattr(result, name) for name in names} | {"depths": list(result.exploration_set)}


def refusal(*arguments: Any, **options: Any) -> str:
    """The message of an `explore` that must fail."""
    try:
        explore(agreeing_model(), *arguments, **options)
    except (InputError, ExplorerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def main(rank: int, processes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder / 'meeting'}", timedelta(seconds=60), world_size=processes, rank=rank
    )
    found: dict[str, Any] = {name: summary(run(explore, name)) for name in CASES}
    found["wrong count"] = refusal(PROMPT, (3, 6), 5)
    found["different"] = refusal(PROMPT, None, 5 + rank)

    def die(tokens: list[int]) -> None:
        dying.append(tokens)
        if rank == processes - 1 and len(dying) == 3:
            (folder / f"{rank}.json").write_text(json.dumps(found))
            os._exit(9)

    dying: list[list[int]] = []
    found["death"] = refusal(PROMPT, None, 30, on_tokens=die)
    found["told"] = len(dying)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # the group is broken: nothing is left to be closed


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
