"""`ludic init` makes a folder whose commands and notebook run as they are printed; it writes all files or none."""

import errno
import shlex
import shutil
from pathlib import Path

import forks
import nbformat
import pytest
from notebook_cells import execute_file, outputs_of

import ludic
from ludic.app.operations import init as module
from ludic.app.operations.first_experiment.environment import Cats
from ludic.app.operations.init import Initialized, init
from ludic.errors import ConfigError

FILES = ["environment.py", "experiment.toml", "model/", "notebook.ipynb"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Initialized:
    """A new folder, whose name has a blank, in one that does not exist either."""
    return init(tmp_path_factory.mktemp("made") / "my experiments" / "first")


def test_a_new_folder_holds_an_environment_its_settings_a_notebook_and_a_model(made: Initialized):
    assert made.files == FILES
    assert sorted(path.name for path in Path(made.folder).iterdir()) == [name.rstrip("/") for name in FILES]
    # Nothing stays beside it.
    assert [path.name for path in Path(made.folder).parent.iterdir()] == ["first"]


def test_the_lines_to_paste_begin_with_a_change_of_folder_that_a_shell_understands(made: Initialized):
    first, *others = [line.strip() for line in repr(made).splitlines() if line.startswith("    ")]
    assert first == f"cd '{made.folder}'"
    assert [line.split("  #")[0].strip() for line in others] == list(made.commands[1:])


def test_an_empty_folder_that_exists_is_filled_and_needs_no_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    found = init(".")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name.rstrip("/") for name in FILES]
    assert found.commands[0].startswith("ludic check ")


def test_a_folder_that_holds_something_is_refused_and_stays_as_it_is(tmp_path: Path):
    for name in "dcba":
        (tmp_path / name).touch()
    wanted = f"{tmp_path} is not empty: it holds a, b, c and 1 more; name a new or an empty folder"
    with pytest.raises(ConfigError) as refused:
        init(tmp_path)
    assert str(refused.value) == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]


def test_a_file_and_a_url_are_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is a file, wanted a new or an empty folder$"):
        init(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"^FOLDER is s3://bucket/first, a URL; wanted a folder on this machine$"):
        init("s3://bucket/first")


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool):
    def fill(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_make_model", fill)
    target = tmp_path / "first"
    if exists:
        target.mkdir()
    with pytest.raises(ConfigError, match=r"first can't be written: No space left on device$"):
        init(target)
    assert [path.name for path in tmp_path.rglob("*")] == (["first"] if exists else [])


def test_what_was_moved_into_an_existing_folder_is_taken_back_if_the_rest_can_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rename = Path.rename

    def fail_at_the_model(self: Path, target: Path) -> Path:
        if self.name == "model" and target.parent == tmp_path:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_at_the_model)
    with pytest.raises(ConfigError, match="Permission denied"):
        init(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_keeps_its_splits_apart_and_scores_the_share_of_cats():
    cats = Cats()
    train, heldout = (
        [cats.example(index, split).messages[0].content for index in range(100)] for split in ("train", "heldout")
    )
    # 4 forms in 7 places, and in 3 others.
    assert (len({*train}), len({*heldout}), {*train} & {*heldout}) == (28, 12, set())
    example = cats.example(0, "train")
    assert cats.score(example, "i love cats cats").reward == 0.5
    assert cats.score(example, "").reward == 0.0


@pytest.mark.slow
def test_the_printed_commands_and_the_notebook_run(made: Initialized, tmp_path: Path):
    folder = tmp_path / "first"
    shutil.copytree(made.folder, folder)
    settings = folder / "experiment.toml"
    few = "num_steps = 3\neval_options = { num_examples = 8 }"
    settings.write_text(settings.read_text().replace("num_steps = 60", few))
    commands = list(made.commands[1:])
    assert commands.pop().startswith("jupyter lab notebook.ipynb")
    printed = ""
    for line in commands:
        name, *words = shlex.split(line, comments=True)
        assert name == "ludic"
        done = forks.ludic(*words, *(["--num-steps", "2"] if words[0] == "run" else []), folder=folder)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    assert "trained to step 2 of 2 in runs/first" in printed
    assert "<html" in (folder / "report.html").read_text()

    notebook = execute_file(folder / "notebook.ipynb")
    assert len(outputs_of(notebook, "image/png")) == 1
    steps = ludic.open(folder / "runs" / "first").sql("select step from metrics where kind = 'train' order by step")
    assert steps["step"].to_list() == [1, 2, 3]


def test_the_notebook_is_one_without_outputs():
    notebook = nbformat.read(Path(module.__file__).with_name("first_experiment") / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs")] == []
