"""Where exporters write to: the argument `out`, which most of them need."""

from pathlib import Path
from typing import BinaryIO

from ludic.base import local_path
from ludic.settings import SettingsError


def given_url(target: str | BinaryIO | None, format: str) -> str:
    """Return the folder or URL to write to. Raises SettingsError if there is none."""
    if not isinstance(target, str):
        raise SettingsError(f"format {format} needs out: a folder or URL that does not exist")
    return target


def given_folder(target: str | BinaryIO | None, format: str, what: str) -> Path:
    """Return the local folder to write to. what: names it in errors. Raises ConfigError."""
    return local_path(given_url(target, format), what)
