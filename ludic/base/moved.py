"""Name the room of a module that had another name before ludic 0.1.0, when a script imports it by the old one."""

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

ROOMS: Mapping[str, str] = MappingProxyType(
    {
        "ludic.agents.play": "ludic.agents",
        "ludic.agents.player": "ludic.agents",
        "ludic.answers": "ludic.base",
        "ludic.batches": "ludic.training.batches",
        "ludic.by_name": "ludic.base",
        "ludic.children": "ludic.base",
        "ludic.cli": "ludic.app",
        "ludic.code": "ludic.settings",
        "ludic.config_files": "ludic.base",
        "ludic.data_files": "ludic.base",
        "ludic.defaults": "ludic.base",
        "ludic.demos": "ludic.app",
        "ludic.devices": "ludic.base",
        "ludic.distributed": "ludic.base",
        "ludic.eval.numbers": "ludic.eval",
        "ludic.extra_columns": "ludic.records",
        "ludic.flags": "ludic.settings",
        "ludic.installed": "ludic.base",
        "ludic.launch": "ludic.app",
        "ludic.maintenance": "ludic.root.maintenance",
        "ludic.masking": "ludic.base",
        "ludic.messages": "ludic.records",
        "ludic.model_json": "ludic.base",
        "ludic.models.first_model": "ludic.root.weights",
        "ludic.models.folder_check": "ludic.base",
        "ludic.operations": "ludic.app",
        "ludic.operations.first_experiment.environment": "ludic.app",
        "ludic.paths": "ludic.base",
        "ludic.printable": "ludic.base",
        "ludic.recording": "ludic.run",
        "ludic.renamed_settings": "ludic.settings",
        "ludic.results": "ludic.base",
        "ludic.rollouts.follower": "ludic.rollouts",
        "ludic.rollouts.pump": "ludic.rollouts",
        "ludic.rollouts.schedule": "ludic.rollouts",
        "ludic.row_files": "ludic.base",
        "ludic.run_config": "ludic.run",
        "ludic.run_json": "ludic.run",
        "ludic.schema": "ludic.records",
        "ludic.scoring": "ludic.eval",
        "ludic.show": "ludic.app",
        "ludic.sql": "ludic.root.sql",
        "ludic.store": "ludic.root",
        "ludic.temporary": "ludic.base",
        "ludic.troubles": "ludic.run",
        "ludic.user_files": "ludic.settings",
        "ludic.values": "ludic.settings",
        "ludic.what_if": "ludic.eval",
    }
)
"""Room by old module; the longest beginning of a name counts."""


def room_of(old: str) -> str | None:
    """Return the room that has what a module of this name had; None if there was none."""
    parts = old.split(".")
    return next((ROOMS[each] for n in range(len(parts), 1, -1) if (each := ".".join(parts[:n])) in ROOMS), None)


class _Finder(MetaPathFinder):
    """Asked last, for a module that no other finder knows."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("ludic.") and (room := room_of(fullname)) is not None:
            raise ModuleNotFoundError(
                f"{fullname} is part of {room} since ludic 0.1.0; write `from {room} import ...` (docs/files.md)",
                name=fullname,
            )
        return None


def explain_moved_modules() -> None:
    """Let the import of a module that moved say where it is."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder())
