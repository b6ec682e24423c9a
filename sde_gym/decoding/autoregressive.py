"""Plain decoding through the same layers: the baseline of every speed-up here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sde_gym.checks import token_ids
from sde_gym.decoding.result import NEAR_TIE, DecodeResult, check_request
from sde_gym.decoding.round import TokenRules
from sde_gym.models.layered import LayeredModel


@torch.inference_mode()
def autoregressive(
    model: LayeredModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    rules: TokenRules | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
    count_near_ties: bool = False,
) -> DecodeResult:
    """Every token through all layers, one after the other.

    Args:
        model: any `LayeredModel`.
        prompt: token ids, at least one.
        max_new_tokens: budget; less is generated if the text or the context ends.
        rules: how tokens are chosen, and what ends the text; None = the most probable one.
        on_tokens: given each token, in a list of one, as soon as it is there.
        count_near_ties: fill `near_ties`.

    Returns:
        Without rules, tokens equal to `model.hf.generate(do_sample=False)` in float32.

    Raises:
        InputError: see `check_request`, or a token id that the model does not have.
    """
    budget = check_request(model, prompt, max_new_tokens)
    result = DecodeResult(model.num_layers)
    if budget == 0:
        return result
    top = model.num_layers
    eos = model.eos_token_ids if rules is None else rules.eos_token_ids
    ids = token_ids("prompt", prompt)
    started = time.perf_counter()
    sequence = model.sequence(len(ids) + budget)
    sequence.append(ids)
    while True:
        sequence.advance(top)
        logits = sequence.score(top)
        if rules is None:
            token = int(logits.argmax())
        else:
            chosen = rules.verify(logits, ids, [], [])[1]
            assert chosen is not None
            token = chosen
        if count_near_ties:
            best = logits[0].topk(2).values
            result.near_ties += int(best[0] - best[1] < NEAR_TIE)
        if result.tokens:
            result.emit(token, top, "final")
        else:
            result.emit(token, top, "prefill")
            result.prefill_seconds = time.perf_counter() - started
            started = time.perf_counter()
        ids.append(token)
        if on_tokens is not None:
            on_tokens([token])
        if len(result.tokens) == budget or token in eos or (rules is not None and rules.stops(ids)):
            break
        sequence.append([token])
    steps = len(result.tokens) - 1
    result.decode_seconds = time.perf_counter() - started
    result.layer_passes = result.sequential_layers = steps * top
    result.head_calls = steps
    return result
