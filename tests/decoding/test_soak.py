"""Five hundred texts, some of them broken off: nothing is left behind, and nothing leaks into the next."""

from __future__ import annotations

import gc

import pytest
import torch

from sde_gym.decoding import autoregressive, generate, huggingface
from sde_gym.models import LayeredModel
from sde_gym.policies import DELController, DraftVerifyController, StaticController, ThresholdController

DEPTHS = (1, 2, 4)
CONTROLLERS = (StaticController(2, 3), ThresholdController(0.4), DraftVerifyController(2), DELController())


class Interrupting:
    """A streamer whose user loses patience at the third token."""

    def __init__(self) -> None:
        self.heard = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard += 1
        if self.heard == 3:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


def one(model: LayeredModel, number: int) -> None:
    """A text in one of several ways, every fifth of them interrupted."""
    controller = CONTROLLERS[number % len(CONTROLLERS)]
    prompt = [1 + number % 30, 7, 3]
    if number % 5 == 0:
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompt, controller, depths=DEPTHS, max_new_tokens=6, streamer=Interrupting())
    elif number % 5 == 1:
        ids = torch.tensor([prompt, prompt])
        custom = huggingface(controller, depths=DEPTHS, model=model)
        model.hf.generate(ids, max_new_tokens=6, do_sample=True, custom_generate=custom, pad_token_id=0)
    else:
        sampled = {"do_sample": True, "seed": number} if number % 5 == 2 else {}
        generate(model, prompt, controller, depths=DEPTHS, max_new_tokens=6, **sampled)


def tensors() -> tuple[int, int]:
    """How many tensors are alive, and their bytes."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return len(alive), sum(each.numel() * each.element_size() for each in alive)


def test_five_hundred_texts_leave_nothing_behind(model: LayeredModel) -> None:
    expected = [autoregressive(model, [1 + n, 7, 3], 20).tokens for n in range(4)]
    for number in range(60):
        one(model, number)
    count, size = tensors()
    for number in range(60, 500):
        one(model, number)
    later = tensors()
    assert later[0] <= count + 8
    assert later[1] <= size + 4096
    for number, controller in enumerate(CONTROLLERS):  # as they were left by five hundred texts
        prompt = [1 + number, 7, 3]
        assert (
            generate(model, prompt, controller, depths=DEPTHS, max_new_tokens=20).tokens == expected[number]
        )


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda controller: type(controller).__name__)
def test_a_text_is_the_same_whatever_came_before(model: LayeredModel, controller: StaticController) -> None:
    """Not its tokens alone, which are plain decoding's: its rounds, that is the controller's decisions."""
    fresh = type(controller)(*_arguments(controller))
    first = generate(model, [5, 7, 3], fresh, depths=DEPTHS, max_new_tokens=30)
    for number in range(3):
        generate(model, [9 + number, 2], controller, depths=DEPTHS, max_new_tokens=30)
    again = generate(model, [5, 7, 3], controller, depths=DEPTHS, max_new_tokens=30)
    assert again.rounds == first.rounds
    assert again.rejected == first.rejected


def _arguments(controller: object) -> tuple[object, ...]:
    if isinstance(controller, StaticController):
        return controller.exit_depth, controller.draft_length
    if isinstance(controller, ThresholdController):
        return (0.4,)
    return (2,) if isinstance(controller, DraftVerifyController) else ()
