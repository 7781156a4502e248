"""Import an attribute of ludic by a text `module:attribute`, and read packaged SQL files by name.

Found by name is what is slow to import, such as engines, and what no module may import: the adapters to other people's
programs, in ludic.adapters (import contracts in pyproject.toml). Most are parts of a kind (ludic.settings.kinds).
"""

from functools import cache
from importlib import import_module, resources
from typing import Any


def find_by_name(name: str) -> Any:
    """Return the attribute of a module of ludic that `module:attribute` names. Never for names that a user gives."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def packaged_names(folder: str, room: str = "ludic.root.sql", suffix: str = ".sql") -> list[str]:
    """Return the names of the files with a suffix in a room's folder, such as ludic/root/sql/{folder}/, sorted."""
    files = resources.files(room).joinpath(folder).iterdir()
    return sorted(file.name.removesuffix(suffix) for file in files if file.name.endswith(suffix))


@cache
def read_packaged(folder: str, name: str, room: str = "ludic.root.sql", suffix: str = ".sql") -> str:
    """Return the text of a file of `packaged_names`, such as ludic/root/sql/{folder}/{name}.sql."""
    return resources.files(room).joinpath(folder, f"{name}{suffix}").read_text(encoding="utf-8")
