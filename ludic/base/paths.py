"""Distinguish URLs, paths on this machine and keys that are not paths, and find the user's cache folder.

Raises ConfigError for a URL in a setting that takes only a path.
"""

import os
from pathlib import Path

import platformdirs

from ludic.errors import ConfigError

CACHE_VARIABLE = "LUDIC_CACHE_DIR"

PATH_BELOW = r"(?!\.\.?(?:/|$))[^/\0\\]+(?:/(?!\.\.?(?:/|$))[^/\0\\]+)*"
"""Pattern of a path below a folder, with / between its parts, as the store writes it."""
RELATIVE_PATH = rf"(?![A-Za-z]:){PATH_BELOW}"
"""Pattern of a path below a folder that was read from a file: it does not lead out on any system."""
A_RELATIVE_PATH = "a path below its folder, without '..', '.', empty parts, '\\' and a drive"
"""Description of RELATIVE_PATH, for errors."""


def is_url(text: str) -> bool:
    """Return whether a text is a URL, such as s3://bucket/run; a path on this machine has no scheme."""
    return "://" in text


def is_path(name: str) -> bool:
    """Return whether a file's name is a path; an object store takes any key, such as one with two slashes."""
    return {"", ".", ".."}.isdisjoint(name.split("/"))


def local_path(text: str, what: str) -> Path:
    """Return a path on this machine; raises ConfigError for a URL. what: the setting's name in the error."""
    if is_url(text):
        raise ConfigError(f"{what} is {text}, a URL; wanted a path on this machine, so copy the file here first")
    return Path(text)


def cache_folder() -> Path:
    """Return the folder of data that can be computed again; LUDIC_CACHE_DIR overrides the user's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    return Path(platformdirs.user_cache_dir("ludic", appauthor=False))
