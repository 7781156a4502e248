"""Attempts: attempts/N.json records the Nth start of a trainer on a root.

The trainer with the newest claim owns the root; an older trainer stops at its next write. So does a trainer whose own
claim is no longer stored: the root was deleted, and perhaps made again, and has nothing to do with it any more.

An attempt names its parent, the attempt and step of the checkpoint that it resumed from. The chain
of parents from the newest attempt is the effective ledger; steps off the chain are superseded.

A trainer claims the root (attempts/N.lease) before it chooses the parent. After each checkpoint a trainer checks that
there is no newer claim, and only then deletes older checkpoints: either it sees the claim, or the new trainer
sees that checkpoint. So a checkpoint that a successor resumes from is never deleted.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ludic.errors import FencedError, OwnedError
from ludic.renamed_settings import with_current_names
from ludic.store.catalogue import ATTEMPTS, AttemptName
from ludic.store.claims import check_claim, claim, newest_claim, read_lease
from ludic.store.records import Attempt, CheckpointId, Lease, encode_record
from ludic.store.root import Root


def start_attempt(
    root: Root,
    *,
    parent_attempt: int | None = None,
    parent_step: int | None = None,
    config: Mapping[str, Any] | None = None,
    numerics: Mapping[str, Any] | None = None,
) -> Attempt:
    """Take ownership of the root and fence every earlier attempt, alive or not.

    Its lease is released from the start, so the next trainer doesn't wait either.
    """
    lease, newest = None, newest_claim(root)
    while lease is None:
        with contextlib.suppress(OwnedError):
            lease = claim(root, newest, released=True)
        newest += 1
    parent = None if parent_attempt is None or parent_step is None else (parent_attempt, parent_step)
    return record_attempt(root, lease, parent, config or {}, numerics)


def record_attempt(
    root: Root,
    lease: Lease,
    parent: CheckpointId | None,
    config: Mapping[str, Any],
    numerics: Mapping[str, Any] | None = None,
    *,
    code: Sequence[Mapping[str, Any]] = (),
) -> Attempt:
    """Put the attempt that a lease claims.

    Raises FencedError if another process has put it, ReplacedRootError if the lease is no longer stored.
    """
    check_claim(root, lease.attempt_id, lease.claim_id)
    parent_attempt, parent_step = parent or (None, None)
    attempt = Attempt(
        attempt_id=lease.attempt_id,
        parent_attempt=parent_attempt,
        parent_step=parent_step,
        owner=lease.owner,
        created_at=datetime.now(UTC).isoformat(),
        config=dict(config),
        numerics=numerics,
        code=list(code),
        claim_id=lease.claim_id,
    )
    name = ATTEMPTS.name_of(attempt)
    if not root.put_if_absent(name, encode_record(attempt)):
        raise FencedError(f"{root.url}/{name} exists with other content: another process trains as this attempt")
    return attempt


def newest_attempt_id(root: Root) -> int:
    """Return the highest attempt_id that is listed; 0 if no trainer has started."""
    return max((found.attempt_id for found in ATTEMPTS.listed(root)), default=0)


def read_attempt(root: Root, attempt_id: int) -> Attempt:
    """Read an attempt, without fields that a newer ludic has added; settings of older versions get their current names.

    Raises FileNotFoundError if there is no such attempt, SchemaError if its file is broken.
    """
    attempt = ATTEMPTS.read(root, attempt_id)
    if attempt is None:
        raise FileNotFoundError(f"{root.url}/{ATTEMPTS.name(AttemptName(attempt_id))}")
    return replace(attempt, config=with_current_names(attempt.config))


def newest_attempt(root: Root, before: int | None = None) -> Attempt | None:
    """Return the newest of all attempts, or of those below `before`; None if there is none.

    Tries names downwards from the newest claim, since a trainer may die between its claim and its attempt.
    """
    for attempt_id in range(newest_claim(root) if before is None else before - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            return read_attempt(root, attempt_id)
    return None


def read_parent(root: Root, attempt_id: int) -> CheckpointId | None:
    """Return an attempt's parent; None if it has none or the attempt is gone."""
    with contextlib.suppress(FileNotFoundError):
        return read_attempt(root, attempt_id).parent
    return None


def check_not_fenced(root: Root, attempt: Attempt) -> None:
    """Check that this attempt owns the root, by reads of its own claim and of the next, since claims have no gaps.

    Raises FencedError if a newer trainer has claimed it, ReplacedRootError if its own claim is no longer stored.
    """
    check_not_replaced(root, attempt)
    newer = read_lease(root, attempt.attempt_id + 1)
    if newer is not None:
        raise FencedError(
            f"{root.url}: attempt {attempt.attempt_id} was replaced by attempt {newer.attempt_id} of {newer.owner} "
            f"at {newer.since}; this trainer stops"
        )


def check_not_replaced(root: Root, attempt: Attempt) -> None:
    """Check that the root is the one that this attempt claimed, also if a newer attempt owns it by now.

    Raises ReplacedRootError.
    """
    if attempt.claim_id is None:
        root.check_same_run()
    else:
        check_claim(root, attempt.attempt_id, attempt.claim_id)


@dataclass(frozen=True, slots=True)
class Link:
    """The part of one attempt that belongs to the effective ledger."""

    attempt_id: int
    last_step: int | None
    """Last step that counts; None for the newest attempt, all of whose steps count."""


def chain(attempt_id: int, parent_of: Callable[[int], CheckpointId | None]) -> Iterator[Link]:
    """Yield an attempt and its chain of parents, newest first; the SQL view attempt_chain has the same links.

    parent_of: returns an attempt's parent, or None if it has none or the attempt is gone.
    """
    link = Link(attempt_id, None)
    while True:
        yield link
        parent = parent_of(link.attempt_id)
        if parent is None or parent[0] >= link.attempt_id:  # a damaged file could make a cycle
            return
        link = Link(parent[0], parent[1] if link.last_step is None else min(parent[1], link.last_step))


def newest_checkpoint(links: Iterable[Link], checkpoints: Collection[CheckpointId]) -> CheckpointId | None:
    """Return the newest complete checkpoint on the chain, from which a trainer resumes; None if there is none.

    Checkpoints off the chain do not count: a fenced trainer may have finished one that no attempt continues.
    """
    for link in links:
        steps = [
            step
            for attempt_id, step in checkpoints
            if attempt_id == link.attempt_id and (link.last_step is None or step <= link.last_step)
        ]
        if steps:
            return link.attempt_id, max(steps)
    return None


def outdated(checkpoints: Iterable[CheckpointId], keep: int) -> list[CheckpointId]:
    """Return all checkpoints except the newest `keep`, oldest first."""
    assert keep >= 1, "a run must keep a checkpoint"
    return sorted(checkpoints)[:-keep]
