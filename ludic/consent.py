"""What code the user of this machine has agreed to run: files and modules that a root names, and that are not ludic's.

Consent is to the text: the digests of a file and of the modules that it brings, the class or function in it, and the
options that it is built with. What says so in the root is of no account, since a root may be a copy, or made up. For a
module that is installed here, it is to its name and options: the root can't change its text.
Kept in the user's configuration folder (LUDIC_CONFIG_DIR overrides it), {folder}/trusted_code/{key}.json, out of any
root's reach.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import platformdirs

from ludic.errors import ConfigError
from ludic.user_files import Files, file_of

CONFIG_VARIABLE = "LUDIC_CONFIG_DIR"

Role = Literal["environment", "advantage", "filter", "selection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeUse:
    """One name in the settings that stands for code."""

    role: Role
    setting: str
    """A name of ludic's own, path/to/file.py:name, path/to/file.sql, or package.module:Class of an environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What an environment is built with."""
    named_by_root: bool = True
    """Whether the setting was read in the root, and not given by whoever started this process."""

    @property
    def is_users(self) -> bool:
        """Whether it is not ludic's own."""
        return file_of(self.setting) is not None or (self.role == "environment" and ":" in self.setting)

    def key(self, files: Files) -> str:
        """What consent is to, as a digest in hexadecimal. files: those that settings name, by name."""
        name = file_of(self.setting)
        entry = self.setting if name is None else self.setting[len(name) :]
        about = [entry, dict(self.options), None if name is None else files[name].digests]
        return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def has_consent(use: CodeUse, files: Files) -> bool:
    """Whether the user has agreed to this code."""
    return _place(use.key(files)).is_file()


def give_consent(use: CodeUse, files: Files, *, root: str, run_id: str) -> None:
    """Remember that the user agrees; root and run_id are for people who look.

    Raises ConfigError where the configuration folder can't be written.
    """
    place = _place(use.key(files))
    name = file_of(use.setting)
    about = {
        "name": use.setting,
        "options": dict(use.options),
        "sha256": None if name is None else files[name].digests,
        "root": root,
        "run_id": run_id,
        "given_at": datetime.now(UTC).isoformat(),
    }
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".partial", delete=False) as partial:
            json.dump(about, partial, indent=2)
        Path(partial.name).replace(place)
    except OSError as error:
        raise ConfigError(
            f"the consent to run {use.setting!r} can't be kept in {place.parent}: {error.strerror or error}; "
            f"set {CONFIG_VARIABLE} to a folder that can be written"
        ) from error


def _place(key: str) -> Path:
    base = os.environ.get(CONFIG_VARIABLE) or platformdirs.user_config_dir("ludic", appauthor=False)
    return Path(base) / "trusted_code" / f"{key}.json"
