"""What transformers itself offers, measured beside our decoder: plain, prompt lookup, early exit.

All go through `model.hf.generate`. The checkpoint's own generation config is set aside for the call: a
repetition penalty or the like would make another text than the one compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sde_gym.decoding.result import DecodeResult, Round, check_request
from sde_gym.errors import InputError
from sde_gym.models.checkpoint import quiet_transformers
from sde_gym.models.layered import LayeredModel

#: Decodes one prompt (token ids, number of the prompt) to a result whose times are filled in.
Method = Callable[[list[int], int], DecodeResult]

#: Seed of the draws for the prompt of this number.
Seeds = Callable[[int], int]


def generate_method(
    model: LayeredModel, max_new_tokens: int, temperature: float = 0.0, seeds: Seeds = int
) -> Method:
    """transformers' `generate`: greedy at temperature 0, else sampling from the whole vocabulary."""
    return lambda prompt, number: _generate(model, prompt, max_new_tokens, temperature, seeds(number))[0]


def prompt_lookup_method(
    model: LayeredModel, max_new_tokens: int, lookup_tokens: int, temperature: float = 0.0, seeds: Seeds = int
) -> Method:
    """transformers' prompt lookup: drafts are copied from where the last tokens occurred before.

    The library does not tell how many tokens it copied, so only rounds are counted.
    """
    if lookup_tokens < 1:
        raise InputError(f"lookup_tokens must be at least 1, not {lookup_tokens}")

    def decode(prompt: list[int], number: int) -> DecodeResult:
        result, emissions = _generate(
            model, prompt, max_new_tokens, temperature, seeds(number), prompt_lookup_num_tokens=lookup_tokens
        )
        result.rounds = [Round(model.num_layers, 0, 0) for _ in emissions]
        return result

    return decode


def assistant_early_exit_method(
    model: LayeredModel,
    max_new_tokens: int,
    exit_depth: int,
    draft_length: int,
    temperature: float = 0.0,
    seeds: Seeds = int,
) -> Method:
    """transformers' own self-speculation, `generate(assistant_early_exit=exit_depth)`.

    The draft length and a constant schedule are put into the generation config, since `generate`
    ignores them as arguments. An exception while it drafts would leave the model cut off at
    `exit_depth`; its number of layers is restored here.
    """
    if not 1 <= exit_depth < model.num_layers:
        raise InputError(f"exit_depth {exit_depth} must lie in 1..{model.num_layers - 1}")

    def decode(prompt: list[int], number: int) -> DecodeResult:
        layers = model.hf.config.num_hidden_layers
        try:
            result, emissions = _generate(
                model, prompt, max_new_tokens, temperature, seeds(number), exit_depth,
                num_assistant_tokens=draft_length,
            )  # fmt: skip
        finally:
            model.hf.config.num_hidden_layers = layers
        emitted = 0
        for count in emissions:  # one emission a round: the accepted drafts and one token more
            drafted = min(draft_length, max_new_tokens - emitted - 1)
            if drafted > 0:
                result.rounds.append(Round(exit_depth, drafted, min(count - 1, drafted)))
            else:
                result.rounds.append(Round(model.num_layers, 0, 0))
            emitted += count
        return result

    return decode


class _Emissions:
    """A streamer that notes when the first tokens came out, and how many came each time."""

    def __init__(self) -> None:
        self.prompt_seen = False
        self.first_at = 0.0
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with new tokens."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        if not self.counts:
            self.first_at = time.perf_counter()
        self.counts.append(int(value.numel()))

    def end(self) -> None:
        """Nothing to flush."""


@torch.inference_mode()
def _generate(
    model: LayeredModel,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    exit_depth: int | None = None,
    **drafting: int,
) -> tuple[DecodeResult, list[int]]:
    """A result, and how many tokens came out at a time; `drafting` are fields of the generation config."""
    result = DecodeResult(model.num_layers)
    budget = check_request(model, prompt, max_new_tokens)
    if budget == 0:
        return result, []
    options = {} if exit_depth is None else {"assistant_early_exit": exit_depth}
    ids = torch.tensor([prompt], device=model.device)
    streamer = _Emissions()
    before = model.hf.generation_config
    model.hf.generation_config = _config(model, budget, temperature, drafting)
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with quiet_transformers(), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            started = time.perf_counter()
            output = model.hf.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options)
            finished = time.perf_counter()
    finally:
        model.hf.generation_config = before
    for token in output[0, len(prompt) :].tolist():
        result.emit(token, model.num_layers, "final")
    if streamer.counts:
        result.prefill_seconds = streamer.first_at - started
        result.decode_seconds = finished - streamer.first_at
        result.untimed_tokens = streamer.counts[0]
    return result, streamer.counts


def _config(model: LayeredModel, budget: int, temperature: float, drafting: dict[str, int]) -> Any:
    """A generation config that holds what was asked for and nothing of the checkpoint's."""
    from transformers import GenerationConfig

    ends = list(model.eos_token_ids)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
    config = GenerationConfig(
        **{"do_sample": False, **sampling}, max_new_tokens=budget, eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )  # fmt: skip
    if "num_assistant_tokens" in drafting:
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
    for name, value in drafting.items():
        setattr(config, name, value)
    return config
