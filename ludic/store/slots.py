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
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ludic.errors import LudicError, ReplacedRootError, SchemaError, SlotTakenError
from ludic.store.catalogue import WORKERS
from ludic.store.json_files import encode_record
from ludic.store.lease import describe_process, is_dead
from ludic.store.names import owner_name
from ludic.store.records import SlotClaim
from ludic.store.registers import Register
from ludic.store.root import Root

logger = logging.getLogger(__name__)


def is_over(claim: SlotClaim) -> bool:
    """Return whether a worker has ended, or its process is proven dead, which only its own machine can prove."""
    return claim.ended_at is not None or (claim.process is not None and is_dead(claim.process))


def newest_slot_claim(root: Root, slot: int) -> SlotClaim | None:
    """Return the newest claim of a slot; None if no worker ever held it. Raises SchemaError if the file is broken."""
    return Register(root, WORKERS, slot).newest_record()


def claim_slot(root: Root, slot: int, worker_id: str, code: Sequence[Mapping[str, Any]] = ()) -> SlotClaim:
    """Claim a slot, which tells the worker that held it to end. code: SlotClaim.code.

    Raises ReplacedRootError if the root is no longer the run that was opened.
    """
    root.check_same_run()
    lives = Register(root, WORKERS, slot)

    def make(life: int) -> SlotClaim:
        return SlotClaim(
            slot=slot,
            life=life,
            worker_id=worker_id,
            owner=owner_name(),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            process=describe_process(os.getpid()),
            code=list(code),
        )

    return lives.claim(make, first=lives.newest_listed() + 1)


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
            root.put(WORKERS.name_of(claim), encode_record(over))
        except ReplacedRootError:
            logger.info("%s/%s is another worker's by now, and is left as it is", root.url, WORKERS.name_of(claim))
        except LudicError as error:
            logger.warning("the claim of slot %d does not say that this worker has ended: %s", slot, error)


def code_before(root: Root, claim: SlotClaim) -> Sequence[Mapping[str, Any]]:
    """Return SlotClaim.code of the previous life; empty if there is none, or if its claim is broken."""
    with suppress(SchemaError):
        earlier = WORKERS.read(root, claim.slot, claim.life - 1)
        return earlier.code if earlier else []
    return []


def check_holds_slot(root: Root, claim: SlotClaim) -> None:
    """Raises SlotTakenError if a newer life has claimed the slot."""
    newer = WORKERS.read(root, claim.slot, claim.life + 1)
    if newer is not None:
        raise SlotTakenError(
            f"{root.url}: another worker took slot {claim.slot}, {newer.owner} at {newer.created_at}; this one stops"
        )


def _check_own(root: Root, claim: SlotClaim) -> None:
    """Check that the stored claim is this one. Raises ReplacedRootError: claims are never deleted, so the root was."""
    stored = WORKERS.read(root, claim.slot, claim.life)
    if stored is None or stored.worker_id != claim.worker_id:
        name = WORKERS.name_of(claim)
        raise ReplacedRootError(f"{root.url}: {name} is not of this worker: the root was deleted or made again")
