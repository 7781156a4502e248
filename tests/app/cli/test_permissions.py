"""Other users of a shared folder may read what the umask of the writer allows, in every file and folder of a root."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import create_root, fill, make_model, make_whole_root, train_here

from ludic.adapters.exports.weights import export_weights
from ludic.app.demos.words import open_demo
from ludic.run.run_json import put_run, run_of


@pytest.fixture(params=[0o022, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def wrong_modes(folder: Path, umask: int) -> dict[str, str]:
    """The modes, by path, that differ from those of a file or folder that a program makes there."""
    assert any(folder.rglob("*"))
    wanted = {path: (0o777 if path.is_dir() else 0o666) & ~umask for path in (folder, *folder.rglob("*"))}
    modes = {path: path.stat().st_mode & 0o7777 for path in wanted}
    return {path.relative_to(folder).as_posix(): oct(modes[path]) for path in wanted if modes[path] != wanted[path]}


@pytest.mark.slow
def test_every_file_of_a_run_follows_the_umask(tmp_path: Path, umask: int) -> None:
    root = make_whole_root(tmp_path)
    assert {"rollouts", "policies", "checkpoints", "model", "quarantine"} <= {
        path.name for path in Path(root.path).iterdir()
    }
    assert wrong_modes(Path(root.path), umask) == {}


def test_the_weights_of_a_trained_run_and_their_export_follow_the_umask(tmp_path: Path, umask: int) -> None:
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    train_here(root, num_steps=1, lora_rank=2, publish_lora="adapter")
    export_weights(root, str(tmp_path / "exported"))
    assert wrong_modes(Path(root.path), umask) == {}
    assert wrong_modes(tmp_path / "exported", umask) == {}


def test_the_model_of_the_demo_follows_the_umask(tmp_path: Path, umask: int) -> None:
    assert (Path(open_demo(str(tmp_path / "demo")).path) / "model/model.safetensors").exists()
    assert wrong_modes(tmp_path / "demo", umask) == {}


def test_a_scratch_folder_is_private_and_files_put_from_it_follow_the_umask(tmp_path: Path, umask: int) -> None:
    root = put_run(str(tmp_path / "run"), run_of(create_root(str(tmp_path / "other"), "model")))
    with root.scratch_folder() as folder:
        assert folder.stat().st_mode & 0o7777 == 0o700
        (folder / "private").touch(mode=0o600)
        assert root.put_file_if_absent(folder / "private", "a.bin")
        (folder / "folder").mkdir(mode=0o700)
        (folder / "folder/private").touch(mode=0o600)
        root.upload(folder / "folder", "uploaded")
    assert wrong_modes(Path(root.path), umask) == {}
