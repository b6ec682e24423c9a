"""Wrappers that leave the agent one of its two decisions: the paper's two ablations.

The other decision is taken by a fixed rule. A step of the wrapper is then one or more steps of the
environment, whose rewards are summed; observation and `info` are those after the last of them. What
a policy does under a wrapper is what a controller does that adds the rule to it: same counters, `head_calls`
aside, and same returns under rewards that charge no heads. Heads are counted and charged here as if every
decision read one; the controller reads none where its rule decides.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.errors import InputError
from sde_gym.policies.observation import Action, Phase

Environment = gymnasium.Env[NDArray[np.float32], np.int64]
Step = tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]


class _OnePhase(gymnasium.Wrapper[NDArray[np.float32], np.int64, NDArray[np.float32], np.int64]):
    """Plays on by a rule while the agent has nothing to decide."""

    def _rule(self, info: dict[str, Any]) -> Action | None:
        """The action that the rule takes in this state, None where the agent decides."""
        raise NotImplementedError

    def _play_on(self, reached: Step) -> Step:
        """Steps by the rule, from a state on; the rewards are summed."""
        observation, total, terminated, truncated, info = reached
        while not (terminated or truncated) and (action := self._rule(info)) is not None:
            observation, reward, terminated, truncated, info = self.env.step(np.int64(action))
            total += float(reward)
        return observation, total, terminated, truncated, info


class DepthOnly(_OnePhase, RecordConstructorArgs):
    """The agent chooses the depth; once it exits, a fixed number of tokens is drafted.

    It is asked in SELECT only. Fewer tokens are drafted where the round ends before: at an end-of-text
    proposal, with the token budget, or at a wrong proposal of a trace set without overrun.

    Args:
        env: an environment of this package, wrapped or not.
        draft_length: proposals of a round, 1..max_draft.

    Raises:
        InputError: draft_length out of range, or an environment of another kind, such as one of many
            lanes.
    """

    def __init__(self, env: Environment, draft_length: int) -> None:
        longest = _attribute(env, "max_draft")
        self.draft_length = whole_number("draft_length", draft_length, 1, longest)
        RecordConstructorArgs.__init__(self, draft_length=self.draft_length)
        super().__init__(env)

    def step(self, action: np.int64 | int) -> Step:
        """`continue` runs the token deeper, `exit` drafts the whole round at this depth."""
        observation, reward, terminated, truncated, info = self.env.step(np.int64(action))
        return self._play_on((observation, float(reward), terminated, truncated, info))

    def _rule(self, info: dict[str, Any]) -> Action | None:
        if info["phase"] == Phase.SELECT:
            return None
        return Action.EXIT if info["draft_length"] < self.draft_length else Action.CONTINUE


class LengthOnly(_OnePhase, RecordConstructorArgs):
    """The depth is fixed; the agent chooses how long to draft.

    It is asked in DRAFT only: a round's first proposal is made by the rule, and `continue` verifies. A
    round in which that proposal is the last passes without a decision. What the rule earns before
    the first decision of a text is paid with the first step. A text without any decision is no episode:
    `reset` goes on to the next one.

    Args:
        env: an environment of this package with max_draft of at least 2, wrapped or not.
        exit_depth: layers, one of the candidate depths.

    Raises:
        InputError: exit_depth is no candidate, max_draft is 1, or an environment of another kind, such
            as one of many lanes.
    """

    def __init__(self, env: Environment, exit_depth: int) -> None:
        depths = _attribute(env, "depths")
        self.exit_depth = whole_number("exit_depth", exit_depth, 1)
        if self.exit_depth not in depths:
            raise InputError(f"exit_depth: {self.exit_depth} is not one of the depths {list(depths)}")
        if _attribute(env, "max_draft") < 2:
            raise InputError("max_draft: 1 leaves nothing to decide once the depth is fixed; give at least 2")
        RecordConstructorArgs.__init__(self, exit_depth=self.exit_depth)
        super().__init__(env)
        self._owed = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the next text that leaves something to decide, at its first decision.

        Raises:
            InputError: the text asked for, or every text there is, leaves nothing to decide.
        """
        passed: set[tuple[int, int]] = set()
        wanted: int | None = None
        while True:
            observation, info = self.env.reset(seed=seed, options=options)
            text, begun = info["text"], info["tokens"] > 0
            if options:
                wanted = text
            elif wanted is not None and not (text == wanted and begun):
                raise InputError(
                    f"options: text {wanted} leaves nothing to decide at depth {self.exit_depth}"
                )
            start = (observation, 0.0, False, False, info)
            observation, self._owed, terminated, truncated, info = self._play_on(start)
            if not (terminated or truncated):
                return observation, info
            # Where an episode is a part of a text, the next one may be the rest of the same text.
            if (text, info["rounds"]) in passed:
                raise InputError(
                    f"exit_depth: no text leaves anything to decide at depth {self.exit_depth}: "
                    "every first proposal ends its round"
                )
            passed.add((text, info["rounds"]))
            seed = options = None  # a seed would start the order of the texts over

    def step(self, action: np.int64 | int) -> Step:
        """`exit` proposes one more token, `continue` verifies and opens the next round."""
        observation, reward, terminated, truncated, info = self.env.step(np.int64(action))
        owed, self._owed = self._owed, 0.0
        return self._play_on((observation, float(reward) + owed, terminated, truncated, info))

    def _rule(self, info: dict[str, Any]) -> Action | None:
        if info["phase"] == Phase.DRAFT:
            return None
        return Action.EXIT if info["depth"] >= self.exit_depth else Action.CONTINUE


def _attribute(env: Environment, name: str) -> Any:
    """An attribute of the environment beneath all wrappers, or of its engine.

    Raises:
        InputError: it has none, or is no single environment.
    """
    if not isinstance(env, gymnasium.Env):
        raise InputError(
            f"env: {type(env).__name__} is not a single environment; to wrap many, use gymnasium.make_vec "
            "with vectorization_mode='sync' and wrappers=[lambda env: ...]"
        )
    inner: Any = env.unwrapped
    for owner in (inner, getattr(inner, "engine", None)):
        if hasattr(owner, name):
            return getattr(owner, name)
    raise InputError(f"env: {env!r} has no {name}; give an environment of this package, sde_gym/LEDE-v0 say")
