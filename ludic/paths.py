"""Distinguish URLs from paths on this machine; no other module does this.

Raises ConfigError for a URL in a setting that takes only a path.
"""

from pathlib import Path

from ludic.errors import ConfigError


def is_url(text: str) -> bool:
    """Return whether a text is a URL, such as s3://bucket/run; a path on this machine has no scheme."""
    return "://" in text


def local_path(text: str, what: str) -> Path:
    """Return a path on this machine; raises ConfigError for a URL. what: the setting's name in the error."""
    if is_url(text):
        raise ConfigError(f"{what} is {text}, a URL; wanted a path on this machine, so copy the file here first")
    return Path(text)
