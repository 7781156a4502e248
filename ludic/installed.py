"""Versions and files of installed packages, for records of what ran; found without running them."""

import contextlib
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version

LUDIC = "ludic-rl"
"""Name under which ludic is packaged."""


def installed_version(package: str) -> str | None:
    """Return a package's version; None if it is not installed, as when ludic runs from a folder of sources."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def name_and_version(package: str) -> str | None:
    """Return a package's name and version, such as ludic-rl 0.1.0; None if it is not installed."""
    found = installed_version(package)
    return None if found is None else f"{package} {found}"


def module_file(module: str) -> str | None:
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


def package_of(module: str) -> str | None:
    """Return name and version of the package that a module belongs to; None if there is none."""
    packages = packages_distributions().get(module.split(".")[0], [])
    return name_and_version(packages[0]) if packages else None
