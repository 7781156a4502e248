"""Repair a root without losing data: quarantine broken files, and delete old temporary files.

A broken file of rollouts/, evals/ or metrics/, or a broken ledger of a superseded step, is useless and harms queries.
The broken ledger of a step that counts is kept: a copy may replace it, and only it says what that step trained on.
Attempts, policies and checkpoints are left for people to decide on.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ludic.maintenance.verify.findings import Finding
from ludic.store import Root, read_attempt
from ludic.store.attempts import chain, newest_attempt
from ludic.store.catalogue import BATCHES
from ludic.store.tombstones import list_leftovers, quarantine

_OLD_S = 24 * 3600.0
"""Age above which a temporary file is deleted: longer than any write, or difference of clocks on a shared disk."""

_ADVICE = (
    "it is kept, for only it says what a step that counts trained on: put a copy of it here, or move it away; "
    "training goes on in any case, since checkpoints hold what was consumed"
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
            repaired.append(replace(finding, problem=f"{finding.problem}; it is {target} now"))
    return repaired, remaining


def delete_leftovers(root: Root) -> Iterator[Finding]:
    """Delete temporary files that were last written more than a day ago."""
    for leftover in list_leftovers(root):
        if leftover.age_s > _OLD_S:
            root.delete(leftover.name)
            yield Finding(check="leftover", where=leftover.name, problem="nobody wrote to it for a day; it is deleted")


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
