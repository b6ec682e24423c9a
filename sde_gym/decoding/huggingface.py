"""The decoder inside transformers: `model.generate(..., custom_generate=huggingface(controller))`.

`generate` prepares inputs, processors and stopping criteria as for its own methods and then calls what it
was given. Anything that cannot be honoured is refused by name (`sde_gym.decoding.request`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from sde_gym.decoding.generate import Decoding, token_by_token, warn_of_the_context
from sde_gym.decoding.opening import check_untouched, fingerprint, opened
from sde_gym.decoding.options import check_streamer, generator_from
from sde_gym.decoding.request import Request, stop_string_criteria
from sde_gym.decoding.result import DecodeResult
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import Controller


def huggingface(
    controller: Controller | None,
    *,
    depths: Sequence[int] | None = None,
    max_draft: int | None = None,
    k: int | None = None,
    window: int | None = None,
    model: LayeredModel | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
) -> CustomGenerate:
    """Self-speculative decoding as the `custom_generate` of transformers' `model.generate`.

    Args:
        controller: decides depth and draft length; None = plain decoding through our layers.
        depths: candidate exit depths; None = what the policy was trained for, or the controller's
            `exit_depth`, else those of 1, 2, 3, 4, 6, 8, 12 that the model has.
        max_draft: most proposals in a round; None = what the policy was trained for, else 12.
        k, window: of features; None = the controller's own.
        model: the `LayeredModel` of the model that `generate` is called on, where it has compact heads,
            adapters or a probe; None = one is made at the first call and kept as long as the model.
        tokenizer: for `stop_strings`, where `generate` is not given one.
        seed: every call draws from a generator with this seed; None = torch's global one, which
            `transformers.set_seed` seeds.

    Returns:
        To be passed as `custom_generate`; any number of times, for any models.
    """
    return CustomGenerate(Decoding(controller, depths, max_draft, k, window), model, tokenizer, seed)


class CustomGenerate:
    """A decoding method for `generate`; made by `huggingface`.

    Attributes:
        results: a `DecodeResult` for each row of the last call; empty if that failed.
    """

    def __init__(
        self, decoding: Decoding, model: LayeredModel | None, tokenizer: Any, seed: int | None
    ) -> None:
        if model is not None and not isinstance(model, LayeredModel):
            raise InputError(
                f"model: a {type(model).__name__} is not a LayeredModel; wrap it (LayeredModel(hf)), or "
                "leave model out"
            )
        generator_from(seed)
        self.results: list[DecodeResult] = []
        self._decoding = decoding
        self._model = model
        self._weights = None if model is None else fingerprint(model.hf)
        self._tokenizer = tokenizer
        self._seed = seed

    # Names of parameters that `generate` does not know are taken out of its arguments and passed on: that
    # is how `stop_strings` gets here without being missed for the tokenizer, which `generate` drops.
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        stop_strings: str | Sequence[str] | None = None,
        streamer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What `generate` calls.

        Returns:
            int64 (rows, t) as `generate`'s own methods, or a `GenerateDecoderOnlyOutput`.

        Raises:
            InputError: something that cannot be honoured, or a model that cannot be decoded so.
        """
        self.results = []
        dropped = _dropped_arguments(self, sys._getframe(1))
        if dropped.get("assistant_model") is not None:
            raise InputError("assistant_model: drafts come from early exits here; leave it out")
        if dropped.get("synced_gpus"):
            raise InputError("synced_gpus: this decoder does not run on sharded weights; leave it out")
        streamer = dropped.get("streamer", streamer)
        criteria = stopping_criteria
        if stop_strings is not None:
            offered = (
                tokenizer,
                dropped.get("tokenizer"),
                self._tokenizer,
                getattr(self._model, "tokenizer", None),
            )
            tokenizer = next((one for one in offered if one is not None), None)
            criteria = type(criteria)([*criteria, stop_string_criteria(stop_strings, tokenizer)])
        request = Request(input_ids, logits_processor, criteria, generation_config, model_kwargs)
        request.check()
        check_streamer(streamer)
        if streamer is not None and len(input_ids) > 1:
            raise InputError(f"streamer: it follows one text, not {len(input_ids)}; give one at a time")
        pad = _pad_token_id(generation_config)
        if pad is None and len(input_ids) > 1:
            raise InputError("pad_token_id: several texts may end at different lengths; set it")
        layered = self._layered(model)
        rows = request.rows(layered.vocab_size, layered.eos_token_ids, generator_from(self._seed))
        self._decoding.warn_of_other_weights(layered)
        self.results = self._decoding.run(
            layered, rows, request.max_new_tokens, None if streamer is None else token_by_token(streamer)
        )
        if streamer is not None:
            streamer.end()
        warn_of_the_context(layered, rows, self.results, request.max_new_tokens)
        sequences = _joined(input_ids, [result.tokens for result in self.results], pad)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        output: Any = GenerateDecoderOnlyOutput  # its annotations ask for a type that no tensor has
        return output(sequences=sequences)

    def _layered(self, hf: Any) -> LayeredModel:
        """The `LayeredModel` of a transformers model: the given one, the one made before, or a new one."""
        if hf.training:
            raise InputError("the model is in training mode; call model.eval() first")
        check_untouched(hf)
        if self._model is None:
            return opened(hf)
        if self._model.hf is not hf:
            raise InputError(
                f"model: {self._model.name!r} is not the LayeredModel of the model that generate was called "
                "on; call its .hf.generate, or leave model out"
            )
        if fingerprint(hf) != self._weights:
            raise InputError(
                f"model: the weights or modules of {self._model.name!r} were changed or moved since "
                "huggingface() was called; make the LayeredModel and this anew"
            )
        return self._model


def _dropped_arguments(method: CustomGenerate, frame: FrameType) -> dict[str, Any]:
    """What `generate` was given but does not hand on to a custom method: streamer, tokenizer and others.

    transformers (5.24) puts a custom method's extra arguments in the place of its own ones, so that a
    streamer would see the prompt and then nothing, and an assistant would be ignored. They still stand in
    the frame of `generate`, which calls this method, and in those of its decorators.

    Args:
        method: the custom method.
        frame: its caller's.
    """
    found: dict[str, Any] = {}
    if frame.f_locals.get("custom_generate") is not method:
        return found  # called by hand
    for name in ("streamer", "assistant_model", "synced_gpus"):
        found[name] = frame.f_locals.get(name)
    outer = frame.f_back
    while outer is not None:
        keywords = outer.f_locals.get("kwargs")
        if not isinstance(keywords, dict) or keywords.get("custom_generate") is not method:
            break
        found["tokenizer"] = keywords.get("tokenizer")
        outer = outer.f_back
    return found


def _pad_token_id(config: Any) -> int | None:
    """What `generate` fills finished rows with."""
    pad = config._pad_token_tensor
    return None if pad is None else int(pad.reshape(-1)[0])


def _joined(input_ids: Tensor, generated: list[list[int]], pad: int | None) -> Tensor:
    """Prompts and what was generated, padded on the right, int64 (rows, t)."""
    longest = max(len(tokens) for tokens in generated)
    filled = [tokens + [0 if pad is None else pad] * (longest - len(tokens)) for tokens in generated]
    return torch.cat([input_ids, torch.tensor(filled, device=input_ids.device)], 1)
