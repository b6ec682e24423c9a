"""What an environment with the model in the loop looks like at a moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sde_gym.envs.snapshot import COUNTED, Fate, Rung, ShownRound, ShownToken, Snapshot
from sde_gym.models.token_text import token_pieces
from sde_gym.policies.observation import Phase

if TYPE_CHECKING:
    from sde_gym.envs.model_env import ModelEnv


class LiveScene:
    """The scene of an environment whose decoder knows the tokens (`Scene`)."""

    def __init__(self, environment: ModelEnv) -> None:
        self._environment = environment
        self._info: dict[str, Any] = {}
        self._reward = self._total = 0.0
        self._over = False

    def start(self, info: Mapping[str, Any]) -> None:
        """Begin an episode."""
        self._info = dict(info)
        self._reward = self._total = 0.0
        self._over = False

    def follow(self, info: Mapping[str, Any], reward: float, over: bool) -> None:
        """Take note of a step."""
        self._info = dict(info)
        self._reward, self._total, self._over = reward, self._total + reward, over

    def snapshot(self) -> Snapshot:
        """What it looks like now.

        Raises:
            RuntimeError: no text was started.
        """
        environment, decoder = self._environment, self._environment.decoder
        if decoder is None:
            raise RuntimeError("there is nothing to show yet: call reset first")
        result = decoder.result
        tokens, depths, fates = list(result.tokens), list(result.depths), list[Fate](result.fates)
        if not self._over and decoder.proposals:
            tokens += decoder.proposals
            depths += [decoder.depths[decoder.index]] * len(decoder.proposals)
            fates += ["proposal"] * len(decoder.proposals)
        last_round = None
        if result.rounds:
            ended = result.rounds[-1]
            rejected = tuple(self._text([token]) for token in environment.rejected)
            last_round = ShownRound(ended.exit_depth, ended.drafted, ended.accepted, rejected)
        return Snapshot(
            title=environment.prompt.id,
            num_layers=result.num_layers,
            depths=decoder.depths,
            prompt=environment.prompt.text,
            tokens=tuple(map(ShownToken, token_pieces(self._text, tokens), depths, fates)),
            rungs=tuple(
                Rung(depth, self._text([token]), chance)
                for depth, token, chance in environment.visited
                if not self._over
            ),
            phase=Phase(self._info["phase"]),
            last_round=last_round,
            counters={name: self._info[name] for name in COUNTED},
            reward=self._reward,
            total=self._total,
            over=self._over,
        )

    def _text(self, ids: list[int]) -> str:
        """Special tokens included; the ids themselves where there is no tokenizer."""
        tokenizer = self._environment.model.tokenizer
        if tokenizer is None:
            return "".join(f" {token}" for token in ids)
        return str(tokenizer.decode(ids, skip_special_tokens=False))
