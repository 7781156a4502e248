"""Put right what can be put right without a loss: broken files are set aside, and old temporary files deleted.

A broken file of rollouts/, evals/ or metrics/ is of no use to anybody, and hurts queries. So is the ledger of a
superseded step. The ledger of a step that counts stays where it is: a copy may mend it, and without it nobody
knows what that step trained on. Attempts, policies and checkpoints are for people to decide on.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ludic.fsck.findings import Finding
from ludic.fsck.tables import ledger_place
from ludic.store import Root, read_attempt
from ludic.store.attempts import chain, newest_attempt
from ludic.store.repair import list_leftovers, set_aside

_OLD_S = 24 * 3600.0
"""No write takes so long, nor do the clocks of a shared disk's machines differ by so much."""

_ADVICE = (
    "it is kept, for only it says what a step that counts trained on: put a copy of it here, or move it away; "
    "training goes on in any case, since checkpoints hold what was consumed"
)


def set_broken_aside(root: Root, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """What was set aside, and the findings that remain. Raises StoreError; then what was done stays done."""
    repaired: list[Finding] = []
    remaining: list[Finding] = []
    steps = _steps_that_count(root)
    for finding in findings:
        if finding.check != "unreadable":
            remaining.append(finding)
        elif _counts(finding.where, steps):
            remaining.append(replace(finding, problem=f"{finding.problem}; {_ADVICE}"))
        else:
            target = set_aside(root, finding.where, finding.problem)
            repaired.append(replace(finding, problem=f"{finding.problem}; it is {target} now"))
    return repaired, remaining


def delete_leftovers(root: Root) -> Iterator[Finding]:
    """Delete the temporary files that nobody wrote to for a day."""
    for leftover in list_leftovers(root):
        if leftover.age_s > _OLD_S:
            root.delete(leftover.name)
            yield Finding(check="leftover", where=leftover.name, problem="nobody wrote to it for a day; it is deleted")


def _counts(name: str, steps: Mapping[int, int | None] | None) -> bool:
    """Whether a file is the ledger of a step that the run stands on, or may be."""
    place = ledger_place(name)
    if place is None:
        return False
    attempt_id, step = place
    if steps is None:
        return True
    last_step = steps.get(attempt_id, 0)
    return last_step is None or step <= last_step


def _steps_that_count(root: Root) -> dict[int, int | None] | None:
    """The last step of each attempt of the chain, None for no limit; None for all where attempts can't be read."""
    try:
        newest = newest_attempt(root)
        if newest is None:
            return None
        links = chain(newest.attempt_id, lambda attempt_id: read_attempt(root, attempt_id).parent)
        return {link.attempt_id: link.last_step for link in links}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None
