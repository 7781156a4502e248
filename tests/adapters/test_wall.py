"""The wall before adapters: no other module imports ludic.adapters, and what they name is there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forks import Forked

import ludic
from ludic.adapters.judge import Judge
from ludic.base.by_name import find_by_name
from ludic.environments.registry import make_environment

PACKAGE = Path(ludic.__file__).parent
CORE = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).parts[0] != "adapters"]
NAMED = sorted({name for file in CORE for name in re.findall(r'"(ludic\.adapters\.[a-z_.]+:\w+)"', file.read_text())})
NOT_OF_LUDIC = {"__init__", "__pycache__", "complaints", "sampling", "trl_rows", "trl_sampling"} | {
    *("openrlhf", "skyrl", "trl", "verl"),  # of ludic/__init__.py, as modules
}
OWN_ENVIRONMENT = """
from ludic.environments.environment import Example
from ludic.environments.judge import Judge

class Judged:
    def __init__(self):
        self.judge = Judge("http://localhost:8000/v1", "big")

    def example(self, index, split):
        return Example(example_id=str(index), messages=())

    async def score(self, example, answer):
        return await self.judge.score(answer)
"""


@pytest.mark.parametrize("name", NAMED)
def test_an_adapter_that_the_core_names_is_there(name: str) -> None:
    assert find_by_name(name) is not None


def test_the_core_names_adapters_of_every_kind() -> None:
    rooms = {name.split(".")[2].partition(":")[0] for name in NAMED}
    assert rooms == {file.stem for file in (PACKAGE / "adapters").iterdir()} - NOT_OF_LUDIC


@pytest.mark.slow
def test_no_module_of_the_core_brings_an_adapter_with_it(tmp_path: Path) -> None:
    modules = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in CORE]
    # Imports vllm, which is in an environment of its own; __main__ runs.
    modules = [module for module in modules if not module.endswith("__main__") and ".vllm_" not in module]
    script = tmp_path / "imports.py"
    script.write_text(f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module.removesuffix(".__init__"))
print([name for name in sys.modules if name.startswith("ludic.adapters")])
""")
    # What it is forked from has imported the commands of ludic, and no adapter either.
    child = Forked([script], tmp_path / "log")
    assert (child.wait(), child.printed()) == (0, "[]\n")


def test_the_contract_finds_an_import_within_a_function(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "ludic")
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    module = tmp_path / "ludic" / "base/masking.py"
    module.write_text(f"{module.read_text()}\n\ndef ask() -> None:\n    import ludic.adapters.judge  # noqa: F401\n")
    linter = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    child = subprocess.run(linter, cwd=tmp_path, capture_output=True, text=True)
    assert child.returncode == 1
    assert re.search(r"it finds them by\s+name\s+BROKEN", child.stdout), child.stdout


def test_an_environment_that_imports_the_judge_by_its_earlier_name_loads(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_ENVIRONMENT)
    environment = make_environment(f"{tmp_path}/mine.py:Judged")()
    assert isinstance(environment.judge, Judge)
    with pytest.raises(ImportError, match="cannot import name 'Juge'"):
        exec("from ludic.environments.judge import Juge")
