"""Does the cost model tell the truth? Simulated speed-ups beside measured ones, on the same texts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.benchmark import ar_method, controller_method, measure, summarise_rows
from sde_gym.models.cost import CostModel
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Controller
from sde_gym.policies.rules import StaticController, ThresholdController
from sde_gym.prompts import Prompt
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS
from sde_gym.traces.recorder import record


@dataclass(frozen=True)
class Prediction:
    """The simulated speed-up of a controller beside the measured one.

    Attributes:
        controller: as it was called.
        predicted: in replay, under the cost model.
        measured: by the real decoder, over plain decoding in the same run.
    """

    controller: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured; positive where too much was promised."""
        return self.predicted / self.measured - 1.0


def check_controllers(
    depths: Sequence[int], max_draft: int, policy: Controller | None = None
) -> dict[str, Controller]:
    """What `sde-gym calibrate --check` runs: a static grid, a rule that reads heads, and a policy.

    Args:
        depths: candidate depths; each is in the grid.
        max_draft: most proposals in a round; drafts of 2, 4 and 8 are in the grid, as far as they fit.
        policy: bound to the same depths and max_draft.
    """
    lengths = [length for length in (2, 4, 8) if length <= max_draft] or [max_draft]
    statics = [StaticController(depth, length) for depth in depths for length in lengths]
    found: dict[str, Controller] = {static.name: static for static in statics}
    rule = ThresholdController(0.5)
    found[rule.name] = rule
    if policy is not None:
        found[policy.name] = policy
    return found


def predict(
    model: LayeredModel,
    cost: CostModel,
    prompts: Sequence[Prompt],
    controllers: Mapping[str, Controller],
    depths: Sequence[int],
    *,
    max_draft: int = DEFAULT_MAX_DRAFT,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    repeats: int = 2,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Prediction]:
    """Compare what a cost model says with what the decoder does.

    The texts are recorded with what lies behind wrong proposals, replayed under each controller,
    and decoded under each by the real decoder, which takes turns with plain decoding.

    Args:
        model: the model that `cost` was calibrated for, with the same number of torch threads.
        cost: what to check.
        prompts: to decode; those whose text has fewer than two tokens are left out.
        controllers: by name; all are bound to `depths` and `max_draft`.
        depths: candidate depths.
        max_draft: most proposals in a round.
        max_new_tokens: tokens generated per prompt.
        repeats: passes of the decoder over the prompts.
        seed: of the order in which methods take turns.
        progress: called with prompts decoded and prompts in all, over all repeats.

    Returns:
        One a controller, in order. Speed-ups are those of all texts together.

    Raises:
        InputError: as `record`, `run_controller` and `measure`; or no text of two tokens.
    """
    if "ar" in controllers:
        raise InputError("controllers: 'ar' is the name of plain decoding here; choose another")
    with tempfile.TemporaryDirectory() as folder:
        traces = record(model, prompts, folder, depths, max_new_tokens=max_new_tokens, overrun=max_draft - 1)
    # Controllers that draw random numbers know texts by their index in the traces.
    by_id = {prompt.id: prompt for prompt in prompts}
    chosen = [by_id[text] for text in traces.text_ids]
    encoded = [(prompt.id, prompt.task, model.encode(prompt.text)) for prompt in chosen]
    methods = {"ar": ar_method(model, max_new_tokens)} | {
        name: controller_method(model, controller, depths, max_new_tokens, max_draft=max_draft)
        for name, controller in controllers.items()
    }
    rows, _ = measure(methods, encoded, repeats=repeats, seed=seed, progress=progress)
    measured = {row["method"]: float(row["speedup"]) for row in summarise_rows(rows)}
    return [
        Prediction(
            name,
            run_controller(traces, controller, cost=cost, max_draft=max_draft).speedup,
            measured[name],
        )
        for name, controller in controllers.items()
    ]
