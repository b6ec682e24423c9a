"""The methods of the decoding benchmark by name, and how each is made.

`METHODS` is the registry: a name and a function that makes the method from a `Preparation`. What a
method leaves open (thresholds, depths, lengths) is chosen on training prompts: by timing (the static
setting), in replay under the run's cost model, or, where replay cannot serve it, by counting layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sde_gym.decoding import DecodeResult, autoregressive
from sde_gym.decoding.dex import dex
from sde_gym.envs.hindsight import PlannedController, least_cost
from sde_gym.errors import InputError
from sde_gym.evaluation.adadecode_settings import adadecode_candidates
from sde_gym.evaluation.benchmark import ar_method
from sde_gym.evaluation.decode_contender import Contender, controlled, draw_seeds, learned, token_rules
from sde_gym.evaluation.decode_preparation import Candidate, Preparation
from sde_gym.evaluation.decode_settings import DecodeSettings
from sde_gym.evaluation.exploration_choice import chosen_exploration_set
from sde_gym.evaluation.exploration_sets import nested_split
from sde_gym.evaluation.peers import assistant_early_exit_method, generate_method, prompt_lookup_method
from sde_gym.policies.ablation import DepthChoiceOnly, LengthChoiceOnly
from sde_gym.policies.controller import View
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.lite import CALMController, LITEController
from sde_gym.policies.observation import Action
from sde_gym.policies.rules import StaticController

#: Target acceptances that LITE's thresholds are calibrated for; the fastest on training texts is used.
LITE_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9)

#: CALM's thresholds tried on training texts.
CALM_THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

#: Explorers of DEX, all in one process.
DEX_EXPLORERS = 4

#: What the tables say of it.
DEX_NOTE = (
    "`dex` is in one process: all stages of a tick run one after the other, and branches that are dropped "
    "are run, too. So it is slower than `ar`; side by side its explorers are measured by `sde-gym bench "
    "explorers`."
)


Builder = Callable[[Preparation], Contender]


def chosen_methods(settings: DecodeSettings) -> tuple[str, ...]:
    """Names of the methods to measure, in the order of `METHODS`; `ar` always is one.

    Raises:
        InputError: a name that there is not, one given twice, or one that cannot sample.
    """
    asked = settings.methods
    if asked is None:
        return tuple(name for name in METHODS if not settings.samples or name not in GREEDY_ONLY)
    for name in asked:
        if name not in METHODS:
            raise InputError(f"methods: there is no {name!r}; the methods are {', '.join(METHODS)}")
        if asked.count(name) > 1:
            raise InputError(f"methods: {name!r} is named twice; name it once")
        if settings.samples and name in GREEDY_ONLY:
            raise InputError(
                f"methods: {name!r} decodes greedily only; leave it out, or the temperature "
                f"{settings.temperature:g}"
            )
    return tuple(name for name in METHODS if name in asked or name == "ar")


def _ar(prepared: Preparation) -> Contender:
    model, budget = prepared.model, prepared.settings.max_new_tokens
    return Contender(
        ar_method(model, budget, token_rules(prepared)),
        counted=lambda ids, number: autoregressive(model, ids, budget, count_near_ties=True),
    )


def _generate(prepared: Preparation) -> Contender:
    settings = prepared.settings
    return Contender(
        generate_method(
            prepared.model, settings.max_new_tokens, settings.temperature, draw_seeds(settings.seed)
        )
    )


def _prompt_lookup(prepared: Preparation) -> Contender:
    settings = prepared.settings
    return Contender(
        prompt_lookup_method(
            prepared.model, settings.max_new_tokens, settings.prompt_lookup_tokens, settings.temperature,
            draw_seeds(settings.seed),
        )
    )  # fmt: skip


def _assistant_early_exit(prepared: Preparation) -> Contender:
    settings, static = prepared.settings, prepared.static
    decode = assistant_early_exit_method(
        prepared.model, settings.max_new_tokens, static.exit_depth, static.draft_length,
        settings.temperature, draw_seeds(settings.seed),
    )  # fmt: skip
    columns = {"exit_depth": static.exit_depth, "draft_length": static.draft_length}
    return Contender(decode, columns=columns, identity=f"({static.exit_depth}, {static.draft_length})")


def _static(prepared: Preparation) -> Contender:
    static = prepared.static
    controller = StaticController(static.exit_depth, static.draft_length)
    columns = {"exit_depth": static.exit_depth, "draft_length": static.draft_length}
    return controlled(prepared, (controller, (static.exit_depth,)), columns=columns)


def _draft_verify(prepared: Preparation) -> Contender:
    candidates: list[Candidate] = [(DraftVerifyController(depth), (depth,)) for depth in prepared.depths]
    return controlled(prepared, prepared.fastest(candidates))


def _lite(prepared: Preparation) -> Contender:
    candidates: list[Candidate] = [
        (LITEController.calibrated(prepared.traces, target, depths), depths)
        for target in LITE_TARGETS
        for depths in _offers(prepared)
    ]
    return controlled(prepared, prepared.fastest(candidates))


def _calm(prepared: Preparation) -> Contender:
    candidates: list[Candidate] = [
        (CALMController(threshold, prepared.settings.max_new_tokens), depths)
        for threshold in CALM_THRESHOLDS
        for depths in _offers(prepared)
    ]
    return controlled(prepared, prepared.fastest(candidates))


def _del(prepared: Preparation) -> Contender:
    return controlled(prepared, (DELController(), prepared.depths))


def _adadecode(prepared: Preparation) -> Contender:
    candidates: list[Candidate] = [*adadecode_candidates(prepared.depths, prepared.static.exit_depth)]
    return controlled(prepared, prepared.fewest_layers("adadecode", candidates))


def _dex(prepared: Preparation) -> Contender:
    model, budget, rules = prepared.model, prepared.settings.max_new_tokens, token_rules(prepared)
    chosen = _dex_depths(prepared)

    def decode(ids: list[int], number: int) -> DecodeResult:
        return dex(model, ids, chosen, budget, rules=rules(number))

    return Contender(
        decode,
        columns={"explorers": len(chosen), "exploration_set": list(chosen)},
        identity=str(list(chosen)),
        counted=lambda ids, number: dex(model, ids, chosen, budget, count_near_ties=True),
        note=DEX_NOTE,
    )


def _dex_depths(prepared: Preparation) -> tuple[int, ...]:
    """The set that takes least on the training traces, if the even one is among those to choose from."""
    layers = prepared.model.num_layers
    even = nested_split(layers, min(DEX_EXPLORERS, layers))
    if {*even[:-1]} <= {*prepared.depths}:
        return chosen_exploration_set(prepared.traces, len(even))
    return even


def _lede(prepared: Preparation) -> Contender:
    return learned(prepared, prepared.policy("lede"))


def _lede_no_depth(prepared: Preparation) -> Contender:
    policy, wanted = prepared.policy("lede"), prepared.static.exit_depth
    nearest = min(policy.depths, key=lambda depth: abs(depth - wanted))
    return learned(prepared, policy, LengthChoiceOnly(policy, nearest))


def _lede_no_length(prepared: Preparation) -> Contender:
    policy = prepared.policy("lede")
    length = min(prepared.static.draft_length, policy.max_draft)
    return learned(prepared, policy, DepthChoiceOnly(policy, length))


def _lede_speed(prepared: Preparation) -> Contender:
    return learned(prepared, prepared.policy("lede_speed"))


def _oracle(prepared: Preparation) -> Contender:
    settings, traces = prepared.settings, prepared.measured_traces
    found = least_cost(traces, max_draft=settings.max_draft, cost=settings.cost)
    number = {prompt.id: index for index, prompt in enumerate(prepared.measured)}
    plans = {
        number[traces.text_ids[text]]: actions
        for text, actions in zip(found.texts.tolist(), found.actions, strict=True)
    }
    made = controlled(prepared, (Oracle(plans), prepared.depths))
    # Replay counts texts as the trace set does, the decoder as the prompts are numbered.
    return replace(made, controller=found.controller())


METHODS: dict[str, Builder] = {
    "ar": _ar,
    "generate": _generate,
    "prompt_lookup": _prompt_lookup,
    "assistant_early_exit": _assistant_early_exit,
    "static": _static,
    "draft_verify": _draft_verify,
    "lite": _lite,
    "calm": _calm,
    "del": _del,
    "adadecode": _adadecode,
    "dex": _dex,
    "lede": _lede,
    "lede_no_depth": _lede_no_depth,
    "lede_no_length": _lede_no_length,
    "lede_speed": _lede_speed,
    "oracle": _oracle,
}
"""By name, in the order of the tables."""

GREEDY_ONLY = frozenset({"oracle"})
"""Methods that know the greedy text beforehand."""


class Oracle(PlannedController):
    """Plays the plan of each text; where a near-tie made the text another one, it drafts no more.

    Args:
        plans: by number of the text, int64 actions in order.
    """

    name = "oracle"

    def act(self, view: View) -> NDArray[np.int64]:
        """The plan's action; CONTINUE after its end."""
        actions = []
        for text, decision in zip(view.text.tolist(), view.decision.tolist(), strict=True):
            plan = self.plans.get(text, ())
            actions.append(plan[decision] if decision < len(plan) else Action.CONTINUE)
        return np.array(actions, dtype=np.int64)


def _offers(prepared: Preparation) -> Sequence[tuple[int, ...]]:
    """The candidate depths that a rule may be offered: all, or one of them."""
    return (prepared.depths, *((depth,) for depth in prepared.depths))
