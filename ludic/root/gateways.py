"""Claim a life of a gateway and the episodes that it serves, and take over the episodes of lives that are over.

A life renews gateways/N.json three times per lease length. It stops answering by itself when its last successful
renewal began more than a lease length ago, by its own clock since boot; so another life may take its episodes once it
has seen the file unchanged for that long. A claim of an episode is one number of a register: a life that takes an
episode over puts the next one. Raises FencedError for a lost lease or episode, NameTakenError for an episode that
exists, ReplacedRootError if the root was deleted or created again.
"""

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ludic.base import LEASE_S, mask
from ludic.errors import ConfigError, FencedError, LudicError, NameTakenError, ReplacedRootError
from ludic.records import new_id
from ludic.root.catalogue import EPISODES, GATEWAYS, EpisodeClaimName
from ludic.root.claims import Register, describe_process, is_dead, owner_name
from ludic.root.json_records import AN_EPISODE, EpisodeClaim, GatewayLife, encode_record
from ludic.root.root import Root

logger = logging.getLogger(__name__)

_RENEWALS_A_LEASE = 3
_LOOKS_A_LEASE = 12
_CONCURRENT_READS = 16


def _clock() -> float:
    """Return seconds since boot. time.monotonic() leaves out the time for which a machine is suspended."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


# --- Lives ----------------------------------------------------------------------------------------------------


class Life:
    """A life of a gateway that this process holds; `held_life` renews it."""

    def __init__(self, root: Root, record: GatewayLife, began: float) -> None:
        """began: _clock() from before the record was put."""
        self.root, self.record, self._renewed = root, record, began
        self._lost: str | None = None

    @property
    def number(self) -> int:
        return self.record.life

    @property
    def worker_id(self) -> str:
        return self.record.worker_id

    def check(self) -> None:
        """Raise FencedError if this life may no longer answer; then it never may again.

        Call it after what an answer depends on was stored, and before the answer leaves: another life that took the
        episodes over can then read what was stored.
        """
        if self._lost is None and _clock() - self._renewed > self.record.lease_s:
            self._lost = (
                f"{GATEWAYS.name_of(self.record)} was not renewed for {self.record.lease_s:g} s, so that another "
                "gateway may have taken its episodes; start this gateway again"
            )
        if self._lost is not None:
            raise FencedError(f"{self.root.url}: {self._lost}")

    def renew(self) -> None:
        """Put the record with a higher count. Raises FencedError if the life was lost, StoreError."""
        self.check()
        began = _clock()
        record = replace(self.record, num_renewals=self.record.num_renewals + 1)
        self._put(record)
        self.check()  # a put that took longer than the lease counts for nothing
        self.record, self._renewed = record, began

    def end(self) -> None:
        """Record the end, so that others need not wait. Raises ReplacedRootError, StoreError."""
        self._put(replace(self.record, ended_at=_now()))
        self._lost = self._lost or f"{GATEWAYS.name_of(self.record)} has ended"

    def _put(self, record: GatewayLife) -> None:
        stored = GATEWAYS.read(self.root, self.number)
        if stored is None or stored.worker_id != self.worker_id:
            name = GATEWAYS.name_of(self.record)
            self._lost = f"{name} is not of this gateway: the root was deleted or created again"
            raise ReplacedRootError(f"{self.root.url}: {self._lost}")
        self.root.put(GATEWAYS.name_of(record), encode_record(record))


def claim_life(root: Root, address: str = "", *, lease_s: float = LEASE_S) -> Life:
    """Claim the next life. address: URL of the gateway; empty in the process of a worker.

    Raises ReplacedRootError if the root is no longer the run that was opened.
    """
    root.check_same_run()
    lives = Register(root, GATEWAYS)
    began = _clock()

    def make(life: int) -> GatewayLife:
        nonlocal began
        began = _clock()
        return GatewayLife(
            life=life,
            worker_id=f"g{life}-{new_id().replace('-', '')[-12:]}",
            owner=owner_name(),
            address=address,
            created_at=_now(),
            process=describe_process(os.getpid()),
            lease_s=lease_s,
        )

    return Life(root, lives.claim(make, first=lives.newest_listed() + 1), began)


@contextmanager
def held_life(root: Root, address: str = "", *, lease_s: float = LEASE_S) -> Iterator[Life]:
    """Claim a life, renew it in a thread until the end of the block, and then record its end."""
    life, done = claim_life(root, address, lease_s=lease_s), threading.Event()
    thread = threading.Thread(target=_renew, args=(life, done), name="ludic-gateway-lease", daemon=True)
    thread.start()
    try:
        yield life
    finally:
        done.set()
        thread.join()
        try:
            life.end()
        except LudicError as error:
            logger.warning("the end of this gateway could not be recorded, so the next one waits: %s", error)


def _renew(life: Life, done: threading.Event) -> None:
    while not done.wait(life.record.lease_s / _RENEWALS_A_LEASE):
        try:
            life.renew()
        except FencedError as error:
            logger.error("%s", error)
            return
        except LudicError as error:
            logger.warning("the lease of this gateway could not be renewed, trying again: %s", error)


class LivesWatch:
    """Decides from repeated reads which lives are over, by this machine's clock since boot alone."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._seen: dict[int, tuple[GatewayLife | None, float]] = {}
        self._renewed: set[int] = set()

    def is_over(self, life: int) -> bool:
        """Return whether a life may answer no more: it has ended, its process is proven dead, or it was unchanged for
        a lease length since this object first read it so. Raises SchemaError for a broken file, StoreError."""
        record = GATEWAYS.read(self._root, life)
        if record is None or record.ended_at is not None or (record.process is not None and is_dead(record.process)):
            return True
        known, since = self._seen.get(life, (None, 0.0))
        if known != record:
            self._renewed |= {life} if known is not None else set()
            self._seen[life] = record, _clock()
            return False
        return _clock() - since > record.lease_s

    def was_renewed(self, life: int) -> bool:
        """Return whether a life was renewed while this object watched it."""
        return life in self._renewed


def lives_that_are_over(root: Root, workers: Collection[str]) -> set[str]:
    """Return those of these worker_ids whose lives may write no more; waits up to a lease length to see it.

    A worker_id of no life counts as over. Raises SchemaError for a broken file of a life, StoreError.
    """
    watch = LivesWatch(root)
    lives = {record.worker_id: record for number in GATEWAYS.listed(root) if (record := GATEWAYS.read(root, *number))}
    over = {worker_id for worker_id in workers if worker_id not in lives}
    left = {worker_id: lives[worker_id] for worker_id in workers if worker_id in lives}
    while True:
        found = {worker_id for worker_id, record in left.items() if watch.is_over(record.life)}
        alive = {worker_id for worker_id, record in left.items() if watch.was_renewed(record.life)}
        over |= found
        left = {worker_id: record for worker_id, record in left.items() if worker_id not in found | alive}
        if not left:
            return over
        time.sleep(min(record.lease_s for record in left.values()) / _LOOKS_A_LEASE)


# --- Episodes -------------------------------------------------------------------------------------------------


def check_episode_id(episode_id: str) -> str:
    """Return the name of an episode. Raises ConfigError if no folder may have it."""
    if EPISODES.parse(f"{EPISODES.folder}/{episode_id}/1/1.json") is None:
        raise ConfigError(f"episode {episode_id[:200]!r} is no name that a folder may have; wanted {AN_EPISODE}")
    return episode_id


def claim_episode(life: Life, *, episode_id: str, attempt: int, key_digest: str, **facts: Any) -> EpisodeClaim:
    """Open an episode for a life. facts: further fields of EpisodeClaim.

    Raises NameTakenError if the attempt exists, ConfigError for a name that no folder may have, FencedError if the life
    was lost, ReplacedRootError if the root is no longer the run that was opened.
    """
    check_episode_id(episode_id)
    life.check()
    life.root.check_same_run()
    claim = EpisodeClaim(
        episode_id=episode_id,
        attempt=attempt,
        number=1,
        life=life.number,
        worker_id=life.worker_id,
        key_digest=key_digest,
        opened_at=_now(),
        **facts,
    )
    if not life.root.put_if_absent(EPISODES.name_of(claim), encode_record(claim)):
        raise NameTakenError(
            f"{life.root.url}: attempt {attempt} of episode {episode_id} exists; open the next attempt, or another "
            "episode"
        )
    return claim


def newest_episode_claim(root: Root, episode_id: str, attempt: int) -> EpisodeClaim | None:
    """Return the newest claim of an attempt; None if it was never opened, or if no episode may have this name."""
    with suppress(ConfigError):
        return Register(root, EPISODES, check_episode_id(episode_id), attempt).newest_record()
    return None


def change_episode(life: Life, claim: EpisodeClaim, **values: Any) -> EpisodeClaim:
    """Put a claim of this life again with other values, and return it. An `error` is masked.

    Raises FencedError if another life has taken the episode over, or if this life was lost.
    """
    assert claim.life == life.number, "a claim of another life"
    if values.get("error") is not None:
        values["error"] = mask(values["error"])
    changed = replace(claim, **values)
    _check_newest(life, claim)
    life.root.put(EPISODES.name_of(claim), encode_record(changed))
    _check_newest(life, claim)
    return changed


def seal_episode(life: Life, claim: EpisodeClaim, *, end: str, **values: Any) -> EpisodeClaim:
    """Record the end of an episode, and return its claim. end: EpisodeClaim.end. values: of further fields.

    Raises as `change_episode` does.
    """
    return change_episode(life, claim, end=end, sealed_at=_now(), **values)


def _check_newest(life: Life, claim: EpisodeClaim) -> None:
    life.check()
    newer = EPISODES.read(life.root, claim.episode_id, claim.attempt, claim.number + 1)
    if newer is not None:
        raise FencedError(
            f"{life.root.url}: attempt {claim.attempt} of episode {claim.episode_id} was taken over by "
            f"{newer.worker_id}"
        )


def take_over(life: Life, claim: EpisodeClaim) -> EpisodeClaim | None:
    """Claim an episode of a life that is over, with the same key; None if another life was faster.

    claim: its newest one. An episode that was sealed meanwhile stays sealed.
    """
    life.check()
    mine = replace(claim, number=claim.number + 1, life=life.number, worker_id=life.worker_id)
    if not life.root.put_if_absent(EPISODES.name_of(mine), encode_record(mine)):
        return None
    before = EPISODES.read(life.root, claim.episode_id, claim.attempt, claim.number)
    if before is not None and before != claim:  # its owner's last write was under way
        mine = change_episode(life, replace(before, number=mine.number, life=mine.life, worker_id=mine.worker_id))
    return mine


def episode_claims(root: Root, *, without: Collection[tuple[str, int]] = ()) -> list[EpisodeClaim]:
    """Return the newest claim of each attempt at each episode, sorted by episode and attempt.

    without: attempts that are not read. Raises SchemaError for a broken claim, StoreError.
    """
    newest: dict[tuple[str, int], EpisodeClaimName] = {found[:2]: found for found in EPISODES.listed(root)}
    return _read_all(root, [found for name, found in newest.items() if name not in without])


def _read_all(root: Root, names: Sequence[EpisodeClaimName]) -> list[EpisodeClaim]:
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        found = pool.map(partial(_read_newest, root), names)
        return [claim for claim in found if claim is not None]


def _read_newest(root: Root, listed: EpisodeClaimName) -> EpisodeClaim | None:
    """Return the newest claim from a listed one on; the listing may lag."""
    newest, number = None, listed.number
    while (claim := EPISODES.read(root, listed.episode_id, listed.attempt, number)) is not None:
        newest, number = claim, number + 1
    return newest


def open_episodes_of(root: Root, life: int | None = None) -> list[EpisodeClaim]:
    """Return the newest claims of episodes that are not sealed. life: that has them; None is any life."""
    return [claim for claim in episode_claims(root) if claim.sealed_at is None and (life is None or claim.life == life)]
