"""Import an attribute of ludic by a text `module:attribute`, and read packaged SQL files by name.

The core finds by name the parts that are slow to import, such as engines, and those that it must never import: the
adapters to other programs, in ludic.adapters (import contracts in pyproject.toml). The interface of an adapter is a
type of the core beside the table that names it.
"""

from functools import cache
from importlib import import_module, resources
from typing import Any


def find_by_name(name: str) -> Any:
    """Return the attribute of a module of ludic that `module:attribute` names. Never for names that a user gives."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def packaged_names(folder: str) -> list[str]:
    """Return the names of the SQL files of ludic/sql/{folder}/, sorted."""
    files = resources.files("ludic.sql").joinpath(folder).iterdir()
    return sorted(file.name.removesuffix(".sql") for file in files if file.name.endswith(".sql"))


@cache
def read_packaged(folder: str, name: str) -> str:
    """Return the text of ludic/sql/{folder}/{name}.sql."""
    return resources.files("ludic.sql").joinpath(folder, f"{name}.sql").read_text(encoding="utf-8")
