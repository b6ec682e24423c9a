"""What environments with the model in the loop share: all but what a step earns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from sde_gym.decoding.result import Round, check_request
from sde_gym.decoding.round import TextDecoder
from sde_gym.envs.arguments import whole_number
from sde_gym.envs.lanes import lane_seeds
from sde_gym.envs.live_scene import LiveScene
from sde_gym.envs.order import TextOrder, chosen_text, text_option
from sde_gym.envs.rendering import RENDER_FPS, RENDER_MODES, Renderer, check_render_mode, warn_without_mode
from sde_gym.errors import InputError
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.models.threads import torch_threads
from sde_gym.policies.observation import HEAD_FEATURES, Action, Phase, bounds, resolve_observation
from sde_gym.prompts import Prompt, load_prompts
from sde_gym.settings import DEFAULT_DEPTHS
from sde_gym.traces.trace_set import texts_of_tasks

_LANE = np.zeros(1, np.int64)


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
        terminated: whether the text is complete.
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
    terminated: bool


class ModelEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
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

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": list(RENDER_MODES),
        "render_fps": RENDER_FPS,
    }

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
        self._reads = self.reads_every_head or not HEAD_FEATURES.isdisjoint(self.names)
        self.window = whole_number("window", window, 1)
        self.max_draft = whole_number("max_draft", max_draft, 1)
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 2)
        self._thread_count = None if threads is None else whole_number("threads", threads, 1)
        self.prompts = _prompts(prompts)
        texts = texts_of_tasks([prompt.task for prompt in self.prompts], tasks)
        self._order = TextOrder(texts, order)
        self._seeded = False

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
        vocabulary = self.model.compact_vocabulary
        self.k = whole_number("k", k, 1, self.model.vocab_size if vocabulary is None else len(vocabulary))
        self._prompt_ids = [self._encode(prompt) for prompt in self.prompts]

        self.observation_space = gymnasium.spaces.Box(*bounds(self.names), dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(Action))
        self._short: set[int] = set()  # texts found to have fewer than two tokens
        self._text = 0
        self.decoder: TextDecoder | None = None
        self.visited: list[tuple[int, int, float]] = []
        self.rejected: list[int] = []
        self._in_progress = False
        self._actions: list[int] = []  # taken in it
        self._opening_seconds = 0.0  # spent on the walk to the first depth, for the next step to pay
        self._renderer = Renderer(render_mode, LiveScene(self)) if render_mode is not None else None

    # ------------------------------------------------------------------ episodes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the next text that has at least two tokens.

        Args:
            seed: starts the order of the texts over.
            options: {"text": index or id of a prompt} plays that one, out of order.

        Raises:
            InputError: a wrong seed, an unknown option, a text that there is not or that is no episode.
        """
        wanted, (given,) = text_option(options), lane_seeds(seed, 1)
        ids = [prompt.id for prompt in self.prompts]
        chosen = None if wanted is None else chosen_text(wanted, self._order.texts, ids)
        super().reset(seed=given)
        if given is not None or not self._seeded:
            self._order.seed(_LANE, [int(self.np_random.integers(2**62)) if given is None else given])
            self._seeded = True
        self.decoder, self._in_progress = None, False
        with torch.inference_mode(), self._threads():
            text, decoder = self._next() if chosen is None else (chosen, self._prefilled(chosen))
            if decoder is None:
                raise InputError(f"options: text {text} is no episode: it has fewer than two tokens")
            self._text, self._actions, self.rejected = text, [], []
            self._begin()
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
            RuntimeError: the text is complete, none was started, or a step of it has failed.
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
        self._in_progress = not step.terminated
        info = self._info(decoder)
        if self._renderer is not None:
            self._renderer.follow(info, reward, step.terminated)
        return observation, reward, step.terminated, False, info

    def render(self) -> str | NDArray[np.uint8] | None:  # type: ignore[override]
        """What it looks like now, as `render_mode` says; a warning and None without a mode.

        Returns:
            a str with ANSI colours for "ansi", uint8 (H, W, 3) for "rgb_array", None for "human".
        """
        if self._renderer is not None:
            return self._renderer.frame()
        warn_without_mode(self)
        return None

    def close(self) -> None:
        """Close the window, if there is one."""
        if self._renderer is not None:
            self._renderer.close()

    @property
    def prompt(self) -> Prompt:
        """That of the newest text."""
        return self.prompts[self._text]

    def _begin(self) -> None:
        """Prepare what `_pay` needs for a new text."""
        raise NotImplementedError

    def _pay(self, decoder: TextDecoder, step: ModelStep) -> float:
        """The reward of a step that was just taken; the decoder may have opened the next round."""
        raise NotImplementedError

    def _info(self, decoder: TextDecoder) -> dict[str, Any]:
        """Counters and state as plain Python values, the same keys and types in every step."""
        result, over = decoder.result, decoder.finished
        return {
            "layer_passes": result.layer_passes,
            "sequential_layers": result.sequential_layers,
            "head_calls": result.head_calls,
            "decisions": result.decisions,
            "drafted": decoder.drafted,
            "accepted": decoder.accepted,
            "rounds": len(result.rounds),
            "tokens": len(result.tokens) - 1,
            "phase": int(Phase.SELECT if over else decoder.phase),
            "depth": self.depths[0 if over else decoder.index],
            "draft_length": 0 if over else len(decoder.proposals),
            "text": self._text,
            "text_id": self.prompt.id,
            "overrun": True,
        }

    # ------------------------------------------------------------------ the decoder

    def _next(self) -> tuple[int, TextDecoder]:
        """The next text in order that is an episode, halted after its prefill."""
        while len(self._short) < len(self._order.texts):
            text = int(self._order.next(_LANE)[0])
            if text not in self._short:
                decoder = self._prefilled(text)
                if decoder is not None:
                    return text, decoder
        raise InputError(f"prompts: none of {len(self._order.texts)} gives a text of at least two tokens")

    def _prefilled(self, text: int) -> TextDecoder | None:
        """A decoder that has emitted token 0, or None if nothing may follow it."""
        prompt = self._prompt_ids[text]
        budget = check_request(self.model, prompt, self.max_new_tokens)
        decoder = TextDecoder(
            self.model, self.depths, budget, self.names,
            max_draft=self.max_draft, k=self.k, window=self.window,
        )  # fmt: skip
        decoder.prefill(prompt)
        if decoder.finished:
            self._short.add(text)
            return None
        return decoder

    def _take(self, decoder: TextDecoder, action: Action) -> tuple[NDArray[np.float32], ModelStep]:
        """Carry out an action and go on to the next decision; what is seen there, and what happened."""
        result = decoder.result
        phase, index = decoder.phase, decoder.index
        layers, opening = result.sequential_layers, len(result.tokens)
        if phase == Phase.SELECT and index == 0:
            layers -= self.depths[0]
        started = perf_counter()
        ended = decoder.act(action)
        observation = np.zeros(len(self.names), np.float32) if ended else self._see(decoder)
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
            terminated=decoder.finished,
        )
        self._opening_seconds = 0.0
        if ended:
            self.rejected = decoder.proposals[ended.accepted :]
            if not step.terminated:
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

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids; an error names the prompt."""
        try:
            return self.model.encode(prompt.text)
        except InputError as error:
            raise InputError(f"prompt {prompt.id!r}: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the decoder, and but the model if it can be loaded again."""
        state = {**self.__dict__, "decoder": None}
        if self._load is not None:
            del state["model"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the model and take the actions of the text in progress again."""
        self.__dict__.update(state)
        if self._load is not None:
            self.model = load_model(*self._load)
        if self._in_progress:
            with torch.inference_mode(), self._threads():
                decoder = self._prefilled(self._text)
                assert decoder is not None
                self._open(decoder)
                for action in self._actions:
                    self._take(decoder, Action(action))
            self.decoder = decoder
            self._opening_seconds = state["_opening_seconds"]


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
