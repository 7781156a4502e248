"""code/: copies of the users' files that a run uses. Each text is stored once, and a list maps file names to texts.

    code/{sha256}.py, .sql    a text, named by the digest of its bytes
    code/N.json               list N: file names as in the settings, each with its digest and path

A file is copied into the root when a run that names it is created, or when a trainer first names it. From then on the
copy runs, on any machine and in any working directory, until a user asks for the file as it is now, which puts list
N + 1. Code that the user did not bring does not run without consent (ludic.consent).
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.consent import QUESTIONS, SCORER_OPTIONS, CodeUse, Role, give_consent, has_consent
from ludic.errors import ConfigError, ConsentError, SchemaError, StoreError
from ludic.parser_stages import own_code_of, parser_stages
from ludic.paths import local_path
from ludic.store.catalogue import CODE, TEXTS, NumberName, TextName
from ludic.store.json_files import convert, encode_record
from ludic.store.names import owner_name
from ludic.store.records import CodeList, FileEntry, TextEntry
from ludic.user_files import Files, UserFile, digest, file_of, files_of, python_file_of, read_user_file

if TYPE_CHECKING:
    from ludic.store.root import Root
    from ludic.store.run_json import RunConfig

logger = logging.getLogger(__name__)

_SUFFIXES = (".py", ".sql")
_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord:
    """Code that determined rewards or advantages, as recorded for attempts and for workers' lives."""

    role: Role
    name: str
    """Name of the code in the settings."""
    sha256: str | None
    """SHA-256 of its text, stored as code/{sha256}.py or .sql if it is a user's file; None if it has no source file."""
    path: str | None = None
    """Path that a user's file was read from."""
    package: str | None = None
    """Name and version of the installed package that contains it, such as ludic-rl 0.1.0."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """Digests of the modules that were read with a user's file, by module name; heldout is that of the held-out
    questions of qa/SOURCE."""

    @property
    def digests(self) -> dict[str, str | None]:
        """SHA-256 by module name; "" is the text itself."""
        return {"": self.sha256, **self.imports}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """Users' files found for the names in some settings."""

    files: dict[str, UserFile]
    kept: frozenset[str]
    """Names of the files that are the root's copies; the others were read from this machine's disk."""


def sampling_uses(run: "RunConfig") -> list[CodeUse]:
    """Return the code that workers sample and score with, each once: environments, tools, and users' other code."""
    environments = [
        CodeUse(role="environment", setting=name, options=run.env_options.get(name, {}))
        for name in dict.fromkeys(run.env)
    ]
    scorers = [CodeUse(role="scorer", setting=name) for name in _own_scorers(run)]
    tools = [CodeUse(role="tool", setting=name) for name in dict.fromkeys(run.tools)]
    parsers = [CodeUse(role="parser", setting=own) for own in map(own_code_of, parser_stages(run.parser)) if own]
    others: list[tuple[Role, str]] = [("context", run.context), ("protocol", run.protocol or "")]
    others += [("sub-agent", name) for name in run.sub_agents]
    named = [CodeUse(role=role, setting=setting) for role, setting in dict.fromkeys(others) if file_of(setting)]
    return [*environments, *scorers, *tools, *parsers, *named]


def _own_scorers(run: "RunConfig") -> list[str]:
    """Return the users' functions that options of environments qa/SOURCE name, each once."""
    options = [run.env_options.get(name) for name in run.env if name.startswith(QUESTIONS)]
    scorers = [each.get(option) for each in options if isinstance(each, Mapping) for option in SCORER_OPTIONS]
    return list(dict.fromkeys(name for name in scorers if isinstance(name, str) and python_file_of(name)))


def find_files(root: "Root", uses: Iterable[CodeUse], *, update: bool = False) -> FoundFiles:
    """Find the users' files that settings name: the root's copy of each, or the file on disk if the root has no copy.

    update: read all of them from the disk. Raises ConfigError if a file is neither on the disk nor in the root.
    """
    entries = _newest_list(root)[1]
    names = files_of(use.setting for use in uses)
    kept = frozenset() if update else entries.keys() & set(names)
    files = {
        name: _read_copy(root, name, entries[name]) if name in kept else _read_disk(name, entries.get(name))
        for name in names
    }
    return FoundFiles(files=files, kept=frozenset(kept))


def trusted_files(root: "Root", uses: Sequence[CodeUse], *, update: bool = False) -> Files:
    """Find files as `find_files` does, and check consent to all. The caller tries them, then calls `keep_files`.

    Warns if a file on disk differs from the root's copy, which is the one that runs. Raises ConsentError, ConfigError.
    """
    found = find_files(root, uses, update=update)
    _check_consent(root, uses, found)
    for name in sorted(found.kept):
        _warn_of_change(root, name, found.files[name])
    return found.files


def consent_to(root: "Root", uses: Iterable[CodeUse], files: Files) -> None:
    """Record the user's consent to all code that is not ludic's own. Raises ConfigError."""
    for use in uses:
        if use.is_users:
            give_consent(use, files, root=root.url, run_id=root.run_id)


def keep_files(root: "Root", files: Files) -> None:
    """Copy texts into the root, and put a new list if they differ from the newest list. Raises StoreError."""
    while True:
        number, entries = _newest_list(root)
        wanted = {**entries, **{name: _entry(file) for name, file in files.items()}}
        if wanted == entries:
            return
        for file in files.values():
            for each in (file, *file.imports.values()):
                _put_text(root, each)
        made = CodeList(files=wanted, owner=owner_name(), created_at=datetime.now(UTC).isoformat())
        if root.put_if_absent(CODE.name(NumberName(number + 1)), encode_record(made)):
            return


def consented_files(root: "Root") -> Files:
    """The files that a new run's settings name, as they are on the disk; who starts the run consents to run them.

    Raises ConfigError for a file that is not there.
    """
    uses = sampling_uses(root.run)
    files = {name: _read_disk(name, None) for name in files_of(use.setting for use in uses)}
    consent_to(root, uses, files)
    return files


def copy_code(source: "Root", root: "Root") -> None:
    """Copy the users' files of the run `source` into a new root; this does not give consent to them."""
    entries = _newest_list(source)[1]
    keep_files(root, {name: _read_copy(source, name, entry) for name, entry in entries.items()})


def describe_file(use: CodeUse, files: Files, name: str) -> CodeRecord:
    """Return the record of the user's file `name`."""
    file = files[name]
    imports = {module: text.sha256 for module, text in file.imports.items()}
    return CodeRecord(role=use.role, name=use.setting, sha256=file.sha256, path=str(file.path), imports=imports)


def to_dicts(records: Iterable[CodeRecord]) -> list[dict[str, Any]]:
    """Return records as dictionaries for JSON."""
    return [asdict(record) for record in records]


def from_dicts(values: Sequence[Any]) -> list[CodeRecord]:
    """Parse the records that `to_dicts` wrote. Skips values that are no such records: a root may hold anything."""
    records = []
    for value in values:
        with suppress(ValueError):
            records.append(convert(value, CodeRecord))
    return records


def parse_name(name: str) -> str | int | None:
    """Return the digest in a text's name, or a list's number; None if `keep_files` does not write such a name."""
    text, of_list = TEXTS.parse(name), CODE.parse(name)
    return text.sha256 if text else of_list.number if of_list else None


def check_list(root: "Root", number: int) -> None:
    """Check a list and its texts.

    Raises SchemaError if the list can't be read or a text is damaged, StoreError if a text is lost.
    """
    for file, entry in _read_list(root, number).items():
        _read_copy(root, file, entry)


def read_kept_text(root: "Root", sha256: str | None, path: str | None) -> str | None:
    """Return the text of a user's file that a record names, for people; None if it is missing or damaged."""
    name = text_name(sha256 or "", Path(path or "").suffix)
    if TEXTS.parse(name) is None:
        return None
    try:
        source = root.read(name)
    except FileNotFoundError:
        return None
    return source.decode(errors="replace") if digest(source) == sha256 else None


def text_name(sha256: str, suffix: str) -> str:
    """Return the path of a text below the root."""
    return TEXTS.name(TextName(sha256, suffix.removeprefix(".")))


def warn_of_other_code(before: Sequence[Mapping[str, Any]], now: Iterable[CodeRecord], *, where: str) -> None:
    """Log one warning for each name whose code differs from the previous life's.

    where: names the previous life, such as attempt 3.
    """
    earlier = {(record.role, record.name): record for record in from_dicts(before)}
    for record in now:
        then = earlier.get((record.role, record.name))
        if then is not None and then.digests != record.digests:
            logger.warning("%s", _describe_change(then, record, where))


def _describe_change(earlier: CodeRecord, record: CodeRecord, where: str) -> str:
    then, now = earlier.digests, record.digests
    name = next(module for module in {**now, **then} if then.get(module) != now.get(module))
    what = f"{record.role} {record.name!r}" + (f", module {name}," if name else "")
    shown = ", ".join(
        f"{str(digests.get(name))[:_SHOWN_DIGITS]} {when}" for digests, when in ((then, "then"), (now, "now"))
    )
    packages = f" ({earlier.package} then, {record.package} now)" if record.package else ""
    return f"{what} is not what {where} ran: sha256 {shown}{packages}"


def _check_consent(root: "Root", uses: Sequence[CodeUse], found: FoundFiles) -> None:
    refused = []
    for use in uses:
        if not use.is_users or has_consent(use, found.files):
            continue
        names = files_of([use.setting])
        if not use.named_by_root and not found.kept.intersection(names):
            give_consent(use, found.files, root=root.url, run_id=root.run_id)
        else:
            refused.append(_describe_refused(root, use, found, names))
    if refused:
        raise ConsentError(
            f"{root.url} names code that this user has not agreed to run: {'; '.join(refused)}; "
            "read it, and give --trust-code, in Python trust_code=True, to run it from now on"
        )


def _describe_refused(root: "Root", use: CodeUse, found: FoundFiles, names: Sequence[str]) -> str:
    what = f"{use.role} {use.setting!r}" + (f" with options {json.dumps(dict(use.options))}" if use.options else "")
    for name in names:
        file = found.files[name]
        path = f"{root.url}/{text_name(file.sha256, file.suffix)}" if name in found.kept else str(file.path)
        return f"{what}, {path}, sha256 {file.sha256[:_SHOWN_DIGITS]}"
    return f"{what}, which is installed here"


def _warn_of_change(root: "Root", name: str, copy: UserFile) -> None:
    """Warn if the file on disk, in the working directory or else where it was read, has another text than the copy."""
    for path in (Path(name).absolute(), copy.path):
        try:
            now = read_user_file(path)
        except OSError:
            continue
        if not now.is_same_text(copy):
            _log_change(root, now, copy)
        return


def _log_change(root: "Root", now: UserFile, copy: UserFile) -> None:
    """Log a warning that names the file itself, or the first of its modules that differs."""
    here, there = now.digests, copy.digests
    module = next(name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name))
    path = now.path.with_name(f"{module}.py") if module else now.path
    logger.warning(
        "%s is not the text that the run uses (sha256 %s, and %s here): the copy in %s/code runs; "
        "--update-code takes the file as it is now",
        *(path, str(there.get(module))[:_SHOWN_DIGITS], str(here.get(module))[:_SHOWN_DIGITS], root.url),
    )


def _read_disk(name: str, entry: FileEntry | None) -> UserFile:
    """Read a file under its name in the settings, or else from the path where it was copied from."""
    paths = [local_path(name, "a user's file"), *([Path(entry.path)] if entry else [])]
    for path in paths:
        if path.is_file():
            try:
                return read_user_file(path)
            except OSError as error:
                raise ConfigError(f"{path} can't be read: {error}") from error
    raise ConfigError(f"there is no file {' and none at '.join(str(path.absolute()) for path in paths)}")


def _read_copy(root: "Root", name: str, entry: FileEntry) -> UserFile:
    imports = {module: _read_text(root, each, ".py") for module, each in entry.imports.items()}
    suffix = ".sql" if name.endswith(".sql") else ".py"
    text = _read_text(root, entry, suffix)
    return UserFile(path=text.path, source=text.source, imports=imports)


def _read_text(root: "Root", entry: TextEntry, suffix: str) -> UserFile:
    name = text_name(entry.sha256, suffix)
    try:
        file = UserFile(path=Path(entry.path), source=root.read(name))
    except FileNotFoundError:
        raise StoreError(f"{root.url}/{name} is gone, the text of {entry.path!r}; --update-code puts it back") from None
    if file.sha256 != entry.sha256:
        raise SchemaError(f"{root.url}/{name} has sha256 {file.sha256}, not that of its name: it is damaged")
    return file


def _put_text(root: "Root", file: UserFile) -> None:
    name = text_name(file.sha256, file.suffix)
    if not root.put_if_absent(name, file.source):
        raise StoreError(f"{root.url}/{name} holds another text than its name says; delete that file")


def _entry(file: UserFile) -> FileEntry:
    imports = {name: TextEntry(sha256=each.sha256, path=str(each.path)) for name, each in sorted(file.imports.items())}
    return FileEntry(sha256=file.sha256, path=str(file.path), imports=imports)


def _newest_list(root: "Root") -> tuple[int, dict[str, FileEntry]]:
    """Return number and files of the newest list, or 0 and {}. Raises SchemaError as `_read_list`."""
    number = 0
    while root.exists(CODE.name(NumberName(number + 1))):  # by name, since a listing may lag
        number += 1
    return number, _read_list(root, number) if number else {}


def _read_list(root: "Root", number: int) -> dict[str, FileEntry]:
    """Read a list. Raises SchemaError for values that `keep_files` does not write, since they become file names."""
    found = CODE.read(root, number)
    entries = dict(found.files) if found else {}
    misnamed = [name for name in entries if not name.endswith(_SUFFIXES)]
    misnamed += [module for entry in entries.values() for module in entry.imports if not module.isidentifier()]
    if misnamed:
        raise SchemaError(
            f"{root.url}/{CODE.name(NumberName(number))} is no {CODE.noun} that ludic can read: {misnamed[0]!r} is not "
            "the name of a Python or SQL file"
        )
    return entries
