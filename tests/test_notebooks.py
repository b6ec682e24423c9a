"""Every notebook runs from its first cell to its last, on small settings, and shows something.

The tour reads the trace set that `SDE_GYM_TRACES` names, the shipped one if there is no such variable. The
others read the shipped ones and make everything smaller by `SDE_GYM_NOTEBOOK_SCALE`; what they hold are
the outputs of a full run.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from sde_gym.errors import InputError
from sde_gym.traces import load_traces

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT = 300  # seconds a cell
SCALE = 0.02
TOUR = "01_environment_tour"


def readable(name: str) -> bool:
    """Whether the shipped trace set can be read by this version."""
    try:
        load_traces(name)
    except InputError:
        return False
    return True


def shows_picture(notebook: Any) -> bool:
    """Whether a cell's output is a picture."""
    return any("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def outputs_of(notebook: Any) -> list[Any]:
    """Outputs of all cells."""
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def complaints_of(notebook: Any) -> list[str]:
    """What was written to stderr, and errors."""
    outputs = outputs_of(notebook)
    said = [output.text for output in outputs if output.get("name") == "stderr"]
    return said + [output.ename for output in outputs if output.output_type == "error"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    if not (readable("stdlib-20m") and readable("stdlib-20m-held-out")):
        if path.stem != TOUR:
            pytest.skip("the shipped trace sets are of another format")
        monkeypatch.setenv("SDE_GYM_TRACES", str(toy_folder))
    if path.stem != TOUR:
        for library in ("d3rlpy", "minari", "stable_baselines3"):
            if importlib.util.find_spec(library) is None:
                pytest.skip(f"needs {library}")
    monkeypatch.setenv("SDE_GYM_NOTEBOOK_SCALE", str(SCALE))
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
    assert shows_picture(notebook)
    assert not complaints_of(notebook)
    assert list(folder.iterdir()) == [folder / path.name]  # it left nothing behind


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_holds_is_a_full_run(path: Path) -> None:
    """From the first cell to the last, in order, in a fresh kernel; with pictures and without complaints."""
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert shows_picture(notebook)
    assert not complaints_of(notebook)
