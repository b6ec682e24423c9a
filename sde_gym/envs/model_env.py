"""What environments with the model in the loop share: all but what a step earns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.checks import whole_number
from sde_gym.decoding.features import checked_probe
from sde_gym.decoding.result import Round, check_request
from sde_gym.decoding.round import TextDecoder
from sde_gym.envs.arguments import choice
from sde_gym.envs.engine import EPISODES
from sde_gym.envs.lanes import lane_seeds
from sde_gym.envs.live_scene import LiveScene
from sde_gym.envs.prompt_texts import PromptTexts
from sde_gym.envs.rendering import RenderedEnv, Renderer, check_render_mode
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.models.threads import torch_threads
from sde_gym.policies.observation import HEAD_FEATURES, Action, Phase, bounds, resolve_observation
from sde_gym.prompts import Prompt
from sde_gym.settings import DEFAULT_DEPTHS


@dataclass(frozen=True)
class ModelStep:
    """What one step did. Whether its proposal is right is known only once the round has ended.

    Attributes:
        phase: in which the action was taken.
        index: of the depth that the newest token had been run to; of l* if it exits.
        action: `Action`.
        opening: position in the text of the round's first proposal.
        proposals: of the round so far, in order.
        ended: the round, if it ended.
        emitted: tokens emitted.
        layers: run one after the other; the walk to the first depth counts in the round's first step.
        seconds: spent on the model and on features, likewise.
        over: whether the episode is.
        complete: whether the text is.
    """

    phase: Phase
    index: int
    action: Action
    opening: int
    proposals: list[int]
    ended: Round | None
    emitted: int
    layers: int
    seconds: float
    over: bool
    complete: bool


class ModelEnv(RenderedEnv):
    """One text of a model, decoded live.

    Arguments and errors are those of `LEDELiveEnv`. A pickled environment does not hold a model
    that was given by name, nor what the model has computed: it loads the one and computes the
    other again.

    Attributes:
        model: the language model.
        depths: candidate depths.
        names: features of the observation.
        prompts: all there are.
        decoder: of the newest text, None before the first.
        visited: depth, best token and its probability wherever the newest token was scored.
        rejected: proposals that the newest verification rejected.
    """

    #: What `episode` may be.
    episodes: ClassVar[tuple[str, ...]] = EPISODES

    #: Whether a head is computed (and counted) for every decision, even if no feature needs one.
    reads_every_head: ClassVar[bool] = True

    def __init__(
        self,
        model: str | Path | LayeredModel,
        prompts: str | Path | Sequence[Prompt],
        *,
        tasks: Sequence[str] | None,
        order: str,
        depths: Sequence[int] | None,
        observation: str | Sequence[str],
        episode: str,
        k: int,
        window: int,
        max_draft: int,
        max_new_tokens: int,
        dtype: str | None,
        device: str | None,
        threads: int | None,
        render_mode: str | None,
    ) -> None:
        self.render_mode = check_render_mode(render_mode)
        self.names = resolve_observation(observation)
        if not self.names:
            raise InputError("observation: an environment needs at least one feature")
        self.episode = choice("episode", episode, self.episodes)
        self._reads = self.reads_every_head or not HEAD_FEATURES.isdisjoint(self.names)
        self.window = whole_number("window", window, 1)
        self.max_draft = whole_number("max_draft", max_draft, 1)
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 2)
        self._thread_count = None if threads is None else whole_number("threads", threads, 1)
        self._texts = PromptTexts(prompts, tasks, order)
        self.prompts = self._texts.prompts

        self._load: tuple[str | Path, str, str] | None = None  # what to load, unless it was loaded already
        if isinstance(model, LayeredModel):
            if dtype is not None or device is not None:
                raise InputError("dtype and device: leave them out, the model given is loaded already")
            self.model = model
        elif isinstance(model, (str, Path)):
            self._load = (model, dtype or "float32", device or "cpu")
            self.model = load_model(*self._load)
        else:
            raise InputError(f"model: {model!r} is neither a name, nor a path, nor a LayeredModel")
        self.depths = self._checked_depths(depths)
        checked_probe(self.model, self.names, self.depths)
        vocabulary = self.model.compact_vocabulary
        self.k = whole_number("k", k, 1, self.model.vocab_size if vocabulary is None else len(vocabulary))
        self._prompt_ids = self._texts.encoded(self.model)

        self.observation_space = gymnasium.spaces.Box(*bounds(self.names), dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(Action))
        self._text = 0
        self.decoder: TextDecoder | None = None
        self.visited: list[tuple[int, int, float]] = []
        self.rejected: list[int] = []
        self._in_progress = False
        self._resumable = False  # whether the episode is over, but its text is not
        self._actions: list[int] = []  # taken in the text
        self._opening_seconds = 0.0  # spent on the walk to the first depth, for the next step to pay
        self._renderer = Renderer(render_mode, LiveScene(self)) if render_mode is not None else None

    # ------------------------------------------------------------------ episodes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the next episode: the text's next round or walk, or the next text of at least two tokens.

        Args:
            seed: starts the order of the texts over, and a text.
            options: {"text": index or id of a prompt} starts that one, out of order.

        Raises:
            InputError: a wrong seed, an unknown option, a text that there is not or that is no episode.
        """
        chosen, (given,) = self._texts.chosen(options), lane_seeds(seed, 1)
        super().reset(seed=given)
        resumed = self.decoder if self._resumable and given is None and chosen is None else None
        self._texts.seed(given, self.np_random)
        self.decoder, self._in_progress, self._resumable = None, False, False
        with torch.inference_mode(), self._threads():
            decoder = self._started(chosen) if resumed is None else resumed
            self._begin(resumed=resumed is not None)
            observation = self._open(decoder)
        self.decoder, self._in_progress = decoder, True
        info = self._info(decoder)
        if self._renderer is not None:
            self._renderer.start(info)
        return observation, info

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take one `Action`.

        Raises:
            InputError: not 0 or 1.
            RuntimeError: the episode is over, none was started, or a step of it has failed.
        """
        if np.ndim(action) != 0 or action not in (Action.CONTINUE, Action.EXIT):
            raise InputError(f"actions: {action!r} is not one action out of 0 and 1")
        decoder = self.decoder
        if decoder is None or not self._in_progress:
            raise RuntimeError("no text in progress; reset the environment first")
        self._in_progress = False  # half a step cannot be taken back, so an exception ends the episode
        with torch.inference_mode(), self._threads():
            observation, step = self._take(decoder, Action(int(action)))
            reward = self._pay(decoder, step)
        self._actions.append(int(action))
        self._in_progress, self._resumable = not step.over, step.over and not step.complete
        info = self._info(decoder)
        if self._renderer is not None:
            self._renderer.follow(info, reward, step.over)
        return observation, reward, step.over, False, info

    @property
    def prompt(self) -> Prompt:
        """That of the newest text."""
        return self.prompts[self._text]

    def _begin(self, resumed: bool) -> None:
        """Prepare what `_pay` needs for an episode of a new text, or of the same one if resumed."""
        raise NotImplementedError

    def _pay(self, decoder: TextDecoder, step: ModelStep) -> float:
        """The reward of a step that was just taken; the decoder may have opened the next round."""
        raise NotImplementedError

    def _counters(self, decoder: TextDecoder) -> dict[str, Any]:
        """What is counted over the text so far."""
        result = decoder.result
        return {
            "layer_passes": result.layer_passes,
            "sequential_layers": result.sequential_layers,
            "head_calls": result.head_calls,
            "decisions": result.decisions,
            "drafted": decoder.drafted,
            "accepted": decoder.accepted,
            "rounds": len(result.rounds),
            "tokens": len(result.tokens) - 1,
        }

    def _info(self, decoder: TextDecoder) -> dict[str, Any]:
        """Counters and state as plain Python values, the same keys and types in every step."""
        over = not self._in_progress
        return {
            **self._counters(decoder),
            "phase": int(Phase.SELECT if over else decoder.phase),
            "depth": self.depths[0 if over else decoder.index],
            "draft_length": 0 if over else len(decoder.proposals),
            "text": self._text,
            "text_id": self.prompt.id,
            "overrun": True,
        }

    # ------------------------------------------------------------------ the decoder

    def _started(self, chosen: int | None) -> TextDecoder:
        """A decoder behind the prefill of the text that is asked for, or of the next that is an episode."""
        while True:
            text = self._texts.next() if chosen is None else chosen
            decoder = self._prefilled(text)
            if not decoder.finished:
                self._text, self._actions, self.rejected = text, [], []
                return decoder
            self._texts.leave_out(text)
            if chosen is not None:
                raise InputError(f"options: text {text} is no episode: it has fewer than two tokens")

    def _prefilled(self, text: int) -> TextDecoder:
        """A decoder that has emitted token 0."""
        prompt = self._prompt_ids[text]
        budget = check_request(self.model, prompt, self.max_new_tokens)
        decoder = TextDecoder(
            self.model, self.depths, budget, self.names,
            max_draft=self.max_draft, k=self.k, window=self.window, walks=self.episode == "token",
        )  # fmt: skip
        decoder.prefill(prompt)
        return decoder

    def _take(self, decoder: TextDecoder, action: Action) -> tuple[NDArray[np.float32], ModelStep]:
        """Carry out an action and go on to the episode's next decision; what is seen there, what happened."""
        result = decoder.result
        phase, index = decoder.phase, decoder.index
        layers, opening = result.sequential_layers, len(result.tokens)
        if phase == Phase.SELECT and index == 0:
            layers -= self.depths[0]
        started = perf_counter()
        ended = decoder.act(action)
        observation = np.zeros(len(self.names), np.float32) if ended else self._see(decoder)
        complete = decoder.finished
        step = ModelStep(
            phase=phase,
            index=index,
            action=action,
            opening=opening,
            proposals=decoder.proposals,
            ended=ended,
            emitted=len(result.tokens) - opening,
            layers=result.sequential_layers - layers,
            seconds=self._opening_seconds + perf_counter() - started,
            over=complete if self.episode == "generation" else ended is not None,
            complete=complete,
        )
        self._opening_seconds = 0.0
        if ended:
            self.rejected = decoder.proposals[ended.accepted :]
            if not step.over:
                observation = self._open(decoder)
        return observation, step

    def _open(self, decoder: TextDecoder) -> NDArray[np.float32]:
        """Open the next round; what is seen at the first depth, float32 (f,)."""
        started = perf_counter()
        decoder.open_round()
        observation = self._see(decoder)
        self._opening_seconds = perf_counter() - started
        return observation

    def _see(self, decoder: TextDecoder) -> NDArray[np.float32]:
        if self._reads:
            decoder.read()
        row: NDArray[np.float32] = decoder.observation()[0]
        if decoder.phase == Phase.DRAFT or decoder.index == 0:
            self.visited = []
        if decoder.best is not None:
            token, surprise = decoder.best
            self.visited.append((self.depths[decoder.index], token, math.exp(-surprise)))
        return row

    def _threads(self) -> AbstractContextManager[None]:
        return nullcontext() if self._thread_count is None else torch_threads(self._thread_count)

    # ------------------------------------------------------------------ arguments and pickling

    def _checked_depths(self, depths: Sequence[int] | None) -> tuple[int, ...]:
        if depths is None:
            depths = [depth for depth in DEFAULT_DEPTHS if depth < self.model.num_layers]
        if isinstance(depths, (str, bytes)) or not isinstance(depths, Sequence):
            raise InputError(f"depths: {depths!r} is not a list of depths")
        return self.model.check_depths(
            [whole_number("depths", depth, 1, self.model.num_layers - 1) for depth in depths]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the decoder, and but the model if it can be loaded again."""
        state = {**self.__dict__, "decoder": None}
        if self._load is not None:
            del state["model"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the model and take the actions of the text again, if there is more to come of it."""
        self.__dict__.update(state)
        if self._load is not None:
            self.model = load_model(*self._load)
        if self._in_progress or self._resumable:
            with torch.inference_mode(), self._threads():
                decoder, over = self._prefilled(self._text), True
                for action in self._actions:
                    if over:
                        self._open(decoder)
                    over = self._take(decoder, Action(action))[1].over
                if over and self._in_progress:
                    self._open(decoder)
            self.decoder = decoder
            self._opening_seconds = state["_opening_seconds"]
