"""docs/api.md: its examples run, section by section, and its tables name the whole API."""

import re
import shutil
from pathlib import Path

import pytest
from tiny_runs import create_root, fill, make_model, train_here

import ludic
from ludic.settings.table import is_operation

GUIDE = (Path(__file__).parents[1] / "docs/api.md").read_text(encoding="utf-8")
SECTIONS = {
    title: blocks
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
    if (blocks := re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/mine, which was trained for two steps, and the model that it started from."""
    folder = tmp_path_factory.mktemp("guide")
    root = create_root(str(folder / "runs/mine"), make_model(folder / "model"))
    fill(root, num_files=2, groups_per_file=2)
    fill(root, num_files=1, worker_id="w1-test", seed=5, policy_version=1)
    train_here(root, num_steps=2)
    return folder


@pytest.mark.parametrize("title", SECTIONS)
def test_the_examples_of_a_section_run(title: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, block in enumerate(SECTIONS[title]):
        exec(compile(block, f"docs/api.md, {title}, block {number}", "exec"), names)


def test_no_section_is_without_its_examples() -> None:
    assert sum(map(len, SECTIONS.values())) == GUIDE.count("```python\n") == GUIDE.count("```\n")


def test_the_tables_name_every_public_name_and_method() -> None:
    rows = "".join(line for line in GUIDE.splitlines() if line.startswith("|"))
    methods = [name for name in dir(ludic.Run) if is_operation(getattr(ludic.Run, name))]
    missing = [name for name in (*ludic.__all__, *methods) if not re.search(rf"[`.]{name}[(`]|`{name}\b", rows)]
    assert missing == []
