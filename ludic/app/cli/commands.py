"""The commands of `ludic`: the operations that have a group, of all modules of ludic.app.operations, and the demo."""

from collections.abc import Mapping
from importlib import import_module
from typing import get_args

from ludic.app.operations import import_operations
from ludic.app.operations.operation import COMMANDS, Command, Group

GONE: Mapping[str, str] = {
    "create": "ludic run ROOT --create-only",
    "stats": "ludic watch ROOT --totals",
    "show": "ludic view ROOT ID --text",
    "launch": "ludic cluster ROOT SYSTEM",
    "eval compare": "ludic compare ROOT[@VERSION] ...",
    "eval contamination": "ludic contamination ROOT",
}
"""What commands of older versions are now."""


def groups() -> Mapping[Group, Mapping[str, Command]]:
    """Return the commands in the groups and the order of `ludic --help`."""
    order = sorted(COMMANDS, key=lambda name: (COMMANDS[name].place, name))
    return {
        group: {name: COMMANDS[name] for name in order if COMMANDS[name].group == group} for group in get_args(Group)
    }


import_operations()
import_module("ludic.app.demos.demo")
