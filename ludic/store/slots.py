"""workers/slot=S/N.json: one a life of a worker. The newest life holds its slot of the schedule.

A life claims the slot before it reads what earlier lives committed, and looks for a newer claim before it samples
and before it appends. So a worker that was stopped, or cut off, and replaced ends before it samples what its
replacement samples. What it committed just before it could look is dropped by the reader, which delivers a
request once (ludic.store.reader). Claims have no gaps: one look by name tells. None is deleted.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ludic.errors import LudicError, SchemaError, SlotTakenError
from ludic.store.json_files import decode_record, encode_json
from ludic.store.lease import describe_process, is_dead, owner_name
from ludic.store.names import parse_numbers
from ludic.store.root import Root

logger = logging.getLogger(__name__)

FOLDER = "workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClaim:
    """One life of a worker."""

    slot: int
    """The part of the schedule that it samples."""
    life: int
    """Counts from 1 in each slot."""
    worker_id: str
    """How the files of this life begin."""
    owner: str
    """host-pid, for people."""
    created_at: str
    """By the owner's clock; for people."""
    process: str | None = None
    """The owner's process among all processes of all machines; None where the system doesn't tell."""
    ended_at: str | None = None
    """When the worker ended by itself; None while it lives, and for one that was killed."""
    code: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The texts of its environments: each as a ludic.store.code.CodeRecord."""

    @property
    def name(self) -> str:
        return claim_name(self.slot, self.life)

    @property
    def is_over(self) -> bool:
        """The worker has ended, or its process is proven dead, which only its own machine can tell."""
        return self.ended_at is not None or (self.process is not None and is_dead(self.process))

    def to_json(self) -> bytes:
        return encode_json(asdict(self))


def claim_name(slot: int, life: int) -> str:
    return f"{FOLDER}/slot={slot}/{life}.json"


def read_slot_claim(root: Root, slot: int, life: int) -> SlotClaim | None:
    """None where there was no such life. Raises SchemaError for a file that is no claim."""
    name = claim_name(slot, life)
    try:
        return decode_record(root.read(name), SlotClaim)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError(
            f"{root.url}/{name} is no claim that ludic can read: {error}; stop the workers of this slot, and delete it"
        ) from error


def newest_slot_claim(root: Root, slot: int) -> SlotClaim | None:
    """None for a slot that no worker ever held."""
    newest = None
    life = max(_listed_lives(root, slot), default=1)
    while (claim := read_slot_claim(root, slot, life)) is not None:
        newest, life = claim, life + 1
    return newest


def claim_slot(root: Root, slot: int, worker_id: str, code: Sequence[Mapping[str, Any]] = ()) -> SlotClaim:
    """Take a slot, which tells whoever held it to end. code: of this life, for the claim to say."""
    claim = SlotClaim(
        slot=slot,
        life=max(_listed_lives(root, slot), default=0) + 1,
        worker_id=worker_id,
        owner=owner_name(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        process=describe_process(os.getpid()),
        code=list(code),
    )
    while not root.put_if_absent(claim.name, claim.to_json()):
        claim = replace(claim, life=claim.life + 1)
    return claim


@contextmanager
def held_slot(root: Root, slot: int, worker_id: str, code: Sequence[Mapping[str, Any]] = ()) -> Iterator[SlotClaim]:
    """Claim a slot, as `claim_slot` does, and at the end of the block say that this life has ended."""
    claim = claim_slot(root, slot, worker_id, code)
    try:
        yield claim
    finally:
        try:
            root.put(claim.name, replace(claim, ended_at=datetime.now(UTC).isoformat(timespec="seconds")).to_json())
        except LudicError as error:
            logger.warning("the claim of slot %d does not say that this worker has ended: %s", slot, error)


def code_before(root: Root, claim: SlotClaim) -> Sequence[Mapping[str, Any]]:
    """The texts of the life before, if there was one that says."""
    with suppress(SchemaError):
        earlier = read_slot_claim(root, claim.slot, claim.life - 1)
        return earlier.code if earlier else []
    return []


def check_holds_slot(root: Root, claim: SlotClaim) -> None:
    """Raises SlotTakenError when a newer life has claimed the slot."""
    newer = read_slot_claim(root, claim.slot, claim.life + 1)
    if newer is not None:
        raise SlotTakenError(
            f"{root.url}: another worker took slot {claim.slot}, {newer.owner} at {newer.created_at}; this one stops"
        )


def _listed_lives(root: Root, slot: int) -> list[int]:
    names = root.list(f"{FOLDER}/slot={slot}")
    return parse_numbers([name.rpartition("/")[2].removesuffix(".json") for name in names])
