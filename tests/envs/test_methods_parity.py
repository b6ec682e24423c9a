"""The selection methods in replay and in the real decoder, on tiny random models: the same rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sde_gym.decoding.speculative import speculative
from sde_gym.envs.run import run_controller
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.controller import RoundOutcome, View
from sde_gym.policies.draft_verify import DraftVerifyController
from sde_gym.policies.dynamic_exit_layer import DELController
from sde_gym.policies.lite import CALMController, LITEController
from sde_gym.traces import TraceSet
from tests.envs.test_live_parity import COUNTED, DEPTHS, TOKENS, model, traces

__all__ = ["model", "traces"]  # fixtures

METHODS: dict[str, Callable[[TraceSet], Any]] = {
    "draft_verify": lambda _: DraftVerifyController(2, 0.35, step=0.2),
    "lite": lambda recorded: LITEController.calibrated(recorded, 0.75),
    "calm": lambda _: CALMController(0.3, TOKENS),
    "del": lambda _: DELController(),
}


def watch(controller: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[Any]]:
    """Lists that fill with its decisions, the rounds it is told of, and their shadow tokens."""
    decisions: list[tuple[int, ...]] = []
    rounds: list[tuple[int, ...]] = []
    shadows: list[Any] = []
    act, feedback = controller.act, controller.feedback

    def watched_act(view: View) -> np.ndarray:
        actions = act(view)
        decisions.append((int(view.phase[0]), int(view.depth_index[0]), int(actions[0])))
        return np.asarray(actions)

    def watched_feedback(outcome: RoundOutcome) -> None:
        rounds.append((int(outcome.depth_index[0]), int(outcome.drafted[0]), int(outcome.accepted[0])))
        shadows.append(None if outcome.shadow is None else outcome.shadow[0])
        feedback(outcome)

    controller.act, controller.feedback = watched_act, watched_feedback
    return decisions, rounds, shadows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_draft", [12, 3])
def test_replay_is_the_decoder(method: str, max_draft: int, model: LayeredModel, traces: TraceSet) -> None:
    """Actions, rounds, shadow tokens, tokens and counters."""
    lengths = set()
    for text in range(len(traces)):
        replayed, followed = METHODS[method](traces), METHODS[method](traces)
        in_replay, live = watch(replayed), watch(followed)
        result = run_controller(traces, replayed, [text], depths=DEPTHS, max_draft=max_draft)
        prompt = traces.prompt_tokens[text]
        assert prompt is not None
        decoded = speculative(
            model, prompt.tolist(), followed, DEPTHS, TOKENS, max_draft=max_draft, text=text
        )
        assert decoded.tokens == traces.tokens_of(text).tolist()
        assert live[:2] == in_replay[:2]
        for mine, theirs in zip(live[2], in_replay[2], strict=True):
            assert (mine is None) == (theirs is None) == (method != "del")
            if mine is not None:
                np.testing.assert_array_equal(mine.right, theirs.right)
                np.testing.assert_allclose(mine.probability, theirs.probability, atol=1e-5)
        assert [(r.drafted, r.accepted) for r in decoded.rounds] == [told[1:] for told in in_replay[1]]
        for name in COUNTED:
            assert getattr(decoded, name) == getattr(result, name)[0], name
        lengths |= {round_.drafted for round_ in decoded.rounds}
    assert len(lengths) > 2  # it decides something
