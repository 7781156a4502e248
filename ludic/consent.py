"""The user's consent, on this machine, to run code that a root names and that is not part of ludic.

Consent to a file covers its text: the digests of the file and of the modules that it imports from beside it, the class
or function in it, and the options that it is built with. Consent to an installed module covers its name and options,
since the root can't change its text. Nothing in a root counts as consent: a root may be a copy or a forgery.
Consents are kept in the user's configuration folder (LUDIC_CONFIG_DIR overrides it), out of reach of any root:
{folder}/trusted_code/{key}.json.
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

QUESTIONS = "qa/"
"""Prefix of environments that read questions from a file or a dataset; SCORER_OPTIONS may name users' functions."""
SCORER_OPTIONS = ("scorer", "group_scorer")
_INSTALLED = "verifiers/"
"""Prefix of environments that import any installed package."""

Role = Literal[
    "environment", "scorer", "parser", "context", "tool", "protocol", "sub-agent", "advantage", "filter", "selection"
]


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """Consent to run the code that a root names."""

    trust_code: bool = False
    """Agree to run the files and modules that the root names, now and in the future. Without this flag, code that came
    with somebody else's root is refused; see docs/security.md."""
    update_code: bool = False
    """Use users' files as they are on this machine now, and store them in the root. Without this flag, the root's
    copies run."""

    @property
    def is_given(self) -> bool:
        return self.trust_code or self.update_code


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeUse:
    """A setting that names code."""

    role: Role
    setting: str
    """A name built into ludic, path/to/file.py:name, path/to/file.sql, mcp:COMMAND of a tool, or of an environment
    package.module:Class, PREFIX/NAME of an optional package, or qa/SOURCE."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that an environment is built with."""
    named_by_root: bool = True
    """True if the setting was read from the root, False if the user who started this process gave it."""

    @property
    def is_users(self) -> bool:
        """True if the code is not part of ludic.

        The tool `python` counts, since it runs what the model writes. So does qa/SOURCE, since it copies a file of this
        machine into the root, question by question.
        """
        if self.role == "tool" and self.setting == "python":
            return True
        if self.role == "environment" and self.setting.startswith((QUESTIONS, _INSTALLED)):
            return True
        return file_of(self.setting) is not None or (self.role in ("environment", "tool") and ":" in self.setting)

    def key(self, files: Files) -> str:
        """Digest, in hexadecimal, of the code that consent covers. files: the files that settings name, by name."""
        name = file_of(self.setting)
        entry = self.setting if name is None else self.setting[len(name) :]
        about = [entry, dict(self.options), None if name is None else files[name].digests]
        return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def has_consent(use: CodeUse, files: Files) -> bool:
    """Return whether the user has agreed to run this code."""
    return _consent_file(use.key(files)).is_file()


def give_consent(use: CodeUse, files: Files, *, root: str, run_id: str) -> None:
    """Record that the user agrees to run this code; root and run_id are recorded for people to read.

    Raises ConfigError if the configuration folder can't be written.
    """
    file = _consent_file(use.key(files))
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
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as partial:
            json.dump(about, partial, indent=2)
        Path(partial.name).replace(file)
    except OSError as error:
        raise ConfigError(
            f"the consent to run {use.setting!r} can't be kept in {file.parent}: {error.strerror or error}; "
            f"set {CONFIG_VARIABLE} to a folder that can be written"
        ) from error


def _consent_file(key: str) -> Path:
    base = os.environ.get(CONFIG_VARIABLE) or platformdirs.user_config_dir("ludic", appauthor=False)
    return Path(base) / "trusted_code" / f"{key}.json"
