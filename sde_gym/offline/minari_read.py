"""Reading Minari data sets as transitions: our own exactly, others if they have what is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sde_gym.errors import InputError
from sde_gym.offline.transitions import Transitions
from sde_gym.policies.observation import resolve_observation

if TYPE_CHECKING:
    from minari import MinariDataset

#: Where the metadata of a data set say how we made it.
METADATA_KEY = "sde_gym"

#: Version of what lies there and of the infos; raised when either changes.
FORMAT_VERSION = 1

#: Infos without which a data set is of no use here.
NEEDED_INFOS = ("propensity", "text")

_EMPTY = "{}: holds no episode; collect at least one"


def import_minari() -> ModuleType:
    """Minari with its HDF5 storage.

    Raises:
        InputError: it, h5py or Pillow is not installed; the message says how to install them.
    """
    try:
        import h5py  # noqa: F401
        import minari
        import minari.dataset.minari_dataset
        import minari.namespace
        import minari.storage
        import PIL  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"Minari data sets need minari, h5py and pillow ({error}); "
            "install them with: pip install 'sde_gym[offline]'"
        ) from None
    module: ModuleType = minari
    return module


def load_minari(dataset: MinariDataset | str) -> MinariDataset:
    """A data set by its id, or the one given.

    Raises:
        InputError: there is none of that id, or it is damaged or of another version of Minari.
    """
    minari = import_minari()
    if not isinstance(dataset, str):
        return dataset
    if not Path(minari.storage.get_dataset_path(dataset), "data").exists():
        raise InputError(f"{dataset}: no such Minari data set in {minari.storage.get_dataset_path()}")
    try:
        return minari.load_dataset(dataset)
    except (ValueError, KeyError, AssertionError, OSError) as error:
        raise InputError(f"{dataset}: a damaged data set, or one of another Minari ({error})") from None


def dataset_to_transitions(dataset: MinariDataset | str) -> Transitions:
    """Transitions of a data set, all columns as they were written.

    Of a data set that was filtered, the episodes that are left. One that `save_minari` did not make
    is read if it was made in an `sde_gym/LEDE` environment, all its episodes end by themselves, and
    its infos hold `propensity` and `text`.

    Args:
        dataset: a data set or its id.

    Raises:
        InputError: no such data set, one that lacks what is needed, or what `Transitions` refuses;
            the message says what is missing.
    """
    opened = load_minari(dataset)
    label = str(opened.spec.dataset_id)
    names, settings, numbers = _provenance(opened, label)
    columns: dict[str, list[NDArray[Any]]] = {}
    for index, episode in zip(opened.episode_indices.tolist(), _episodes(opened, label), strict=True):
        steps = len(episode.rewards)
        where = f"{label}, episode {index}"
        _check_episode(episode, steps, len(names), where)
        infos = {"component": np.zeros(steps, dtype=np.int64), **episode.infos}
        found = {
            "observation": episode.observations[:-1],
            "action": episode.actions,
            "reward": episode.rewards,
            "terminal": episode.terminations,
            "propensity": np.asarray(infos["propensity"])[:steps],
            "text": np.asarray(infos["text"])[:steps],
            "component": np.asarray(infos["component"])[:steps],
            "episode": np.full(steps, index if numbers is None else numbers[index]),
            "step": np.arange(steps),
        }
        for name, values in found.items():
            columns.setdefault(name, []).append(values)
    if not columns:
        raise InputError(_EMPTY.format(label))
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    for name in ("action", "text", "component"):
        if arrays[name].dtype.kind not in "iu":
            raise InputError(f"{label}: {name} is {arrays[name].dtype}, expected whole numbers")
    try:
        return Transitions(
            observation=arrays["observation"].astype(np.float32, copy=False),
            action=arrays["action"].astype(np.int64, copy=False),
            reward=arrays["reward"].astype(np.float32, copy=False),
            terminal=arrays["terminal"].astype(np.bool_, copy=False),
            episode=arrays["episode"].astype(np.int64, copy=False),
            step=arrays["step"].astype(np.int64, copy=False),
            propensity=arrays["propensity"].astype(np.float64, copy=False),
            text=arrays["text"].astype(np.int64, copy=False),
            component=arrays["component"].astype(np.int64, copy=False),
            names=names,
            settings=settings,
        )
    except InputError as error:
        raise InputError(f"{label}: {error}") from None


def read_info(dataset: MinariDataset | str, name: str) -> NDArray[Any]:
    """One info, such as `q_true`, with a row for each transition: (n, ...).

    Raises:
        InputError: no such data set, one without episodes, or an episode without that info.
    """
    opened = load_minari(dataset)
    label = str(opened.spec.dataset_id)
    parts = []
    for episode in _episodes(opened, label):
        if name not in (episode.infos or {}):
            raise InputError(f"{label}: its infos hold no {name}")
        parts.append(np.asarray(episode.infos[name])[: len(episode.rewards)])
    if not parts:
        raise InputError(_EMPTY.format(label))
    return np.concatenate(parts)


def _episodes(dataset: MinariDataset, label: str) -> list[Any]:
    """All episodes; InputError where the file is damaged."""
    try:
        return list(dataset.iterate_episodes())
    except (OSError, KeyError, AssertionError) as error:
        raise InputError(f"{label}: a damaged data set ({error}); collect it again") from None


def _provenance(
    dataset: MinariDataset, label: str
) -> tuple[tuple[str, ...], Mapping[str, Any], list[int] | None]:
    """Feature names, settings, and the episodes' numbers where they are not 0, 1, 2, ..."""
    metadata = dataset.storage.metadata
    ours = metadata.get(METADATA_KEY)
    if ours is not None:
        if ours["format_version"] != FORMAT_VERSION:
            raise InputError(
                f"{label}: format version {ours['format_version']}; this package reads version "
                f"{FORMAT_VERSION}; collect it again"
            )
        return tuple(ours["names"]), ours["settings"], ours["episodes"]
    spec = dataset.env_spec
    if spec is None or not spec.id.startswith("sde_gym/LEDE"):
        raise InputError(
            f"{label}: made in {'an unknown environment' if spec is None else spec.id}, so its observations "
            "have no names here; give data collected in an sde_gym/LEDE environment"
        )
    observation = spec.kwargs.get("observation", "paper")
    settings = {"minari": label, "environment": spec.id, **spec.kwargs}
    return resolve_observation(observation), settings, None


def _check_episode(episode: Any, steps: int, features: int, where: str) -> None:
    """Refuse what cannot become transitions: lengths that do not fit, missing infos, cut episodes."""
    infos = episode.infos or {}
    missing = [name for name in NEEDED_INFOS if name not in infos]
    if missing:
        raise InputError(
            f"{where}: its infos hold no {' and no '.join(missing)}, which off-policy estimates and replays "
            "need; collect with sde-gym collect"
        )
    shape = np.shape(episode.observations)
    if shape != (steps + 1, features):
        raise InputError(
            f"{where}: observations of shape {shape}; expected ({steps + 1}, {features}), one more than "
            "actions, with a column for each feature"
        )
    lengths = {"actions": len(episode.actions), "terminations": len(episode.terminations)}
    lengths |= {name: len(infos[name]) for name in (*NEEDED_INFOS, "component") if name in infos}
    for name, length in lengths.items():
        if length != steps and (name not in infos or length != steps + 1):
            raise InputError(f"{where}: {length} {name} for {steps} rewards")
    if np.any(episode.truncations):
        raise InputError(f"{where}: was truncated; only episodes that end by themselves have a return")
