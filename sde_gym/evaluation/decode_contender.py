"""A method of the decoding benchmark, ready to be timed and, where replay can serve it, simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sde_gym.decoding.rules import GenerationRules
from sde_gym.envs.run import RunResult, run_controller
from sde_gym.evaluation.benchmark import Method, Rules, controller_method, greedy
from sde_gym.evaluation.decode_preparation import Candidate, Preparation
from sde_gym.policies.controller import Controller
from sde_gym.policies.qnetwork import QController


@dataclass(frozen=True)
class Contender:
    """A method that is ready to decode.

    Attributes:
        decode: what is timed.
        controller: who decides, where it is our speculative decoder.
        depths: its candidate depths.
        max_draft: its cap on the proposals of a round.
        columns: further columns of its table row.
        identity: what tells it from the same method made otherwise.
        counted: the same, greedy, with near-ties counted: of our decoders that no controller leads.
        note: what a reader of the tables has to know of it.
    """

    decode: Method
    controller: Controller | None = None
    depths: tuple[int, ...] = ()
    max_draft: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    identity: str = ""
    counted: Method | None = None
    note: str = ""


def simulate(contender: Contender, prepared: Preparation) -> RunResult | None:
    """What replay says of a method on the measured prompts; None if it has no controller.

    Raises:
        InputError: replay cannot serve this controller.
    """
    controller = contender.controller
    if controller is None:
        return None
    return run_controller(
        prepared.measured_traces, controller, depths=contender.depths, max_draft=contender.max_draft,
        cost=prepared.settings.cost,
    )  # fmt: skip


def token_rules(prepared: Preparation) -> Rules:
    """How our decoder chooses tokens: greedily, or by drawing with a generator of the prompt's own."""
    settings, model = prepared.settings, prepared.model
    if not settings.samples:
        return greedy
    seeds = draw_seeds(settings.seed)
    return lambda number: GenerationRules(
        model.vocab_size,
        model.eos_token_ids,
        lambda ids, scores: scores / settings.temperature,
        generator=torch.Generator().manual_seed(seeds(number)),
    )


def draw_seeds(seed: int) -> Callable[[int], int]:
    """Seeds of what is drawn for the prompt of each number: the same for all methods and repeats."""
    return lambda number: int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def controlled(
    prepared: Preparation,
    candidate: Candidate,
    max_draft: int | None = None,
    identity: str = "",
    columns: dict[str, Any] | None = None,
) -> Contender:
    """Our speculative decoder under a controller."""
    (controller, depths), settings = candidate, prepared.settings
    cap = settings.max_draft if max_draft is None else max_draft
    decode = controller_method(
        prepared.model, controller, depths, settings.max_new_tokens, token_rules(prepared), max_draft=cap
    )
    return Contender(
        decode,
        controller,
        depths,
        cap,
        columns or {},
        f"{controller.name} of {list(depths)} {identity}".strip(),
    )


def learned(prepared: Preparation, policy: QController, controller: Controller | None = None) -> Contender:
    """The decoder under a policy, or under a controller that asks it."""
    weights = str(policy.meta.get("weights_sha256", ""))[:16]
    return controlled(prepared, (controller or policy, policy.depths), policy.max_draft, weights)
