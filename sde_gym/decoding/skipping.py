"""Self-speculative decoding with a draft that skips sublayers: Draft & Verify (Zhang et al. 2023).

The draft is the whole stack but for the sublayers of a `SkipSet`, scored by the final norm and the full
head. To the controller it looks like the only candidate depth: the number of layers that cost about
as much (`SkipSet.depth`). Everything else is the round of `TextDecoder`, with two differences. A draft
leaves nothing that verification could go on from: every fed token is run through all layers, from the
first. And the keys and values of drafts are those of the skipped stack until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_

import numpy as np
import torch

from sde_gym.checks import token_ids
from sde_gym.decoding.decisions import check_controller
from sde_gym.decoding.features import check_features
from sde_gym.decoding.result import DecodeResult, check_model, check_request
from sde_gym.decoding.round import TextDecoder, TokenRules
from sde_gym.decoding.speculative import drive
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.sequence import Sequence
from sde_gym.models.skipping import SkippedStack, SkipSet
from sde_gym.policies.controller import Controller, feature_settings
from sde_gym.settings import DEFAULT_MAX_DRAFT

_LANE = np.zeros(1, np.int64)


@torch.inference_mode()
def skipping(
    model: LayeredModel,
    prompt: Sequence_[int],
    skip: SkipSet,
    controller: Controller,
    max_new_tokens: int,
    *,
    max_draft: int = DEFAULT_MAX_DRAFT,
    k: int | None = None,
    window: int | None = None,
    text: int = 0,
    rules: TokenRules | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
    count_near_ties: bool = False,
) -> DecodeResult:
    """Self-speculative decoding of one prompt, drafts made without some sublayers.

    Args:
        model: any `LayeredModel` whose stack can skip sublayers.
        prompt: token ids, at least one.
        skip: the sublayers that drafts leave out.
        controller: decides whether and how long to draft; it is bound to the one depth
            `skip.depth(model.num_layers)`, and reset, here.
        max_new_tokens: budget, at least 0.
        max_draft: most proposals in a round.
        k, window, text, rules, on_tokens, count_near_ties: as for `speculative`.

    Returns:
        Tokens equal to `autoregressive`'s in float32; with sampling `rules`, distributed like its. The depth
        of a draft, and of its round, is the depth bound. Draft passes are counted as half a layer for
        each sublayer that they run, the sum of all rounded up.

    Raises:
        InputError: a skip set that does not fit the model, or a controller that needs several depths or the
            exit probe.
    """
    check_model(model)
    check_controller(controller)
    k, window = feature_settings(controller, k, window)
    _check_controller(controller)
    max_draft, k, window = check_features(model, controller.observation, max_draft, k, window)
    stack = SkippedStack(model, skip)
    depth = skip.depth(model.num_layers)
    budget = check_request(model, prompt, max_new_tokens)
    prompt = token_ids("prompt", prompt)
    controller.bind((depth,), model.num_layers, max_draft)
    controller.reset(_LANE)
    if budget == 0:
        return DecodeResult(model.num_layers)
    started = time.perf_counter()
    decoder = SkippingDecoder(
        stack, budget, controller.observation, max_draft=max_draft, k=k, window=window,
        rules=rules, count_near_ties=count_near_ties,
    )  # fmt: skip
    drive(decoder, prompt, controller, text, on_tokens, started)
    return decoder.result


class SkippingDecoder(TextDecoder):
    """`TextDecoder` whose one candidate depth is a stack without some sublayers.

    Args:
        stack: makes the drafts.
        budget, names, max_draft, k, window, rules, count_near_ties: as for `TextDecoder`.
    """

    def __init__(
        self, stack: SkippedStack, budget: int, names: tuple[str, ...], *, max_draft: int, k: int,
        window: int, rules: TokenRules | None = None, count_near_ties: bool = False,
    ) -> None:  # fmt: skip
        model = stack.model
        super().__init__(
            model, (stack.skip.depth(model.num_layers),), budget, names, max_draft=max_draft, k=k,
            window=window, rules=rules, count_near_ties=count_near_ties,
        )  # fmt: skip
        self.stack = stack
        self._kept = stack.skip.kept(model.num_layers)
        self._sublayers = 0  # run by all drafts so far
        self._vocabulary = None  # drafts are scored by the full head

    def score(self) -> None:
        """Run the newest token through the skipped stack and compute the full head."""
        assert isinstance(self.sequence, Sequence)
        states = self.stack.newest(self.sequence)
        before, self._sublayers = self._sublayers, self._sublayers + self._kept
        layers = (self._sublayers + 1) // 2 - (before + 1) // 2
        self.result.layer_passes += layers
        self.result.sequential_layers += layers
        self.result.head_calls += 1
        started = time.perf_counter()
        self._logits = self.stack.logits(states)
        self._head_seconds = time.perf_counter() - started


def _check_controller(controller: Controller) -> None:
    """Refuse what one virtual depth cannot serve, by name."""
    if getattr(controller, "walks_every_token", False) or getattr(controller, "shadows", False):
        raise InputError(
            f"controller: {controller.name!r} compares exit depths, and a draft that skips sublayers has "
            "none; use speculative(), or a controller that decides on length alone"
        )
    if "probe" in controller.observation:
        raise InputError(
            f"controller: {controller.name!r} reads the feature 'probe', and the exit probe knows nothing of "
            "skipped sublayers; leave that feature out"
        )
