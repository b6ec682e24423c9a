"""What the methods of the decoding benchmark are made of: traces, a static setting, policies.

Each part is made when a method first asks for it, from training prompts only (but for the traces of the
measured prompts, which serve the oracle and simulated speed-ups), and kept in the output folder:

    traces/            of the training prompts
    static.json        the best static setting and all that were timed
    adadecode.json     the setting of AdaDecode, and what others cost
    lede/, lede_speed/ policies, see `sde_gym.offline.pipeline`; `trained.json` when one is finished
    measured-traces/   of the measured prompts

A later run takes what is there if it was made from the same things, and makes it anew otherwise; traces
of other settings are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import sde_gym
from sde_gym.decoding import speculative
from sde_gym.envs.run import run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.decode_settings import DecodeSettings, usable_draft
from sde_gym.evaluation.demo import TUNING_PROMPTS, Progress, hardware
from sde_gym.evaluation.measured_prompts import digest, encoded
from sde_gym.evaluation.static import StaticScore, best_static
from sde_gym.files import read_json, write_json
from sde_gym.models.cost import head_sizes, resolve_cost
from sde_gym.models.layered import LayeredModel
from sde_gym.offline import DQNSettings, train_policy
from sde_gym.offline.collect import trace_set_id
from sde_gym.policies.controller import Controller
from sde_gym.policies.files import load_policy
from sde_gym.policies.qnetwork import QController
from sde_gym.prompts import Prompt
from sde_gym.settings import DEFAULT_DEPTHS, is_number, is_whole
from sde_gym.traces import TraceSet
from sde_gym.traces.recorder import record

#: What is particular to each policy trained here; both proved fastest with these (docs/evaluation.md).
POLICY_SETTINGS: dict[str, dict[str, Any]] = {
    "lede": {"final_token_reward": 0.0, "gamma": 0.99},
    "lede_speed": {"reward": "speed", "gamma": 0.9, "n_steps": 3},
}

#: Says of a policy's folder that its training was finished, and on what.
_TRAINED = "trained.json"

#: A controller and the candidate depths that it is offered.
Candidate = tuple[Controller, tuple[int, ...]]


class Preparation:
    """Makes and keeps what methods ask for.

    Args:
        model: the model to decode with.
        settings: of the benchmark; of its cap on drafts no more is used than the token budget.
        train: prompts to tune and train on.
        measured: prompts to measure on, none of them among `train`.
        out: the output folder.
        progress: told of every stage.

    Attributes:
        depths: candidate exit depths: those of the settings and those of policies that were given.

    Raises:
        InputError: depths that the model does not have, or a policy or cost model that cannot be read or
            does not fit.
    """

    def __init__(
        self,
        model: LayeredModel,
        settings: DecodeSettings,
        train: Sequence[Prompt],
        measured: Sequence[Prompt],
        out: Path,
        progress: Progress,
    ) -> None:
        self.model = model
        self.settings = replace(settings, max_draft=usable_draft(settings.max_draft, settings.max_new_tokens))
        self.train = list(train)
        self.measured = list(measured)
        self.out = out
        self._progress = progress
        self._policies: dict[str, QController] = {}
        for name, folder in (("lede", settings.policy), ("lede_speed", settings.speed_policy)):
            if folder is not None:
                policy = load_policy(folder)
                policy.bind(policy.depths, model.num_layers, policy.max_draft)
                self._policies[name] = policy
        chosen = settings.depths or tuple(depth for depth in DEFAULT_DEPTHS if depth < model.num_layers)
        model.check_depths(chosen)
        for depth in settings.policy_depths or ():
            if depth not in chosen:
                raise InputError(f"policy_depths: {depth} is not one of the depths {list(chosen)}")
        given = [depth for policy in self._policies.values() for depth in policy.depths]
        self.depths: tuple[int, ...] = model.check_depths(sorted({*chosen, *given}))
        longest = max(self.settings.max_draft, *(policy.max_draft for policy in self._policies.values()), 1)
        self._overrun = longest - 1
        resolve_cost(settings.cost, model.num_layers, longest, head_sizes(model))  # refused now or never

    @cached_property
    def traces(self) -> TraceSet:
        """The training prompts, recorded."""
        return self._record("record training prompts", self.train, self.out / "traces")

    @cached_property
    def measured_traces(self) -> TraceSet:
        """The measured prompts, recorded; texts of fewer than two tokens are not among them."""
        return self._record("record measured prompts", self.measured, self.out / "measured-traces")

    def _record(self, stage: str, prompts: list[Prompt], folder: Path) -> TraceSet:
        self._progress(stage, 0, len(prompts))
        return record(
            self.model,
            prompts,
            folder,
            self.depths,
            max_new_tokens=self.settings.max_new_tokens,
            overrun=self._overrun,
            progress=lambda done, total, count: self._progress(stage, done, total, f"{count} tokens"),
        )

    @cached_property
    def static(self) -> StaticScore:
        """The best static setting on training prompts, see `best_static`."""
        return _static_score(self.static_choice["chosen"])

    @cached_property
    def static_choice(self) -> dict[str, Any]:
        """What `static.json` holds: `request`, `chosen`, and `candidates` with what was measured."""
        stage, tuning = "tune the static setting", self.train[:TUNING_PROMPTS]

        def choose() -> dict[str, Any]:
            self._progress(stage, 0, len(tuning))
            score, timed = best_static(
                self.model,
                self.traces,
                encoded(self.model, tuning),
                self.settings.max_new_tokens,
                max_draft=self.settings.max_draft,
                progress=lambda done, total: self._progress(stage, done, total),
            )
            candidates = [{**asdict(candidate), "measured_speedup": speed} for candidate, speed in timed]
            return {"chosen": asdict(score), "candidates": candidates}

        machine = {
            "traces": trace_set_id(self.traces),
            "hardware": hardware(self.model, self.settings.threads),
        }

        def check(found: dict[str, Any]) -> None:
            _static_score(found["chosen"])
            len(found["candidates"])

        return self._kept("static", machine, choose, check)

    def fewest_layers(self, name: str, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate that the decoder runs the fewest layers with, heads counted by size.

        For controllers that replay cannot serve: tuning prompts are decoded, nothing is timed. The choice is
        kept in `NAME.json`.
        """
        labels = [f"{controller.name} of {list(depths)}" for controller, depths in candidates]

        def choose() -> dict[str, Any]:
            layers = []
            for number, candidate in enumerate(candidates):
                self._progress(f"tune {name}", number, len(candidates), labels[number])
                layers.append(self._layers(*candidate))
            self._progress(f"tune {name}", len(candidates), len(candidates))
            return {"chosen": int(np.argmin(layers)), "layers_a_token": layers}

        def check(found: dict[str, Any]) -> None:
            if not is_whole(found["chosen"]) or not 0 <= found["chosen"] < len(candidates):
                raise ValueError

        return candidates[self._kept(name, {"candidates": labels}, choose, check)["chosen"]]

    def _layers(self, controller: Controller, depths: tuple[int, ...]) -> float:
        """Layers a token on tuning prompts; every head counts as an exit head."""
        exit_head, _ = head_sizes(self.model)
        layers, tokens = 0.0, 0
        for _, _, ids in encoded(self.model, self.train[:TUNING_PROMPTS]):
            result = speculative(
                self.model, ids, controller, depths, self.settings.max_new_tokens,
                max_draft=self.settings.max_draft,
            )  # fmt: skip
            layers += result.sequential_layers + exit_head * result.head_calls
            tokens += len(result.tokens) - 1
        return layers / max(1, tokens)

    def _kept(
        self,
        name: str,
        also: dict[str, Any],
        choose: Callable[[], dict[str, Any]],
        check: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """A choice made on tuning prompts: that of `NAME.json` if it was asked the same, else a new one.

        A file that `check` refuses with a KeyError, TypeError or ValueError is damaged: the choice is made
        anew.
        """
        request = {
            "model": self.model.weights_hash(),
            "prompts": digest(self.train[:TUNING_PROMPTS]),
            "max_new_tokens": self.settings.max_new_tokens,
            "max_draft": self.settings.max_draft,
            "version": sde_gym.__version__,
            **also,
        }
        path = self.out / f"{name}.json"
        found = _read_if_any(path)
        if isinstance(found, dict) and found.get("request") == request:
            with suppress(KeyError, TypeError, ValueError):
                check(found)
                return found
        choice = {"request": request, **choose()}
        write_json(path, choice)
        return choice

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate of highest simulated speed-up on the training prompts."""
        return max(candidates, key=lambda candidate: self._speedup(*candidate))

    def _speedup(self, controller: Controller, depths: tuple[int, ...]) -> float:
        settings = self.settings
        return run_controller(
            self.traces, controller, depths=depths, max_draft=settings.max_draft, cost=settings.cost
        ).speedup

    def policy(self, name: str) -> QController:
        """The policy `lede` or `lede_speed`: the one given, the one in the folder, or one trained now."""
        if name not in self._policies:
            self._policies[name] = self._trained(name)
        return self._policies[name]

    def _trained(self, name: str) -> QController:
        given = self.settings
        settings = replace(
            DQNSettings(**POLICY_SETTINGS[name]),
            depths=given.policy_depths or (self.static.exit_depth,),
            max_draft=given.max_draft,
            episodes=given.episodes,
            gradient_steps=given.gradient_steps,
            evaluate_every=min(DQNSettings().evaluate_every, given.gradient_steps),
            seed=given.seed,
        )
        folder, stage = self.out / name, f"train {name}"
        request = {
            "settings": settings.to_json(),
            "traces": trace_set_id(self.traces),
            "version": sde_gym.__version__,
        }
        if _read_if_any(folder / _TRAINED) == request:
            return load_policy(folder)
        (folder / _TRAINED).unlink(missing_ok=True)
        self._progress(stage, 0, settings.gradient_steps)
        train_policy(
            self.traces,
            folder,
            settings,
            progress=lambda done, total, metrics: self._progress(stage, done, total),
        )
        write_json(folder / _TRAINED, request)
        return load_policy(folder)  # as a later run will


def _static_score(values: Any) -> StaticScore:
    """What `asdict` gave; TypeError for anything else."""
    score = StaticScore(**values)
    if not is_whole(score.exit_depth) or not is_whole(score.draft_length):
        raise TypeError
    if not all(is_number(getattr(score, field.name)) for field in fields(score)):
        raise TypeError
    return score


def _read_if_any(path: Path) -> Any:
    """What a JSON file holds; None if there is none, or none that can be read."""
    try:
        return read_json(path)
    except InputError:
        return None
