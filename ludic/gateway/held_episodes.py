"""Hold the episodes of one life of a gateway: open, find by key or name, take over, score, expire, seal.

Writes episodes/ (ludic.root.gateways), in threads. An episode of another life is taken over once that life has ended;
while it lives, calls are refused with its address. Only digests of keys are kept. Raises RefusedCallError.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from reprlib import repr as shown
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from ludic.base import mask, mask_values, storable
from ludic.errors import ConfigError, FencedError, LudicError, NameTakenError, one_line
from ludic.gateway.call_rows import held_calls, prompt_digests
from ludic.gateway.calls import refused
from ludic.gateway.episode_calls import EpisodeCalls, HeldCall
from ludic.gateway.episodes import (
    OWN_COLUMNS,
    CallCounts,
    EpisodeFacts,
    EpisodeResult,
    OpenEpisode,
    derived_seed,
    key_digest,
    make_key,
)
from ludic.records import LARGEST_REWARD, Row, new_id
from ludic.root import (
    GATEWAYS,
    EpisodeClaim,
    Life,
    LivesWatch,
    Root,
    change_episode,
    claim_episode,
    episode_claims,
    newest_episode_claim,
    seal_episode,
    take_over,
)
from ludic.root.rows import EarlierCalls, read_prompt
from ludic.settings import SideThread

logger = logging.getLogger(__name__)

T = TypeVar("T")
Name = tuple[str, int]
"""episode_id and attempt."""

RETRY_S = 1.0
"""Seconds after which a client should repeat a refused request that may succeed later."""
_LOAD_SHARE = 0.1
"""Maximum share of the time in which the claims of other lives are read, whatever unknown keys are tried."""
WATCH_S = 2.0
"""Seconds between two looks for episodes that expire."""
_MOST_SEALED_KEYS = 100_000
_MOST_CHARACTERS = 10_000
_MOST_COMPONENTS = 1_000
_MOST_THREADS = 64
_LOOKS_A_LEASE = 12


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """An episode that this life holds."""

    episode: OpenEpisode
    claim: EpisodeClaim
    calls: EpisodeCalls | None = None
    """None until they are read."""
    is_replay: bool = False
    is_sealing: bool = False
    reading: asyncio.Task[EpisodeCalls] | None = None
    sealing: asyncio.Task[None] | None = None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the claim is changed."""

    @property
    def name(self) -> Name:
        return self.episode.episode_id, self.episode.attempt

    def check_open(self) -> None:
        """Raise RefusedCallError if it has ended, or is about to."""
        if self.is_sealing:
            raise _sealed(self.name, "has ended")
        if self.episode.expires_at <= datetime.now(UTC):
            raise _sealed(self.name, f"expired at {self.episode.expires_at:%Y-%m-%d %H:%M:%S} UTC")


class HeldEpisodes:
    """The episodes of one life."""

    def __init__(
        self,
        root: Root,
        life: Life,
        max_open: int,
        timeout_s: float,
        *,
        drain_timeout_s: float,
        keeps_rows: bool = False,
    ) -> None:
        """timeout_s: seconds after which an episode expires. drain_timeout_s: as of GatewaySettings.

        keeps_rows: as of Gateway.
        """
        self._keeps_rows, self._drain_timeout_s = keeps_rows, drain_timeout_s
        self._root, self._life, self._max_open, self._timeout_s = root, life, max_open, timeout_s
        self._held: dict[Name, Held] = {}
        self._by_key: dict[str, Name] = {}
        """By digest: of held episodes, of those of other lives, and of lately sealed ones."""
        self._sealed_keys: dict[str, None] = {}
        """Digests of keys of sealed episodes, the oldest first."""
        self._others: dict[Name, EpisodeClaim] = {}
        """Open episodes of other lives, when the root was last read."""
        self._sealed: set[Name] = set()
        """Episodes that are known to be sealed, so that they are not read again."""
        self._taking: dict[Name, asyncio.Task[Held]] = {}
        self._expiring: dict[Name, asyncio.Task[None]] = {}
        self._num_opening = 0
        self._next_load: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self._next_load_at = 0.0
        """time.monotonic() from which on claims are read again."""
        self.earlier = EarlierCalls(root, life.worker_id)
        self._prompt = lru_cache(1024)(partial(read_prompt, root))
        self._threads = _Threads()
        self._lives = _OtherLives(root, self._threads)

    @property
    def num_open(self) -> int:
        """Episodes that are held, or being opened."""
        return len(self._held) + self._num_opening

    # --- Open ---

    async def open(
        self,
        episode_id: str | None,
        attempt: int,
        seed: int | None,
        facts: EpisodeFacts,
        timeout_s: float | None,
        *,
        replay: bool,
    ) -> OpenEpisode:
        """Claim an attempt, or go on with it in a replay; see Gateway.open_episode."""
        if self.num_open >= self._max_open:
            sentence = f"the gateway holds {self._max_open} open episodes, its limit (--max-episodes); try again later"
            raise refused("full", sentence, retry_after_s=RETRY_S)
        name = new_id() if episode_id is None else episode_id, attempt
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        _check(attempt, seed, facts, timeout_s)
        _check_columns(facts.columns, self._root.extra_columns)
        key = make_key()
        expires_at = datetime.now(UTC) + timedelta(seconds=min(timeout_s, self._timeout_s))
        self._num_opening += 1
        try:
            if replay and await self._is_stored(name):
                return await self._replay(name, key, expires_at)
            claim = await self._claim(name, seed, facts, key, expires_at)
        finally:
            self._num_opening -= 1
        held = self._hold(claim, EpisodeCalls(rows=self._new_rows()))
        held.episode.key = key
        return held.episode

    async def _claim(
        self, name: Name, seed: int | None, facts: EpisodeFacts, key: str, expires_at: datetime
    ) -> EpisodeClaim:
        episode_id, attempt = name
        values = {each: getattr(facts, each) for each in _STORED_FACTS}
        values |= {
            "group_id": facts.group_id or episode_id,
            "env_example_id": facts.env_example_id or episode_id,
            "facts": dict(facts.columns),
            "seed": derived_seed(*name) if seed is None else seed,
            "expires_at": expires_at.isoformat(),
            "key_digest": key_digest(key),
        }
        claim = partial(claim_episode, self._life, episode_id=episode_id, attempt=attempt, **values)
        try:
            return await self._write(claim)
        except ConfigError as error:
            raise refused("invalid", str(error), field="episode_id") from None
        except NameTakenError:
            await self._take(name)  # says if it is sealed, or elsewhere
            sentence = (
                f"attempt {attempt} of episode {episode_id} is open already; use its key, or open another attempt"
            )
            raise refused("invalid", sentence, field="episode_id") from None

    async def _is_stored(self, name: Name) -> bool:
        return (
            name in self._held or await self._threads.run(partial(newest_episode_claim, self._root, *name)) is not None
        )

    async def _replay(self, name: Name, key: str, expires_at: datetime) -> OpenEpisode:
        """Begin to answer an agent that was started again. Its earlier key no longer works."""
        held = await self._take(name)
        held.check_open()
        held.is_sealing = True
        try:
            await self._end_calls(held, 0)
            await self._changed(held, key_digest=key_digest(key), expires_at=expires_at.isoformat())
        except BaseException:
            held.is_sealing = False
            raise
        self._by_key.pop(held.episode.key_digest, None)
        again = self._hold(held.claim, None)
        again.is_replay, again.episode.key = True, key
        return again.episode

    def _hold(self, claim: EpisodeClaim, calls: EpisodeCalls | None) -> Held:
        held = Held(episode=_episode(claim, self._timeout_s), claim=claim, calls=calls)
        self._held[held.name] = held
        self._by_key[claim.key_digest] = held.name
        self._others.pop(held.name, None)
        return held

    # --- Find ---

    async def of(self, episode: OpenEpisode) -> Held:
        """Return what is held of an open episode. Raises RefusedCallError."""
        held = self._held.get((episode.episode_id, episode.attempt))
        if held is None or held.episode is not episode:
            raise _sealed((episode.episode_id, episode.attempt), "has ended, or its agent was started again")
        held.check_open()
        return held

    def counts(self, episode: OpenEpisode) -> CallCounts:
        """Return the counts of an open or sealed episode."""
        held = self._held.get((episode.episode_id, episode.attempt))
        return episode.counts if held is None or held.calls is None else held.calls.counts

    async def find(self, key: str | None, episode_id: str | None, attempt: int | None) -> Held:
        """Return the episode of a key, or of a name; see Gateway.find."""
        name = None if episode_id is None or attempt is None else (episode_id, attempt)
        if key is not None:
            of_key = await self._name_of(key_digest(key), name)
            if of_key is None:
                raise refused("wrong_key", "this API key opens no episode of this gateway; its episode may have ended")
            if name is not None and name != of_key:
                raise refused("wrong_key", "this API key opens another episode than the one in the address")
            name = of_key
        if name is None:
            raise refused("not_found", "no episode is named; use the address or the key of one")
        held = await self._take(name)
        if key is not None and held.claim.key_digest != key_digest(key):  # a later start of the agent has another one
            raise refused("wrong_key", "this API key is no longer that of its episode")
        held.check_open()
        return held

    async def _name_of(self, digest: str, named: Name | None) -> Name | None:
        """Return the episode of a key's digest; None if there is none. named: the episode that the address names."""
        if digest not in self._by_key and named is not None:
            claim = await self._threads.run(partial(newest_episode_claim, self._root, *named))
            return named if claim is not None and claim.key_digest == digest else None
        if digest not in self._by_key:
            await self._load()
        return self._by_key.get(digest)

    async def _load(self) -> None:
        """Read the claims of the open episodes of other lives. All that wait for the next reading share it."""
        if self._next_load is None:
            self._next_load = asyncio.create_task(self._read_claims())
        await asyncio.shield(self._next_load)

    async def _read_claims(self) -> None:
        async with self._loading:
            await asyncio.sleep(max(0.0, self._next_load_at - time.monotonic()))
            self._next_load = None  # what is asked for from now on may be newer than this reading
            began = time.monotonic()
            try:
                known = {*self._held, *self._sealed}
                claims = await self._threads.run(partial(episode_claims, self._root, without=known))
            except LudicError as error:
                logger.error("the episodes of other gateways could not be read: %s", error)
                return
            finally:
                ended = time.monotonic()
                self._next_load_at = ended + (ended - began) / _LOAD_SHARE
        named = {(claim.episode_id, claim.attempt): claim for claim in claims}
        self._sealed.update(name for name, claim in named.items() if claim.sealed_at is not None)
        self._others = {
            name: claim for name, claim in named.items() if name not in self._sealed and name not in self._held
        }
        self._by_key.update({claim.key_digest: name for name, claim in self._others.items()})

    # --- Take over ---

    async def _take(self, name: Name) -> Held:
        """Return a held episode; take over the one of a life that has ended. Raises RefusedCallError."""
        held = self._held.get(name)
        if held is not None:
            return held
        if name not in self._taking:
            task = asyncio.create_task(self._take_now(name))
            self._taking[name] = task
            task.add_done_callback(lambda _: self._taking.pop(name))
        return await asyncio.shield(self._taking[name])

    async def _take_now(self, name: Name) -> Held:
        while True:
            claim = await self._threads.run(partial(newest_episode_claim, self._root, *name))
            if claim is None:
                raise refused("not_found", f"there is no attempt {name[1]} of episode {name[0]!r}")
            if claim.sealed_at is None and claim.life != self._life.number:
                owner = await self._lives.owner_of(claim)
                if owner is not None:
                    sentence = f"episode {name[0]!r} is held by another gateway{owner and f', {owner}'}; send it there"
                    raise refused("elsewhere", sentence, owner=owner)
                taken = await self._write(partial(take_over, self._life, claim))
                if taken is None:
                    continue
                claim = taken
            if claim.sealed_at is not None:
                self._remember_sealed(claim.key_digest, name)
                raise _sealed(name, "has ended")
            return self._held.get(name) or self._hold(claim, None)

    async def calls(self, held: Held) -> EpisodeCalls:
        """Return the calls of a held episode; those of earlier lives are read when they are first asked for."""
        if held.calls is None:
            if held.reading is None or held.reading.done():
                held.reading = asyncio.create_task(self._read_calls(held))
            await asyncio.shield(held.reading)
        assert held.calls is not None
        return held.calls

    async def _read_calls(self, held: Held) -> EpisodeCalls:
        rows, found = await self._threads.run(partial(self._stored_calls, *held.name))
        found = [call for call in found if call.call_id not in held.claim.left_behind]
        held.calls = EpisodeCalls(found, is_replay=held.is_replay, rows=self._new_rows())
        held.episode.found_rows = rows if self._keeps_rows else None
        return held.calls

    def _new_rows(self) -> list[Row] | None:
        return [] if self._keeps_rows else None

    def _stored_calls(self, episode_id: str, attempt: int) -> tuple[pa.Table, list[HeldCall]]:
        """Return the rows of an attempt, and its calls. Takes milliseconds."""
        rows = self.earlier.read(episode_id, attempt)
        return rows, held_calls(rows, {digest: self._prompt(digest) for digest in prompt_digests(rows)})

    # --- Change ---

    async def leave_behind(self, held: Held) -> None:
        """Store which calls a replay did not reach, if it has ended."""
        if values := self._left_behind(held):
            await self._changed(held, **values)

    @staticmethod
    def _left_behind(held: Held) -> dict[str, Any]:
        known = held.claim.left_behind
        new = [] if held.calls is None else [each for each in held.calls.left_behind if each not in known]
        return {"left_behind": [*known, *new]} if new else {}

    async def score(self, held: Held, result: EpisodeResult) -> None:
        """Store the score of an open episode."""
        check_score(result)
        await self._changed(held, **_score(result))

    async def seal(self, episode: OpenEpisode, result: EpisodeResult, wait_s: float | None = None) -> None:
        """End an episode after its calls in flight, and forget its calls. A sealed one stays as it is.

        wait_s: as of Gateway.
        """
        held = self._held.get((episode.episode_id, episode.attempt))
        if held is None or held.episode is not episode:
            return
        check_score(result)
        if held.sealing is None or held.sealing.done():
            left_s = (held.episode.expires_at - datetime.now(UTC)).total_seconds()
            held.sealing = asyncio.create_task(self._seal(held, result, left_s if wait_s is None else wait_s))
        await asyncio.shield(held.sealing)

    async def _seal(self, held: Held, result: EpisodeResult, wait_s: float) -> None:
        episode, held.is_sealing = held.episode, True
        try:
            if held.is_replay:  # calls that the agent's last run did not reach
                (await self.calls(held)).end_replay()
            await self._end_calls(held, wait_s)
            await self._changed(held, is_end=True, **self._left_behind(held), **_end(result))
        except BaseException:
            held.is_sealing = False
            raise
        episode.result, episode.left_behind = result, held.claim.left_behind
        if held.calls is not None:
            episode.counts, episode.rows = held.calls.counts, held.calls.rows or ()
        self._held.pop(held.name, None)
        self._remember_sealed(held.claim.key_digest, held.name)

    async def _end_calls(self, held: Held, wait_s: float) -> None:
        """Wait until the calls in flight are stored or have failed; after wait_s and drain_timeout_s they fail.

        What the engine does not end then is left.
        """
        running = [] if held.calls is None else held.calls.running
        if running:
            _, late = await asyncio.wait(running, timeout=max(wait_s, self._drain_timeout_s))
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=self._drain_timeout_s)

    async def _changed(self, held: Held, *, is_end: bool = False, **values: Any) -> None:
        """Store a claim with other values; also if the waiter is cancelled, so that what is held is what is stored."""
        await asyncio.shield(asyncio.create_task(self._change(held, is_end=is_end, values=values)))

    async def _change(self, held: Held, *, is_end: bool, values: dict[str, Any]) -> None:
        async with held.changing:
            if held.claim.sealed_at is not None:
                return
            change = seal_episode if is_end else change_episode
            held.claim = await self._write(partial(change, self._life, held.claim, **values))

    async def _write(self, function: Callable[[], T]) -> T:
        """Return what a function that writes a claim returns. Raises RefusedCallError if another try may succeed."""
        try:
            return await self._threads.run(function)
        except (ConfigError, NameTakenError):
            raise
        except FencedError as error:
            raise refused("stopping", one_line(error), retry_after_s=RETRY_S) from error
        except LudicError as error:
            logger.warning("an episode could not be stored: %s", error)
            sentence = "the gateway can't store the episode now; try again"
            raise refused("stopping", sentence, retry_after_s=RETRY_S) from error

    def _remember_sealed(self, digest: str, name: Name) -> None:
        """Keep a key for the answer that its episode has ended."""
        self._by_key[digest] = name
        self._sealed.add(name)
        self._sealed_keys[digest] = None
        if len(self._sealed_keys) > _MOST_SEALED_KEYS:
            oldest = next(iter(self._sealed_keys))
            del self._sealed_keys[oldest]
            self._by_key.pop(oldest, None)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    # --- Expire ---

    async def watch(self) -> None:
        """Seal episodes that expire until this is cancelled; a gateway with an address also those of ended lives."""
        if self._life.record.address:
            await self._load()
        while True:
            try:
                await self._lives.look(claim.life for claim in self._others.values())
            except LudicError as error:
                logger.warning("lives of other gateways could not be read: %s", error)
            now = datetime.now(UTC)
            over = [name for name, claim in self._others.items() if _expires(claim, self._timeout_s) <= now]
            own = [held for held in self._held.values() if held.episode.expires_at <= now and not held.is_sealing]
            for name in [*over, *(held.name for held in own)]:
                self._expiring[name] = self._expiring.get(name) or asyncio.create_task(self._expire(name))
            await asyncio.sleep(WATCH_S)

    async def _expire(self, name: Name) -> None:
        try:
            held = await self._take(name)
            error = f"it was open for longer than its limit, until {held.episode.expires_at:%Y-%m-%d %H:%M:%S} UTC"
            await self.seal(held.episode, EpisodeResult(outcome="expired", error=error))
        except LudicError as error:  # "stopping": later; else another gateway's, or sealed already
            if getattr(error, "reason", "stopping") != "stopping":
                self._others.pop(name, None)
        finally:
            self._expiring.pop(name, None)


_COUNTS = ("group_index", "group_size", "request_index")
_STORED_FACTS = (*_COUNTS, "env_name", "purpose")


class _Threads:
    """Threads for blocking functions, kept for the next ones: to start one blocks the event loop for milliseconds.

    So there are few: each request with a wrong key asks for one.
    """

    def __init__(self) -> None:
        self._idle: list[SideThread] = []
        self._room = asyncio.Semaphore(_MOST_THREADS)

    async def run(self, function: Callable[[], T]) -> T:
        async with self._room:
            thread = self._idle.pop() if self._idle else SideThread()
            try:
                result = await thread.run(function)
            except asyncio.CancelledError:  # the function goes on
                thread.close()
                raise
            except BaseException:
                self._idle.append(thread)
                raise
            self._idle.append(thread)
            return result

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _OtherLives:
    """Decides whether other lives of gateways have ended."""

    def __init__(self, root: Root, threads: "_Threads") -> None:
        self._root, self._watch, self._threads = root, LivesWatch(root), threads
        self._alive: dict[int, tuple[float, str]] = {}
        """By life: when it was last seen to be renewed, and its address."""

    async def look(self, lives: Iterable[int]) -> None:
        """Begin to watch lives, so that it is known sooner whether they have ended."""
        for life in {*lives}:
            await self._threads.run(partial(self._watch.is_over, life))

    async def owner_of(self, claim: EpisodeClaim) -> str | None:
        """Return the address of a claim's life, empty if it has none; None if it has ended.

        Waits until the life is renewed or has ended, for at most the length of its lease.
        """
        seen, address = self._alive.get(claim.life, (-float("inf"), ""))
        first = await self._threads.run(partial(GATEWAYS.read, self._root, claim.life))
        if first is None or time.monotonic() - seen < first.lease_s / 2:
            return None if first is None or first.ended_at is not None else address
        while not await self._threads.run(partial(self._watch.is_over, claim.life)):
            record = await self._threads.run(partial(GATEWAYS.read, self._root, claim.life))
            if record is not None and record.ended_at is None and record != first:
                self._alive[claim.life] = time.monotonic(), record.address
                return record.address
            await asyncio.sleep(first.lease_s / _LOOKS_A_LEASE)
        return None


def _episode(claim: EpisodeClaim, timeout_s: float) -> OpenEpisode:
    facts = {name: getattr(claim, name) for name in _STORED_FACTS}
    return OpenEpisode(
        episode_id=claim.episode_id,
        attempt=claim.attempt,
        seed=claim.seed,
        key_digest=claim.key_digest,
        facts=EpisodeFacts(**facts, group_id=claim.group_id, env_example_id=claim.env_example_id, columns=claim.facts),
        opened_at=datetime.fromisoformat(claim.opened_at),
        expires_at=_expires(claim, timeout_s),
    )


def _expires(claim: EpisodeClaim, timeout_s: float) -> datetime:
    if claim.expires_at is not None:
        return datetime.fromisoformat(claim.expires_at)
    return datetime.fromisoformat(claim.opened_at) + timedelta(seconds=timeout_s)


def _check(attempt: int, seed: int | None, facts: EpisodeFacts, timeout_s: float) -> None:
    """Raise RefusedCallError for values that a claim can't hold."""
    counts = {"attempt": attempt, "seed": seed or 0} | {each: getattr(facts, each) for each in _COUNTS}
    for name, count in counts.items():
        low, high = {"attempt": (1, 2**31 - 1), "seed": (-(2**63), 2**63 - 1)}.get(name, (0, 2**31 - 1))
        if not low <= count <= high:
            raise refused("invalid", f"{name} is {count}, wanted {low} to {high}", field=name)
    if not 0 < timeout_s < float("inf"):
        raise refused("invalid", f"timeout_s is {timeout_s}, wanted seconds above 0", field="timeout_s")
    texts = {each: getattr(facts, each) or "" for each in ("env_name", "env_example_id", "group_id")}
    for name, text in texts.items():
        if text != storable(text) or len(text) > _MOST_CHARACTERS:
            raise refused("invalid", f"{name} is not UTF-8, or has over {_MOST_CHARACTERS:,} characters", field=name)


def _check_columns(columns: Mapping[str, Any], extra_columns: Collection[str]) -> None:
    """Raise RefusedCallError for values of columns that no row of the episode could hold."""
    for name, value in columns.items():
        kind = OWN_COLUMNS.get(name)
        if kind is None:
            sentence = f"columns has {name[:100]!r}, wanted {', '.join(sorted(OWN_COLUMNS))}"
            raise refused("invalid", sentence, field="columns")
        if not isinstance(value, kind):
            wanted = "an object" if kind is dict else "a text"
            raise refused("invalid", f"columns has {name} {shown(value)}, wanted {wanted}", field="columns")
    for name in columns.get("extra") or ():
        if name not in extra_columns:
            sentence = f"extra has {name[:100]!r}, wanted the run's extra_columns: {', '.join(extra_columns) or 'none'}"
            raise refused("invalid", sentence, field="columns")
    try:
        msgspec.json.decode(msgspec.json.encode(dict(columns)), strict=True)
    except (TypeError, UnicodeEncodeError, msgspec.DecodeError) as error:
        raise refused("invalid", f"columns hold a value that JSON can't: {one_line(error)}", field="columns") from None


def check_score(result: EpisodeResult) -> None:
    """Raise RefusedCallError for a reward that rows can't hold."""
    for name, value in {"reward": result.reward, **result.reward_components}.items():
        if value is not None and not abs(value) <= LARGEST_REWARD:
            raise refused("invalid", f"{name} is {value}, wanted a number up to {LARGEST_REWARD:g}", field=name)
    if len(result.reward_components) > _MOST_COMPONENTS or max(map(len, result.reward_components), default=0) > 1_000:
        sentence = f"reward_components may have {_MOST_COMPONENTS:,} names of up to 1,000 characters"
        raise refused("invalid", sentence, field="reward_components")


def _score(result: EpisodeResult) -> dict[str, Any]:
    return {
        "reward": result.reward,
        "reward_components": mask_values(dict(result.reward_components)),
        "correct": result.correct,
        "scored_call_id": result.scored_call_id,
        "scored_at": datetime.now(UTC).isoformat(timespec="microseconds"),
    }


def _end(result: EpisodeResult) -> dict[str, Any]:
    """Return the fields of a claim that seal it; without a reward the score that was posted stays."""
    values = {} if result.reward is None else _score(result)
    last_output = None if result.last_output is None else mask(storable(result.last_output))
    agent = {"exit_code": result.exit_code, "last_output": last_output}
    return {
        **values,
        "end": result.outcome,
        "error": None if result.error is None else storable(result.error),
        "agent": {name: value for name, value in agent.items() if value is not None},
    }


def _sealed(name: Name, why: str) -> Exception:
    return refused("sealed", f"attempt {name[1]} of episode {name[0]!r} {why}; open another attempt or episode")
