"""Check that a root is sound: files match their names and schemas, weights and checkpoints are whole, data checks pass.

Reads all files below the root; with `repair`, also quarantines broken files and deletes old temporary files. Each
problem becomes a Finding. Raises StoreError if the filesystem fails: a file that can't be reached is not reported as
broken. Files that vanish while they are checked are ignored, since a run may delete them.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from ludic.errors import ModelError, SchemaError
from ludic.maintenance.verify.compactions import check_compactions, unfinished_compactions
from ludic.maintenance.verify.data import check_data, note_data
from ludic.maintenance.verify.findings import Finding, Report, meaning_of
from ludic.maintenance.verify.model import check_model
from ludic.maintenance.verify.records import check_code, check_records
from ludic.maintenance.verify.repairs import delete_leftovers, quarantine_broken
from ludic.maintenance.verify.rows import RowChecks
from ludic.maintenance.verify.tables import (
    TABLES,
    Checked,
    Footer,
    check_tables,
    first_names,
    read_footers,
)
from ludic.maintenance.verify.weights import check_weights
from ludic.models.first_model import vocabulary_of
from ludic.sql import connect
from ludic.store import Root
from ludic.store.catalogue import Records, row_of
from ludic.store.files import parse_file
from ludic.store.local import links_out
from ludic.store.root import Track, untracked
from ludic.store.tombstones import list_leftovers, list_quarantined

__all__ = ["TABLES", "Finding", "Footer", "Report", "check_root", "meaning_of", "read_footers"]


def check_root(root: Root, track: Track = untracked, *, repair: bool = False) -> Report:
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
    findings += [*check_model(root), *check_code(root), *_check_links(root)]
    unreadable = [finding.where for finding in findings if finding.check in ("unreadable", "newer_schema")]
    unreadable += [finding.where for finding in findings if isinstance(row_of(finding.where), Records)]
    findings += rows.finish()
    con = connect(root, without=unreadable)
    findings += check_data(con, root, track)
    notes = [
        *note_data(con),
        *unfinished_compactions(root, appended),
        *_leftovers(root),
        *_quarantined(root),
        *_without_digests(stored),
    ]
    return Report(findings=findings, notes=notes, repaired=repaired)


def _check_links(root: Root) -> Iterator[Finding]:
    """Find links that lead out of a local root."""
    for name in sorted(links_out(root.path)) if root.is_local else ():
        problem = "leads out of the run; delete it, and put the files themselves there if they belong to the run"
        yield Finding(check="link", where=name, problem=problem)


def _vocabulary(root: Root) -> int | None:
    """Return the number of tokens that the run's model knows; None if that is not known: `check_model` says why."""
    with suppress(ModelError, SchemaError):
        return vocabulary_of(root)
    return None


def _leftovers(root: Root) -> Iterator[Finding]:
    for leftover in list_leftovers(root):
        problem = f"last written {leftover.age_s / 3600:.1f} hours ago; after a day `ludic verify --repair` deletes it"
        yield Finding(check="leftover", where=leftover.name, problem=problem)


def _without_digests(stored: Sequence[Checked]) -> Iterator[Finding]:
    names = {file.name for file in stored if not file.has_digests}
    if names:
        problem = f"{first_names(names)}; a flipped bit in them may pass; `ludic compact` writes rollouts with digests"
        yield Finding(check="no_digests", where="", problem=problem)


def _quarantined(root: Root) -> Iterator[Finding]:
    for file in list_quarantined(root):
        yield Finding(check="quarantined", where=file.name, problem=f"{file.reason} (found at {file.found_at})")
