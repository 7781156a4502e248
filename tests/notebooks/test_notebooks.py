"""The notebooks are executed on roots that really ran, and give the kinds of output that are committed."""

import re
from pathlib import Path

import ludic
import nbformat
import pytest
from notebook_cells import NOTEBOOKS, execute, outputs_of

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))

pytestmark = pytest.mark.slow

Notebooks = dict[str, nbformat.NotebookNode]


def files_of(run: ludic.Run) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(run.url).rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def files_before(trained: ludic.Run) -> dict[str, bytes]:
    return files_of(trained)


@pytest.fixture(scope="session")
def executed(trained: ludic.Run, delegated: ludic.Run, files_before: dict[str, bytes]) -> Notebooks:
    """Each notebook after a run of all its cells."""
    return execute({name: (delegated if name == "credit" else trained).url for name in NAMES})


def answer_of(notebook: nbformat.NotebookNode) -> str:
    (answer,) = outputs_of(notebook, "text/markdown")
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_executing_gives_the_same_kinds_of_output_as_are_committed(name: str, executed: Notebooks):
    committed = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for kind in ("image/png", "text/html", "text/markdown"):
        assert len(outputs_of(executed[name], kind)) == len(outputs_of(committed, kind)) > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_outputs_name_no_folder_of_a_machine_and_no_error(name: str):
    committed = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    outputs = [output for cell in committed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data"}
    text = nbformat.writes(committed).replace("ludic/root/", "")  # a folder of the package
    assert not [folder for folder in ("/home/", "/root/", "/tmp/", "/Users/", "/work/") if folder in text]


@pytest.mark.parametrize("name", NAMES)
def test_only_outputs_answer(name: str):
    """Text of a notebook stays when somebody opens another root, so no figure of a run stands in it."""
    committed = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    texts = [cell.source for cell in committed.cells if cell.cell_type == "markdown"]
    prose = [line for text in texts for line in text.splitlines() if not line.startswith("    ")]  # without commands
    assert all(f"**{word}.**" in texts[0] for word in ("Question", "Store"))
    assert texts[0].endswith("**Answer.** Computed below from the opened root.")
    assert answer_of(committed).startswith("**Answer.** ")
    figures = re.compile(r"\d[.,]\d|[+-]\d|\d+ (?:gradient steps|rollouts|of \d)|\bp = |from \d\S* to \d|version \d")
    assert [found for line in prose for found in figures.findall(line)] == []


@pytest.mark.parametrize("name", NAMES)
def test_another_root_gets_another_answer(name: str, executed: Notebooks):
    """The committed answers are those of the demos, and the roots of this test are smaller."""
    committed = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert answer_of(executed[name]).startswith("**Answer.** ")
    assert answer_of(executed[name]) != answer_of(committed)


def test_rollouts_answers_from_the_root_that_it_is_given(executed: Notebooks):
    # 4 steps of 8 groups of 8 rollouts.
    assert "4 gradient steps used 256 rollouts and dropped 0" in answer_of(executed["rollouts"])


def test_evaluation_answers_with_the_paired_difference(executed: Notebooks, trained: ludic.Run):
    answer, (pair,) = answer_of(executed["evaluation"]), trained.compare(0, 4).differences.to_dicts()
    assert f"from {pair['estimate_a']:.2f} at version 0 to {pair['estimate_b']:.2f} at version 4" in answer
    assert f"{pair['num_gains']} prompts up and {pair['num_losses']} down" in answer


def test_mismatch_counts_every_sampled_token_that_was_trained_on(executed: Notebooks, trained: ludic.Run):
    (num_tokens,) = trained.sql(
        "select sum(action_length)::bigint from batches inner join rollouts using (rollout_id) where used"
    ).row(0)
    assert f"Over {num_tokens:,} sampled tokens" in answer_of(executed["mismatch"])


def test_offline_replay_repeats_its_training_exactly(executed: Notebooks):
    assert answer_of(executed["offline_replay"]).endswith("a replay repeats 20 of 20 steps exactly.")


def test_no_notebook_changes_the_root(executed: Notebooks, trained: ludic.Run, files_before: dict[str, bytes]):
    assert files_of(trained) == files_before
