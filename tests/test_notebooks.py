"""Every notebook runs from its first cell to its last, on a small trace set, and shows something.

A notebook reads the trace set that `SDE_GYM_TRACES` names, the shipped one if there is no such variable.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sde_gym.errors import InputError
from sde_gym.traces import load_traces

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT = 300  # seconds a cell


def readable(name: str) -> bool:
    """Whether the shipped trace set can be read by this version."""
    try:
        load_traces(name)
    except InputError:
        return False
    return True


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    if not readable("stdlib-20m"):
        monkeypatch.setenv("SDE_GYM_TRACES", str(toy_folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # the kernel's files stay here, too
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # pictures go into the notebook
    folder = tmp_path / "work"
    folder.mkdir()
    notebook = nbformat.read(shutil.copy(path, folder), as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()  # raises at the first cell that fails
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    complaints = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not complaints
    assert list(folder.iterdir()) == [folder / path.name]  # it left nothing behind
