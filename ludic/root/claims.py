"""Claim a number for a process, such as an attempt or a slot, which no other process can then get.

A register numbers its records without gaps. Two registers hold claims of live processes: attempts/N.lease of the
trainer that owns the root, and workers/slot=S/N.json of the worker that samples a slot of the schedule. Raises
OwnedError, FencedError, SlotTakenError or ReplacedRootError for a claim that another process holds.
"""

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ludic.base import LEASE_S, left_out
from ludic.errors import LudicError, OwnedError, ReplacedRootError, SchemaError, SlotTakenError, one_line
from ludic.records import new_id
from ludic.root.catalogue import ATTEMPTS, LEASES, WORKERS, FileKind, Records, parse_number
from ludic.root.json_records import Lease, SlotClaim, encode_record
from ludic.root.root import Root

if TYPE_CHECKING:
    from ludic.root.storage.filesystem import Storage

# --- Registers ------------------------------------------------------------------------------------------------
# Records that are numbered without gaps, so that N + 1 exists exactly if N is no longer the newest.
#
# A record is put if absent under the next free number. So of several processes one gets a number, and one read by name
# finds what is newer: a listing, which may lag, is only a hint. ludic deletes no record of a register.


R = TypeVar("R")


class Register(Generic[R]):
    """The records of a row that has a first number."""

    def __init__(self, root: "Storage", row: Records[Any, R], *key: Any, beside: FileKind[Any] | None = None) -> None:
        """key: fields of the name before the number, such as a slot. beside: a row whose files take numbers, too."""
        assert row.first is not None, f"{row.kind} is no register"
        self._root, self._row, self._key, self._first = root, row, key, row.first
        self._rows = [row] if beside is None else [row, beside]

    def name(self, number: int) -> str:
        """Return the path below the root."""
        return self._row.name(self._row.fields._make([*self._key, number]))

    def read(self, number: int) -> R | None:
        """Return a record; None if the number is free. Raises SchemaError if the file is broken."""
        return self._row.read(self._root, *self._key, number)

    def newest(self) -> int:
        """Return the newest number; the one before the first if there is none. Raises SchemaError for a broken file."""
        number = self.newest_listed()
        while self.read(number + 1) is not None:
            number += 1
        return number

    def newest_record(self) -> R | None:
        """Return the newest record; None if there is none. Raises SchemaError for a broken file."""
        newest, number = None, max(self._first, self.newest_listed())
        while (record := self.read(number)) is not None:
            newest, number = record, number + 1
        return newest

    def newest_listed(self) -> int:
        """Return the newest number that is listed; the one before the first if none is. There may be newer ones."""
        names = self._root.list(self._row.below(**dict(zip(self._row.fields._fields, self._key, strict=False))))
        numbers: list[int] = [found[-1] for row in self._rows for found in row.parsed(names)]
        return max(numbers, default=self._first - 1)

    def claim(self, make: Callable[[int], R], *, first: int) -> R:
        """Put the record that `make` makes of the first free number from `first` on, and return it."""
        number = first
        while (record := self.try_claim(number, make)) is None:
            number += 1
        return record

    def try_claim(self, number: int, make: Callable[[int], R]) -> R | None:
        """Put the record of a number, and return it; None if another process has the number."""
        record = make(number)
        return record if self._root.put_if_absent(self.name(number), encode_record(record)) else None


def owner_name(pid: int | None = None) -> str:
    """Return the readable name of a process of this machine, host-pid. pid: None means this process."""
    return f"{socket.gethostname()}-{os.getpid() if pid is None else pid}"


# --- Leases of trainers ---------------------------------------------------------------------------------------
# attempts/N.lease: the trainer that owns a root as attempt N, and a renewal count that shows that it is alive.
#
# Putting the file if absent claims the root, and fences attempt N - 1. The owner then replaces it three times per lease
# length, with a higher count, and marks it as released when it ends. Before each of these writes it reads the file:
# only a lease with its own claim_id is its own, since the root may have been deleted and created again. A trainer that
# starts watches the newest lease: if it changes, its owner is alive; if it stays the same for its whole length, it has
# expired. Only the watching machine's monotonic clock counts. An expired lease does not stop a trainer; a newer claim
# does.


logger = logging.getLogger(__name__)

_MOST_ERROR_CHARACTERS = 400
_RENEWALS_A_LEASE = 3
_LOOKS_A_LEASE = 12


def _claims(root: Root) -> Register[Lease]:
    return Register(root, LEASES, beside=ATTEMPTS)  # a cut has an attempt without a lease


def claim(root: Root, after: int, *, lease_s: float = LEASE_S, released: bool = False) -> Lease:
    """Claim attempt `after` + 1, which fences attempt `after`.

    Raises OwnedError if another process was faster, ReplacedRootError if the root is no longer the run that was opened.
    """
    root.check_same_run()
    lease = _claims(root).try_claim(
        after + 1,
        lambda attempt_id: Lease(
            attempt_id=attempt_id,
            claim_id=new_id(),
            owner=owner_name(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            process=describe_process(os.getpid()),
            lease_s=lease_s,
            released=released,
        ),
    )
    if lease is None:
        raise _refusal(root, after + 1)
    return lease


def newest_claim(root: Root) -> int:
    """Return the newest claimed attempt; 0 if there is none. Claims have no gaps, so the listing may lag."""
    return _claims(root).newest()


def read_lease(root: Root, attempt_id: int) -> Lease | None:
    """Read an attempt's lease; returns None if it was not claimed. Raises SchemaError if the file is no lease."""
    return LEASES.read(root, attempt_id)


def check_claim(root: Root, attempt_id: int, claim_id: str) -> None:
    """Check that an attempt's lease is the one with this claim_id, by one read.

    Raises ReplacedRootError if not: leases are never deleted, so the root was deleted, and perhaps created again.
    """
    try:
        lease = read_lease(root, attempt_id)
    except SchemaError:
        root.check_same_run()
        return  # damaged; the next renewal puts a sound one
    if lease is None:
        raise ReplacedRootError(
            f"{root.url}: the lease of attempt {attempt_id}, which this trainer holds, was deleted, and perhaps the "
            "whole root; this trainer stops"
        )
    if lease.claim_id != claim_id:
        raise ReplacedRootError(
            f"{root.url} was deleted and created again: attempt {attempt_id} is of {lease.owner} since "
            f"{lease.since}, and "
            "not of this trainer; this trainer stops, and leaves the new run as it is"
        )


def await_free(root: Root, stop: threading.Event) -> int | None:
    """Wait until the newest claim's owner is gone, and return that claim; 0 if there is none, None if `stop` is set.

    Returns at once if the owner released its lease or its process is proven dead; else watches for one lease length.
    Raises OwnedError as soon as the lease is renewed.
    """
    newest = newest_claim(root)
    first = read_lease(root, newest)
    if first is None or has_ended(first):
        return newest
    logger.warning(
        "%s: attempt %d of %s, since %s, has not released its lease; watching it for %.0f s to see whether it is alive",
        *(root.url, newest, first.owner, first.since, first.lease_s),
    )
    deadline = time.monotonic() + first.lease_s
    while time.monotonic() < deadline:
        if stop.wait(first.lease_s / _LOOKS_A_LEASE):
            return None
        lease = read_lease(root, newest)
        if lease is None or has_ended(lease):
            return newest
        if lease != first:
            raise _refusal(root, newest)
    return newest


def _refusal(root: Root, attempt_id: int) -> OwnedError:
    lease = read_lease(root, attempt_id)
    if lease is None:
        return OwnedError(f"{root.url}: the lease of attempt {attempt_id} was deleted meanwhile; start again")
    return OwnedError(
        f"{root.url}: attempt {attempt_id} of {lease.owner} trains here since {lease.since} and renews its lease; "
        "stop it, or start with --take-over, which fences it"
    )


@contextmanager
def held(
    root: Root, lease: Lease, *, on_fenced: Callable[[], None], also: Callable[[], None], level: int = logging.WARNING
) -> Iterator[None]:
    """Renew a lease in a thread until the end of the block, and then release it.

    `also` is called after each renewal, in that thread. A failed renewal is retried without limit. On a newer
    claim, or if the stored lease is not this one, `on_fenced` is called, once, and the lease is left as it is.
    An error in the block is stored with the released lease. level: of the log entries for what fails.
    """
    done, errors = threading.Event(), list[str]()
    args = (root, lease, done, errors, on_fenced, also, level)
    thread = threading.Thread(target=_renew, args=args, name="ludic-lease", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        errors.append(left_out(f"{type(error).__name__}: {one_line(error)}", _MOST_ERROR_CHARACTERS))
        raise
    finally:
        done.set()
        thread.join()


def _renew(
    root: Root,
    lease: Lease,
    done: threading.Event,
    errors: Sequence[str],
    on_fenced: Callable[[], None],
    also: Callable[[], None],
    level: int,
) -> None:
    """errors: filled before `done` is set if an error ends the owner."""
    while not done.wait(lease.lease_s / _RENEWALS_A_LEASE):
        try:
            if read_lease(root, lease.attempt_id + 1) is not None:
                return on_fenced()
            lease = replace(lease, num_renewals=lease.num_renewals + 1)
            _replace(root, lease)
            also()
        except ReplacedRootError as error:
            logger.log(level, "%s", error)
            return on_fenced()
        except LudicError as error:
            logger.log(level, "the lease of attempt %d could not be renewed, trying again: %s", lease.attempt_id, error)
    try:
        _replace(root, replace(lease, released=True, error=next(iter(errors), None)))
    except ReplacedRootError as error:
        logger.log(level, "%s", error)
    except LudicError as error:
        logger.log(
            level,
            "the lease of attempt %d could not be released, so the next trainer waits: %s",
            lease.attempt_id,
            error,
        )


def _replace(root: Root, lease: Lease) -> None:
    """Replace the content of a lease. A put can't depend on an earlier read, so it follows the read immediately."""
    check_claim(root, lease.attempt_id, lease.claim_id)
    root.put(LEASES.name_of(lease), encode_record(lease))


@dataclass(frozen=True, slots=True)
class LeaseState:
    """State of a lease's owner, from repeated reads of the lease."""

    state: Literal["alive", "silent", "ended", "dead", "unknown"]
    """silent: not renewed for its whole length. dead: proven, on this machine. unknown: not watched for long enough."""
    unchanged_s: float
    """Seconds since the lease was first seen with its current content."""


class LeaseWatch:
    """Decides from repeated reads of a lease whether its owner is alive: by changes of the lease, not by other
    machines' clocks."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._since = 0.0
        self._was_renewed = False

    def poll(self, lease: Lease) -> LeaseState:
        """Record the lease as just read, and return its owner's state."""
        if lease != self._lease:
            known = self._lease
            self._was_renewed = known is not None and known.claim_id == lease.claim_id
            self._lease, self._since = lease, time.monotonic()
        unchanged_s = time.monotonic() - self._since
        if lease.released:
            return LeaseState("ended", unchanged_s)
        if has_ended(lease):
            return LeaseState("dead", unchanged_s)
        if unchanged_s >= lease.lease_s:
            return LeaseState("silent", unchanged_s)
        return LeaseState("alive" if self._was_renewed else "unknown", unchanged_s)


def has_ended(lease: Lease) -> bool:
    """Return whether a lease is released, or its owner proven dead, which only its own machine can prove."""
    return lease.released or (lease.process is not None and is_dead(lease.process))


def describe_process(pid: int) -> str | None:
    """Identify a live process of this machine uniquely: boot id, pid namespace, pid, start time in clock ticks.

    Returns None if the process is dead, or if there is no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        # Split after the name, which may hold anything: the state is the 3rd field of all, the start time the 22nd.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot} {namespace} {pid} {fields[19]}"


def is_alive(process: str) -> bool:
    """Return whether a process is proven alive: it is on this machine, in this pid namespace, and runs."""
    pid = _local_pid(process)
    return pid is not None and describe_process(pid) == process


def _local_pid(process: str) -> int | None:
    """Return the pid of a process that was started on this boot, in this pid namespace; None for any other."""
    here, there = describe_process(os.getpid()), process.split()
    is_here = here is not None and here.split()[:2] == there[:2] and len(there) == 4
    return parse_number(there[2]) if is_here else None


def is_dead(process: str) -> bool:
    """Return whether a process is proven dead: started on this boot, in this pid namespace, and no longer there."""
    if (pid := _local_pid(process)) is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process, whose /proc may be hidden from this user
        return False
    return describe_process(pid) != process


# --- Slots of workers -----------------------------------------------------------------------------------------
# workers/slot=S/N.json: one claim for each life of a worker. The newest life holds its slot of the schedule.
#
# A life claims the slot before it reads what earlier lives committed, and checks for a newer claim before each append,
# also of the requests that it has started, which are written within seconds. So a worker that was paused or
# disconnected, and replaced meanwhile, soon ends. If it commits a group before it can check, the reader drops the
# duplicate: it delivers a request once (ludic.root.rows.reader). Claims have no gaps, so one read by name finds a newer
# claim. Claims are never deleted.


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
    return lives.claim(partial(_slot_claim, slot, worker_id, code), first=lives.newest_listed() + 1)


def claim_free_slot(root: Root, worker_id: str) -> SlotClaim:
    """Claim the first slot whose newest life is over, else one that nobody has held; so no other process has to end.

    Raises ReplacedRootError if the root is no longer the run that was opened.
    """
    root.check_same_run()
    for slot in itertools.count():
        newest = newest_slot_claim(root, slot)
        if newest is not None and newest.worker_id == worker_id:  # the answer to an earlier try was lost
            return newest
        if newest is None or is_over(newest):
            life = newest.life + 1 if newest else 1
            claimed = Register(root, WORKERS, slot).try_claim(life, partial(_slot_claim, slot, worker_id, ()))
            if claimed is not None:
                return claimed
    raise AssertionError


def _slot_claim(slot: int, worker_id: str, code: Sequence[Mapping[str, Any]], life: int) -> SlotClaim:
    return SlotClaim(
        slot=slot,
        life=life,
        worker_id=worker_id,
        owner=owner_name(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        process=describe_process(os.getpid()),
        code=list(code),
    )


def change_claim(root: Root, claim: SlotClaim, **values: Any) -> SlotClaim:
    """Put a claim of this process again with other values, and return it.

    Raises ReplacedRootError if it is not stored any more.
    """
    changed = replace(claim, **values)
    _check_own(root, claim)
    root.put(WORKERS.name_of(claim), encode_record(changed))
    return changed


@contextmanager
def held_slot(root: Root, slot: int, worker_id: str, code: Sequence[Mapping[str, Any]] = ()) -> Iterator[SlotClaim]:
    """Claim a slot as `claim_slot` does, and record the end of this life at the end of the block."""
    claim = claim_slot(root, slot, worker_id, code)
    try:
        yield claim
    finally:
        try:
            change_claim(root, claim, ended_at=datetime.now(UTC).isoformat(timespec="seconds"))
        except ReplacedRootError:
            logger.info(
                "%s/%s belongs to another worker by now, and is left unchanged", root.url, WORKERS.name_of(claim)
            )
        except LudicError as error:
            logger.warning("the end of this worker could not be recorded in the claim of slot %d: %s", slot, error)


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
        raise ReplacedRootError(f"{root.url}: {name} is not of this worker: the root was deleted or created again")
