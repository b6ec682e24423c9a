"""What policies are worth on recorded texts, exactly: policy files and rules, one line each.

    python agents/evaluate.py runs/lede runs/cql static:4,6 threshold:0.5 plain --traces stdlib-20m-held-out

A policy is a file or folder that `save_policy` wrote, or a rule:

    static:DEPTH,LENGTH          LayerSkip's setting
    threshold:P or P,P           exit where the best token's probability reaches P; the second is for drafting
    random:P                     exit with probability P
    plain                        never exit: plain decoding

A policy file is played with the depths and the cap it was trained for, rules with `--depths` and
`--max-draft`. The return is the mean over texts, with its standard error. The speed-up is simulated by
counting layers, or by `--cost`, a file of `sde-gym calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sde_gym.envs.run import RunResult, run_controller
from sde_gym.errors import InputError
from sde_gym.files import write_json
from sde_gym.options import parse_list
from sde_gym.policies.controller import Controller
from sde_gym.policies.files import load_policy
from sde_gym.policies.qnetwork import QController
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.terminal import errors_as_sentences
from sde_gym.traces import TraceSet, load_traces


def main(
    policies: Annotated[list[str], typer.Argument(help="Policy files or rules, see above.")],
    traces: Annotated[str, typer.Option(help="A trace set's name or its folder.")] = "stdlib-20m-held-out",
    depths: Annotated[str | None, typer.Option(help="Candidate depths of rules, such as 1,2,3.")] = None,
    max_draft: Annotated[
        int, typer.Option(min=1, help="Most proposals in one round, for rules.")
    ] = DEFAULT_MAX_DRAFT,
    reward: Annotated[str, typer.Option(help="'lede', 'speed' or 'module:function'.")] = "lede",
    final_token_reward: Annotated[float, typer.Option(help="Reward of a token of the final layer.")] = 1.0,
    cost: Annotated[str, typer.Option(help="'unit' or a JSON file of `sde-gym calibrate`.")] = "unit",
    seed: Annotated[int, typer.Option(min=0, help="Of random rules.")] = 0,
    json: Annotated[Path | None, typer.Option(help="JSON file for the totals.")] = None,
) -> None:
    """Play recorded texts under policies and print what each is worth."""
    with errors_as_sentences():
        for name in policies:
            if policies.count(name) > 1:
                raise InputError(f"policy {name!r} is named {policies.count(name)} times; name it once")
        texts = load_traces(traces)
        chosen = None if depths is None else parse_list(depths, int, "depths")
        shared: dict[str, Any] = {"reward": reward, "final_token_reward": final_token_reward, "cost": cost}
        console = Console(highlight=False)
        table = Table(
            "policy", "return", "simulated speed-up", "acceptance", "exit depth", "draft length", "rounds"
        )
        totals = {}
        for name in policies:
            controller = parse_policy(name, seed)
            own: dict[str, Any] = {"depths": chosen, "max_draft": max_draft}
            if isinstance(controller, QController):
                own = {"depths": controller.depths, "max_draft": controller.max_draft}
                note_other_model(console, name, controller, texts)
            result = run_controller(texts, controller, **own, **shared)
            table.add_row(name, *row(result))
            totals[name] = result.totals()
        console.print(f"{len(texts)} texts of {traces}, reward {reward}")
        console.print(table)
        if not texts.overrun:
            console.print(
                "recorded without overrun: drafting on in vain costs nothing, so this is optimistic"
            )
        if json is not None:
            write_json(json, totals)


def row(result: RunResult) -> tuple[str, ...]:
    """The cells of one policy."""
    error = result.returns.std(ddof=1) / len(result.returns) ** 0.5 if len(result.returns) > 1 else 0.0
    return (
        f"{result.returns.mean():.2f} ± {error:.2f}",
        f"{result.speedup:.2f}x",
        f"{result.acceptance_rate:.2f}",
        f"{result.mean_exit_depth:.1f}",
        f"{result.mean_draft_length:.1f}",
        str(int(result.rounds.sum())),
    )


def parse_policy(name: str, seed: int) -> Controller:
    """The controller of a name.

    Raises:
        InputError: neither a file nor a rule, or numbers that the rule refuses.
    """
    kind, _, rest = name.partition(":")
    if kind in RULES and not Path(name).exists():
        try:
            return RULES[kind](rest, seed)
        except ValueError as error:
            detail = f" ({error})" if isinstance(error, InputError) else ""
            raise InputError(
                f"policy {name!r}: expected static:DEPTH,LENGTH, threshold:P, random:P or plain{detail}"
            ) from None
    return load_policy(name)


def _static(rest: str, seed: int) -> Controller:
    depth, length = (int(part) for part in rest.split(","))
    return StaticController(depth, length)


def _threshold(rest: str, seed: int) -> Controller:
    values = [float(part) for part in rest.split(",")]
    if len(values) > 2:
        raise InputError("more than two probabilities")
    return ThresholdController(values[0], values[-1])


def _plain(rest: str, seed: int) -> Controller:
    if rest:
        raise InputError("plain takes no number")
    return RandomController(0.0)


RULES: dict[str, Callable[[str, int], Controller]] = {
    "static": _static,
    "threshold": _threshold,
    "random": lambda rest, seed: RandomController(float(rest), seed=seed),
    "plain": _plain,
}


def note_other_model(console: Console, name: str, policy: QController, traces: TraceSet) -> None:
    """Say so if a policy was trained on another model than these texts come from."""
    trained: Any = policy.meta.get("model", {}).get("weights_hash")
    if trained is not None and trained != traces.manifest["model_hash"]:
        console.print(f"note: {name} was trained on another model than {traces.manifest['model']}")


if __name__ == "__main__":
    typer.run(main)
