"""Which text of a user's file a run uses, the root's copy or this machine's file, and the consent that it needs.

A file is copied into the root (ludic.root.code) when a run that names it is created, or when a trainer first names it.
From then on the copy runs, on any machine and in any working directory, until a user asks for the file as it is now,
which is copied too. Code that the user did not bring does not run without consent (ludic.settings.consent).
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludic.base import LUDIC, find_by_name, local_path, module_file, name_and_version
from ludic.errors import ConfigError, ConsentError, SchemaError, StoreError
from ludic.root import SHOWN_DIGITS, WORKERS, CodeRecord, FileEntry, Root, keep_files, newest_list, read_copy, text_name
from ludic.settings import (
    KINDS,
    CodeSettings,
    CodeUse,
    Files,
    UserFile,
    can_be_packaged,
    digest,
    file_of,
    files_of,
    give_consent,
    has_consent,
    read_user_file,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """Users' files found for the names in some settings."""

    files: dict[str, UserFile]
    snapshots: frozenset[str]
    """Names of the files that are the root's copies; the others were read from this machine's disk."""


def find_files(root: Root, uses: Iterable[CodeUse], *, update: bool = False) -> FoundFiles:
    """Find the users' files that settings name: the root's copy of each, or the file on disk if the root has no copy.

    update: read all of them from the disk. Raises ConfigError if a file is neither on the disk nor in the root.
    """
    entries = newest_list(root)[1]
    names = files_of(use.setting for use in uses)
    kept = frozenset() if update else entries.keys() & set(names)
    files = {
        name: read_copy(root, name, entries[name]) if name in kept else _read_disk(name, entries.get(name))
        for name in names
    }
    return FoundFiles(files=files, snapshots=frozenset(kept))


def trusted_files(root: Root, uses: Sequence[CodeUse], *, update: bool = False) -> Files:
    """Find files as `find_files` does, and check consent to all. The caller tries them, then calls `keep_files`.

    Warns if a file on disk differs from the root's copy, which is the one that runs. Raises ConsentError, ConfigError.
    """
    _check_installed(root, uses)
    found = find_files(root, uses, update=update)
    _check_consent(root, uses, found)
    for name in sorted(found.snapshots):
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
    _check_installed(root, uses)
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
        file_of(use.setting) in found.snapshots
        and not _is_consented(use, found.files)
        and _is_named_by_user(use, found)
        for use in uses
    )


def _is_consented(use: CodeUse, files: Files) -> bool:
    return not use.is_users or has_consent(use, files)


def _agrees(root: Root, use: CodeUse, found: FoundFiles, settings: CodeSettings) -> bool:
    """Return whether the user agrees to code that had no consent before."""
    if settings.trust_code or _is_named_by_user(use, found):
        return True
    name = file_of(use.setting)
    if name is None or not settings.update_code:
        return False
    return _has_consented_copy(root, use) or not _is_inside(root, found.files[name])


def _is_named_by_user(use: CodeUse, found: FoundFiles) -> bool:
    """Return whether the user names the code, and its text and paths are those of the file on this machine's disk."""
    name = file_of(use.setting)
    if use.named_by_root or name is None or name not in found.snapshots:
        return not use.named_by_root
    try:
        return read_user_file(Path(name)) == found.files[name]
    except OSError:
        return False


def _check_paths(root: Root, uses: Sequence[CodeUse], found: FoundFiles) -> None:
    """Raises ConsentError for a file found at a path that the root gives, unless the user agreed to the root's copy."""
    for use in uses:
        name = file_of(use.setting)
        if name is None or name in found.snapshots or found.files[name].path == Path(name).absolute():
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
    return file_of(use.setting) in found.snapshots and has_consent(use, found.files)


def _is_inside(root: Root, file: UserFile) -> bool:
    """Return whether the file came with the root."""
    return root.is_local and file.path.resolve().is_relative_to(Path(root.path).resolve())


def _give_all(uses: Iterable[CodeUse], files: Files, url: str, run_id: str) -> None:
    """Record the user's consent to all code that is not ludic's own. Raises ConfigError."""
    for use in uses:
        if use.is_users:
            give_consent(use, files, root=url, run_id=run_id)


def keep_code(root: Root, uses: Iterable[CodeUse], files: Files) -> list[CodeRecord]:
    """Copy the users' files that settings name into the root, as `keep_files` does; return the record of each use."""
    keep_files(root, files)
    return [record_of(use, files) for use in uses]


def consented_files(uses: Sequence[CodeUse], url: str, run_id: str) -> Files:
    """Return the files that a new run's settings name, as they are on disk; starting it is consent to run them.

    Raises ConfigError for a file that is not there.
    """
    files = {name: _read_disk(name, None) for name in files_of(use.setting for use in uses)}
    _give_all(uses, files, url, run_id)
    return files


def record_of(use: CodeUse, files: Files) -> CodeRecord:
    """Return the record of the code that a setting names; `files` holds the users' files."""
    path, kind = file_of(use.setting), KINDS[use.role]
    if path is not None:
        file = files[path]
        imports = {module: text.sha256 for module, text in file.imports.items()}
        return CodeRecord(role=use.role, name=use.setting, sha256=file.sha256, path=str(file.path), imports=imports)
    sha256, package, others = None, name_and_version(LUDIC), {}
    if (part := use.packaged) is not None:
        text = module_file(part.module)
        sha256, package = None if text is None else digest(Path(text).read_bytes()), part.package
    elif (text := kind.text(use.setting)) is not None:
        sha256 = digest(text.encode())
    elif kind.source is not None:
        sha256, package, others = find_by_name(kind.source)(use.setting, use.options)
    return CodeRecord(role=use.role, name=use.setting, sha256=sha256, package=package, imports=others)


def _check_installed(root: Root, uses: Iterable[CodeUse]) -> None:
    """Raise ConfigError for a part that a package brought to the run, and no installed package brings here and now."""
    for use in uses:
        if not can_be_packaged(KINDS[use.role], use.setting) or use.packaged is not None:
            continue
        for life in sorted(WORKERS.listed(root), key=lambda each: each.life, reverse=True):
            claim = WORKERS.read(root, life.slot, life.life)
            for record in claim.code if claim is not None else ():
                if (record["role"], record["name"]) == (use.role, use.setting) and record.get("package"):
                    name, _, version = record["package"].rpartition(" ")
                    raise KINDS[use.role].error(
                        f"{root.url} names {use.role} {use.setting!r} of {record['package']}, which is not installed "
                        f"here or no longer brings it; pip install '{name}=={version}'"
                    )


def _check_consent(root: Root, uses: Sequence[CodeUse], found: FoundFiles) -> None:
    refused = []
    for use in uses:
        if not use.is_users or has_consent(use, found.files):
            continue
        names = files_of([use.setting])
        if not use.named_by_root and not found.snapshots.intersection(names):
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
        if name not in found.snapshots:
            return f"{what}, {file.path}, sha256 {file.sha256[:SHOWN_DIGITS]}"
        text = f"{root.url}/{text_name(file.sha256, file.suffix)}, sha256 {file.sha256[:SHOWN_DIGITS]}"
        return f"{what}, {text}, run as {file.path}"
    of_package = "" if use.packaged is None else f" of {use.packaged.package}"
    return f"{what}{of_package}, which is installed here"


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
        *(path, str(there.get(module))[:SHOWN_DIGITS], str(here.get(module))[:SHOWN_DIGITS], root.url),
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
