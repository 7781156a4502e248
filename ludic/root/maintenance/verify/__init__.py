"""Verify a root: check files against names and schemas, weights and checkpoints for completeness, and the data.

Reads all files below the root; with `repair`, also quarantines broken files and deletes old temporary files. Each
problem becomes a Finding. Raises StoreError if the filesystem fails: a file that can't be reached is not reported as
broken. Files that vanish while they are checked are ignored, since a run may delete them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ludic.base import Track, untracked
from ludic.errors import ModelError, SchemaError
from ludic.root.attempts import chain, newest_attempt, read_attempt
from ludic.root.catalogue import BATCHES, CALLS, DATA, Records, file_kind_of
from ludic.root.maintenance.verify.calls import check_calls
from ludic.root.maintenance.verify.checks import (
    Finding,
    RowChecks,
    VerifyReport,
    check_data,
    meaning_of,
    note_data,
    small_views_as_tables,
)
from ludic.root.maintenance.verify.other_files import (
    AT_THE_TOP,
    check_code,
    check_inputs,
    check_model,
    check_records,
    check_weights,
    folders_for_files,
)
from ludic.root.maintenance.verify.tables import (
    NOT_OURS,
    TABLES,
    CheckedTable,
    FileFooter,
    check_compactions,
    check_tables,
    first_names,
    read_footers,
    unfinished_compactions,
)
from ludic.root.root import Root
from ludic.root.rows.files import parse_file
from ludic.root.rows.tombstones import list_leftovers, list_quarantined, quarantine
from ludic.root.sql.connection import connect
from ludic.root.storage.local import leads_out
from ludic.root.weights.model_location import vocabulary_of

__all__ = ["TABLES", "FileFooter", "Finding", "VerifyReport", "check_root", "meaning_of", "read_footers"]


def check_root(root: Root, track: Track = untracked, *, repair: bool = False) -> VerifyReport:
    """Return all problems of a run, file by file, then check by check. Raises StoreError if the filesystem fails.

    repair: also quarantine broken files and delete old temporary files.
    """
    rows = RowChecks(_vocabulary(root))
    stored = check_tables(root, rows, track)
    findings = sorted((finding for file in stored for finding in file.findings), key=lambda finding: finding.check)
    repaired: list[Finding] = []
    if repair:
        repaired, findings = quarantine_broken(root, findings)
        repaired += delete_leftovers(root)
    moved = {finding.where for finding in repaired}
    appended = [file for file in stored if parse_file(file.name) and file.name not in moved]
    findings += [*check_compactions(root, appended), *check_records(root), *check_weights(root)]
    broken = {finding.where for finding in findings}
    findings += check_calls(root, [each.name for each in stored if CALLS.parse(each.name) and each.name not in broken])
    findings += [*check_model(root), *check_code(root), *check_inputs(root), *_check_strays(root)]
    unreadable = [finding.where for finding in findings if finding.check in ("unreadable", "newer_schema")]
    unreadable += [finding.where for finding in findings if isinstance(file_kind_of(finding.where), Records)]
    findings += rows.finish()
    con = connect(root, without=unreadable)
    with small_views_as_tables(con):
        findings += check_data(con, root, track)
        notes = list(note_data(con))
    notes += [
        *unfinished_compactions(root, appended),
        *_leftovers(root),
        *_quarantined(root),
        *_without_digests(stored),
        *_at_the_top(root),
    ]
    return VerifyReport(root=root.url, findings=findings, notes=notes, repaired=repaired)


def _check_strays(root: Root) -> Iterator[Finding]:
    """Find entries that listings skip; among files of other programs only links that lead out."""
    for name, problem in root.strays().items():
        is_link = root.is_local and leads_out(root.path, name)
        if is_link or not name.startswith(NOT_OURS) or DATA.parse(name) is not None:
            yield Finding(check="link" if is_link else "no_file", where=name, problem=problem)
    for name in folders_for_files(root):
        problem = "is a folder, wanted a file; ludic does not open it: delete it, or move it out of the run"
        yield Finding(check="no_file", where=name, problem=problem)


def _at_the_top(root: Root) -> Iterator[Finding]:
    """Find entries at the top of a run that the catalogue does not know, except hidden files."""
    for name in dict.fromkeys(name.partition("/")[0] for name in root.list("")):
        if name not in AT_THE_TOP and not name.startswith("."):
            yield Finding(check="stray", where=name, problem="ludic writes nothing of this name here")


def _vocabulary(root: Root) -> int | None:
    """Return the size of the vocabulary of the run's model; None if it is unknown, which `check_model` reports."""
    with suppress(ModelError, SchemaError):
        return vocabulary_of(root)
    return None


def _leftovers(root: Root) -> Iterator[Finding]:
    for leftover in list_leftovers(root):
        problem = f"last written {leftover.age_s / 3600:.1f} hours ago; after a day `ludic verify --repair` deletes it"
        yield Finding(check="leftover", where=leftover.name, problem=problem)


def _without_digests(stored: Sequence[CheckedTable]) -> Iterator[Finding]:
    names = {file.name for file in stored if not file.has_digests}
    if names:
        problem = f"{first_names(names)}; a flipped bit in them may pass; `ludic compact` writes rollouts with digests"
        yield Finding(check="no_digests", where="", problem=problem)


def _quarantined(root: Root) -> Iterator[Finding]:
    for file in list_quarantined(root):
        yield Finding(check="quarantined", where=file.name, problem=f"{file.reason} (found at {file.found_at})")


# --- Repairs --------------------------------------------------------------------------------------------------
# Repair a root without losing data: quarantine broken files, and delete old temporary files.
#
# A broken file of rollouts/, evals/ or metrics/, or a broken ledger of a superseded step, is useless and breaks
# queries. The broken ledger of an effective step is kept: it is the only record of that step's rollouts, and a copy may
# replace it. Attempts, policies and checkpoints are left for people to decide on.


_OLD_S = 24 * 3600.0
"""Age above which a temporary file is deleted: longer than any write or clock difference on a shared disk."""

_ADVICE = (
    "it is kept as the only record of the rollouts of a step that counts: put a sound copy in its place, or move it "
    "away; training continues in any case, since checkpoints hold the consumed rollouts"
)


def quarantine_broken(root: Root, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Quarantine unreadable files; return the findings that were repaired, and those that remain.

    Raises StoreError if the filesystem fails; files that are already in quarantine stay there.
    """
    repaired: list[Finding] = []
    remaining: list[Finding] = []
    steps = _steps_that_count(root)
    for finding in findings:
        if finding.check != "unreadable":
            remaining.append(finding)
        elif _counts(finding.where, steps):
            remaining.append(replace(finding, problem=f"{finding.problem}; {_ADVICE}"))
        else:
            target = quarantine(root, finding.where, finding.problem)
            now = "it was deleted since" if target is None else f"it is {target} now"
            repaired.append(replace(finding, problem=f"{finding.problem}; {now}"))
    return repaired, remaining


def delete_leftovers(root: Root) -> Iterator[Finding]:
    """Delete temporary files that were last written more than a day ago."""
    for leftover in list_leftovers(root):
        if leftover.age_s > _OLD_S:
            root.delete(leftover.name)
            yield Finding(check="leftover", where=leftover.name, problem="unchanged for a day; it was deleted")


def _counts(name: str, steps: Mapping[int, int | None] | None) -> bool:
    """Return whether a file is, or may be, the ledger of a step on the chain of the newest attempt."""
    ledger = BATCHES.parse(name)
    if ledger is None:
        return False
    attempt_id, step = ledger
    if steps is None:
        return True
    last_step = steps.get(attempt_id, 0)
    return last_step is None or step <= last_step


def _steps_that_count(root: Root) -> dict[int, int | None] | None:
    """Return the last step that counts of each attempt on the chain, None for no limit.

    Returns None, so that every step may count, if there is no attempt or if an attempt can't be read.
    """
    try:
        newest = newest_attempt(root)
        if newest is None:
            return None
        links = chain(newest.attempt_id, lambda attempt_id: read_attempt(root, attempt_id).parent)
        return {link.attempt_id: link.last_step for link in links}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
