"""workers/slot=S/N.json: one claim for each life of a worker. The newest life holds its slot of the schedule.

A life claims the slot before it reads what earlier lives committed, and checks for a newer claim before it samples
and before it appends. So a worker that was stopped or cut off, and then replaced, ends before it samples the requests
of its replacement. If it commits a group before it can check, the reader drops the duplicate: it delivers a request
once (ludic.store.reader). Claims have no gaps, so one read by name finds a newer claim. Claims are never deleted.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ludic.errors import LudicError, ReplacedRootError, SchemaError, SlotTakenError
from ludic.store.json_files import encode_record, read_record
from ludic.store.lease import describe_process, is_dead
from ludic.store.names import owner_name, parse_numbers
from ludic.store.root import Root

logger = logging.getLogger(__name__)

FOLDER = "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClaim:
    """Claim of a slot by one life of a worker."""

    slot: int
    """Part of the schedule that the worker samples."""
    life: int
    """Number of the life, from 1 in each slot."""
    worker_id: str
    """Prefix of the names of this life's files."""
    owner: str
    """host-pid, for people."""
    created_at: str
    """Time of the claim by the owner's clock; for people."""
    process: str | None = None
    """Identity of the owner's process among all processes of all machines; None if the system doesn't give it."""
    ended_at: str | None = None
    """Time at which the worker ended on its own; None while it lives, or if it was killed."""
    code: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Source files of its environments, each as a ludic.store.code_files.CodeRecord."""

    @property
    def name(self) -> str:
        return claim_name(self.slot, self.life)

    @property
    def is_over(self) -> bool:
        """True if the worker has ended, or if its process is proven dead, which only its own machine can prove."""
        return self.ended_at is not None or (self.process is not None and is_dead(self.process))


def claim_name(slot: int, life: int) -> str:
    return f"{FOLDER}/slot={slot}/{life}.json"


def read_slot_claim(root: Root, slot: int, life: int) -> SlotClaim | None:
    """Return the claim of a life; None if there was no such life. Raises SchemaError if the file is broken."""
    advice = "stop the workers of this slot, and delete it"
    return read_record(root, claim_name(slot, life), SlotClaim, "claim", advice)


def newest_slot_claim(root: Root, slot: int) -> SlotClaim | None:
    """Return the newest claim of a slot; None if no worker ever held it. Raises SchemaError if the file is broken."""
    newest = None
    life = max(_listed_lives(root, slot), default=1)
    while (claim := read_slot_claim(root, slot, life)) is not None:
        newest, life = claim, life + 1
    return newest


def claim_slot(root: Root, slot: int, worker_id: str, code: Sequence[Mapping[str, Any]] = ()) -> SlotClaim:
    """Claim a slot, which tells the worker that held it to end. code: SlotClaim.code.

    Raises ReplacedRootError if the root is no longer the run that was opened.
    """
    root.check_same_run()
    claim = SlotClaim(
        slot=slot,
        life=max(_listed_lives(root, slot), default=0) + 1,
        worker_id=worker_id,
        owner=owner_name(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        process=describe_process(os.getpid()),
        code=list(code),
    )
    while not root.put_if_absent(claim.name, encode_record(claim)):
        claim = replace(claim, life=claim.life + 1)
    return claim


@contextmanager
def held_slot(root: Root, slot: int, worker_id: str, code: Sequence[Mapping[str, Any]] = ()) -> Iterator[SlotClaim]:
    """Claim a slot as `claim_slot` does, and record the end of this life at the end of the block."""
    claim = claim_slot(root, slot, worker_id, code)
    try:
        yield claim
    finally:
        try:
            over = replace(claim, ended_at=datetime.now(UTC).isoformat(timespec="seconds"))
            _check_own(root, claim)
            root.put(claim.name, encode_record(over))
        except ReplacedRootError:
            logger.info("%s/%s is another worker's by now, and is left as it is", root.url, claim.name)
        except LudicError as error:
            logger.warning("the claim of slot %d does not say that this worker has ended: %s", slot, error)


def code_before(root: Root, claim: SlotClaim) -> Sequence[Mapping[str, Any]]:
    """Return SlotClaim.code of the previous life; empty if there is none, or if its claim is broken."""
    with suppress(SchemaError):
        earlier = read_slot_claim(root, claim.slot, claim.life - 1)
        return earlier.code if earlier else []
    return []


def check_holds_slot(root: Root, claim: SlotClaim) -> None:
    """Raises SlotTakenError if a newer life has claimed the slot."""
    newer = read_slot_claim(root, claim.slot, claim.life + 1)
    if newer is not None:
        raise SlotTakenError(
            f"{root.url}: another worker took slot {claim.slot}, {newer.owner} at {newer.created_at}; this one stops"
        )


def _check_own(root: Root, claim: SlotClaim) -> None:
    """Check that the stored claim is this one. Raises ReplacedRootError: claims are never deleted, so the root was."""
    stored = read_slot_claim(root, claim.slot, claim.life)
    if stored is None or stored.worker_id != claim.worker_id:
        raise ReplacedRootError(f"{root.url}: {claim.name} is not of this worker: the root was deleted or made again")


def _listed_lives(root: Root, slot: int) -> list[int]:
    names = root.list(f"{FOLDER}/slot={slot}")
    return parse_numbers([name.rpartition("/")[2].removesuffix(".json") for name in names])
