"""Run the cells of a notebook in a kernel or in this process, and look at what came of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import pytest
from forks import forked_kernels
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def execute(urls: Mapping[str, str]) -> dict[str, nbformat.NotebookNode]:
    """Notebooks of notebooks/ by name, after a run of all their cells, each on the root that its name maps to.

    One kernel runs them one after the other, without the names of the one before: a new one imports for seconds.
    """
    notebooks = {name: nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name in urls}
    together = nbformat.v4.new_notebook()
    for name, notebook in notebooks.items():
        begin = nbformat.v4.new_code_cell(f"%reset -f\n%env LUDIC_ROOT={urls[name]}")
        together.cells += [begin, *notebook.cells]  # the same cells, which get their outputs here
    execute_cells(together, NOTEBOOKS)
    return notebooks


def execute_file(path: Path) -> nbformat.NotebookNode:
    """A notebook after a run of all its cells in a kernel, in its folder; an error in one fails with its traceback."""
    return execute_cells(nbformat.read(path, as_version=4), path.parent)


def execute_cells(notebook: nbformat.NotebookNode, folder: Path, timeout_s: float = 200) -> nbformat.NotebookNode:
    """The notebook, after a run of all its cells in a forked kernel. timeout_s: of a cell."""
    with TemporaryDirectory() as logs, forked_kernels(Path(logs)):
        return NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}).execute()


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
