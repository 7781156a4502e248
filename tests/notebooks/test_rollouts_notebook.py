"""The notebook is executed on a root that two workers and a trainer really filled."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
NOTEBOOK = REPOSITORY / "notebooks" / "rollouts.ipynb"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    script = REPOSITORY / "pipelines" / "async_rloo.py"
    subprocess.run(
        [sys.executable, script, "--root", folder / "run", "--model", folder / "model", "--num-steps", "4"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
    )
    return folder / "run"


@pytest.fixture(scope="module")
def executed(run_root: Path) -> nbformat.NotebookNode:
    """The notebook after a run of all its cells; an error in one fails the test with its traceback."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUDIC_ROOT", str(run_root))
        patch.setenv("OMP_NUM_THREADS", "1")
        return NotebookClient(notebook, timeout=120, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()


def outputs_of(notebook: nbformat.NotebookNode, kind: str) -> list:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def test_the_notebook_answers_from_the_root_that_it_is_given(executed: nbformat.NotebookNode):
    (answer,) = outputs_of(executed, "text/markdown")
    # 4 steps of 8 groups of 8 rollouts.
    assert "4 gradient steps used 256 rollouts and dropped 0" in answer


def test_executing_gives_the_same_kinds_of_output_as_are_committed(executed: nbformat.NotebookNode):
    committed = nbformat.read(NOTEBOOK, as_version=4)
    for kind in ("image/png", "text/html"):
        assert len(outputs_of(executed, kind)) == len(outputs_of(committed, kind)) == 4


def test_the_committed_outputs_name_no_folder_of_a_machine_and_no_error():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    outputs = [output for cell in committed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data"}
    text = nbformat.writes(committed)
    assert not [folder for folder in ("/home/", "/root/", "/tmp/", "/Users/", "/work/") if folder in text]
