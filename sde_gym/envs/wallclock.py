"""`sde_gym/LEDEWallClock-v0`: the decision problem with the model in the loop and a clock beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from sde_gym.decoding.autoregressive import autoregressive
from sde_gym.decoding.round import TextDecoder
from sde_gym.envs.engine import EPISODES
from sde_gym.envs.model_env import ModelEnv, ModelStep
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.observation import Action
from sde_gym.prompts import Prompt
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS


class LEDEWallClockEnv(ModelEnv):
    """One text of a language model, decoded live, paid by tokens and by the time they took.

    ## Description
    As `sde_gym/LEDELive-v0`, but what a step costs is measured on this machine, so that two runs
    never earn quite the same: the id is registered as non-deterministic. An exit head that no
    feature of the observation needs is not computed until a token is proposed from it.

    ## Action Space, Observation Space, Episode End
    As in `sde_gym/LEDE-v0`, but for episode "token": depth selection alone verifies nothing, so that its
    time says nothing about decoding.

    ## Rewards
    Tokens emitted - rho * seconds. Seconds are those spent on the model and on features; the
    agent's own time and the environment's are not among them, nor is prefill. The walk to the
    first depth counts in the first step of its round. Credit is given per round, for a proposal's
    fate is not known before: a step that proposes and does not end its round earns 0, and its time
    is charged when the round ends.

    ## Info
    As in `sde_gym/LEDE-v0` (`head_calls` counts what was computed), but `seconds`, the measured time of the
    step, instead of `cost` and `speedup`, which a cost model foretells.

    ## Version History
    - v0: first version.

    Args:
        model, prompts, tasks, order, depths, observation, k, window, max_draft, max_new_tokens,
            dtype, device, threads, render_mode: as in `sde_gym/LEDELive-v0`.
        credit: "round".
        episode: "generation" or "round".
        rho: price of a second in tokens. If not given it is measured at the first reset: plain
            decoding's tokens per second on the first text, which plain decoding then earns about 0
            with. Give it to compare runs.

    Attributes:
        rho: None until it was measured.

    Raises:
        InputError: an argument out of range; the message names it.
    """

    episodes: ClassVar[tuple[str, ...]] = EPISODES[:2]
    reads_every_head = False

    def __init__(
        self,
        model: str | Path | LayeredModel = "stdlib-20m",
        prompts: str | Path | Sequence[Prompt] = "stdlib:train",
        *,
        tasks: Sequence[str] | None = None,
        order: str = "shuffled",
        depths: Sequence[int] | None = None,
        observation: str | Sequence[str] = "paper",
        credit: str = "round",
        episode: str = "generation",
        k: int = 5,
        window: int = 8,
        max_draft: int = DEFAULT_MAX_DRAFT,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        rho: float | None = None,
        dtype: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if credit != "round":
            raise InputError(
                f"credit: {credit!r} cannot be given here, only 'round': what becomes of a proposal is "
                "measured, not foreseen; sde_gym/LEDELive-v0 pays at once"
            )
        if rho is not None and (
            isinstance(rho, bool)
            or not isinstance(rho, (int, float))
            or not (math.isfinite(rho) and rho >= 0)
        ):
            raise InputError(f"rho: {rho!r} is not a finite number of at least 0")
        super().__init__(
            model,
            prompts,
            tasks=tasks,
            order=order,
            depths=depths,
            observation=observation,
            episode=episode,
            k=k,
            window=window,
            max_draft=max_draft,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=device,
            threads=threads,
            render_mode=render_mode,
        )
        self.credit = credit
        self.rho = None if rho is None else float(rho)
        self._seconds = 0.0  # of the newest step
        self._held = 0.0  # seconds that the round has not paid yet

    def _begin(self, resumed: bool) -> None:
        self._seconds = self._held = 0.0
        if self.rho is None:
            prompt = self._prompt_ids[self._text]
            for _ in range(2):  # the first run warms up
                plain = autoregressive(self.model, prompt, self.max_new_tokens)
            self.rho = (len(plain.tokens) - plain.untimed_tokens) / plain.decode_seconds

    def _pay(self, decoder: TextDecoder, step: ModelStep) -> float:
        assert self.rho is not None
        self._seconds = step.seconds
        self._held += step.seconds
        if step.action == Action.EXIT and not step.ended:
            return 0.0
        seconds, self._held = self._held, 0.0
        return step.emitted - self.rho * seconds

    def _info(self, decoder: TextDecoder) -> dict[str, Any]:
        return {**super()._info(decoder), "seconds": self._seconds}
