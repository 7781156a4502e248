"""attempts/N.json: one a trainer start. The newest claim owns the root; an older one stops at its next write.

An attempt names its parent, the attempt and step of the checkpoint that it resumed from. The chain
of parents from the newest attempt is the effective ledger; what lies off the chain is superseded.

The claim (attempts/N.lease) comes before the parent is chosen. A trainer checks after each checkpoint that no
newer claim is there, and only then deletes older ones: so either it sees the claim, or whoever claimed sees
that checkpoint. None that a successor resumes from is deleted under its hands.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ludic.errors import FencedError, OwnedError, SchemaError
from ludic.store.json_files import Count, decode_record, encode_json
from ludic.store.lease import Lease, claim, newest_claim, read_lease
from ludic.store.names import parse_attempt_id
from ludic.store.root import Root

Place = tuple[int, int]
"""attempt_id and step of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a trainer."""

    attempt_id: Count
    parent_attempt: Count | None
    """None: started from the run's first weights."""
    parent_step: Count | None
    """The parent's steps up to this one count; later ones are superseded."""
    owner: str
    """host-pid, for people."""
    created_at: str
    config: Mapping[str, Any]
    """The trainer's settings; the next start takes them over unless told otherwise."""
    numerics: Mapping[str, Any] | None = None
    """Threads, versions and hardware that the last bits of weights depend on; None: not recorded."""
    code: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The texts of its advantage, filters and selection: each as a ludic.store.code.CodeRecord."""

    @property
    def name(self) -> str:
        return f"attempts/{self.attempt_id}.json"

    @property
    def parent(self) -> Place | None:
        if self.parent_attempt is None or self.parent_step is None:
            return None
        return self.parent_attempt, self.parent_step


def start_attempt(
    root: Root,
    *,
    parent_attempt: int | None = None,
    parent_step: int | None = None,
    config: Mapping[str, Any] | None = None,
    numerics: Mapping[str, Any] | None = None,
) -> Attempt:
    """Take ownership of the root; fences every earlier attempt, alive or not.

    Without a lease: whoever starts next doesn't wait either.
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
    parent: Place | None,
    config: Mapping[str, Any],
    numerics: Mapping[str, Any] | None = None,
    *,
    code: Sequence[Mapping[str, Any]] = (),
) -> Attempt:
    """Put the attempt that a lease claims. Raises FencedError when another process put it."""
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
    )
    if not root.put_if_absent(attempt.name, encode_json(asdict(attempt))):
        raise FencedError(
            f"{root.url}/{attempt.name} exists with other content: another process trains as this attempt"
        )
    return attempt


def newest_attempt_id(root: Root) -> int:
    """0 when no trainer ever started."""
    return max((_attempt_id(name) for name in root.list("attempts")), default=0)


def read_attempt(root: Root, attempt_id: int) -> Attempt:
    """An attempt that is there; what a newer ludic has added is left out. Raises SchemaError for a broken file."""
    name = f"attempts/{attempt_id}.json"
    try:
        return decode_record(root.read(name), Attempt)
    except ValueError as error:
        raise SchemaError(f"{root.url}/{name} is no attempt that ludic can read: {error}") from error


def newest_attempt(root: Root, before: int | None = None) -> Attempt | None:
    """The newest of all attempts, or of those below `before`; None when there is none.

    By name, not by listing, and downwards: who claims may die before the attempt is put.
    """
    for attempt_id in range(newest_claim(root) if before is None else before - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            return read_attempt(root, attempt_id)
    return None


def read_parent(root: Root, attempt_id: int) -> Place | None:
    """None for an attempt that has no parent, or is gone."""
    with contextlib.suppress(FileNotFoundError):
        return read_attempt(root, attempt_id).parent
    return None


def check_not_fenced(root: Root, attempt: Attempt) -> None:
    """Raises FencedError when a newer trainer has claimed the root. Claims have no gaps: one look by name tells."""
    newer = read_lease(root, attempt.attempt_id + 1)
    if newer is not None:
        raise FencedError(
            f"{root.url}: attempt {attempt.attempt_id} was replaced by attempt {newer.attempt_id} of {newer.owner} "
            f"at {newer.since}; this trainer stops"
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The part of one attempt that the run stands on."""

    attempt_id: int
    last_step: int | None
    """None: of the newest attempt, which no child has left."""


def chain(attempt_id: int, parent_of: Callable[[int], Place | None]) -> Iterator[Link]:
    """From an attempt back through its parents, as the SQL view attempt_chain has it.

    parent_of: None for an attempt without a parent, and for one that is gone.
    """
    link = Link(attempt_id, None)
    while True:
        yield link
        parent = parent_of(link.attempt_id)
        if parent is None or parent[0] >= link.attempt_id:  # a damaged file could make a circle
            return
        link = Link(parent[0], parent[1] if link.last_step is None else min(parent[1], link.last_step))


def newest_checkpoint(links: Iterable[Link], checkpoints: Collection[Place]) -> Place | None:
    """The complete checkpoint to resume from: any on the chain is a legitimate parent, the newest loses least.

    Not the newest of all: a trainer that was fenced may still have finished one that nobody continues.
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


def outdated(checkpoints: Iterable[Place], keep: int) -> list[Place]:
    """All but the newest `keep`, oldest first."""
    assert keep >= 1, "a run must keep a checkpoint"
    return sorted(checkpoints)[:-keep]


def _attempt_id(name: str) -> int:
    stem = name.removeprefix("attempts/").removesuffix(".json")
    return parse_attempt_id(stem) or 0
