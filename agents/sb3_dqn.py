"""DQN online, with stable-baselines3, on many lanes of the replayed environment.

    python agents/sb3_dqn.py --out runs/sb3-dqn --seed 0

1. All lanes replay training texts together (`sde_gym.envs.sb3.sb3_vec_env`), observations standardised
   by `VecNormalize`.
2. Every `--evaluate-every` steps the present policy is copied into plain numpy, checked against
   DQN's own predictions, and played on the training texts, exactly; the best one is written.
3. Training and test texts are played under the best one.

Metrics, in TensorBoard (`tensorboard --logdir OUT`) and OUT/scalars.jsonl: of the greedy policy what
`replay_metrics` says (return, speedup, acceptance_rate, mean_exit_depth, mean_draft_length; the speed-up
is simulated), and of the learner train/loss (Huber TD loss), train/learning_rate,
train/n_updates and rollout/exploration_rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from sde_gym.envs.sb3 import sb3_vec_env
from sde_gym.errors import InputError
from sde_gym.files import write_json
from sde_gym.offline.buffer import check_returns
from sde_gym.offline.collect import trace_set_id
from sde_gym.offline.scalars import ScalarLog
from sde_gym.offline.selection import check_same_model, replay_metrics
from sde_gym.options import parse_list
from sde_gym.policies.files import policy_paths, save_policy
from sde_gym.policies.importing import from_sb3
from sde_gym.policies.observation import resolve_observation
from sde_gym.policies.qnetwork import QController
from sde_gym.settings import DEFAULT_MAX_DRAFT
from sde_gym.terminal import errors_as_sentences, progress_bars
from sde_gym.traces import load_traces


def main(
    out: Annotated[Path, typer.Option(help="Folder for the policy and its logs.")],
    traces: Annotated[str, typer.Option(help="Trace set to train on: name or folder.")] = "stdlib-20m",
    test: Annotated[str, typer.Option(help="Trace set never trained on.")] = "stdlib-20m-held-out",
    observation: Annotated[
        str, typer.Option(help="'paper', 'extended', or feature names joined by commas.")
    ] = "extended",
    depths: Annotated[
        str | None, typer.Option(help="Candidate depths, such as 1,2,3; else all recorded ones.")
    ] = None,
    reward: Annotated[str, typer.Option(help="'lede', 'speed' or 'module:function'.")] = "lede",
    max_draft: Annotated[int, typer.Option(min=1, help="Most proposals in one round.")] = DEFAULT_MAX_DRAFT,
    lanes: Annotated[int, typer.Option(min=1, help="Texts played side by side.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Decisions in all.")] = 200_000,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Decisions between checkpoints.")] = 20_000,
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers.", metavar="A,B,...")] = "64,64",
    gamma: Annotated[float, typer.Option(help="Discount per decision.")] = 0.95,
    n_steps: Annotated[int, typer.Option(min=1, help="Rewards summed before bootstrapping.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Of Adam.")] = 5e-4,
    batch_size: Annotated[int, typer.Option(min=1, help="Transitions in one gradient step.")] = 256,
    gradient_steps: Annotated[int, typer.Option(min=1, help="After every step of all lanes.")] = 4,
    buffer_size: Annotated[int, typer.Option(min=1, help="Decisions that are remembered.")] = 200_000,
    learning_starts: Annotated[int, typer.Option(min=0, help="Decisions before the first update.")] = 2_000,
    target_update: Annotated[
        int, typer.Option(min=1, help="Decisions between copies to the target network.")
    ] = 2_000,
    exploration: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of training over which exploration falls to 5 %.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="Of texts, weights and exploration.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
) -> None:
    """Train a DQN online on the vector environment."""
    with errors_as_sentences():
        given = dict(locals())
        check_returns(n_steps, gamma)
        if not (learning_rate > 0 and math.isfinite(learning_rate)):
            raise InputError(f"learning_rate is {learning_rate}; it must be positive and finite")
        features = resolve_observation(
            observation
            if observation in ("paper", "extended")
            else parse_list(observation, str, "observation")
        )
        widths = list(parse_list(hidden, int, "hidden"))
        training, held_out = load_traces(traces), load_traces(test)
        check_same_model(training, held_out)
        identity = trace_set_id(training)
        if identity == trace_set_id(held_out):
            raise InputError(f"--test {test} holds the texts that are trained on; name other ones")
        chosen = training.depths if depths is None else parse_list(depths, int, "depths")
        environment: dict[str, Any] = {"depths": chosen, "reward": reward, "max_draft": max_draft}
        lane_env = sb3_vec_env(lanes, training, observation=features, step_infos=False, **environment)
        lane_env.seed(seed)

        import torch
        from stable_baselines3 import DQN
        from stable_baselines3.common.logger import Logger
        from stable_baselines3.common.vec_env import VecNormalize

        torch.set_num_threads(threads)
        # No feature is ever clipped: a policy file holds the standardisation, but no clipping.
        env = VecNormalize(lane_env, norm_reward=False, clip_obs=float(np.finfo(np.float32).max))
        model: Any = DQN(
            "MlpPolicy",
            env,
            learning_rate=learning_rate,
            buffer_size=buffer_size,
            learning_starts=learning_starts,
            batch_size=batch_size,
            gamma=gamma,
            n_steps=n_steps,
            train_freq=1,
            gradient_steps=gradient_steps,
            target_update_interval=target_update,
            exploration_fraction=exploration,
            policy_kwargs={"net_arch": widths},
            seed=seed,
            device="cpu",
        )
        model.set_logger(Logger(folder=None, output_formats=[]))

        def policy() -> QController:
            return from_sb3(
                model,
                observation=features,
                depths=chosen,
                num_layers=training.num_layers,
                max_draft=max_draft,
                name="sb3_dqn",
            )

        best: tuple[float, QController] | None = None
        console = Console(highlight=False)
        with ScalarLog(out) as log, progress_bars() as advance:
            if log.notice:
                console.print(log.notice)

            def checkpoint(done: int) -> None:
                nonlocal best
                present = policy()
                found = replay_metrics(training, present, **environment)
                log.add(done, {**learner_metrics(model), **found})
                if best is None or found["return"] > best[0]:
                    best = (found["return"], present)
                    save_policy(
                        out / "policy",
                        present,
                        model={
                            "name": training.manifest["model"],
                            "weights_hash": training.manifest["model_hash"],
                        },
                        traces=identity,
                        training=json_values(given),
                        provenance={"algorithm": "sb3_dqn", "checkpoint": {"step": done, **found}},
                    )

            def progress(done: int) -> None:
                advance("train", min(done, steps), steps, f"return {best[0]:.1f}" if best else "")

            # A policy of an earlier run must not lie beside the settings of this one.
            for stale in policy_paths(out / "policy"):
                stale.unlink(missing_ok=True)
            write_json(out / "settings.json", json_values(given))
            callback = every(evaluate_every, steps, checkpoint, progress)
            model.learn(steps, callback=callback, log_interval=None)
            checkpoint(model.num_timesteps)
        assert best is not None
        table = Table("texts", "return", "simulated speed-up", "acceptance", "exit depth", "draft length")
        for name, texts in (("training", training), ("test", held_out)):
            found = replay_metrics(texts, best[1], **environment)
            table.add_row(
                name,
                f"{found['return']:.2f}",
                f"{found['speedup']:.2f}x",
                f"{found['acceptance_rate']:.2f}",
                f"{found['mean_exit_depth']:.1f}",
                f"{found['mean_draft_length']:.1f}",
            )
        console.print(f"{model.num_timesteps} decisions in {lanes} lanes")
        console.print(table)
        console.print(f"policy: {out / 'policy.safetensors'}", soft_wrap=True)


def every(
    interval: int, total: int, checkpoint: Callable[[int], None], progress: Callable[[int], None]
) -> Any:
    """A callback that calls `checkpoint` each time so many more decisions were made, and `progress`.

    From the total on there are no more checkpoints: the last update is still to come.
    """
    from stable_baselines3.common.callbacks import BaseCallback

    class Every(BaseCallback):
        due = interval

        def _on_step(self) -> bool:
            progress(self.num_timesteps)
            if self.due <= self.num_timesteps < total:
                checkpoint(self.num_timesteps)
                self.due += interval * -(-(self.num_timesteps - self.due + 1) // interval)
            return True

    return Every()


def learner_metrics(model: Any) -> dict[str, float]:
    """What the model noted since its last update, numbers only."""
    noted = model.logger.name_to_value
    return {name: float(value) for name, value in noted.items() if isinstance(value, (int, float, np.number))}


def json_values(given: dict[str, Any]) -> dict[str, Any]:
    """Options as plain JSON values."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


if __name__ == "__main__":
    typer.run(main)
