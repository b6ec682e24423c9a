"""Self-speculative greedy decoding under a controller, lossless: `TextDecoder`, decided by a `Controller`."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_

import numpy as np
import torch

from sde_gym.checks import token_ids
from sde_gym.decoding.decisions import ask, check_controller
from sde_gym.decoding.features import check_features
from sde_gym.decoding.result import DecodeResult, Round, check_model, check_request
from sde_gym.decoding.round import TextDecoder, TokenRules
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Controller, RoundOutcome, View, feature_settings
from sde_gym.settings import DEFAULT_MAX_DRAFT

_LANE = np.zeros(1, np.int64)


@torch.inference_mode()
def speculative(
    model: LayeredModel,
    prompt: Sequence_[int],
    controller: Controller,
    depths: Sequence_[int],
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
    """Self-speculative decoding of one prompt.

    Args:
        model: any `LayeredModel`.
        prompt: token ids, at least one.
        controller: decides depth and draft length; it is bound and reset here.
        depths: candidate exit depths, increasing, below L.
        max_new_tokens: budget, at least 0.
        max_draft: most proposals in a round (LEDE's cap is 12), at most `settings.LONGEST_DRAFT`.
        k: tokens averaged by the `confidence` feature; None takes what the controller was made
            for, else 5.
        window: tokens averaged by the `trace` feature; None likewise, else 8.
        text: number of the text, for controllers that draw random numbers.
        rules: how tokens are chosen, and what ends the text; None = the most probable one.
        on_tokens: given the tokens of each emission as soon as they are certain, token 0 first. What it
            raises ends the decoding and passes through; nothing of the model is left changed.
        count_near_ties: fill `near_ties`.

    Returns:
        Tokens equal to `autoregressive`'s in float32; with sampling `rules`, distributed like its.

    Raises:
        InputError: an argument of another kind or out of its range, depths or settings that the controller
            does not fit, or one that answers anything but actions.
    """
    check_model(model)
    check_controller(controller)
    k, window = feature_settings(controller, k, window)
    max_draft, k, window = check_features(model, controller.observation, max_draft, k, window)
    candidates = model.check_depths(depths)
    budget = check_request(model, prompt, max_new_tokens)
    prompt = token_ids("prompt", prompt)
    controller.bind(candidates, model.num_layers, max_draft)
    controller.reset(_LANE)
    if budget == 0:
        return DecodeResult(model.num_layers)
    started = time.perf_counter()
    decoder = TextDecoder(
        model, candidates, budget, controller.observation, max_draft=max_draft, k=k, window=window,
        every_token=getattr(controller, "walks_every_token", False),
        shadows=getattr(controller, "shadows", False), rules=rules, count_near_ties=count_near_ties,
    )  # fmt: skip
    drive(decoder, prompt, controller, text, on_tokens, started)
    return decoder.result


def drive(
    decoder: TextDecoder,
    prompt: Sequence_[int],
    controller: Controller,
    text: int,
    on_tokens: Callable[[list[int]], None] | None,
    started: float,
) -> None:
    """Decode a text to its end, every decision the controller's.

    Args:
        decoder: new.
        prompt: token ids.
        controller: bound, and reset for lane 0.
        text: number of the text.
        on_tokens: as for `speculative`.
        started: when prefill began, of `time.perf_counter`.
    """
    result = decoder.result
    decoder.prefill(prompt)
    result.prefill_seconds = time.perf_counter() - started
    if on_tokens is not None:
        on_tokens(result.tokens[:1])
    started = time.perf_counter()
    number = np.array([text], np.int64)
    while not decoder.finished:
        known = len(result.tokens)
        ended = _round(decoder, controller, number)
        fed_back = time.perf_counter()
        controller.feedback(
            RoundOutcome(
                _LANE,
                np.array([decoder.index]),
                np.array([ended.drafted]),
                np.array([ended.accepted]),
                None if decoder.shadow is None else [decoder.shadow],
            )
        )
        result.controller_seconds += time.perf_counter() - fed_back
        if on_tokens is not None:
            on_tokens(result.tokens[known:])
    result.decode_seconds = time.perf_counter() - started


def _round(decoder: TextDecoder, controller: Controller, text: np.ndarray) -> Round:
    """One round, every decision the controller's."""
    result = decoder.result
    decoder.open_round()
    while True:
        if decoder.names and controller.reads(decoder.phase, decoder.index):
            decoder.read()
        started = time.perf_counter()
        view = View(
            np.array([decoder.phase], np.int64),
            np.array([decoder.index], np.int64),
            np.array([len(decoder.proposals)], np.int64),
            decoder.observation(),
            _LANE,
            text,
            np.array([result.decisions], np.int64),
        )
        (action,) = ask(controller, view)
        result.controller_seconds += time.perf_counter() - started
        ended = decoder.act(action)
        if ended is not None:
            return ended
