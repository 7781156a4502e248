"""Tell URLs from paths on this machine: the only place that does.

Raises ConfigError for a URL where only a path will do.
"""

from pathlib import Path

from ludic.errors import ConfigError


def is_url(text: str) -> bool:
    """Whether a text names a filesystem, such as s3://bucket/run; a path on this machine has no scheme."""
    return "://" in text


def local_path(text: str, what: str) -> Path:
    """A path on this machine. what: the setting, as errors name it."""
    if is_url(text):
        raise ConfigError(f"{what} is {text}, a URL; wanted a path on this machine, so copy the file here first")
    return Path(text)
