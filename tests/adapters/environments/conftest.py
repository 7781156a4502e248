"""Packages of verifiers that tests write and install."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Installs a package of one module, and returns the name of its environment."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(text: str) -> str:
        name = f"made_by_a_test_{tmp_path.name}_{len(names)}".replace("[", "_").replace("]", "_").lower()
        (tmp_path / f"{name}.py").write_text(text)
        about = tmp_path / f"{name}-0.1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\nRequires-Dist: verifiers\n"
        )
        (about / "RECORD").write_text(f"{name}.py,,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n")
        names.append(name)
        return f"verifiers/{name}"

    yield write
    for name in names:
        sys.modules.pop(name, None)
