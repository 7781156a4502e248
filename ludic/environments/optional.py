"""Find optional packages, and say which extra installs one that is missing."""

import importlib.util

from ludic.errors import ConfigError


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; does not import it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, extra: str, what: str) -> None:
    """Raise ConfigError if a package is missing. extra: ludic's extra that installs it. what: begin of the message."""
    if not is_installed(package):
        raise ConfigError(f"{what}: the package {package} is not installed; pip install 'ludic-rl[{extra}]'")
