"""Findings of checks, and the meaning of each check."""

from dataclasses import dataclass

from ludic.errors import one_line
from ludic.sql.library import load_checks, load_notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, or one thing that is worth a note."""

    check: str
    """A key of MEANINGS, or the name of a file in ludic/sql/checks/ or ludic/sql/notes/."""
    where: str
    """Name of the file or folder below the root; empty if the finding spans files."""
    problem: str
    """The problem, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Findings of all checks on a root."""

    findings: list[Finding]
    """Problems that remain; a root without findings is sound."""
    notes: list[Finding]
    """Harmless facts that are worth knowing."""
    repaired: list[Finding]
    """Problems and leftovers that were repaired."""


MEANINGS = {
    "unreadable": "a file that no reader can use; `ludic verify --repair` moves it to quarantine/",
    "newer_schema": "a file that a newer ludic wrote; upgrade this one",
    "misnamed": "a file whose name does not say what is in it",
    "link": "a symbolic link that leads out of the run; ludic reads, writes and deletes nothing through it",
    "scattered_groups": "a group whose rows are not adjacent in their file, though readers take them in one piece",
    "compaction": "a compacted file that does not agree with what it replaces",
    "note": "a small file about the run that is not as it was written, or that ludic can't read",
    "model": "a file of the run's first model that was changed since the run began",
    "attempt": "a trainer start that can't be read",
    "worker": "a worker's claim of its slot that can't be read",
    "code": "a copy of a user's file, or a list of them, that is not what its name says",
    "policy": "published weights that can't be used",
    "checkpoint": "a checkpoint that no trainer can resume from",
    "unfinished": "work that was cut short and harms nobody",
    "leftover": "temporary files of writers that were killed",
    "no_digests": "files that an older ludic or another writer made, without digests of their bytes",
    "quarantined": "a broken file that was moved out of sight",
}


def meaning_of(check: str) -> str:
    """Return the meaning of a check: its text in MEANINGS, or the first comment lines of its SQL file."""
    if check in MEANINGS:
        return MEANINGS[check]
    comment, _, _ = (load_checks() | load_notes())[check].partition("\n-- grain:")
    return " ".join(comment.replace("--", " ").split()).removeprefix(f"{check}: ")


def reason_of(error: Exception) -> str:
    """Return an error's message on one line, or the name of its class if the message is empty."""
    return one_line(error) or type(error).__name__
