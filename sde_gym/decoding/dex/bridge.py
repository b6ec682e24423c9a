"""Depth exploration inside transformers: `model.generate(..., custom_generate=huggingface(X))`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sde_gym.decoding.dex.decoder import dex
from sde_gym.decoding.generate import Decoding
from sde_gym.decoding.huggingface import CustomGenerate
from sde_gym.decoding.request import Row
from sde_gym.decoding.result import DecodeResult
from sde_gym.models.layered import LayeredModel


def huggingface(
    exploration_set: int | Sequence[int],
    *,
    decs: bool = True,
    single_exit: bool = False,
    model: LayeredModel | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
) -> CustomGenerate:
    """Depth exploration as the `custom_generate` of transformers' `model.generate`.

    What is honoured and what is refused is as for `sde_gym.decoding.huggingface`. Several prompts are
    decoded one after the other. Sampled texts are distributed as `generate`'s, but a seed gives others.

    Args:
        exploration_set, decs, single_exit: as for `dex`.
        model: the `LayeredModel` of the model that `generate` is called on, where it has compact heads or
            adapters; None = one is made at the first call.
        tokenizer: for `stop_strings`, where `generate` is not given one.
        seed: every call draws from a generator with this seed; None = torch's global one.

    Returns:
        To be passed as `custom_generate`; its `results` are a `DexResult` for each row.
    """
    decoding = DexDecoding(None, exploration_set=exploration_set, decs=decs, single_exit=single_exit)
    return CustomGenerate(decoding, model, tokenizer, seed)


@dataclass(frozen=True)
class DexDecoding(Decoding):
    """`Decoding` that explores depths, under no controller.

    Attributes:
        exploration_set, decs, single_exit: as for `dex`.
    """

    exploration_set: int | Sequence[int] = ()
    decs: bool = True
    single_exit: bool = False

    def run(
        self,
        model: LayeredModel,
        rows: Sequence[Row],
        max_new_tokens: int,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> list[DecodeResult]:
        """Decode texts one after the other; `on_tokens` hears of each token."""
        return [
            dex(
                model, row.prompt, self.exploration_set, max_new_tokens, decs=self.decs,
                single_exit=self.single_exit, rules=row.rules, on_tokens=on_tokens,
            )
            for row in rows
        ]  # fmt: skip
