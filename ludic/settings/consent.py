"""The code that settings name, and the user's consent, on this machine, to run what is not part of ludic.

Consent to a file covers its text: the digests of the file and of the modules that it imports from beside it, the class
or function in it, and the options that it is built with. It also covers their paths: a path becomes __file__, by which
code finds data beside it, and a root can name any path. Consent to an installed module covers its name and options,
since the root can't change its text. Consent to a part that a package brings by an entry point covers its name, the
package and the options, and records the package's version. Nothing in a root counts as consent: a root may be a copy or
a forgery. Consents are kept in the user's configuration folder (LUDIC_CONFIG_DIR overrides it), out of reach of any
root: {folder}/trusted_code/{key}.json.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import platformdirs

from ludic.base import PackagedPart
from ludic.errors import ConfigError
from ludic.settings.kinds import KINDS, packaged_part
from ludic.settings.user_files import Files, file_of
from ludic.settings.values import Role

CONFIG_VARIABLE = "LUDIC_CONFIG_DIR"


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """Consent to run the code that a root names."""

    trust_code: Annotated[bool, Role(first_page=True)] = False
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

    role: str
    """Role of a kind of ludic.settings.kinds."""
    setting: str
    """A name of that kind."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that an environment is built with."""
    named_by_root: bool = True
    """True if the setting was read from the root, False if the user who started this process gave it."""

    @property
    def is_users(self) -> bool:
        """True if the code is not part of ludic."""
        return KINDS[self.role].is_users(self.setting)

    @property
    def packaged(self) -> PackagedPart | None:
        """The part that an installed package brings under this name; None for any other code."""
        return packaged_part(KINDS[self.role], self.setting)

    def key(self, files: Files) -> str:
        """Digest, in hexadecimal, of the texts and options of the code. files: the files that settings name."""
        name = file_of(self.setting)
        entry = self.setting if name is None else self.setting[len(name) :]
        about = [entry, dict(self.options), None if name is None else files[name].digests]
        if (part := self.packaged) is not None:
            about += [KINDS[self.role].entry_points, part.distribution]
        return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def has_consent(use: CodeUse, files: Files) -> bool:
    """Return whether the user has agreed to run this code."""
    return _consent_file(use, files).is_file()


def give_consent(use: CodeUse, files: Files, *, root: str, run_id: str) -> None:
    """Record that the user agrees to run this code; root and run_id are recorded for people to read.

    Raises ConfigError if the configuration folder can't be written.
    """
    file = _consent_file(use, files)
    name, part = file_of(use.setting), use.packaged
    about = {
        "name": use.setting,
        **({} if part is None else {"distribution": part.distribution, "version": part.version}),
        "options": dict(use.options),
        "sha256": None if name is None else files[name].digests,
        "paths": None if name is None else files[name].paths,
        "root": root,
        "run_id": run_id,
        "given_at": datetime.now(UTC).isoformat(),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".partial", delete=False) as partial:
            partial.write(json.dumps(about, indent=2).encode())
        Path(partial.name).replace(file)
    except OSError as error:
        raise ConfigError(
            f"the consent to run {use.setting!r} can't be kept in {file.parent}: {error.strerror or error}; "
            f"set {CONFIG_VARIABLE} to a folder that can be written"
        ) from error


def _consent_file(use: CodeUse, files: Files) -> Path:
    key, name = use.key(files), file_of(use.setting)
    if name is not None:
        key = sha256(json.dumps([key, files[name].paths], sort_keys=True).encode()).hexdigest()
    base = os.environ.get(CONFIG_VARIABLE) or platformdirs.user_config_dir("ludic", appauthor=False)
    return Path(base) / "trusted_code" / f"{key}.json"
