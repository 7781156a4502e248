"""Find installed packages, their versions, files and parts, without running them; say which extra installs one.

`pip install ludic-rl` installs the packages that read, write and maintain roots; the extra train adds those that sample
from and train models. Raises MissingPackageError for a missing package.
"""

import contextlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, packages_distributions, version

from ludic.errors import MissingPackageError

TRAIN = "train"
"""The extra with the packages that sample from and train models."""
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("torch", "transformers", "peft", "reasoning_gym", "safetensors"), TRAIN),
    "matplotlib": "plot",
}
"""The extra of each package that modules of ludic import without a call of `require`."""

LUDIC = "ludic-rl"
"""Name under which ludic is packaged."""


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it. A folder of that name without code does not
    count."""
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(package)
        return spec is not None and spec.origin is not None
    return False


def require(package: str, extra: str, what: str) -> None:
    """Raise MissingPackageError if a package is missing.

    extra: ludic's extra that installs it. what: beginning of the message.
    """
    if not is_installed(package):
        raise MissingPackageError(f"{what}: {_advice(package, extra)}")


def missing_extra(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the message for a failed import: the extra that installs the package; None if there is none."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS or is_installed(package):  # another version is installed, without this module
        return None
    return MissingPackageError(_advice(package, EXTRAS[package]))


def _advice(package: str, extra: str) -> str:
    return f"the package {package} is not installed; pip install 'ludic-rl[{extra}]'"


def installed_version(package: str) -> str | None:
    """Return a package's version; None if it is not installed, for example if ludic runs from its sources."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedPart:
    """A part that an installed package brings, as an entry point of a group such as ludic.environments."""

    name: str
    distribution: str
    """Name of the package, as pip knows it."""
    version: str
    entry: EntryPoint
    """Its `load` imports the part."""

    @property
    def package(self) -> str:
        """Name and version of the package."""
        return f"{self.distribution} {self.version}"

    @property
    def module(self) -> str:
        return self.entry.module


def packaged_parts(group: str) -> list[PackagedPart]:
    """Return the parts that installed packages bring in a group of entry points, by name; imports none of them."""
    parts = [
        PackagedPart(name=each.name, distribution=each.dist.name, version=each.dist.version, entry=each)
        for each in entry_points(group=group)
        if each.dist is not None
    ]
    return sorted(parts, key=lambda each: (each.name, each.distribution))


def package_of(module: str) -> str | None:
    """Return name and version of the package that a module belongs to; None if there is none."""
    packages = packages_distributions().get(module.split(".")[0], [])
    return name_and_version(packages[0]) if packages else None
