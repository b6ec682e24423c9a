"""Metrics of a training run, for TensorBoard where it is installed, and as JSON lines always."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sde_gym.errors import InputError

#: What the file beside the TensorBoard events is called.
SCALARS_FILE = "scalars.jsonl"


class ScalarLog:
    """Writes the same numbers to `scalars.jsonl` and, with the package tensorboard, to its event files.

    Attributes:
        folder: where both lie; `tensorboard --logdir FOLDER` shows them.
        newest: the step noted last, -1 before the first.
        notice: one sentence if tensorboard is missing, else empty.
    """

    def __init__(self, folder: str | Path) -> None:
        """Start afresh in this folder, which is made if missing.

        Args:
            folder: of the run; scalars that another run left there are replaced.

        Raises:
            InputError: the folder is a file.
        """
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file; give a folder for the run")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lines = (self.folder / SCALARS_FILE).open("w", encoding="utf-8")
        self._writer: Any = None
        self.newest = -1
        self.notice = ""
        if importlib.util.find_spec("tensorboard") is None:
            self.notice = (
                f"tensorboard is not installed: metrics go to {self.folder / SCALARS_FILE} only "
                '(pip install "sde_gym[offline]")'
            )
        else:
            for stale in self.folder.glob("events.out.tfevents.*"):
                stale.unlink()
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note metrics at a step; numbers that are not finite are left out.

        Args:
            step: gradient or environment steps so far.
            metrics: by name.
        """
        self.newest = step
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._lines.flush()
        if self._writer is not None:
            for name, value in finite.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> ScalarLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
