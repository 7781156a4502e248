"""Versions of installed packages, for records of what ran."""

import contextlib
from importlib.metadata import PackageNotFoundError, version

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
