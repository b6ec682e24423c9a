"""Minari data sets: the master copy of collected transitions.

`save_minari` writes what `collect` returned, with everything that says how it was made, as a Minari
data set that plain `minari.load_dataset` reads; `dataset_to_transitions` reads it back exactly.

An episode of T decisions has T + 1 observations; the last one, after the end, is zeros as in the
environment. Infos have T + 1 rows as well, row t belonging to decision t:

    propensity  float64 (T + 1,)    of the action under the behaviour policy
    text        int64 (T + 1,)      index of the text in the trace set
    component   int64 (T + 1,)      which member of a mixture over episodes acted
    q_true      float64 (T + 1, 2)  exact action values, where they were given (`add_infos`)

The last row belongs to no decision: NaN in columns of floats, in those of whole numbers the row before.

Under the metadata's key "sde_gym" lie the version of this layout, the feature names and
`Transitions.settings`: behaviour, seed, trace set, model. Data are written into a hidden folder beside
the others and moved to their id when they are complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import sde_gym
from sde_gym.errors import InputError
from sde_gym.offline.collect import trace_set_id
from sde_gym.offline.minari_read import FORMAT_VERSION, METADATA_KEY, import_minari, load_minari
from sde_gym.offline.transitions import Transitions, refuse_restricted
from sde_gym.policies.qnetwork import NUM_ACTIONS
from sde_gym.traces.store import SHIPPED

if TYPE_CHECKING:
    from minari import MinariDataset
    from minari.data_collector import EpisodeBuffer

#: The environment whose decisions are stored.
ENVIRONMENT = "sde_gym/LEDE-v0"

#: Arguments of the environment that `Transitions.settings` hold under the same name.
_SETTINGS = (
    "depths", "reward", "credit", "episode", "k", "window", "max_draft", "max_new_tokens",
    "final_token_reward",
)  # fmt: skip

_ROOT_VARIABLE = "MINARI_DATASETS_PATH"
_DATA_FILE = "main_data.hdf5"


def check_id(dataset_id: str, overwrite: bool = False) -> None:
    """Refuse an id that cannot be written to.

    Args:
        dataset_id: "namespace/name-v0"; the namespace may have several parts.
        overwrite: whether a data set may stand there already.

    Raises:
        InputError: the id is malformed or taken, or Minari is not installed.
    """
    minari = import_minari()
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset_id)
    except (ValueError, TypeError):  # Minari converts a version that is not there
        raise InputError(
            f"{dataset_id!r} is not a Minari id; give one like sde_gym/stdlib-20m/uniform-v0, that ends in "
            "-v and a number, or a path that ends in .npz"
        ) from None
    target = _root() / dataset_id
    if target.exists() and not (target / "data").exists():
        raise InputError(f"{dataset_id}: {target} is no data set, it may hold others; choose another id")
    if target.exists() and not overwrite:
        raise InputError(
            f"{dataset_id}: there is already a data set in {target}; choose another id, or overwrite it"
        )


def save_minari(
    dataset_id: str,
    transitions: Transitions,
    traces: str | Path,
    *,
    q_true: NDArray[np.float64] | None = None,
    overwrite: bool = False,
) -> MinariDataset:
    """Write transitions as a Minari data set.

    Minari's folder is that of the variable MINARI_DATASETS_PATH, else ~/.minari/datasets. The
    variable is changed for a moment: other threads should not use Minari meanwhile.

    Args:
        dataset_id: see `check_id`.
        transitions: as `collect` made them.
        traces: name or folder of the trace set that they were collected on, by which
            `recover_environment` will find it again.
        q_true: float64 (n, 2), exact values of both actions for every transition.
        overwrite: replace the data set of that id, if there is one.

    Returns:
        The data set, opened.

    Raises:
        InputError: see `check_id`; settings that do not say how the transitions were made, a trace
            set that is not theirs, transitions restricted to one phase, or `q_true` of another shape.
    """
    refuse_restricted(
        transitions,
        "so the environment would not play them as they are; save the transitions that they were made "
        "from, and restrict what is read back",
    )
    check_id(dataset_id, overwrite)
    infos = {
        "propensity": transitions.propensity,
        "text": transitions.text,
        "component": transitions.component,
    }
    if q_true is not None:
        infos["q_true"] = _checked_info("q_true", q_true, len(transitions))
    env = _environment(transitions, traces)
    minari = import_minari()
    settings = transitions.settings
    numbers = transitions.episode[transitions.start[:-1]].tolist()
    try:
        with _moved_when_complete(dataset_id, overwrite) as root, _datasets_root(root), _quiet():
            dataset = minari.create_dataset_from_buffers(
                dataset_id,
                list(_buffers(transitions, infos)),
                env=env,
                data_format="hdf5",
                algorithm_name=str(settings["behaviour"]["kind"]),
                description=(
                    "Self-speculative decoding by early exits: decisions along recorded texts of "
                    f"{settings.get('model', {}).get('name', 'a language model')}, with the propensities of "
                    "the policy that took them."
                ),
            )
            provenance = {
                "format_version": FORMAT_VERSION,
                "package_version": sde_gym.__version__,
                "names": list(transitions.names),
                "settings": dict(settings),
                "episodes": None if numbers == list(range(len(numbers))) else numbers,
            }
            dataset.storage.update_metadata({METADATA_KEY: provenance})
    finally:
        env.close()
    namespace = dataset_id.rpartition("/")[0]
    if namespace and namespace not in minari.namespace.list_local_namespaces():
        minari.namespace.create_namespace(namespace)
    return load_minari(dataset_id)


def add_infos(dataset_id: str, infos: Mapping[str, NDArray[np.float64]]) -> MinariDataset:
    """Add infos, such as `q_true`, to a data set; it is replaced as a whole.

    Args:
        dataset_id: of a data set here.
        infos: by name, float64 (n, ...), a row for each transition in the order of
            `dataset_to_transitions`.

    Raises:
        InputError: no such data set, an info that it has already, or not a row for each transition.
    """
    dataset = load_minari(dataset_id)
    import h5py

    count = int(dataset.total_steps)
    checked = {name: _checked_info(name, values, count) for name, values in infos.items()}
    with _moved_when_complete(dataset_id, overwrite=True) as root:
        copy = root / dataset_id
        shutil.copytree(_root() / dataset_id, copy)
        with h5py.File(copy / "data" / _DATA_FILE, "a") as file:
            first = 0
            for number in range(len(dataset)):
                episode = file[f"episode_{number}"]
                end = first + len(episode["rewards"])
                group = episode.require_group("infos")
                for name, values in checked.items():
                    if name in group:
                        raise InputError(f"{dataset_id}: has an info {name} already; save the data anew")
                    group.create_dataset(name, data=_with_filler(values[first:end]))
                first = end
        storage = import_minari().MinariDataset(copy / "data").storage
        storage.update_metadata({"dataset_size": float(storage.get_size())})
    return load_minari(dataset_id)


def _environment(transitions: Transitions, traces: str | Path) -> gymnasium.Env[Any, Any]:
    """The environment in which transitions were collected, checked to be that."""
    settings = transitions.settings
    missing = [name for name in (*_SETTINGS, "behaviour", "traces") if name not in settings]
    if missing:
        raise InputError(
            f"transitions: their settings lack {', '.join(missing)}, so nothing could say how they were "
            "made; collect them again"
        )
    shipped = (SHIPPED / str(traces)).is_dir()
    where = str(traces) if shipped else str(Path(traces).absolute())
    arguments = {name: settings[name] for name in _SETTINGS}
    env = gymnasium.make(ENVIRONMENT, traces=where, observation=list(transitions.names), **arguments)
    found = trace_set_id(env.unwrapped.traces)  # type: ignore[attr-defined]
    if found != settings["traces"]:
        env.close()
        raise InputError(
            f"traces: {str(traces)!r} is the set {found}, but the transitions were collected on "
            f"{settings['traces']}; name the trace set that they come from"
        )
    return env


def _buffers(transitions: Transitions, infos: Mapping[str, NDArray[Any]]) -> Iterator[EpisodeBuffer]:
    """One buffer an episode. `options` are those with which `reset` begins it, where it begins a text."""
    from minari.data_collector import EpisodeBuffer

    over = np.zeros((1, len(transitions.names)), dtype=np.float32)
    by_round = transitions.settings["episode"] == "round"
    text = transitions.text
    for number, (first, end) in enumerate(pairwise(transitions.start)):
        resumed = by_round and number > 0 and text[first - 1] == text[first]
        yield EpisodeBuffer(
            id=number,
            options=None if resumed else {"text": int(text[first])},
            observations=np.concatenate([transitions.observation[first:end], over]),
            actions=transitions.action[first:end],
            rewards=transitions.reward[first:end],
            terminations=transitions.terminal[first:end],
            truncations=np.zeros(end - first, dtype=bool),
            infos={name: _with_filler(values[first:end]) for name, values in infos.items()},
        )


def _with_filler(values: NDArray[Any]) -> NDArray[Any]:
    """One row more: NaN for floats, else the last row again."""
    filler = np.full_like(values[-1:], np.nan) if values.dtype.kind == "f" else values[-1:]
    return np.concatenate([values, filler])


def _checked_info(name: str, values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """`values` if they are float64, finite, with a row for each transition; q_true has two columns."""
    width = f"({count}, {NUM_ACTIONS})" if name == "q_true" else f"({count}, ...)"
    fits = isinstance(values, np.ndarray) and values.dtype == np.float64 and values.shape[:1] == (count,)
    if not fits or (name == "q_true" and values.shape != (count, NUM_ACTIONS)):
        found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else repr(type(values))
        raise InputError(f"{name}: {found}; expected float64 {width}, a row for each transition")
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values).reshape(count, -1).all(axis=1)))
        raise InputError(f"{name}: holds NaN or infinity, first in row {row}")
    return values


def _root() -> Path:
    """The folder of all data sets."""
    return Path(import_minari().storage.get_dataset_path())


@contextlib.contextmanager
def _moved_when_complete(dataset_id: str, overwrite: bool) -> Iterator[Path]:
    """A hidden folder for data sets; the one of this id is moved out of it when the block succeeds."""
    root = _root()
    temporary = Path(tempfile.mkdtemp(dir=root, prefix=".sde-gym-"))
    try:
        yield temporary
        target = root / dataset_id
        target.parent.mkdir(parents=True, exist_ok=True)
        replaced = temporary / "replaced"
        try:
            if overwrite and target.exists():
                os.replace(target, replaced)
            os.replace(temporary / dataset_id, target)
        except BaseException:  # an interrupt, too
            if replaced.exists() and not target.exists():
                os.replace(replaced, target)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _datasets_root(folder: Path) -> Iterator[None]:
    """Have Minari keep its data sets in this folder."""
    before = os.environ.get(_ROOT_VARIABLE)
    os.environ[_ROOT_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ROOT_VARIABLE]
        else:
            os.environ[_ROOT_VARIABLE] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Minari's warnings of what we leave out: authors and an evaluation environment of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is set to None", category=UserWarning)
        yield
