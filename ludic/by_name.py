"""Find what a text `module:attribute` names; its module is imported only then.

The core finds by name what is slow to import, such as engines, and what it must never import: the adapters to other
people's programs, in ludic.adapters (import contracts in pyproject.toml). What an adapter must offer is a type of the
core beside the table that names it.
"""

from importlib import import_module
from typing import Any


def find_by_name(name: str) -> Any:
    """Return the attribute of a module of ludic that `module:attribute` names. Never for names that a user gives."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
