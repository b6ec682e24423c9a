"""The results table: offline algorithms, data sets, seeds, ablations, features, one command, resumable.

    python agents/reproduce.py --out runs/reproduce
    python agents/reproduce.py --out runs/reproduce --groups algorithms --seeds 2    # a part of it

Every run is one small file in OUT/jobs; a second start goes on with what is missing. Policies are trained on
the training texts and chosen there (best checkpoint), then played on texts they never saw: the values are
exact. Speed-ups are simulated under the unit cost model (layers and heads by size), or `--cost`.

Groups of runs:

    algorithms   every algorithm of `sde_gym.offline.algorithms` on two data sets, reward `speed`
    rewards      double DQN under LEDE's reward, with and without reward for the last layer's own tokens
    features     double DQN and CQL on other observations: the paper's three features, with `chain`, with
                 the exit probe, all of them
    ablations    double DQN that chooses among three depths; the same without depth choice, and without length
    episodes     double DQN on fewer and more exploratory episodes

Beside them stand rules chosen on the training texts (the best static setting, the best threshold), coin
flips, the hindsight optimum, and the best that was reached on these features at all, by policy iteration
that sees exact action values (`sde_gym.evaluation.improvement`). OUT then holds results.md, results.json and
pictures.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from sde_gym.envs.hindsight import best_speedup, headroom
from sde_gym.envs.run import RunResult, run_controller
from sde_gym.errors import InputError
from sde_gym.evaluation.aggregate import stratified_interval
from sde_gym.evaluation.improvement import improve
from sde_gym.files import atomic_path, read_json, sha256, write_json, write_text
from sde_gym.models.cost import UNIT, resolve_cost
from sde_gym.offline import DQNSettings, Transitions, collect, exploratory_schedule, train
from sde_gym.offline.behaviours import EpsilonGreedy, UniformRandom
from sde_gym.offline.collect import trace_set_id
from sde_gym.offline.restricted import OnePhase, restricted
from sde_gym.offline.selection import check_same_model
from sde_gym.offline.sequences import SequenceController
from sde_gym.options import parse_list
from sde_gym.policies.ablation import DepthChoiceOnly, LengthChoiceOnly
from sde_gym.policies.controller import Controller
from sde_gym.policies.observation import EXTENDED, PAPER
from sde_gym.policies.rules import RandomController, StaticController, ThresholdController
from sde_gym.terminal import errors_as_sentences, progress_bars
from sde_gym.traces import TraceSet, load_traces

SLOW = "decision_transformer"
ALGORITHMS = ("dqn", "double_dqn", "cql", "bcq", "sac", "bc", "nfq", "qr_dqn", SLOW)
DATA = ("schedule", "uniform")
OBSERVATIONS: dict[str, tuple[str, ...]] = {
    "paper": PAPER,
    "paper + chain": (*PAPER, "chain"),
    "paper + probe": (*PAPER, "probe"),
    "extended": EXTENDED,
    "extended + probe": (*EXTENDED, "probe"),
}
DEPTH, LENGTH = 4, 4
"""The best static setting of the embedded model, on the training texts."""

CHOICE = (3, 4, 6)
"""Depths offered where there is a choice."""

REFERENCE_SEEDS, SLOW_SEEDS = 2, 2
"""Most seeds of policy iteration and of the Decision Transformer, which take longest."""

EPISODES = (25, 50, 100, 200, 400, 800, 1600)
GROUPS = ("references", "algorithms", "rewards", "features", "ablations", "episodes")
GAMMA, N_STEPS, MAX_DRAFT = 0.9, 3, 12
LENGTHS, THRESHOLDS = (1, 2, 3, 4, 5, 6, 8, 12), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Job:
    """One training run, or the policy iteration of `references`."""

    group: str
    algorithm: str
    seed: int
    data: str = "schedule"
    observation: str = "extended"
    depths: tuple[int, ...] = (DEPTH,)
    reward: str = "speed"
    final_token_reward: float = 1.0
    ablation: str = ""
    episodes: int = 400
    gradient_steps: int = 3000

    @property
    def name(self) -> str:
        """Of its file; runs that differ in anything have different names."""
        parts = (
            self.group, self.algorithm, self.data, self.observation.replace(" ", ""),
            "-".join(map(str, self.depths)), f"{self.reward}{self.final_token_reward:g}",
            self.ablation.replace(" ", "-") or "full", f"{self.episodes}x{self.gradient_steps}",
            f"seed{self.seed}",
        )  # fmt: skip
        return "_".join(parts)

    @property
    def environment(self) -> dict[str, Any]:
        """What `run_controller` is told."""
        return {
            "depths": self.depths,
            "max_draft": MAX_DRAFT,
            "reward": self.reward,
            "final_token_reward": self.final_token_reward,
        }


def plan(groups: Sequence[str], seeds: int, gradient_steps: int) -> list[Job]:
    """All runs, those of the first group first."""
    found: list[Job] = []
    for seed in range(seeds):
        shared = {"seed": seed, "gradient_steps": gradient_steps}
        # Its steps cost ten times as much as those of the others.
        fewer = {"seed": seed, "gradient_steps": max(1, gradient_steps // 3)}
        per_group: dict[str, list[Job]] = {
            "references": [
                Job("references", "exact", **shared, observation=observation, episodes=160)
                for observation in OBSERVATIONS
                if seed < REFERENCE_SEEDS
            ],
            "algorithms": [
                Job("algorithms", algorithm, **(fewer if algorithm == SLOW else shared), data=data)
                for algorithm in ALGORITHMS
                for data in DATA
                if algorithm != SLOW or seed < SLOW_SEEDS
            ],
            "rewards": [
                Job("rewards", "double_dqn", **shared, reward="lede", final_token_reward=paid)
                for paid in (1.0, 0.0)
            ],
            "features": [
                Job("features", algorithm, **shared, observation=observation)
                for algorithm in ("double_dqn", "cql")
                for observation in OBSERVATIONS
                if observation != "extended"  # which `algorithms` has
            ],
            "ablations": [
                Job("ablations", "double_dqn", **shared, depths=CHOICE, ablation=ablation)
                for ablation in ("", "no depth", "no length")
            ],
            "episodes": [Job("episodes", "double_dqn", **shared, episodes=count) for count in EPISODES],
        }
        found += [job for group in groups for job in per_group[group]]
    return sorted(found, key=lambda job: groups.index(job.group))


def run(job: Job, out: Path, traces: str, test: str, cost: str) -> str:
    """Do a job and write its file; its name."""
    started = time.perf_counter()
    training, held_out = load_traces(traces), load_traces(test)
    log: list[dict[str, float]] = []
    policy: Controller
    if job.group == "references":
        series = improve(
            training, StaticController(DEPTH, LENGTH), observation=OBSERVATIONS[job.observation],
            depths=job.depths, reward=job.reward, max_draft=MAX_DRAFT, episodes=job.episodes, seed=job.seed,
        )  # fmt: skip
        policy = max(series, key=lambda entry: entry.mean_return).policy
    else:
        policy = trained(job, training, log)

    def play(texts: TraceSet) -> dict[str, Any]:
        player = policy.on(texts) if isinstance(policy, SequenceController) else policy
        return numbers(run_controller(texts, player, cost=cost, **job.environment), texts)

    write_json(
        out / "jobs" / f"{job.name}.json",
        {
            "job": as_json(job),
            "traces": [trace_set_id(training), trace_set_id(held_out)],
            "cost": cost_id(cost),
            "train": play(training),
            "test": play(held_out),
            "log": log,
            "seconds": time.perf_counter() - started,
        },
    )
    return job.name


def trained(job: Job, training: TraceSet, log: list[dict[str, float]]) -> Controller:
    """Collect, train, and join the policy to the rule of its ablation."""
    observation = OBSERVATIONS[job.observation]
    rules = {**job.environment, "observation": observation}
    settings = DQNSettings(
        gamma=GAMMA, n_steps=N_STEPS, gradient_steps=job.gradient_steps, evaluate_every=1000, seed=job.seed,
        max_draft=MAX_DRAFT,
    )  # fmt: skip
    join: Any = lambda policy: policy  # noqa: E731
    if job.ablation:
        static = StaticController(DEPTH, LENGTH)
        phase = "draft" if job.ablation == "no depth" else "select"
        explored = EpsilonGreedy(ThresholdController(0.3), 0.5)
        data: Transitions = restricted(
            collect(training, OnePhase(explored, static, phase), job.episodes, job.seed, **rules), phase
        )
        if phase == "draft":
            join = lambda policy: LengthChoiceOnly(policy, DEPTH)  # noqa: E731
        else:
            join = lambda policy: DepthChoiceOnly(policy, LENGTH)  # noqa: E731
    else:
        schedule = exploratory_schedule(job.depths, MAX_DRAFT, 0.15)
        behaviour = UniformRandom() if job.data == "uniform" else schedule
        data = collect(training, behaviour, job.episodes, job.seed, **rules)

    def evaluate(policy: Controller) -> Mapping[str, float]:
        found = numbers(run_controller(training, join(policy), **job.environment), training)
        return {name: value for name, value in found.items() if name != "tasks"}

    on_checkpoint: Any = lambda metrics: log.append(dict(metrics))  # noqa: E731
    return join(
        train(data, job.algorithm, settings, traces=training, evaluate=evaluate, on_checkpoint=on_checkpoint)
    )


def numbers(result: RunResult, traces: TraceSet) -> dict[str, Any]:
    """What is kept of a policy's run over texts."""
    tasks = np.array(traces.tasks)[result.texts]
    speedup = {
        task: result.cost_model.speedup(
            float(result.tokens[tasks == task].sum()), float(result.cost[tasks == task].sum())
        )
        for task in sorted(set(traces.tasks))
    }
    return {
        "return": float(result.returns.mean()),
        "speedup": result.speedup,
        "acceptance_rate": result.acceptance_rate,
        "mean_exit_depth": result.mean_exit_depth,
        "mean_draft_length": result.mean_draft_length,
        "tasks": speedup,
    }


def rules(training: TraceSet, held_out: TraceSet, cost: str) -> list[dict[str, Any]]:
    """The rules to beat, chosen on the training texts, and the hindsight optimum."""
    settings: dict[str, Any] = {"max_draft": MAX_DRAFT, "cost": cost}
    static = [StaticController(depth, length) for depth in training.depths for length in LENGTHS]
    threshold = [(ThresholdController(value), depth) for depth in training.depths[1:] for value in THRESHOLDS]
    if not threshold:
        raise InputError("traces: one depth only; a threshold needs one above the first to be offered")
    best = max(static, key=lambda rule: run_controller(training, rule, **settings).speedup)
    rule, depth = max(
        threshold, key=lambda pair: run_controller(training, pair[0], depths=[pair[1]], **settings).speedup
    )
    rows = []
    for label, name, controller, own in (
        ("best static", best.name, best, {}),
        ("best threshold", f"{rule.name} at depth {depth}", rule, {"depths": [depth]}),
        ("coin flips", "every depth", RandomController(0.5, seed=0), {}),
    ):
        found = numbers(run_controller(held_out, controller, **own, **settings), held_out)
        rows.append({"label": label, "setting": name, **found})
    for label, depths in (("hindsight optimum", None), (f"hindsight, depth {DEPTH} only", [DEPTH])):
        speedup = best_speedup(held_out, depths=depths, **settings)
        rows.append({"label": label, "setting": "", "speedup": speedup})
    return rows


def report(out: Path, jobs: Sequence[Job], training: TraceSet, held_out: TraceSet, cost: str) -> str:
    """Tables of all runs that are there, as Markdown; results.json has the same and more."""
    done = [read_json(out / "jobs" / f"{job.name}.json") for job in jobs]
    fixed = rules(training, held_out, cost)
    static = fixed[0]["speedup"]
    optimum = fixed[3]["speedup"]
    series = [entry for entry in done if entry["job"]["group"] == "references"]
    chosen = max(series, key=lambda entry: entry["train"]["speedup"], default=None)
    reached = None if chosen is None else chosen["test"]["speedup"]
    lines = [
        f"{len(training)} training texts, {len(held_out)} held-out ones; double DQN and others: "
        f"{jobs[0].gradient_steps} gradient steps, discount {GAMMA}, {N_STEPS}-step returns, depth {DEPTH}, "
        f"cost model {cost!r}. Speed-ups are simulated, on held-out texts.",
        "",
        "| rule | setting | speed-up |",
        "|---|---|---|",
        *(f"| {row['label']} | {row['setting']} | {row['speedup']:.3f} |" for row in fixed),
    ]
    if chosen is not None:
        setting = f"policy iteration on exact values, {chosen['job']['observation']}"
        lines.append(f"| best reached | {setting} | {reached:.3f} |")
    lines += [
        "",
        "| group | run | speed-up; IQM over seeds, tasks | over best static | of the way to the best reached "
        "| to hindsight | acceptance | exit depth | draft length | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    table = []
    for label, entries in grouped(done):
        speedups = [entry["test"]["speedup"] for entry in entries]
        scores = np.array([list(entry["test"]["tasks"].values()) for entry in entries])
        interval = stratified_interval(scores)
        mean = float(np.mean(speedups))
        row = {
            "group": entries[0]["job"]["group"],
            "run": label,
            "iqm": interval.value,
            "interval": [interval.low, interval.high],
            "speedups": speedups,
            "over_static": mean / static - 1,
            "share_of_reached": None if reached is None else headroom(mean, static, reached),
            "share_of_hindsight": headroom(mean, static, optimum),
            **{
                name: float(np.mean([entry["test"][name] for entry in entries]))
                for name in ("return", "acceptance_rate", "mean_exit_depth", "mean_draft_length")
            },
        }
        table.append(row)
        share = "–" if row["share_of_reached"] is None else f"{row['share_of_reached']:.0%}"
        lines.append(
            f"| {row['group']} | {label} | {mean:.3f}; {interval.value:.3f} ({interval.low:.3f}–"
            f"{interval.high:.3f}) | {row['over_static']:+.1%} | {share} | {row['share_of_hindsight']:.0%} | "
            f"{row['acceptance_rate']:.2f} | {row['mean_exit_depth']:.1f} | {row['mean_draft_length']:.1f} | "
            f"{len(entries)} |"
        )
    write_json(out / "results.json", {"rules": fixed, "rows": table, "best_reached": reached})
    text = "\n".join(lines) + "\n"
    write_text(out / "results.md", text)
    pictures(out, done)
    return text


def grouped(done: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Runs that differ by their seed alone, with a label."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in done:
        job = entry["job"]
        label = {
            "references": f"exact values, {job['observation']}",
            "algorithms": f"{job['algorithm']}, {job['data']}",
            "rewards": f"{job['reward']}, final token {job['final_token_reward']:g}",
            "features": f"{job['algorithm']}, {job['observation']}",
            "ablations": f"depths {','.join(map(str, job['depths']))}, {job['ablation'] or 'both decisions'}",
            "episodes": f"{job['episodes']} episodes",
        }[job["group"]]
        found.setdefault(f"{job['group']}: {label}", []).append(entry)
    return [(key.partition(": ")[2], entries) for key, entries in found.items()]


def pictures(out: Path, done: Sequence[Mapping[str, Any]]) -> None:
    """Learning curves against episodes of data, where that group was run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = [entry for entry in done if entry["job"]["group"] == "episodes"]
    if not runs:
        return
    counts = sorted({entry["job"]["episodes"] for entry in runs})
    figure = Figure(figsize=(12, 2.9), dpi=150, layout="constrained")
    panels = (
        ("return", "return of a text"), ("speedup", "simulated speed-up"),
        ("acceptance_rate", "acceptance rate"), ("mean_exit_depth", "mean exit depth"),
    )  # fmt: skip
    for axes, (name, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        values = [[run["test"][name] for run in runs if run["job"]["episodes"] == count] for count in counts]
        for count, some in zip(counts, values, strict=True):
            axes.plot([count] * len(some), some, ".", color="#98a3b3", markersize=5)
        axes.plot(
            counts, [float(np.median(some)) for some in values], color="#544896", marker="o", markersize=4
        )
        axes.set(xscale="log", xlabel="episodes of data", title=label)
        axes.set_xticks(counts, [str(count) for count in counts], rotation=45)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(out / "episodes.png") as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def as_json(job: Job) -> dict[str, Any]:
    """A job as JSON gives it back."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(job)))
    return values


def cost_id(cost: str) -> str:
    """What tells cost models apart: "unit", or the hash of the file."""
    return cost if cost == UNIT else sha256(Path(cost))


def missing(jobs: Sequence[Job], out: Path, identities: list[str], cost: str) -> list[Job]:
    """Jobs without a file of theirs, of these trace sets and this cost model."""
    found = []
    for job in jobs:
        try:
            stored = read_json(out / "jobs" / f"{job.name}.json")
        except InputError:
            found.append(job)
            continue
        wanted = (as_json(job), identities, cost_id(cost))
        if (stored.get("job"), stored.get("traces"), stored.get("cost")) != wanted:
            found.append(job)
    return found


def main(
    out: Annotated[Path, typer.Option(help="Folder; a run that was stopped goes on there.")],
    groups: Annotated[str, typer.Option(help=f"Some of {','.join(GROUPS)}.")] = ",".join(GROUPS),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every run.")] = 5,
    gradient_steps: Annotated[int, typer.Option(min=1, help="Gradient steps of every run.")] = 3000,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
    traces: Annotated[str, typer.Option(help="Trace set to train on: name or folder.")] = "stdlib-20m",
    test: Annotated[str, typer.Option(help="Trace set never trained on.")] = "stdlib-20m-held-out",
    cost: Annotated[
        str, typer.Option(help="Cost model of the reported speed-ups: 'unit' or a calibrated file.")
    ] = "unit",
) -> None:
    """Train everything that the results table holds, and write the table."""
    console = Console(highlight=False)
    with errors_as_sentences():
        chosen = parse_list(groups, str, "groups")
        unknown = sorted(set(chosen) - set(GROUPS))
        if unknown:
            raise InputError(f"groups: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
        training, held_out = load_traces(traces), load_traces(test)
        check_same_model(training, held_out)
        if trace_set_id(training) == trace_set_id(held_out):
            raise InputError(f"test: {test!r} holds the training texts; give others")
        resolve_cost(cost, training.num_layers, MAX_DRAFT)  # refused before anything is trained
        jobs = plan(chosen, seeds, gradient_steps)
        waiting = missing(jobs, out, [trace_set_id(training), trace_set_id(held_out)], cost)
        context = multiprocessing.get_context("spawn")
        with progress_bars() as advance, ProcessPoolExecutor(workers, mp_context=context) as pool:
            advance("runs", len(jobs) - len(waiting), len(jobs), "")
            running = [pool.submit(run, job, out, traces, test, cost) for job in waiting]
            try:
                for count, future in enumerate(as_completed(running), len(jobs) - len(waiting) + 1):
                    advance("runs", count, len(jobs), future.result().partition("_seed")[0])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        console.print(report(out, jobs, training, held_out, cost), soft_wrap=True)
        console.print(f"{out / 'results.md'}, {out / 'results.json'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
