"""Explorers in processes of their own that stay for many prompts, and whoever tells them what to decode.

Between two requests they wait for a line on their stdin and use no processor, so that something else can
be measured in turns with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sde_gym
from sde_gym.decoding.dex.exploration import exploration_set
from sde_gym.decoding.dex.result import DexResult
from sde_gym.errors import InputError

#: Seconds that an explorer has to end by itself before it is killed.
_PATIENCE = 10.0


class ExplorersEndedError(RuntimeError):
    """An explorer has died, does not answer the others, or never came up."""


@dataclass(frozen=True)
class Exploration:
    """A text of an `ExplorerGroup`.

    Attributes:
        result: as `explore` returns it, without `nodes`; its times are the first explorer's.
        stage_tokens: per tick, the lattice tokens that each stage ran.
    """

    result: DexResult
    stage_tokens: list[list[int]]


class ExplorerGroup:
    """N processes on this machine (gloo), one for each stage; to be used with `with`.

    Args:
        model: a name, a folder, or a hub id; every explorer loads it.
        depths: the exploration set.
        num_layers: L of the model.
        dtype: float32 or bfloat16.
        threads: of each explorer.
        timeout: seconds that explorers wait for each other.

    Raises:
        InputError: an exploration set or model that cannot be.
        ExplorersEndedError: an explorer did not come up.
    """

    def __init__(
        self,
        model: str,
        depths: Sequence[int],
        num_layers: int,
        *,
        dtype: str = "float32",
        threads: int = 1,
        timeout: float = 60.0,
    ) -> None:
        self.depths = exploration_set(depths, num_layers)
        if threads < 1:
            raise InputError(f"threads must be at least 1, not {threads}")
        self._folder = tempfile.TemporaryDirectory()
        self._errors = [Path(self._folder.name) / f"{rank}.stderr" for rank in range(len(self.depths))]
        self.processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(len(self.depths)):
                self.processes.append(self._start(rank, model, dtype, threads, timeout))
            self._answers(range(len(self.depths)))
        except BaseException:
            self.close()
            raise

    def _start(
        self, rank: int, model: str, dtype: str, threads: int, timeout: float
    ) -> subprocess.Popen[str]:
        options = {
            "rank": rank, "processes": len(self.depths), "meeting": Path(self._folder.name) / "meeting",
            "model": model, "dtype": dtype, "threads": threads, "timeout": timeout,
        }  # fmt: skip
        package = str(Path(sde_gym.__file__).parents[1])  # theirs is this package, wherever it was found
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        surroundings = {
            **os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)
        }  # fmt: skip
        command = [sys.executable, "-m", "sde_gym.decoding.dex.serve"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with self._errors[rank].open("w") as errors:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=surroundings,
            )  # fmt: skip

    def explore(self, prompt: Sequence[int], max_new_tokens: int) -> Exploration:
        """Decode one prompt greedily, all explorers side by side.

        Raises:
            InputError: as `explore`.
            ExplorersEndedError: an explorer has died or does not answer; the group is closed.
        """
        request = {"prompt": list(prompt), "depths": list(self.depths), "max_new_tokens": max_new_tokens}
        answer = self._ask(range(len(self.processes)), request)[0]
        fields = {**answer["result"], "exploration_set": tuple(answer["result"]["exploration_set"])}
        return Exploration(DexResult(**fields), answer["stage_tokens"])

    def stage_seconds(self, stage: int, context: Sequence[int], tokens: int, repeats: int) -> list[float]:
        """`timing.stage_seconds` in the explorer of a stage, while all others wait.

        Raises:
            InputError, ExplorersEndedError: as for `explore`.
        """
        request = {
            "depths": list(self.depths), "context": list(context), "tokens": tokens, "repeats": repeats
        }  # fmt: skip
        found: list[float] = self._ask([stage], request)[0]["seconds"]
        return found

    def close(self) -> None:
        """End all explorers."""
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended before
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.processes = []
        self._folder.cleanup()

    def __enter__(self) -> ExplorerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, ranks: Sequence[int], request: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.processes:
            raise ExplorersEndedError("the explorers have ended; start a new group")
        for rank in ranks:
            stdin = self.processes[rank].stdin
            assert stdin is not None
            with suppress(BrokenPipeError):  # a dead one is missed when answers are read
                print(json.dumps(request), file=stdin, flush=True)
        return self._answers(ranks)

    def _answers(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """The next answer of each of these explorers; a failure of one is raised, and ends all."""
        answers = []
        for rank in ranks:  # where one has died, the others give up by themselves
            stdout = self.processes[rank].stdout
            assert stdout is not None
            answers.append(json.loads(stdout.readline() or "null"))
        try:
            for rank, answer in zip(ranks, answers, strict=True):
                if answer is None:
                    self._raise_death(rank)
            for answer in answers:
                if answer.get("error") == InputError.__name__:
                    raise InputError(answer["message"])
                if "error" in answer:
                    raise ExplorersEndedError(answer["message"])
        except ExplorersEndedError:
            self.close()
            raise
        return answers

    def _raise_death(self, rank: int) -> None:
        status = self.processes[rank].wait()
        lines = self._errors[rank].read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = f": {lines[-1]}" if lines else ""
        raise ExplorersEndedError(
            f"the explorer of stage {rank} has ended with status {status}{reason}; start a new group"
        )
