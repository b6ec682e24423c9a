"""Plain greedy decoding through the same layers: the baseline of every speed-up here."""

from __future__ import annotations

import time

import torch

from sde_gym.decoding.result import DecodeResult, check_request
from sde_gym.models.layered import LayeredModel


@torch.inference_mode()
def autoregressive(model: LayeredModel, prompt: list[int], max_new_tokens: int) -> DecodeResult:
    """Greedy decoding, every token through all layers.

    Args:
        model: any `LayeredModel`.
        prompt: token ids, at least one.
        max_new_tokens: budget; less is generated if the text or the context ends.

    Returns:
        Tokens equal to `model.hf.generate(do_sample=False)` in float32.
    """
    budget = check_request(model, prompt, max_new_tokens)
    result = DecodeResult(model.num_layers)
    if budget == 0:
        return result
    top = model.num_layers
    started = time.perf_counter()
    sequence = model.sequence(len(prompt) + budget)
    sequence.append(prompt)
    sequence.advance(top)
    token = int(sequence.score(top).argmax())
    result.emit(token, top, "prefill")
    result.prefill_seconds = time.perf_counter() - started
    started = time.perf_counter()
    while len(result.tokens) < budget and token not in model.eos_token_ids:
        sequence.append([token])
        sequence.advance(top)
        token = int(sequence.score(top).argmax())
        result.emit(token, top, "final")
    steps = len(result.tokens) - 1
    result.decode_seconds = time.perf_counter() - started
    result.layer_passes = result.sequential_layers = steps * top
    result.head_calls = steps
    return result
