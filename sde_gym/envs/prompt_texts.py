"""The texts that a model makes of prompts, and the order in which they are played."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sde_gym.envs.order import TextOrder, chosen_text, text_option
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.prompts import Prompt, load_prompts
from sde_gym.traces.trace_set import texts_of_tasks

_LANE = np.zeros(1, np.int64)


class PromptTexts:
    """One text for each prompt. Which of them are no episode shows only once the model has begun them.

    Args:
        prompts: name of a prompt set, path of a file, or `Prompt`s.
        tasks: only prompts of these tasks; all if not given.
        order: "shuffled" or "sequential".

    Attributes:
        prompts: all there are, of any task.

    Raises:
        InputError: no such prompts, tasks or order.
    """

    def __init__(
        self, prompts: str | Path | Sequence[Prompt], tasks: Sequence[str] | None, order: str
    ) -> None:
        self.prompts = _prompts(prompts)
        self._order = TextOrder(texts_of_tasks([prompt.task for prompt in self.prompts], tasks), order)
        self._seeded = False
        self._left_out: set[int] = set()

    def encoded(self, model: LayeredModel) -> list[list[int]]:
        """Token ids of all prompts.

        Raises:
            InputError: a prompt that the model cannot encode; the message names it.
        """
        return [_encoded(model, prompt) for prompt in self.prompts]

    def chosen(self, options: Mapping[str, Any] | None) -> int | None:
        """The text that reset's options ask for, None if they ask for none.

        Raises:
            InputError: an unknown option, or a text that there is not.
        """
        wanted = text_option(options)
        if wanted is None:
            return None
        return chosen_text(wanted, self._order.texts, [prompt.id for prompt in self.prompts])

    def seed(self, seed: int | None, entropy: np.random.Generator) -> None:
        """Start the order over with this seed; without one only if there never was any, then drawn."""
        if seed is not None or not self._seeded:
            self._order.seed(_LANE, [int(entropy.integers(2**62)) if seed is None else seed])
            self._seeded = True

    def next(self) -> int:
        """The next text in order that was not left out.

        Raises:
            InputError: all were.
        """
        while len(self._left_out) < len(self._order.texts):
            text = int(self._order.next(_LANE)[0])
            if text not in self._left_out:
                return text
        raise InputError(f"prompts: none of {len(self._order.texts)} gives a text of at least two tokens")

    def leave_out(self, text: int) -> None:
        """Pass over a text that turned out to be too short for an episode."""
        self._left_out.add(text)


def _prompts(prompts: Any) -> list[Prompt]:
    """The prompts behind the argument."""
    if isinstance(prompts, (str, Path)):
        return load_prompts(prompts)
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts: {prompts!r} is neither a set's name, nor a path, nor a list of Prompt")
    found = list(prompts)
    for prompt in found:
        if not isinstance(prompt, Prompt):
            raise InputError(f"prompts: {prompt!r} is no Prompt")
    if not found or len({prompt.id for prompt in found}) != len(found):
        raise InputError("prompts: give at least one, and no two with the same id")
    return found


def _encoded(model: LayeredModel, prompt: Prompt) -> list[int]:
    """Token ids; an error names the prompt."""
    try:
        return model.encode(prompt.text)
    except InputError as error:
        raise InputError(f"prompt {prompt.id!r}: {error}") from None
