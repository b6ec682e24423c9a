"""`sde_gym/LEDE-v0`: the decision problem as a gymnasium environment, over recorded traces."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.rewards import Reward
from sde_gym.errors import InputError
from sde_gym.policies.observation import Action, bounds
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.traces import TraceSet, load_traces

ORDERS = ("shuffled", "sequential")


class LEDEEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """One text of a language model, decoded by early exits and verification.

    ## Description
    Self-speculative decoding: the model drafts tokens with its first layers and checks them with
    all L. The agent decides, for each round, at which depth to draft and when to stop (LEDE,
    arXiv 2606.03113). Replay of recorded greedy text: every observation and outcome is what the
    model would have produced, up to the departure below. An episode is one text.

    A round starts with one emitted token. SELECT: the token is walked down the candidate depths
    d_1 < ... < d_m < L. `exit` at a depth l* proposes the exit head's best token there and opens
    DRAFT, in which the newest proposal has been run to l*. `continue` after d_m takes the last
    layer's token. Verification runs everything pending to L in one pass, keeps the proposals that
    agree from the left and adds one token of the last layer; it happens inside the step that
    triggers it. It is forced by max_draft proposals (the last is run to l*, but not scored), by an
    end-of-text proposal and by the last token that the budget allows (neither is run, and if right
    no token of the last layer follows).

    Departure: without recorded overrun a round is verified at its first wrong proposal, in the
    same step; `info["overrun"]` says so. The cost of drafting on behind a wrong proposal is hidden.

    ## Action Space
    | action | SELECT | DRAFT |
    |---|---|---|
    | 0 continue | run the token to the next depth | stop drafting, verify |
    | 1 exit | propose at this depth | propose one more token |

    ## Observation Space
    float32 Box, one column a feature, clipped to finite bounds; zeros once the text is complete.

    | feature | meaning | bounds |
    |---|---|---|
    | confidence | -(1/k) sum of log p over the k most probable tokens at this depth | 0..50 |
    | entropy | of the head's distribution, nats | 0..16 |
    | trace | mean of -log p(top-1) over the last `window` tokens, each at the depth it comes from | 0..16 |
    | depth | depth / L | 0..1 |
    | phase | 0 SELECT, 1 DRAFT | 0..1 |
    | draft_length | proposals of this round / max_draft | 0..1 |
    | top1, margin | best probability; best less second | 0..1 |
    | stable | 1 if the candidate depth before had the same best token; 0 at d_1 and in DRAFT | 0..1 |
    | acceptance | accepted / proposed over the finished rounds; 1 before the first proposal | 0..1 |
    | chain | -sum of log p(top-1) over the proposals of this round | 0..192 |

    "paper" is the first three, "extended" all of them.

    ## Rewards
    See `sde_gym.envs.rewards`: "lede" (the default), "speed", "module:function" or a callable.
    With credit "round", what proposals earn is paid in the step that ends their round.

    ## Episode End
    `terminated` when the text is complete, by end of text or by the token budget. Never truncated.

    ## Info
    Counters since prefill (`layer_passes`, `sequential_layers`, `head_calls`, `decisions`,
    `drafted`, `accepted`, `rounds`, `tokens`), `phase`, `depth` (layers the newest token has been
    run through), `draft_length`, `text` (index), `text_id`, `overrun`.

    ## Arguments
    All but a raw callable and a `TraceSet` are plain JSON, so that the spec can be stored.

    ## Version History
    - v0: first version.

    Args:
        traces: name of a shipped trace set, path of a folder, or a `TraceSet` (which, like a raw
            callable for the reward, cannot be stored in a spec).
        tasks: only texts of these tasks; all if not given.
        order: "shuffled" (anew each time all texts were played, by the seed) or "sequential".
        depths: candidate depths, a rising subset of the recorded ones; all if not given.
        observation: "paper", "extended" or a list of feature names.
        reward: see above.
        credit: "immediate" or "round".
        k: log-probabilities averaged by `confidence`, at most those recorded.
        window: tokens averaged by `trace`.
        max_draft: cap on the proposals of a round; 12 is LEDE's.
        max_new_tokens: token budget, at least 2, by default the recorded one; more only if no
            text was cut by it.
        final_token_reward: of reward "lede", for the last layer's own tokens.
        rho: of reward "speed", the price of a layer in tokens; 1 / L if not given.
        render_mode: None.

    Raises:
        InputError: an argument out of range; the message names it.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self,
        traces: str | Path | TraceSet = "stdlib-20m",
        *,
        tasks: Sequence[str] | None = None,
        order: str = "shuffled",
        depths: Sequence[int] | None = None,
        observation: str | Sequence[str] = "paper",
        reward: str | Reward = "lede",
        credit: str = "immediate",
        k: int = 5,
        window: int = 8,
        max_draft: int = DEFAULT_MAX_DRAFT,
        max_new_tokens: int | None = None,
        final_token_reward: float = 1.0,
        rho: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise InputError(f"render_mode: {render_mode!r} is not supported, only None is")
        self.render_mode = render_mode
        if order not in ORDERS:
            raise InputError(f"order: {order!r} is not one of {', '.join(ORDERS)}")
        if callable(reward):
            warnings.warn(
                f"reward: the callable {reward!r} cannot be stored in the environment's spec; "
                "name it as 'module:function' instead",
                stacklevel=2,
            )
        if not isinstance(traces, (str, Path, TraceSet)):
            raise InputError(f"traces: {traces!r} is neither a name nor a path")
        trace_set = traces if isinstance(traces, TraceSet) else load_traces(traces)
        self.engine = ReplayEngine(
            trace_set,
            depths=depths,
            observation=observation,
            reward=reward,
            credit=credit,
            k=k,
            window=window,
            max_draft=max_draft,
            max_new_tokens=max_new_tokens,
            final_token_reward=final_token_reward,
            rho=rho,
        )
        if not self.engine.names:
            raise InputError("observation: an environment needs at least one feature")
        texts = trace_set.texts_of(tasks)
        self._texts = texts[self.engine.tables.playable[texts]]
        if not len(self._texts):
            raise InputError(f"tasks: no text of {tasks!r} has at least two tokens")
        self._order = order
        self._waiting: list[int] = []
        self.observation_space = gymnasium.spaces.Box(*bounds(self.engine.names), dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(Action))

    @property
    def traces(self) -> TraceSet:
        """The recorded texts."""
        return self.engine.traces

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the next text.

        Args:
            seed: starts the order of the texts over.
            options: {"text": index or id} plays that one, out of order.

        Raises:
            InputError: an unknown option, or a text that there is not.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._waiting = []
        text = self._next_text() if not options else self._chosen_text(options)
        observation = self.engine.reset_lanes([0], [text])
        return observation[0], self._info(text)

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take one `Action`.

        Raises:
            InputError: not 0 or 1.
            RuntimeError: the text is complete, or none was started.
        """
        observation, reward, terminated, _ = self.engine.step(np.array([action]))
        return observation[0], float(reward[0]), bool(terminated[0]), False, self._info()

    def _next_text(self) -> int:
        """The next text in order; the first one again, or a new order, after the last."""
        if not self._waiting:
            shuffled = self._order == "shuffled"
            texts = self.np_random.permutation(self._texts) if shuffled else self._texts
            self._waiting = texts[::-1].tolist()
        return self._waiting.pop()

    def _chosen_text(self, options: dict[str, Any]) -> int:
        """The text that `options` ask for."""
        if set(options) != {"text"}:
            raise InputError(f"options: {sorted(options)} given, only 'text' is known")
        choice = options["text"]
        if isinstance(choice, str):
            choice = self.traces.index_of(choice)
        if isinstance(choice, bool) or not isinstance(choice, (int, np.integer)):
            raise InputError(f"options: text {choice!r} is neither an index nor an id")
        if choice not in self._texts:
            raise InputError(
                f"options: text {choice} is not among the {len(self._texts)} texts of this environment "
                f"(0..{len(self.traces) - 1}, of the chosen tasks)"
            )
        return int(choice)

    def _info(self, text: int | None = None) -> dict[str, Any]:
        """Counters and state as plain Python values, the same keys and types in every step."""
        if text is not None:
            self._text = text
        lane = np.zeros(1, dtype=np.int64)
        view = self.engine.view(lane, np.zeros((1, 0), dtype=np.float32))
        return {
            **{name: int(value[0]) for name, value in self.engine.counters(lane).items()},
            "phase": int(view.phase[0]),
            "depth": self.engine.depths[int(view.depth_index[0])],
            "draft_length": int(view.draft_length[0]),
            "text": self._text,
            "text_id": self.traces.text_ids[self._text],
            "overrun": bool(self.traces.manifest["overrun"]),
        }
