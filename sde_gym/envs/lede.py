"""`sde_gym/LEDE-v0`: the decision problem as a gymnasium environment, over recorded traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.envs.engine import ReplayEngine
from sde_gym.envs.lanes import Lanes, lane_seeds
from sde_gym.envs.rendering import RenderedEnv, Renderer, check_render_mode
from sde_gym.envs.rewards import Reward, warn_if_raw
from sde_gym.envs.snapshot import ReplayScene
from sde_gym.models.cost import CostModel
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.traces import TraceSet


class LEDEEnv(RenderedEnv):
    """One text of a language model, decoded by early exits and verification.

    ## Description
    Self-speculative decoding: the model drafts tokens with its first layers and checks them with
    all L. The agent decides, for each round, at which depth to draft and when to stop (LEDE,
    arXiv 2606.03113). Replay of recorded greedy text: every observation and outcome is what the
    model would have produced, up to the departure below.

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
    float32 Box, one column a feature, clipped to finite bounds; zeros once the episode is over.

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
    | probe | the exit probe's probability that the proposal is the last layer's token | 0..1 |

    "paper" is the first three, "extended" all but `probe`, which needs traces recorded with an exit
    probe (`sde_gym.models.probe`) and is asked for by name.

    ## Rewards
    See `sde_gym.envs.rewards`: "lede" (the default), "speed", "module:function" or a callable.
    With credit "round", what proposals earn is paid in the step that ends their round.

    ## Episode End
    Never truncated.

    | `episode` | `terminated` | `reset()` |
    |---|---|---|
    | "generation" | the text is complete, by end of text or by the token budget | the next text |
    | "round" | a round was verified | the text's next round with its history, after the last the next text |
    | "token" | `exit`, or `continue` after d_m | the same walk from the next token of the true text |

    "token" has SELECT only: a proposal is neither fed nor verified, and `trace` sees all earlier tokens
    at L. A policy trained on it has never seen DRAFT. `reset(seed=...)` draws a text and begins it; so
    does a reset in the middle of a round or walk, which the text cannot go on from.

    ## Info
    Counters since prefill (`layer_passes`, `sequential_layers`, `head_calls`, `decisions`,
    `drafted`, `accepted`, `rounds`, `tokens`); `cost`, all of that under the cost model, in its unit,
    and `speedup`, plain decoding's cost of as many tokens over it (1.0 at first; of episode "token" it
    says nothing); `phase`, `depth` (layers the newest token has been run through), `draft_length`,
    `text` (index), `text_id`, `overrun`. With shorter episodes counters go on as long as the text does.

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
        episode: "generation", "round" or "token"; see Episode End.
        k: log-probabilities averaged by `confidence`, at most those recorded.
        window: tokens averaged by `trace`.
        max_draft: cap on the proposals of a round; 12 is LEDE's.
        max_new_tokens: token budget, at least 2, by default the recorded one; more only if no
            text was cut by it.
        final_token_reward: of reward "lede", for the last layer's own tokens.
        rho: of reward "speed", the price in tokens of a unit of cost; that of plain decoding if not given.
        cost: cost model behind `info` and reward "speed": "unit", or the path of a calibrated JSON file.
        accelerator: what takes the steps, all with the same results: "auto" (the fastest), "numpy",
            "python" (one text only) or "numba" (extra `fast`; rewards "lede" and "speed").
        render_mode: "ansi" (text with colours), "rgb_array" (a picture), "human" (the picture in a
            window, or the text printed where there is none) or None.

    Raises:
        InputError: an argument out of range; the message names it.
    """

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
        episode: str = "generation",
        k: int = 5,
        window: int = 8,
        max_draft: int = DEFAULT_MAX_DRAFT,
        max_new_tokens: int | None = None,
        final_token_reward: float = 1.0,
        rho: float | None = None,
        cost: str | Path | CostModel = "unit",
        accelerator: str = "auto",
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = check_render_mode(render_mode)
        warn_if_raw(reward)
        self._lanes = Lanes(
            traces,
            tasks=tasks,
            order=order,
            depths=depths,
            observation=observation,
            reward=reward,
            credit=credit,
            episode=episode,
            k=k,
            window=window,
            max_draft=max_draft,
            max_new_tokens=max_new_tokens,
            final_token_reward=final_token_reward,
            rho=rho,
            cost=cost,
            accelerator=accelerator,
        )
        self.observation_space = self._lanes.observation_space
        self.action_space = self._lanes.action_space
        scene = ReplayScene(self.traces, self.engine.depths)
        self._renderer = Renderer(render_mode, scene) if render_mode is not None else None

    @property
    def engine(self) -> ReplayEngine:
        """The engine, of one lane."""
        return self._lanes.engine

    @property
    def traces(self) -> TraceSet:
        """The recorded texts."""
        return self.engine.traces

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start the next episode.

        Args:
            seed: starts the order of the texts over.
            options: {"text": index or id} plays that one, out of order.

        Raises:
            InputError: a wrong seed, an unknown option, or a text that there is not.
        """
        lanes = self._lanes
        texts, (lane_seed,) = lanes.chosen(options), lane_seeds(seed, 1)
        super().reset(seed=lane_seed)
        lanes.seed([lane_seed], self.np_random)
        observation = lanes.begin(lanes.all, texts)
        info = lanes.info_alone()
        if self._renderer is not None:
            self._renderer.start(info)
        return observation[0], info

    def step(self, action: np.int64 | int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take one `Action`.

        Raises:
            InputError: not 0 or 1.
            RuntimeError: the episode is over, or none was started.
        """
        engine = self._lanes.engine
        if engine.accelerator == "python":
            observation, reward, terminated = engine.one.step(action)
            info = engine.one.info()
        else:
            rows, rewards, ends = engine.advance(np.array([action]))
            observation, reward, terminated = rows[0], float(rewards[0]), bool(ends[0])
            info = self._lanes.info_alone()
        if self._renderer is not None:
            self._renderer.follow(info, reward, terminated)
        return observation, reward, terminated, False, info
