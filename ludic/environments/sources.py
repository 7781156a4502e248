"""Digest and package of an installed environment's source file, found without running it."""

import inspect
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

from ludic.environments.reasoning_gym import generator_file
from ludic.environments.registry import BUILT_IN, REASONING_GYM
from ludic.installed import LUDIC, name_and_version


def installed_source(name: str) -> tuple[str | None, str | None]:
    """Return the sha256 of an installed environment's file, and its package with version.

    The digest is None if there is no source file, and the package is None if the module belongs to no package.
    """
    if name in BUILT_IN:
        return _digest(inspect.getsourcefile(BUILT_IN[name])), name_and_version(LUDIC)
    if name.startswith(REASONING_GYM):
        path = generator_file(name.removeprefix(REASONING_GYM))
        return _digest(path), name_and_version("reasoning-gym")
    module = name.rpartition(":")[0]
    return _digest(_module_file(module)), _package_of(module)


def _digest(path: str | None) -> str | None:
    return sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None


def _module_file(module: str) -> str | None:
    """Return a module's file. Searches folder by folder: importlib.util.find_spec would import parent packages."""
    folders: list[str] | None = None
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return spec.origin if spec else None


def _package_of(module: str) -> str | None:
    packages = packages_distributions().get(module.split(".")[0], [])
    return name_and_version(packages[0]) if packages else None
