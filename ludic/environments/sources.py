"""Which installed text an environment's name stands for: its digest and its package, found without running it."""

import inspect
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

from ludic.environments.reasoning_gym import generator_file
from ludic.environments.registry import BUILT_IN, REASONING_GYM
from ludic.installed import LUDIC, name_and_version


def installed_source(name: str) -> tuple[str | None, str | None]:
    """sha256 of the file, and the package with its version, of an environment that is no user's file.

    None for what has no source file, is not installed, or belongs to no package.
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
    """Found folder by folder: importlib.util.find_spec would import the packages around it."""
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
