"""What checks find, and what each check looks for."""

from dataclasses import dataclass

from ludic.errors import in_a_line
from ludic.sql.library import load_checks, load_notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or that is worth a note."""

    check: str
    """A key of MEANINGS, or the name of a file in ludic/sql/checks/ or ludic/sql/notes/."""
    where: str
    """A name below the root; empty for what spans files."""
    problem: str
    """What was found, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A root as it is now."""

    findings: list[Finding]
    """What is wrong; a root without any is sound."""
    notes: list[Finding]
    """What somebody may want to know, and harms nobody."""
    repaired: list[Finding]
    """What was wrong, or left over, and was put right."""


MEANINGS = {
    "unreadable": "a file that no reader can use; `ludic verify --repair` sets it aside",
    "newer_schema": "a file that a newer ludic wrote; upgrade this one",
    "misnamed": "a file whose name does not say what is in it",
    "scattered_groups": "a group that lies in several places of a file, though readers take it in one piece",
    "compaction": "a compacted file that does not agree with what it replaces",
    "note": "a small file about the run that was changed since it was written",
    "model": "a file of the run's first model that was changed since the run began",
    "attempt": "a trainer start that can't be read",
    "worker": "a worker's claim of its slot that can't be read",
    "code": "a copy of a user's file, or a list of them, that is not what its name says",
    "policy": "published weights that can't be used",
    "checkpoint": "a checkpoint that no trainer can resume from",
    "unfinished": "work that was cut short and harms nobody",
    "leftover": "temporary files of writers that were killed",
    "no_digests": "files that an older ludic or another writer made, without digests of their bytes",
    "set_aside": "a broken file that was moved out of sight",
}


def meaning_of(check: str) -> str:
    """What a check looks for, in words; those of ludic/sql/checks/ and notes/ say it on their first lines."""
    if check in MEANINGS:
        return MEANINGS[check]
    comment, _, _ = (load_checks() | load_notes())[check].partition("\n-- grain:")
    return " ".join(comment.replace("--", " ").split()).removeprefix(f"{check}: ")


def reason_of(error: Exception) -> str:
    """An error's message on one line; its name where it says nothing."""
    return in_a_line(error) or type(error).__name__
