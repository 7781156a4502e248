"""The code that settings name, and the user's consent, on this machine, to run what is not part of ludic.

Consent to a file covers its text: the digests of the file and of the modules that it imports from beside it, the class
or function in it, and the options that it is built with. It also covers their paths: a path becomes __file__, by which
code finds data beside it, and a root can name any path. Consent to an installed module covers its name and options,
since the root can't change its text. Nothing in a root counts as consent: a root may be a copy or a forgery.
Consents are kept in the user's configuration folder (LUDIC_CONFIG_DIR overrides it), out of reach of any root:
{folder}/trusted_code/{key}.json.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import platformdirs

from ludic.code.kinds import (
    KINDS,
    PARSER,
    SCORER,
    SCORER_OPTIONS,
    own_code_of,
    parser_stages,
    scorer_names,
    takes_settings,
)
from ludic.errors import ConfigError
from ludic.run_config import RunConfig
from ludic.user_files import QUESTIONS, Files, file_of

CONFIG_VARIABLE = "LUDIC_CONFIG_DIR"


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

    role: str
    """Role of a kind of ludic.code.kinds."""
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

    def key(self, files: Files) -> str:
        """Digest, in hexadecimal, of the texts and options of the code. files: the files that settings name."""
        name = file_of(self.setting)
        entry = self.setting if name is None else self.setting[len(name) :]
        about = [entry, dict(self.options), None if name is None else files[name].digests]
        return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def sampling_uses(run: RunConfig, of_root: RunConfig | None = None) -> list[CodeUse]:
    """Return the code that workers sample and score with, each once: environments, tools, and users' other code.

    of_root: settings in the root, None if they are `run`; the user named the code that these do not name.
    """
    if of_root is not None:
        named = sampling_uses(of_root)
        return [use if use in named else replace(use, named_by_root=False) for use in sampling_uses(run)]
    environments = [
        CodeUse(role="environment", setting=name, options=run.env_options.get(name, {}))
        for name in dict.fromkeys(run.env)
    ]
    scorers = [CodeUse(role="scorer", setting=name, options=options) for name, options in _scorers(run).items()]
    tools = [CodeUse(role="tool", setting=name) for name in dict.fromkeys(run.tools)]
    in_stages = [own_code_of(PARSER, stage) for stage in parser_stages(run.parser)]
    parsers = [CodeUse(role="parser", setting=own) for own in in_stages if own]
    others: list[tuple[str, str]] = [("context", run.context), ("protocol", run.protocol or "")]
    others += [("sub-agent", name) for name in run.sub_agents]
    named = [CodeUse(role=role, setting=setting) for role, setting in dict.fromkeys(others) if file_of(setting)]
    return [*environments, *scorers, *tools, *parsers, *named]


def _scorers(run: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Return the users' functions and the reward models that options of environments qa/SOURCE name, with settings."""
    found: dict[str, Mapping[str, Any]] = {}
    for env in run.env:
        options = run.env_options.get(env)
        if not env.startswith(QUESTIONS) or not isinstance(options, Mapping):
            continue
        settings = options.get("scorer_options")
        for name in (each for option in SCORER_OPTIONS for each in scorer_names(options.get(option))):
            if not isinstance(name, str):
                continue
            if own := own_code_of(SCORER, name):
                found[own] = {}
            elif takes_settings(SCORER, name):
                given = settings.get(name) if isinstance(settings, Mapping) else None
                found[name] = given if isinstance(given, Mapping) else {}
    return found


def has_consent(use: CodeUse, files: Files) -> bool:
    """Return whether the user has agreed to run this code."""
    return _consent_file(use, files).is_file()


def has_consent_without_path(use: CodeUse, files: Files) -> bool:
    """Return whether the user has agreed to this text in an older ludic, which did not ask about paths."""
    return file_of(use.setting) is not None and _file_of_key(use.key(files)).is_file()


def give_consent(use: CodeUse, files: Files, *, root: str, run_id: str) -> None:
    """Record that the user agrees to run this code; root and run_id are recorded for people to read.

    Raises ConfigError if the configuration folder can't be written.
    """
    file = _consent_file(use, files)
    name = file_of(use.setting)
    about = {
        "name": use.setting,
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
    return _file_of_key(key)


def _file_of_key(key: str) -> Path:
    base = os.environ.get(CONFIG_VARIABLE) or platformdirs.user_config_dir("ludic", appauthor=False)
    return Path(base) / "trusted_code" / f"{key}.json"
