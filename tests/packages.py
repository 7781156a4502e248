"""Small packages with entry points, installed into a folder on the path of this process and of those that it starts."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

PARTS = """
from contextlib import contextmanager
from pathlib import Path

from ludic.environments.environment import Example
from ludic.records.rollout import Message


class Rooms:
    def __init__(self, size=1, run_in=None):
        self.size = size
        if run_in is not None:
            self.run_in = run_in

    def example(self, index, split):
        return Example(example_id=str(index), messages=(Message(role="user", content="Go."),))

    def score(self, example, answer):
        return float(self.size)


def near(example, answer):
    return 0.25


@contextmanager
def tracker(run):
    yield Log(Path(run.root.path) / "told.txt")


class Log:
    def __init__(self, path):
        self.path = path

    def numbers(self, step, values):
        with self.path.open("a") as file:
            file.write(f"{step} {values.get('loss') is not None}\\n")

    def samples(self, step, samples): ...


class System:
    start = "qsub {}"

    def check(self, cluster): ...

    def files(self, root, config, engine, cluster):
        return {"run.pbs": f"ludic run {root.url}"}


def part(*args, **kwargs):
    raise AssertionError("it ran")


system, number = System(), 7
"""


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry_points: Mapping[str, Mapping[str, str]],
    *,
    name: str = "acme-rl",
    version: str = "1.0",
    text: str = PARTS,
) -> Path:
    """Install a package with a module of its name as pip does, and put the folder on the path; return the folder.

    entry_points: by group and name. A second call with the same folder installs another package, or another version.
    """
    module = name.replace("-", "_")
    for old in folder.glob(f"{module}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in parts.items())
        for group, parts in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.delitem(sys.modules, module, raising=False)
    if os.environ.get("PYTHONPATH") != str(folder):
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder
