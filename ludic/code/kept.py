"""code/: copies of the users' files that a run uses, and the consent that running them needs.

Each text is stored once, and a list maps file names to texts.

    code/{sha256}.py, .sql    a text, named by the digest of its bytes
    code/N.json               list N: file names as in the settings, each with its digest and path

A file is copied into the root when a run that names it is created, or when a trainer first names it. From then on the
copy runs, on any machine and in any working directory, until a user asks for the file as it is now, which puts list
N + 1. Code that the user did not bring does not run without consent (ludic.code.consent).
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from ludic.by_name import find_by_name, read_packaged
from ludic.code.consent import CodeSettings, CodeUse, give_consent, has_consent, has_consent_without_path, sampling_uses
from ludic.code.kinds import KINDS
from ludic.defaults import EXAMPLE_IDS
from ludic.errors import ConfigError, ConsentError, SchemaError, StoreError
from ludic.installed import LUDIC, name_and_version
from ludic.paths import local_path
from ludic.records import new_id
from ludic.run_config import RunConfig
from ludic.settings import check_urls
from ludic.store.catalogue import CODE, RUN, TEXTS, NumberName, TextName
from ludic.store.claims import owner_name
from ludic.store.filesystem import Storage
from ludic.store.inputs import copy_data
from ludic.store.records import CodeList, CodeRecord, FileEntry, TextEntry, convert, encode_record
from ludic.store.root import Root, check_scheme, to_json
from ludic.user_files import NO_FILES, Files, UserFile, digest, file_of, files_of, read_user_file

logger = logging.getLogger(__name__)

_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """Users' files found for the names in some settings."""

    files: dict[str, UserFile]
    kept: frozenset[str]
    """Names of the files that are the root's copies; the others were read from this machine's disk."""


def find_files(root: Root, uses: Iterable[CodeUse], *, update: bool = False) -> FoundFiles:
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


def trusted_files(root: Root, uses: Sequence[CodeUse], *, update: bool = False) -> Files:
    """Find files as `find_files` does, and check consent to all. The caller tries them, then calls `keep_files`.

    Warns if a file on disk differs from the root's copy, which is the one that runs. Raises ConsentError, ConfigError.
    """
    found = find_files(root, uses, update=update)
    _check_consent(root, uses, found)
    for name in sorted(found.kept):
        _warn_of_change(root, name, found.files[name])
    return found.files


def prepare_code(root: Root, uses: Sequence[CodeUse], settings: CodeSettings, check: Callable[[Files], object]) -> None:
    """Record the consent that the settings give, and store users' files in the root.

    check: loads the files; if it raises, no consent and no file is stored. Raises ConsentError, ConfigError.
    """
    new, files = _agreed(root, uses, settings)
    check(files)
    _give_all(new, files, root.url, root.run_id)
    for use in new:
        logger.info("%s may run %s %r from now on", root.url, use.role, use.setting)
    keep_files(root, files)


def files_to_check(root: Root, uses: Sequence[CodeUse], settings: CodeSettings) -> Files:
    """Return the files that `prepare_code` checks, and store nothing. Raises ConsentError, ConfigError."""
    return _agreed(root, uses, settings)[1]


def _agreed(root: Root, uses: Sequence[CodeUse], settings: CodeSettings) -> tuple[list[CodeUse], dict[str, UserFile]]:
    """Return the uses that the settings give consent to, and the files of all uses."""
    found = find_files(root, uses, update=settings.update_code)
    _check_paths(root, uses, found)
    new = [use for use in uses if not _is_consented(use, found.files) and _agrees(root, use, found, settings)]
    others = [use for use in uses if use not in new]
    # The texts that were checked for consent, should the root have changed since the first look.
    return new, {**found.files, **trusted_files(root, others, update=settings.update_code)}


def gives_consent(root: Root, uses: Sequence[CodeUse]) -> bool:
    """Return whether the user names a file without consent that the root already holds, with the same text and path."""
    found = find_files(root, uses)
    return any(
        file_of(use.setting) in found.kept and not _is_consented(use, found.files) and _is_named_here(use, found)
        for use in uses
    )


def _is_consented(use: CodeUse, files: Files) -> bool:
    return not use.is_users or has_consent(use, files)


def _agrees(root: Root, use: CodeUse, found: FoundFiles, settings: CodeSettings) -> bool:
    """Return whether the user agrees to code that had no consent before."""
    if settings.trust_code or _is_named_here(use, found):
        return True
    name = file_of(use.setting)
    if name is None or not settings.update_code:
        return False
    return _has_consented_copy(root, use) or not _is_inside(root, found.files[name])


def _is_named_here(use: CodeUse, found: FoundFiles) -> bool:
    """Return whether the user names the code, and its text and paths are those of the file on this machine's disk."""
    name = file_of(use.setting)
    if use.named_by_root or name is None or name not in found.kept:
        return not use.named_by_root
    try:
        return read_user_file(Path(name)) == found.files[name]
    except OSError:
        return False


def _check_paths(root: Root, uses: Sequence[CodeUse], found: FoundFiles) -> None:
    """Raises ConsentError for a file found at a path that the root gives, unless the user agreed to the root's copy."""
    for use in uses:
        name = file_of(use.setting)
        if name is None or name in found.kept or found.files[name].path == Path(name).absolute():
            continue
        if not _has_consented_copy(root, use):
            raise ConsentError(
                f"there is no file {Path(name).absolute()}; {root.url} says that {name!r} is {found.files[name].path}, "
                "and this user has not agreed to run the copy that the root holds; "
                f"start where {name!r} is found, or leave out --update-code"
            )


def _has_consented_copy(root: Root, use: CodeUse) -> bool:
    """Return whether the user has agreed to the text that the root holds now."""
    try:
        found = find_files(root, [use])
    except (SchemaError, StoreError):  # the copy is damaged or gone
        return False
    return file_of(use.setting) in found.kept and has_consent(use, found.files)


def _is_inside(root: Root, file: UserFile) -> bool:
    """Return whether the file came with the root."""
    return root.is_local and file.path.resolve().is_relative_to(Path(root.path).resolve())


def _give_all(uses: Iterable[CodeUse], files: Files, url: str, run_id: str) -> None:
    """Record the user's consent to all code that is not ludic's own. Raises ConfigError."""
    for use in uses:
        if use.is_users:
            give_consent(use, files, root=url, run_id=run_id)


def keep_files(root: Root, files: Files) -> None:
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


def keep_code(root: Root, uses: Iterable[CodeUse], files: Files) -> list[CodeRecord]:
    """Copy the users' files that settings name into the root, as `keep_files` does; return the record of each use."""
    keep_files(root, files)
    return [record_of(use, files) for use in uses]


def create_root(
    url: str, run: RunConfig, *, like: Root | None = None, fs: fsspec.AbstractFileSystem | None = None
) -> Root:
    """Start a run, or open an existing run that has the same settings.

    A new root gets copies of the users' files that `run` names; creating it is consent to run them.
    like: the run that the settings come from. The files are copied from it, and consent is still needed.
    Raises ConfigError for a missing file or a URL with a secret, and as Root.create does.
    """
    run_id = new_id()
    storage = Storage.connect(url, fs)
    # Consent is stored before run.json: if the process is killed in between, the same command can resume.
    is_there = storage.exists(RUN.template)
    is_new = like is None and not is_there
    if is_new:
        check_urls(run)
        to_json(run, run_id)  # refuses options that JSON can't hold
    files = _consented_files(run, storage.url, run_id) if is_new else NO_FILES
    example_ids = EXAMPLE_IDS[0] if like is None else like.example_ids
    if like is not None and not is_there:
        if fs is None:
            check_scheme(url)
        # Before run.json: if the process is killed in between, the same command can resume.
        copy_data(like, storage, run)
    root = Root.create(url, run, run_id=run_id, is_copy=like is not None, example_ids=example_ids, fs=fs)
    if root.run_id != run_id:  # another process has started it
        return root
    if like is None:
        keep_files(root, files)
    else:
        copy_code(like, root)
    return root


def _consented_files(run: RunConfig, url: str, run_id: str) -> Files:
    """The files that a new run's settings name, as they are on the disk; who starts the run consents to run them.

    Raises ConfigError for a file that is not there.
    """
    uses = sampling_uses(run)
    files = {name: _read_disk(name, None) for name in files_of(use.setting for use in uses)}
    _give_all(uses, files, url, run_id)
    return files


def copy_code(source: Root, root: Root) -> None:
    """Copy the users' files of the run `source` into a new root; this does not give consent to them."""
    entries = _newest_list(source)[1]
    keep_files(root, {name: _read_copy(source, name, entry) for name, entry in entries.items()})


def record_of(use: CodeUse, files: Files) -> CodeRecord:
    """Return the record of the code that a setting names; `files` holds the users' files."""
    path, kind = file_of(use.setting), KINDS[use.role]
    if path is not None:
        file = files[path]
        imports = {module: text.sha256 for module, text in file.imports.items()}
        return CodeRecord(role=use.role, name=use.setting, sha256=file.sha256, path=str(file.path), imports=imports)
    sha256, package, others = None, name_and_version(LUDIC), {}
    if kind.folder is not None:
        sha256 = digest(read_packaged(kind.folder, use.setting).encode())
    elif kind.source is not None:
        sha256, package, others = find_by_name(kind.source)(use.setting, use.options)
    return CodeRecord(role=use.role, name=use.setting, sha256=sha256, package=package, imports=others)


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


def check_list(root: Root, number: int) -> None:
    """Check a list and its texts.

    Raises SchemaError if the list can't be read or a text is damaged, StoreError if a text is lost.
    """
    for file, entry in _read_list(root, number).items():
        _read_copy(root, file, entry)


def read_kept_text(root: Root, sha256: str | None, path: str | None) -> str | None:
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


def _check_consent(root: Root, uses: Sequence[CodeUse], found: FoundFiles) -> None:
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


def _describe_refused(root: Root, use: CodeUse, found: FoundFiles, names: Sequence[str]) -> str:
    what = f"{use.role} {use.setting!r}" + (f" with options {json.dumps(dict(use.options))}" if use.options else "")
    for name in names:
        file = found.files[name]
        if name not in found.kept:
            return f"{what}, {file.path}, sha256 {file.sha256[:_SHOWN_DIGITS]}"
        older = (
            ", a text that you agreed to, but not to this path" if has_consent_without_path(use, found.files) else ""
        )
        text = f"{root.url}/{text_name(file.sha256, file.suffix)}, sha256 {file.sha256[:_SHOWN_DIGITS]}"
        return f"{what}, {text}, run as {file.path}{older}"
    return f"{what}, which is installed here"


def _warn_of_change(root: Root, name: str, copy: UserFile) -> None:
    """Warn if the file on disk, in the working directory or else where it was read, has another text than the copy."""
    for path in (Path(name).absolute(), copy.path):
        try:
            now = read_user_file(path)
        except OSError:
            continue
        if not now.is_same_text(copy):
            _log_change(root, now, copy)
        return


def _log_change(root: Root, now: UserFile, copy: UserFile) -> None:
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


def _read_copy(root: Root, name: str, entry: FileEntry) -> UserFile:
    imports = {module: _read_text(root, each, ".py") for module, each in entry.imports.items()}
    suffix = ".sql" if name.endswith(".sql") else ".py"
    text = _read_text(root, entry, suffix)
    return UserFile(path=text.path, source=text.source, imports=imports)


def _read_text(root: Root, entry: TextEntry, suffix: str) -> UserFile:
    name = text_name(entry.sha256, suffix)
    try:
        file = UserFile(path=Path(entry.path), source=root.read(name))
    except FileNotFoundError:
        raise StoreError(f"{root.url}/{name} is gone, the text of {entry.path!r}; --update-code puts it back") from None
    if file.sha256 != entry.sha256:
        raise SchemaError(f"{root.url}/{name} has sha256 {file.sha256}, not that of its name: it is damaged")
    return file


def _put_text(root: Root, file: UserFile) -> None:
    name = text_name(file.sha256, file.suffix)
    if not root.put_if_absent(name, file.source):
        raise StoreError(f"{root.url}/{name} holds another text than its name says; delete that file")


def _entry(file: UserFile) -> FileEntry:
    imports = {name: TextEntry(sha256=each.sha256, path=str(each.path)) for name, each in sorted(file.imports.items())}
    return FileEntry(sha256=file.sha256, path=str(file.path), imports=imports)


def _newest_list(root: Root) -> tuple[int, dict[str, FileEntry]]:
    """Return number and files of the newest list, or 0 and {}. Raises SchemaError as `_read_list`."""
    number = 0
    while root.exists(CODE.name(NumberName(number + 1))):  # by name, since a listing may lag
        number += 1
    return number, _read_list(root, number) if number else {}


def _read_list(root: Root, number: int) -> dict[str, FileEntry]:
    """Read a list. Raises SchemaError for values that `keep_files` does not write."""
    found = CODE.read(root, number)
    return dict(found.files) if found else {}
