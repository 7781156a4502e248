"""Record a user's consent to the code that a root names, and copy users' files into the root."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ludic.batches.rules import batch_rules
from ludic.consent import CodeSettings, CodeUse, has_consent
from ludic.errors import ConsentError, SchemaError, StoreError
from ludic.sql.planner import BatchRules
from ludic.store import Root, RunConfig
from ludic.store.code_files import FoundFiles, consent_to, find_files, keep_files, trusted_files
from ludic.training.config import TrainConfig
from ludic.user_files import Files, UserFile, file_of, read_user_file

logger = logging.getLogger(__name__)


def prepare_code(root: Root, uses: Sequence[CodeUse], settings: CodeSettings, check: Callable[[Files], object]) -> None:
    """Record the consent that the settings give, and store users' files in the root.

    check: loads the files; if it raises, no consent and no file is stored. Raises ConsentError, ConfigError.
    """
    found = find_files(root, uses, update=settings.update_code)
    _check_paths(root, uses, found)
    new = [use for use in uses if not _is_consented(use, found.files) and _agrees(root, use, found, settings)]
    others = [use for use in uses if use not in new]
    # The texts that were checked for consent, should the root have changed since the first look.
    files = {**found.files, **trusted_files(root, others, update=settings.update_code)}
    check(files)
    consent_to(root, new, files)
    for use in new:
        logger.info("%s may run %s %r from now on", root.url, use.role, use.setting)
    keep_files(root, files)


def rules_of(run: RunConfig, train: TrainConfig) -> BatchRules:
    """Return the rules that a trainer plans batches by, without users' files. Raises ConfigError."""
    return batch_rules(train.batch, run.groups_per_batch, run.seed, loss_unit=train.loss.loss_unit)


def gives_consent(root: Root, uses: Sequence[CodeUse]) -> bool:
    """Return whether the user names a file without consent that the root already holds, with the same text."""
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
    """Return whether the user names the code, and its text is that of the file on this machine's disk."""
    name = file_of(use.setting)
    if use.named_by_root or name is None or name not in found.kept:
        return not use.named_by_root
    try:
        return read_user_file(Path(name)).is_same_text(found.files[name])
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
