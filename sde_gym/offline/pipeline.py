"""The whole stage in one call: recorded traces in, a policy file out.

The output folder, in the order in which it fills:

    transitions.npz       the exploratory episodes, with propensities
    settings.json         every setting and the trace set's identity, before the first gradient step
    policy.safetensors    the best checkpoint so far, replaced whenever a better one appears,
    policy.json           and a readable copy of its description
    training_log.jsonl    one row of metrics per checkpoint (see `training`)

Every file is replaced as a whole, so a run that is stopped leaves a folder that can be used. The
policy and log of another run are removed only when the new one is about to take its first gradient
step. A second run with the same collection settings takes the transitions from the folder and
trains afresh; a reward that is imported is collected for every time, its code may have changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sde_gym
from sde_gym.envs.ranking import reward_ranking
from sde_gym.errors import InputError
from sde_gym.files import read_json, write_json, write_text
from sde_gym.offline.algorithms import algorithm_factory
from sde_gym.offline.backend import import_d3rlpy
from sde_gym.offline.behaviours import exploratory_schedule
from sde_gym.offline.collect import collect, trace_set_id
from sde_gym.offline.selection import check_fit, environment_of, replay_metrics
from sde_gym.offline.settings import DQNSettings
from sde_gym.offline.training import Log, Progress, dqn_name, train
from sde_gym.offline.transitions import Transitions, load_transitions, save_transitions
from sde_gym.policies.controller import Controller
from sde_gym.policies.files import policy_paths, save_policy
from sde_gym.policies.qnetwork import QController
from sde_gym.traces import TraceSet

SETTINGS_FILE = "settings.json"
TRANSITIONS_FILE = "transitions.npz"
LOG_FILE = "training_log.jsonl"
POLICY_NAME = "policy"


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """What `train_policy` made.

    Attributes:
        policy: the best checkpoint, as saved.
        log: one row of metrics per checkpoint.
        transitions: what it was trained on.
        reused: whether the transitions were found in the folder.
    """

    policy: QController
    log: Log
    transitions: Transitions
    reused: bool


def train_policy(
    traces: TraceSet,
    out: str | Path,
    settings: DQNSettings | None = None,
    progress: Progress | None = None,
    *,
    algorithm: str | None = None,
    transitions: Transitions | None = None,
) -> TrainedPolicy:
    """Explore, train, write the policy.

    The checkpoint that is kept is the one of highest return on `traces` themselves, in the environment
    of the transitions; keep the texts that a result is reported on out of them.

    Args:
        traces: the training texts.
        out: folder, see the module; made if missing. What another run left there is replaced, but
            not before this one can start.
        settings: `DQNSettings()` if None.
        progress: called with gradient steps done, in all, and the newest checkpoint's metrics.
        algorithm: a name out of `algorithms.algorithm_names()`; DQN or double DQN, as the settings
            say, if not given.
        transitions: train on these instead of exploring; nothing of them is written.

    Returns:
        The policy, its log and its data.

    Raises:
        InputError: settings that train nothing or do not fit the traces or the transitions, an algorithm
            that there is not or whose policy no file can hold, an `out` that is a file, or d3rlpy missing.
    """
    chosen = settings or DQNSettings()
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; give a folder for the policy")
    method = algorithm or dqn_name(chosen)
    algorithm_factory(method)
    identity = trace_set_id(traces)
    import_d3rlpy()
    if transitions is not None:
        check_fit(transitions, chosen, traces)
        data, reused = transitions, False
    else:
        data, reused = _transitions(traces, folder / TRANSITIONS_FILE, chosen, identity)
    environment = environment_of(data)  # says more than the settings do: credit, budget, cost
    ranking = reward_ranking(traces, **environment) if traces.overrun else math.nan

    def evaluate(policy: Controller) -> dict[str, float]:
        return replay_metrics(traces, policy, **environment)

    def keep(policy: Controller, metrics: Mapping[str, float]) -> None:
        save_policy(
            folder / POLICY_NAME,
            _of_a_file(policy, method),
            model={"name": traces.manifest["model"], "weights_hash": traces.manifest["model_hash"]},
            traces=identity,
            training=chosen.to_json(),
            provenance={
                "algorithm": method,
                "selected_by": "highest mean return per training text, greedy, in replay",
                "checkpoint": dict(metrics),
                # None where it is undefined: JSON has no NaN.
                "reward_speed_rank_correlation": ranking if math.isfinite(ranking) else None,
                "texts": len(traces),
                "transitions": len(data),
                "versions": _versions(),
            },
        )

    rows: Log = []

    def note(row: Mapping[str, float]) -> None:
        rows.append(dict(row))
        write_text(folder / LOG_FILE, "".join(json.dumps(row) + "\n" for row in rows))

    def start(policy: Controller) -> None:
        _of_a_file(policy, method)
        run = {"settings": chosen.to_json(), "traces": identity, "algorithm": method}
        if transitions is not None:
            run["data"] = {"transitions": len(data), **data.settings}
        _begin(folder, run)

    best = train(
        data, method, chosen, traces=traces, evaluate=evaluate, progress=progress, on_best=keep,
        on_checkpoint=note, on_start=start, name="lede" if algorithm is None else method,
    )  # fmt: skip
    return TrainedPolicy(_of_a_file(best, method), rows, data, reused)


def _of_a_file(policy: Controller, method: str) -> QController:
    """This policy, if a policy file can hold it.

    Raises:
        InputError: it cannot.
    """
    if not isinstance(policy, QController):
        raise InputError(
            f"no policy file can hold what {method} trains; train it with sde_gym.offline.train and compare "
            "it in replay"
        )
    return policy


def _begin(folder: Path, run: dict[str, Any]) -> None:
    """Write what this run is, and remove the policy and log of another one."""
    path = folder / SETTINGS_FILE
    try:
        before = read_json(path)
    except InputError:  # none there, or none that can be read: not this run's
        before = None
    if before != run:
        for stale in (*policy_paths(folder / POLICY_NAME), folder / LOG_FILE):
            stale.unlink(missing_ok=True)
    write_json(path, run)


def _transitions(
    traces: TraceSet, path: Path, settings: DQNSettings, identity: str
) -> tuple[Transitions, bool]:
    """The exploratory episodes: those in the folder if they are what would be collected, else new ones."""
    depths = settings.depths or traces.depths
    request = {
        "depths": list(depths),
        "traces": identity,
        "package_version": sde_gym.__version__,
        "max_new_tokens": traces.manifest["max_new_tokens"],
        "context_limit": traces.manifest["context_limit"],
        **{name: getattr(settings, name) for name in _COLLECTION_SETTINGS},
    }
    try:
        found = load_transitions(path)
        # The code behind "module:function" may have changed since.
        if ":" not in settings.reward and found.settings.get("request") == request:
            return found, True
    except InputError:  # missing or damaged: collecting is cheap
        pass
    collected = explore(traces, settings)
    transitions = dataclasses.replace(collected, settings={**collected.settings, "request": request})
    save_transitions(path, transitions)
    return transitions, False


def explore(traces: TraceSet, settings: DQNSettings) -> Transitions:
    """LEDE's exploratory episodes on these texts, in the environment that the settings describe."""
    return collect(
        traces,
        exploratory_schedule(settings.depths or traces.depths, settings.max_draft, settings.epsilon),
        settings.episodes,
        settings.seed,
        observation=settings.features,
        depths=settings.depths,
        reward=settings.reward,
        final_token_reward=settings.final_token_reward,
        k=settings.k,
        window=settings.window,
        max_draft=settings.max_draft,
    )


#: Settings on which the transitions depend.
_COLLECTION_SETTINGS = (
    "observation", "reward", "final_token_reward", "k", "window", "max_draft", "episodes", "epsilon", "seed",
)  # fmt: skip


def _versions() -> dict[str, str]:
    """Versions of what the weights depend on."""
    from importlib.metadata import version

    return {"sde_gym": sde_gym.__version__, **{name: version(name) for name in ("d3rlpy", "torch", "numpy")}}
