"""Versions of installed packages, for records of what ran."""

import contextlib
from importlib.metadata import PackageNotFoundError, version

LUDIC = "ludic-rl"
"""Name of the distribution that ludic is in."""


def installed_version(package: str) -> str | None:
    """None where the package is not installed, such as ludic that runs from a folder of sources."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def name_and_version(package: str) -> str | None:
    """Such as ludic-rl 0.1.0; None where the package is not installed."""
    found = installed_version(package)
    return None if found is None else f"{package} {found}"
