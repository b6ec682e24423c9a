"""`sde_gym/LEDELive-v0`: the decision problem with the model in the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sde_gym.decoding.round import TextDecoder
from sde_gym.envs.arguments import choice
from sde_gym.envs.engine import CREDITS
from sde_gym.envs.model_env import ModelEnv, ModelStep
from sde_gym.envs.rewards import Reward, StepOutcome, checked_reward, resolve_reward, warn_if_raw
from sde_gym.envs.timing import StepCosts
from sde_gym.models.cost import CostModel, head_sizes, resolve_cost
from sde_gym.models.generation import generate_greedy
from sde_gym.models.layered import LayeredModel
from sde_gym.policies.observation import HEAD_FEATURES, Action
from sde_gym.prompts import Prompt
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS


class LEDELiveEnv(ModelEnv):
    """One text of a language model, decoded live by early exits and verification.

    ## Description
    The decision problem of `sde_gym/LEDE-v0` with the model in the loop instead of recorded traces:
    same actions, observations, rewards, episodes and info. What lies behind a wrong proposal is
    computed, not looked up, so any model, prompts, depths and draft cap will do.

    Departure: with an "immediate" credit a proposal is paid before the model has verified it.
    So the text that plain greedy decoding gives is computed on the side, once for each prompt, and
    charged to nobody. Where rounding makes the verified text another one (near-ties; common
    below float32), the side text is computed anew from there; rewards already paid stand. Episode
    "token" needs no such text: it goes on with the last layer's token in the same step, and what serves
    that alone is charged to nobody.

    ## Action Space, Observation Space, Rewards, Episode End, Info
    As in `sde_gym/LEDE-v0`. `text` and `text_id` are index and id of the prompt. A prompt whose text
    has fewer than two tokens is no episode and is passed over.

    ## Arguments
    All but raw callables, a `LayeredModel` and `Prompt`s are plain JSON, so that the spec can be stored.

    ## Version History
    - v0: first version.

    Args:
        model: name, folder or hub id as in `load_model`, or a `LayeredModel`, which several
            environments may share.
        prompts: name of a prompt set, path of a file, or `Prompt`s.
        tasks: only prompts of these tasks; all if not given.
        order: "shuffled" (anew each time all texts were played, by the seed) or "sequential".
        depths: candidate depths, rising, below L; those of 1, 2, 3, 4, 6, 8 and 12 if not given.
        observation: "paper", "extended" or a list of feature names.
        reward: "lede", "speed", "module:function" or a callable of `StepOutcome`.
        credit: "immediate" or "round".
        episode: "generation", "round" or "token", as in `sde_gym/LEDE-v0`.
        k: log-probabilities averaged by `confidence`, at most the exit heads' vocabulary.
        window: tokens averaged by `trace`.
        max_draft: cap on the proposals of a round; 12 is LEDE's.
        max_new_tokens: token budget, at least 2; less where the context ends.
        final_token_reward: of reward "lede", for the last layer's own tokens.
        rho: of reward "speed", the price in tokens of a unit of cost; plain decoding's rate if not given.
        cost: of reward "speed", and of `cost` and `speedup` in the info: "unit", the path of a
            calibrated cost model, or a `CostModel`.
        dtype: as in `load_model`; "float32" if not given.
        device: as in `load_model`; "cpu" if not given.
        threads: torch threads while the model runs; torch's own number if not given.
        render_mode: "ansi", "rgb_array", "human" or None, as in `sde_gym/LEDE-v0`.

    Raises:
        InputError: an argument out of range; the message names it.
    """

    def __init__(
        self,
        model: str | Path | LayeredModel = "stdlib-20m",
        prompts: str | Path | Sequence[Prompt] = "stdlib:train",
        *,
        tasks: Sequence[str] | None = None,
        order: str = "shuffled",
        depths: Sequence[int] | None = None,
        observation: str | Sequence[str] = "paper",
        reward: str | Reward = "lede",
        credit: str = "immediate",
        episode: str = "generation",
        k: int = 5,
        window: int = 8,
        max_draft: int = DEFAULT_MAX_DRAFT,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        final_token_reward: float = 1.0,
        rho: float | None = None,
        cost: str | Path | CostModel = "unit",
        dtype: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        warn_if_raw(reward)
        self.credit = choice("credit", credit, CREDITS)
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
        model_of_cost = resolve_cost(cost, self.model.num_layers, self.max_draft, head_sizes(self.model))
        reads = not HEAD_FEATURES.isdisjoint(self.names)
        self.step_costs = StepCosts(model_of_cost, self.depths, self.max_draft, reads)
        self.reward = resolve_reward(reward, self.step_costs, final_token_reward, rho)
        self._side_texts: dict[int, list[int]] = {}  # of plain decoding, by prompt
        self._side: list[int] = []  # that of the text in progress
        self._right = True  # whether all proposals of the round so far are
        self._held = 0.0  # reward that credit="round" still owes
        self._spent = 0.0  # cost of the text's steps so far

    def _begin(self, resumed: bool) -> None:
        if resumed:
            return
        self._right, self._held, self._spent = True, 0.0, 0.0
        if self.episode == "token":
            return
        if self._text not in self._side_texts:
            prompt = self._prompt_ids[self._text]
            self._side_texts[self._text] = generate_greedy(self.model, [prompt], self.max_new_tokens)[0]
        self._side = self._side_texts[self._text]

    def _pay(self, decoder: TextDecoder, step: ModelStep) -> float:
        outcome = self._outcome(decoder, step)
        paid = float(checked_reward(self.reward, outcome)[0])
        self._spent += float(self.step_costs(outcome)[0])
        if step.ended:
            self._right = True
            if not step.complete and self.episode != "token":
                self._follow(decoder, step.opening)
        if self.credit == "immediate":
            return paid
        self._held += paid
        if step.action == Action.EXIT and not step.ended:
            return 0.0
        reward, self._held = self._held, 0.0
        return reward

    def _counters(self, decoder: TextDecoder) -> dict[str, Any]:
        counters = super()._counters(decoder)
        speedup = self.step_costs.model.speedup(counters["tokens"], self._spent)
        return {**counters, "cost": self._spent, "speedup": speedup}

    def _outcome(self, decoder: TextDecoder, step: ModelStep) -> StepOutcome:
        """The step as rewards see it, in one lane."""
        proposals, ended = step.proposals, step.ended
        proposed, drafted = step.action == Action.EXIT, len(proposals)
        accepted = ended.accepted if ended else 0
        walk = proposed and self.episode == "token"  # it ends here, neither fed nor verified
        unfed = False
        if proposed:
            # Behind a wrong proposal the text on the side may have ended already.
            self._right = self._right and (
                accepted == 1 if walk else proposals[-1] == self._side[step.opening + drafted - 1]
            )
            last = drafted == decoder.budget - step.opening
            unfed = walk or last or proposals[-1] in self.model.eos_token_ids
        pending = 1 + drafted - unfed if ended and drafted and not walk else 0
        return StepOutcome(
            num_layers=self.model.num_layers,
            phase=np.array([step.phase], np.int64),
            action=np.array([step.action], np.int64),
            depth=np.array([self.depths[step.index]], np.int64),
            depth_index=np.array([step.index], np.int64),
            proposed=np.array([proposed]),
            accepted=np.array([proposed and self._right]),
            ended=np.array([ended is not None]),
            drafted=np.array([drafted if ended else 0], np.int64),
            round_accepted=np.array([accepted], np.int64),
            final=np.array([step.emitted > accepted and not walk]),
            emitted=np.array([step.emitted], np.int64),
            fed=np.array([proposed and not unfed]),
            verified=np.array([pending], np.int64),
            layers=np.array([step.layers], np.int64),
            terminated=np.array([step.complete]),
        )

    def _follow(self, decoder: TextDecoder, opening: int) -> None:
        """Compute the side text anew from here if verification, in another order of sums, left it."""
        tokens = decoder.result.tokens
        if tokens[opening:] != self._side[opening : len(tokens)]:
            known = self._prompt_ids[self._text] + tokens
            rest = generate_greedy(self.model, [known], decoder.budget - len(tokens))[0]
            self._side = [*tokens, *rest]
