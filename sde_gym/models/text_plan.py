"""What a model writes for adapters to learn from: which text each lane is at, and what is fed there next.

There are two kinds of text. Most start from nothing but the model's own idea of a beginning: a chat model
is given the template up to the user's turn and draws a question there, another model draws some tokens
behind its first one. The others start from a prompt that was given. Behind either comes the answer, drawn
or greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.models.adapter_settings import HELD_OUT, OwnTextSettings
from sde_gym.models.layered import LayeredModel

#: Stands where the user's words are, to find out what the chat template puts around them.
_MARK = "\u2603"

#: Multiples of it, less their whole part, fall evenly into [0, 1) however many are taken: (sqrt(5) - 1) / 2.
_GOLDEN = 0.6180339887498949

_GIVEN, _OPENING, _ANSWER = range(3)


@dataclass(frozen=True)
class Frame:
    """The tokens around what is drawn: `prefix`, then the opening, then `bridge`, then the answer."""

    prefix: tuple[int, ...]
    bridge: tuple[int, ...]


def frame(model: LayeredModel) -> Frame:
    """What surrounds a text of the model.

    Raises:
        InputError: no tokenizer, or a template that does not leave the user's words alone.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"model {model.name!r} has no tokenizer, so it cannot begin a text of its own")
    if not getattr(tokenizer, "chat_template", None):
        first = tokenizer.bos_token_id
        first = first if first is not None else (model.eos_token_ids or (0,))[0]
        return Frame((int(first),), ())
    turn = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    before, found, behind = text.partition(_MARK)
    prefix = tuple(tokenizer(before, add_special_tokens=False)["input_ids"])
    bridge = tuple(tokenizer(behind, add_special_tokens=False)["input_ids"])
    if not found or not prefix or not bridge:
        raise InputError(f"the chat template of {model.name!r} does not show where the user's words are")
    return Frame(prefix, bridge)


class TextPlan:
    """One block's texts and the lanes that write them.

    Args:
        around: the model's frame.
        settings: which texts.
        ends: token ids that end a text.
        prompts: token ids of whole prompts, which a share of the texts answers; may be empty.
        block: the block's number.

    Attributes:
        text: int (lanes,), the number in its block of the text that each lane writes.
        fed: int64 (lanes,), the token that each lane is fed next.
        common: tokens that all texts begin with; lanes hold them before their first step.
        capacity: most tokens of a lane.
    """

    def __init__(
        self, around: Frame, settings: OwnTextSettings, ends: Sequence[int],
        prompts: Sequence[Sequence[int]] = (), block: int = 0,
    ) -> None:  # fmt: skip
        self._around, self._settings, self._ends = around, settings, set(ends)
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._prompt_of, self._drawn = _shares(settings, len(prompts), block)
        self.common = _common((around.prefix, *self._prompts))
        own = len(around.prefix) + settings.opening + len(around.bridge)
        self.capacity = max(own, *map(len, self._prompts), 0) + settings.answer + 1
        lanes = min(settings.lanes, settings.texts)
        self._next = lanes  # the number of the next text
        self.text = np.arange(lanes)
        self._phase = np.empty(lanes, dtype=np.int64)
        self._then = np.empty(lanes, dtype=np.int64)  # the phase behind the given one
        self._count = np.empty(lanes, dtype=np.int64)  # tokens of the phase
        self.fed = np.empty(lanes, dtype=np.int64)
        self._given: list[tuple[int, ...]] = [()] * lanes  # what is fed in the given phase
        for lane in range(lanes):
            self._begin(lane)

    def _begin(self, lane: int) -> None:
        """Put a lane at the start of its text."""
        prompt = int(self._prompt_of[self.text[lane]])
        whole = self._around.prefix if prompt < 0 else self._prompts[prompt]
        self._give(lane, whole[len(self.common) :], _OPENING if prompt < 0 else _ANSWER)

    def _give(self, lane: int, tokens: tuple[int, ...], then: int) -> None:
        """Feed these tokens, at least one, whatever the model says; the last one is in front of `then`."""
        self._given[lane], self._count[lane], self.fed[lane] = tokens, 0, tokens[0]
        self._phase[lane], self._then[lane] = (then if len(tokens) == 1 else _GIVEN), then

    @property
    def is_own(self) -> NDArray[np.bool_]:
        """Of each lane, whether what follows the token that it is fed is the model's own choice."""
        own: NDArray[np.bool_] = self._phase != _GIVEN
        return own

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Of each lane, whether the first token of a text of the model's own follows."""
        first: NDArray[np.bool_] = (self._phase == _OPENING) & (self._count == 0)
        return first

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """Of each lane, whether it goes on with the most probable token; else with a drawn one."""
        greedy: NDArray[np.bool_] = (self._phase == _ANSWER) & ~self._drawn[self.text]
        return greedy

    def go_on(self, drawn: NDArray[np.int64], best: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Take up what was said behind the tokens fed; lanes that started anew, lanes that are done."""
        around, settings, greedy = self._around, self._settings, self.is_greedy
        anew, done = [], []
        for lane in range(len(self.text)):
            token = int(best[lane] if greedy[lane] else drawn[lane])
            self._count[lane] += 1
            over = False
            if self._phase[lane] == _GIVEN:
                given, count = self._given[lane], self._count[lane]
                token = given[count]
                if count == len(given) - 1:
                    self._phase[lane], self._count[lane] = self._then[lane], 0
            elif self._phase[lane] == _OPENING:
                ended = token in self._ends or (around.bridge and token == around.bridge[0])
                if around.bridge and (ended or self._count[lane] > settings.opening):
                    self._give(lane, around.bridge, _ANSWER)
                    continue
                if ended:
                    over = True
                elif not around.bridge and self._count[lane] >= settings.opening:
                    self._phase[lane], self._count[lane] = _ANSWER, 0
            else:
                over = token in self._ends or self._count[lane] >= settings.answer
            self.fed[lane] = token
            if over and self._next < settings.texts:
                self.text[lane], self._next = self._next, self._next + 1
                self._begin(lane)
                anew.append(lane)
            elif over:
                done.append(lane)
        return anew, done

    def keep(self, lanes: Sequence[int]) -> None:
        """Drop all other lanes."""
        chosen = list(lanes)
        self.text, self.fed = self.text[chosen], self.fed[chosen]
        self._phase, self._then, self._count = self._phase[chosen], self._then[chosen], self._count[chosen]
        self._given = [self._given[lane] for lane in chosen]


def _shares(
    settings: OwnTextSettings, prompts: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Of each text of a block, the prompt that it answers (-1: none) and whether its answer is drawn.

    If answers are greedy, only the first one to each prompt is: later ones would be the same.
    """
    numbers = np.arange((block + 1) * settings.texts)
    held_out = numbers % settings.texts % HELD_OUT == HELD_OUT - 1
    answers = (numbers * _GOLDEN % 1 < settings.prompt_share) & (prompts > 0) & ~held_out
    turn = np.cumsum(answers) - 1
    prompt = np.where(answers, turn % max(prompts, 1), -1)
    drawn = ~held_out if settings.draw_answers else answers & (turn >= prompts)
    mine = slice(block * settings.texts, None)
    return prompt[mine], drawn[mine]


def _common(texts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest beginning that all texts share, at least one token short of the shortest."""
    most = min(map(len, texts)) - 1
    for place in range(most):
        if len({text[place] for text in texts}) > 1:
            return texts[0][:place]
    return texts[0][:most]
