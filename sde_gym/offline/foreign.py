"""Policy files of d3rlpy (`.d3`) and stable-baselines3 (`.zip`): only on the user's explicit word.

Both are pickles, and a pickle runs whatever code its author put into it. Our own policy files hold
numbers and JSON and can run nothing; import a foreign file once and save it as one of those.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.offline.backend import import_d3rlpy
from sde_gym.policies.controller import DEFAULT_K, DEFAULT_WINDOW
from sde_gym.policies.importing import from_d3rlpy, from_sb3
from sde_gym.policies.qnetwork import QController
from sde_gym.settings import DEFAULT_MAX_DRAFT

#: An argument that only this algorithm of stable-baselines3 has.
_TELLING = {"DQN": "exploration_fraction", "PPO": "clip_range", "A2C": "gae_lambda"}


def load_foreign(
    path: str | Path,
    trust: bool = False,
    *,
    observation: str | Sequence[str],
    depths: Sequence[int],
    num_layers: int,
    max_draft: int = DEFAULT_MAX_DRAFT,
    k: int = DEFAULT_K,
    window: int = DEFAULT_WINDOW,
    mean: NDArray[np.float32] | None = None,
    std: NDArray[np.float32] | None = None,
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> QController:
    """Read a policy that `algorithm.save` of d3rlpy or `model.save` of stable-baselines3 wrote.

    Args:
        path: a `.d3` or `.zip` file.
        trust: True says that you know where the file comes from: loading it runs the code it holds.
        observation: see `from_d3rlpy` and `from_sb3`, as for the arguments below.
        depths: likewise.
        num_layers: likewise.
        max_draft: likewise.
        k: likewise.
        window: likewise.
        mean: likewise; a `.zip` does not hold the statistics of `VecNormalize`, they have to be given.
        std: likewise.
        name: likewise; the file's if not given.
        meta: likewise.

    Raises:
        InputError: not trusted, no such file, another kind of file, the library missing, or a policy that
            does not fit.
    """
    source = Path(path)
    if source.suffix not in (".d3", ".zip"):
        raise InputError(
            f"{source}: neither a .d3 file of d3rlpy nor a .zip of stable-baselines3; sde_gym's own files "
            "are read by load_policy"
        )
    if not source.is_file():
        raise InputError(f"{source}: no such file")
    if trust is not True:
        raise InputError(
            f"{source}: loading a {source.suffix} file runs whatever code it holds; pass trust=True only if "
            "you know who made it"
        )
    same: dict[str, Any] = {
        "observation": observation, "depths": depths, "num_layers": num_layers, "max_draft": max_draft,
        "k": k, "window": window, "mean": mean, "std": std, "name": name or source.stem, "meta": meta,
    }  # fmt: skip
    if source.suffix == ".d3":
        return from_d3rlpy(_load_d3(source), **same)
    return from_sb3(_load_zip(source), **same)


def _load_d3(path: Path) -> Any:
    d3rlpy = import_d3rlpy()
    try:
        return d3rlpy.load_learnable(str(path), device=False)
    except Exception as error:  # unpickling what is no .d3 file can raise anything
        raise InputError(f"{path}: not a .d3 file of d3rlpy, or of another version ({error})") from None


def _load_zip(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            described = json.loads(archive.read("data"))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise InputError(f"{path}: not a model of stable-baselines3 ({error})") from None
    kind = next((kind for kind, argument in _TELLING.items() if argument in described), None)
    if kind is None:
        raise InputError(f"{path}: holds neither of {', '.join(_TELLING)}")
    try:
        import stable_baselines3
    except ImportError as error:
        raise InputError(
            f'stable-baselines3 is not installed ({error}); pip install "sde-gym[online]"'
        ) from None
    try:
        return getattr(stable_baselines3, kind).load(path, device="cpu")
    except Exception as error:  # as above
        raise InputError(f"{path}: stable-baselines3 cannot load it ({error})") from None
