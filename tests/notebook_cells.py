"""Run the cells of a notebook in a kernel or in this process, and look at what came of them."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def execute(name: str, url: str) -> nbformat.NotebookNode:
    """The notebook of notebooks/ after a run of all its cells on a root."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUDIC_ROOT", url)
        return execute_file(NOTEBOOKS / f"{name}.ipynb")


def execute_file(path: Path) -> nbformat.NotebookNode:
    """A notebook after a run of all its cells in a kernel, in its folder; an error in one fails with its traceback."""
    notebook = nbformat.read(path, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return NotebookClient(notebook, timeout=200, resources={"metadata": {"path": path.parent}}).execute()


def outputs_of(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """The outputs of one MIME type, in order."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def names_of(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the notebook's cells define, in this process, which draws to nowhere."""
    monkeypatch.setenv("LUDIC_ROOT", url)
    names: dict[str, Any] = {}
    with mpl.rc_context({"figure.max_open_warning": 0}):
        mpl.use("agg")
        for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
        plt.close("all")
    return names
