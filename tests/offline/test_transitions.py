"""Transitions refuse what no learner should be fed, and their file is exact and reproducible."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sde_gym.errors import InputError
from sde_gym.offline.transitions import COLUMNS, Transitions, load_transitions, save_transitions

Make = Callable[..., Transitions]


def test_starts_and_returns(make_transitions: Make) -> None:
    data = make_transitions((3, 1, 2))
    assert data.start.tolist() == [0, 3, 4, 6]
    assert (len(data), data.num_episodes) == (6, 3)
    np.testing.assert_allclose(
        data.returns(), [data.reward[:3].sum(), data.reward[3], data.reward[4:].sum()], rtol=1e-6
    )


def test_round_trip(make_transitions: Make, tmp_path: Path) -> None:
    data = make_transitions()
    back = load_transitions(save_transitions(tmp_path / "data.npz", data))
    for name, (dtype, _) in COLUMNS.items():
        np.testing.assert_array_equal(getattr(back, name), getattr(data, name))
        assert getattr(back, name).dtype == dtype
    assert (back.names, back.settings) == (data.names, data.settings)


def test_same_data_same_bytes_and_plain_numpy_reads_them(make_transitions: Make, tmp_path: Path) -> None:
    one = save_transitions(tmp_path / "one.npz", make_transitions())
    two = save_transitions(tmp_path / "two.npz", make_transitions())
    other = save_transitions(tmp_path / "other.npz", make_transitions(seed=1))
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
    with np.load(one, allow_pickle=False) as archive:
        assert json.loads(str(archive["header"]))["settings"] == {"seed": 0}


def change(data: Transitions, name: str, row: int, value: float) -> Transitions:
    array = getattr(data, name).copy()
    array[row] = value
    return dataclasses.replace(data, **{name: array})


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("observation", 2, np.nan, "observation holds NaN or infinity, first in row 2"),
        ("reward", 4, np.inf, "reward holds NaN or infinity, first in row 4"),
        ("action", 1, 2, r"action 2 in row 1; expected 0 \(continue\) or 1 \(exit\)"),
        ("action", 1, -1, "action -1 in row 1"),
        ("propensity", 3, 0.0, "propensity 0.0 in row 3"),
        ("propensity", 3, 1.5, "propensity 1.5 in row 3"),
        ("propensity", 3, np.nan, "propensity nan in row 3"),
        ("terminal", 1, True, "not whole episodes in order"),
        ("terminal", 2, False, "not whole episodes in order"),
        ("step", 1, 5, "not whole episodes in order"),
        ("episode", 5, 0, "not whole episodes in order"),
    ],
)
def test_bad_rows_are_refused(
    make_transitions: Make, name: str, row: int, value: float, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        change(make_transitions((3, 1, 4)), name, row, value)


def test_an_empty_buffer_and_wrong_shapes_are_refused(make_transitions: Make) -> None:
    data = make_transitions()
    empty = {name: getattr(data, name)[:0] for name in COLUMNS}
    with pytest.raises(InputError, match="the buffer is empty"):
        dataclasses.replace(data, **empty)
    with pytest.raises(InputError, match=r"reward is float32 \(15,\); expected float32 \(16,\)"):
        dataclasses.replace(data, reward=data.reward[:-1])
    with pytest.raises(InputError, match="reward is float64"):
        dataclasses.replace(data, reward=data.reward.astype(np.float64))
    with pytest.raises(InputError, match=r"expected float32 \(16, 1\)"):
        dataclasses.replace(data, names=("top1",))
    with pytest.raises(InputError, match="'mood' is not a feature"):
        dataclasses.replace(data, names=("top1", "mood"))
    with pytest.raises(InputError, match="named twice"):
        dataclasses.replace(data, names=("top1", "top1"))


@pytest.mark.parametrize("kept", [0, 1, 30, 0.5, 0.9, 0.999])
def test_cut_files_are_refused(make_transitions: Make, tmp_path: Path, kept: float) -> None:
    path = save_transitions(tmp_path / "data.npz", make_transitions())
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(InputError, match=r"data.npz: not a transitions file, or a cut one"):
        load_transitions(path)


def test_missing_foreign_and_altered_files_are_refused(make_transitions: Make, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    with pytest.raises(InputError, match=r"data.npz: no such file"):
        load_transitions(path)
    with path.open("wb") as stream:
        np.savez(stream, other=np.zeros(3))
    with pytest.raises(InputError, match=r"data.npz: not a transitions file"):
        load_transitions(path)
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(InputError, match=r"data.npz: not a transitions file"):
        load_transitions(path)
    with path.open("wb") as stream:
        np.savez(stream, header=np.array(json.dumps({"format_version": 9})))
    with pytest.raises(InputError, match="format version 9; this package reads version 1"):
        load_transitions(path)
    data = make_transitions()
    columns = {name: getattr(data, name) for name in COLUMNS}
    columns["reward"] = np.full(len(data), np.nan, dtype=np.float32)
    with path.open("wb") as stream:
        header = {"format_version": 1, "names": list(data.names), "settings": {}}
        np.savez(stream, header=np.array(json.dumps(header)), **columns)
    with pytest.raises(InputError, match=r"data.npz: transitions: reward holds NaN"):
        load_transitions(path)
