"""The whole path in one run: record, train offline, decode for real, compare, report.

The policy is offered the depth of the best static setting and, as always, the full model, and is
trained on the literal reading of the paper's reward, which pays nothing for the last layer's tokens:
of what was tried, that was fastest (`docs/evaluation.md`).

Everything a stage makes goes into the output folder as soon as it exists, so that an
interrupted run leaves a usable folder, and a repeated one takes up what is there: traces are
resumed, exploratory episodes reused. The methods are compared on prompts that neither the
policy nor the static setting was chosen on; their modules were also kept from the language
model's own training.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import sde_gym
from sde_gym.decoding import DecodeResult
from sde_gym.errors import InputError
from sde_gym.evaluation.benchmark import (
    Method,
    ar_method,
    assistant_early_exit_method,
    controller_method,
    generate_method,
    measure,
    summarise_rows,
)
from sde_gym.evaluation.measured_prompts import digest, encoded, unseen
from sde_gym.evaluation.picture import picture
from sde_gym.evaluation.report import write_report
from sde_gym.evaluation.samples import Sample, token_pieces
from sde_gym.evaluation.static import best_static
from sde_gym.files import write_json
from sde_gym.models.layered import LayeredModel
from sde_gym.models.loading import load_model
from sde_gym.models.threads import torch_threads
from sde_gym.offline import DQNSettings, train_policy
from sde_gym.offline.backend import import_d3rlpy
from sde_gym.policies.files import load_policy
from sde_gym.policies.rules import StaticController
from sde_gym.prompts import Prompt, load_prompts
from sde_gym.settings import DEFAULT_MAX_DRAFT, DEFAULT_NEW_TOKENS, command_of, setting
from sde_gym.traces.recorder import record

#: Training prompts on which static settings are timed.
TUNING_PROMPTS = 8

#: What a finished run adds to its folder; removed when another run begins there.
RESULT_FILES = ("results.json", "report.html", "report.png", "measurements.jsonl")


@dataclass(frozen=True)
class DemoSettings:
    """What the demo does; the defaults take about four minutes on two cores."""

    model: str = setting("stdlib-20m", "model: a shipped name, a local path or a hub id")
    train_prompts: str = setting("stdlib:train", "prompt set or JSONL file to record and learn from")
    test_prompts: str = setting("stdlib:held-out", "prompt set or JSONL file to measure on")
    train_limit: int = setting(60, "prompts recorded")
    test_limit: int = setting(12, "prompts measured")
    max_new_tokens: int = setting(DEFAULT_NEW_TOKENS, "tokens generated per prompt")
    depths: tuple[int, ...] = setting(
        (2, 3, 4, 6, 8), "exit depths recorded, and tried by the static setting"
    )
    policy_depths: tuple[int, ...] | None = setting(
        None, "exit depths offered to the policy; the static setting's if none"
    )
    max_draft: int = setting(DEFAULT_MAX_DRAFT, "most drafts in a round of the policy")
    final_token_reward: float = setting(0.0, "the policy's reward for a token of the last layer")
    gamma: float = setting(0.99, "the policy's discount per decision")
    gradient_steps: int = setting(6_000, "gradient steps of the offline DQN")
    episodes: int = setting(600, "exploratory episodes in the replay buffer")
    repeats: int = setting(2, "passes over the measured prompts")
    threads: int = setting(2, "torch threads")
    seed: int = setting(0, "seed of exploration and training")

    def __post_init__(self) -> None:
        for name in (
            "train_limit", "test_limit", "gradient_steps", "episodes", "repeats", "threads",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens must be at least 2, not {self.max_new_tokens}")


class Progress(Protocol):
    """Where the demo reports to."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` steps of a stage are over; called with 0 when it begins."""


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """A `Progress` that says nothing."""


def run_demo(settings: DemoSettings, out: Path, progress: Progress = silent) -> dict[str, Any]:
    """Run all stages and write traces, replay buffer, policy, results and report into `out`.

    Returns:
        What `results.json` holds: `rows` (one per method), the settings, hardware, versions.

    Raises:
        InputError: a setting, prompt file or model that does not fit, or an `out` that holds
            the traces of another run.
    """
    with torch_threads(settings.threads):
        return _run(settings, out, progress)


def _run(settings: DemoSettings, out: Path, progress: Progress) -> dict[str, Any]:
    started = datetime.now(UTC)
    # Everything that can be refused is refused before anything is written.
    dqn = DQNSettings(
        episodes=settings.episodes,
        gradient_steps=settings.gradient_steps,
        max_draft=settings.max_draft,
        final_token_reward=settings.final_token_reward,
        gamma=settings.gamma,
        seed=settings.seed,
    )
    import_d3rlpy()
    model = load_model(settings.model)
    model.check_depths(settings.depths)
    for depth in settings.policy_depths or ():
        if depth not in settings.depths:
            raise InputError(f"policy_depths: {depth} is not one of the recorded depths {settings.depths}")
    train = load_prompts(settings.train_prompts)[: settings.train_limit]
    test = unseen(load_prompts(settings.test_prompts), train)[: settings.test_limit]
    encoded_test = encoded(model, test)
    encoded_train = encoded(model, train[:TUNING_PROMPTS])
    tokens = settings.max_new_tokens

    out.mkdir(parents=True, exist_ok=True)
    stage = "record traces"
    progress(stage, 0, len(train))
    traces = record(
        model,
        train,
        out / "traces",
        settings.depths,
        max_new_tokens=tokens,
        overrun=max(settings.max_draft, DEFAULT_MAX_DRAFT) - 1,
        progress=lambda done, total, count: progress(stage, done, total, f"{count} tokens"),
    )
    for stale in RESULT_FILES:  # of an earlier run with this folder
        (out / stale).unlink(missing_ok=True)
    write_json(out / "settings.json", asdict(settings))

    progress("tune the static setting", 0, len(encoded_train))
    static, timed = best_static(
        model,
        traces,
        encoded_train,
        tokens,
        progress=lambda done, total: progress("tune the static setting", done, total),
    )

    progress("train the policy", 0, dqn.gradient_steps)
    train_policy(
        traces,
        out / "policy",
        replace(dqn, depths=settings.policy_depths or (static.exit_depth,)),
        progress=lambda done, total, metrics: progress("train the policy", done, total, _note(metrics)),
    )
    policy = load_policy(out / "policy" / "policy")

    methods: dict[str, Method] = {
        "ar": ar_method(model, tokens),
        "generate": generate_method(model, tokens),
        "assistant_early_exit": assistant_early_exit_method(
            model, tokens, static.exit_depth, static.draft_length
        ),
        "static": controller_method(
            model, StaticController(static.exit_depth, static.draft_length), traces.depths, tokens
        ),
        "lede": controller_method(model, policy, policy.depths, tokens, max_draft=policy.max_draft),
    }
    progress("measure", 0, len(test) * settings.repeats)
    log = (out / "measurements.jsonl").open("w", encoding="utf-8")
    with log:
        raw, outputs = measure(
            methods,
            encoded_test,
            repeats=settings.repeats,
            seed=settings.seed,
            progress=lambda done, total: progress("measure", done, total),
            sink=lambda row: print(json.dumps(asdict(row)), file=log, flush=True),
        )
    rows = summarise_rows(raw)
    for row in rows:
        if row["method"] in ("static", "assistant_early_exit"):
            row["exit_depth"], row["draft_length"] = static.exit_depth, static.draft_length
    results: dict[str, Any] = {
        "rows": rows,
        "settings": asdict(settings),
        "model": {"name": model.name, "layers": model.num_layers, "weights": model.weights_hash()},
        "static_candidates": [
            {"exit_depth": s.exit_depth, "draft_length": s.draft_length, "layer_speedup": s.layer_speedup,
             "measured_speedup": speed}
            for s, speed in timed
        ],
        "prompts": {"recorded": len(train), "measured": len(test), "recorded_tokens": len(traces.token),
                    "recorded_sha256": digest(train), "measured_sha256": digest(test)},
        "hardware": hardware(model, settings.threads),
        "versions": versions(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
        "command": command_line(settings),
    }  # fmt: skip
    write_json(out / "results.json", results)
    samples = _samples(model, test, outputs["lede"])
    write_report(out / "report.html", results, samples)
    picture(samples[:2], out / "report.png")
    return results


def command_line(settings: DemoSettings) -> str:
    """The command that repeats a run: `sde-gym demo` and the options that are not defaults."""
    return command_of("sde-gym demo", settings)


def _samples(model: LayeredModel, prompts: list[Prompt], results: Mapping[str, DecodeResult]) -> list[Sample]:
    """The first texts of every task, ready to be shown."""
    shown: dict[str, Prompt] = {}
    for prompt in prompts:
        shown.setdefault(prompt.task, prompt)
    samples = []
    for prompt in shown.values():
        result = results[prompt.id]
        pieces = token_pieces(lambda ids: model.decode(ids), result.tokens)
        samples.append(
            Sample(
                prompt.text,
                pieces,
                result.depths,
                result.fates,
                model.num_layers,
                f"{prompt.task}: {prompt.id}",
            )
        )
    return samples


def _note(metrics: Mapping[str, float]) -> str:
    return f"return {metrics['return']:.1f}" if "return" in metrics else ""


def hardware(model: LayeredModel, threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            models = [line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")]
        name = models[0] if models else name
    except OSError:  # not Linux
        pass
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }


def versions(*further: str) -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on, as far as they are installed."""
    found = {"python": platform.python_version(), "sde_gym": sde_gym.__version__}
    for name in ("torch", "transformers", "numpy", "gymnasium", "d3rlpy", *further):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
