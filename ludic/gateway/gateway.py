"""Answer the model calls of agents, each after it is stored.

Writes calls/ and prompts/ (ludic.root.rows.calls). A call's intent is stored while it is sampled, and its answer leaves
when the call is stored. Raises RefusedCallError for what a client did, and for what it can try again; a failed call is
stored, too.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from ludic.agents import derive_seed
from ludic.engines import SamplingParams
from ludic.errors import FencedError, InvalidBatchError, LudicError, StoreError, one_line
from ludic.gateway.call_rows import (
    Work,
    base_of,
    call_row,
    calls_table,
    failed_row,
    intent_row,
    sampled_answer,
    stored_call,
    without_messages,
)
from ludic.gateway.calls import Answer, Backend, Caller, CallRequest, Delivery, RefusedCallError, refused
from ludic.gateway.config import GatewaySettings
from ludic.gateway.episode_calls import EpisodeCalls, HeldCall
from ludic.gateway.episodes import CallCounts, EpisodeFacts, EpisodeResult, OpenEpisode
from ludic.gateway.held_episodes import RETRY_S, Held, HeldEpisodes, check_score
from ludic.gateway.root_assembly import post_score
from ludic.records import Message
from ludic.root import Life, Root
from ludic.root.rows import CallLog
from ludic.settings import in_thread

logger = logging.getLogger(__name__)

_CALL_ID_LENGTH = 36
"""Characters of a uuid, with which the ids of responses end."""


class Gateway:
    """Answers the calls of the episodes that one life of a gateway holds.

    All coroutines run in one event loop. A call goes on if its waiter is cancelled, and is stored.
    """

    def __init__(
        self,
        root: Root,
        life: Life,
        backend: Backend,
        settings: GatewaySettings,
        sampling: SamplingParams,
        *,
        keeps_rows: bool = False,
        takes_scores: bool = True,
    ) -> None:
        """life: of ludic.root.gateways.held_life. sampling: settings of the run, which clients can only shorten.

        keeps_rows: keep the rows of an episode's calls in memory until `calls_of` returns them. takes_scores: whether
        an agent may score its episode.
        """
        self.root, self.life, self.backend, self.settings, self.sampling = root, life, backend, settings, sampling
        self._takes_scores = takes_scores
        self.engine_error: LudicError | None = None
        """The last error of the engine; it may need a new start."""
        self._log = CallLog(root, life)
        self._episodes = HeldEpisodes(
            root,
            life,
            settings.max_episodes,
            settings.episode_timeout_s,
            drain_timeout_s=settings.drain_timeout_s,
            keeps_rows=keeps_rows,
        )
        self._working: set[asyncio.Task[Answer]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._is_stopping = False

    @property
    def num_in_flight(self) -> int:
        """Calls that are being sampled or stored."""
        return len(self._working)

    @property
    def num_open(self) -> int:
        """Open episodes."""
        return self._episodes.num_open

    # --- Episodes ---

    async def start(self) -> None:
        """Begin to take over the episodes of lives that have ended, and to seal episodes that expire.

        Claims are read in the background, and the calls of an episode when its first call comes.
        """
        self._background.append(asyncio.create_task(self._episodes.watch()))

    async def open_episode(
        self,
        *,
        episode_id: str | None = None,
        attempt: int = 1,
        seed: int | None = None,
        facts: EpisodeFacts | None = None,
        timeout_s: float | None = None,
        replay: bool = False,
    ) -> OpenEpisode:
        """Claim an attempt at an episode and return it, with its key.

        episode_id: None makes one. seed: None derives one from the id. timeout_s: seconds until it expires; None is the
        settings'. replay: if the attempt is stored, open and of this gateway or of a life that has ended, take it over,
        with a new key: calls whose requests are equal to stored ones, from the first on, are answered with the stored
        answers, and not sampled. The first other request ends the replay.

        Raises RefusedCallError: invalid for a bad id or attempt, or one that is open already; sealed; elsewhere for one
        that a live gateway holds; full; stopping.
        """
        self._check_running()
        return await self._episodes.open(episode_id, attempt, seed, facts or EpisodeFacts(), timeout_s, replay=replay)

    async def find(self, key: str | None, episode_id: str | None = None, attempt: int | None = None) -> OpenEpisode:
        """Return the open episode of a key, or of an id and attempt.

        key: of the episode; None if the caller has proven otherwise that it may use every episode, by the gateway's own
        key. episode_id, attempt: from the URL; None takes the key's. A key of another episode than the URL's is wrong.

        Raises RefusedCallError: wrong_key, not_found, sealed (also if it has expired), elsewhere (with the owner's
        address), stopping.
        """
        return (await self._episodes.find(key, episode_id, attempt)).episode

    def counts(self, episode: OpenEpisode) -> CallCounts:
        """Return the calls and tokens of an episode in this life of the gateway."""
        return self._episodes.counts(episode)

    async def last_answer(self, episode: OpenEpisode) -> Message | None:
        """Return the answer of an open episode that came last; None before the first. Raises RefusedCallError."""
        return (await self._episodes.calls(await self._episodes.of(episode))).last_answer

    async def posted_score(self, episode: OpenEpisode) -> EpisodeResult | None:
        """Return the score of an open episode that was posted last; None if there is none. Raises RefusedCallError."""
        claim = (await self._episodes.of(episode)).claim
        if claim.scored_at is None:
            return None
        return EpisodeResult(
            reward=claim.reward,
            reward_components=claim.reward_components,
            correct=claim.correct,
            scored_call_id=claim.scored_call_id,
        )

    def calls_of(self, episode: OpenEpisode) -> pa.Table:
        """Return the calls of a sealed episode as they are stored, also those of earlier lives, without reading.

        Only of a gateway that keeps rows.
        """
        return calls_table(self.root.run_id, self.life.worker_id, episode.found_rows, episode.rows)

    def stored_calls(self, episode_id: str, attempt: int) -> pa.Table:
        """Return the stored calls of an attempt that an earlier life sealed; may be called from any thread.

        Each file of calls is looked through once for all episodes. Raises SchemaError, StoreError.
        """
        return self._episodes.earlier.read(episode_id, attempt)

    async def score(
        self,
        episode: OpenEpisode,
        *,
        reward: float | None,
        reward_components: Mapping[str, float] | None = None,
        correct: bool | None = None,
        scored_call_id: str | None = None,
    ) -> None:
        """Store the score of an open episode; the newest one counts. Raises RefusedCallError.

        scored_call_id: id of the response whose answer was scored, or of its call.
        """
        result = EpisodeResult(
            reward=reward,
            reward_components=reward_components or {},
            correct=correct,
            scored_call_id=scored_call_id and scored_call_id[-_CALL_ID_LENGTH:],
        )
        if not self._takes_scores:
            raise refused("invalid", "this run scores its episodes itself; --posted-scores takes scores of agents")
        held = await self._episodes.of(episode)
        call_id = result.scored_call_id
        if call_id is not None and not (await self._episodes.calls(held)).has(call_id):
            raise refused("not_found", f"the episode has no call {call_id!r}", field="scored_call_id")
        await self._episodes.score(held, result)

    async def score_sealed(self, episode_id: str, attempt: int, result: EpisodeResult) -> None:
        """Store the score of a sealed episode: in its rows if they are made later, else as a score of `posted`.

        Raises RefusedCallError as `post_score` does.
        """
        check_score(result)
        await in_thread(partial(post_score, self.life, episode_id, attempt, result))

    async def seal(
        self, episode: OpenEpisode, result: EpisodeResult | None = None, *, wait_s: float | None = None
    ) -> None:
        """End an episode, after the calls in flight; later calls are refused as sealed.

        wait_s: seconds after which the calls in flight fail, at least drain_timeout_s; None waits until it expires.
        result: None is complete, with the score that was posted; so is a reward of None. Sealing a sealed episode again
        does nothing.
        """
        await self._episodes.seal(episode, result or EpisodeResult(), wait_s)

    async def drain(self) -> None:
        """Refuse new calls as stopping, wait for those in flight, at most drain_timeout_s, and stop all tasks.

        Open episodes stay open, so that the next life takes them over.
        """
        self._is_stopping = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._working:
            _, left = await asyncio.wait(self._working, timeout=self.settings.drain_timeout_s)
            for call in left:
                call.cancel()
        self._episodes.close()
        await in_thread(self._log.close)

    # --- Calls ---

    async def call(
        self, episode: OpenEpisode, request: CallRequest, caller: Caller, delivery: Delivery | None = None
    ) -> Answer:
        """Store the call's intent, sample, store the call, and return its answer.

        delivery: of this request, which the caller ends once the answer is sent or lost; None: it is sent when this
        returns, and lost if this is cancelled.

        A retry gets the answer of the call that it repeats; if its stored answer is masked, it is sampled again. If the
        waiter is cancelled, such as by a client that disconnects, the call goes on. Raises RefusedCallError; a failed
        call is stored, too.
        """
        held = await self._episodes.of(episode)
        calls = await self._episodes.calls(held)
        held.check_open()
        call = calls.find(caller)
        if call is None and calls.is_replaying:
            call = calls.replay(caller)
        if call is None or call.state in ("failed", "unfinished") or call.is_masked:
            self._check_room()
            call = calls.begin(caller, call)
            call.work = self._start(self._sample(held, calls, call, request, caller))
        elif call.state == "unstored":
            call.work = self._start(self._store(calls, call))
        own = delivery or Delivery()
        call.deliveries.append(own)
        try:
            answer = await _result(call)
            self.life.check()
        except FencedError as error:
            own.end("lost")
            raise refused("stopping", one_line(error), retry_after_s=RETRY_S) from error
        except BaseException:
            own.end("lost")
            raise
        if delivery is None:
            own.end("sent")
        return self._with_logprobs(call, answer) if request.asks_logprobs and answer.token_texts is None else answer

    def _with_logprobs(self, call: HeldCall, answer: Answer) -> Answer:
        """Return the answer of a call of an earlier life with logprobs, if they were captured."""
        completion = None if call.stored is None else call.stored.completion
        if completion is None or "response_logprobs" not in completion.columns:
            return answer
        texts = self.backend.token_texts(completion)
        return answer if texts is None else replace(answer, token_texts=texts, token_logprobs=completion.logprobs)

    def _start(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        """Start a task that goes on without its waiters."""
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a waiter may be gone
        return task

    async def _sample(
        self, held: Held, calls: EpisodeCalls, call: HeldCall, request: CallRequest, caller: Caller
    ) -> Answer:
        """Sample and store a call."""
        seed, params = derive_seed(held.episode.seed, call.number), self._shortened(request)
        work = Work(episode=held.episode, call=call, request=request, caller=caller, params=params, seed=seed)
        with suppress(Exception):  # the call's row meets it again, and proves that there was a call
            # The log has it now; it acknowledges no later row before it.
            self._log.submit(intent_row(work)).add_done_callback(lambda task: task.cancelled() or task.exception())
        began = None
        try:
            await self._episodes.leave_behind(held)
            work.request = calls.with_earlier(request)
            work.prompt = await self.backend.prepare(work.request, calls.earlier)
            began = time.monotonic()
            sampled = await self.backend.sample(work.request, work.prompt, params, seed)
            engine_s = time.monotonic() - began
            work.prompt = sampled.prompt or work.prompt
            call.retry_of = await calls.maybe_repeated(call, caller)
            message, earlier = calls.with_unique_ids(call, sampled.message), calls.earlier
            call.row = call_row(work, self.backend, sampled, message, engine_s, earlier)
            call.stored = stored_call(work, sampled, message, earlier)
            call.answer = sampled_answer(work, call.row, sampled, message)
            return await self._store(calls, call)
        except (Exception, asyncio.CancelledError) as error:
            if call.state == "unstored" or (isinstance(error, asyncio.CancelledError) and not held.is_sealing):
                raise
            spent_s = None if began is None else time.monotonic() - began
            raise await self._failed(work, calls, error, spent_s) from error

    async def _store(self, calls: EpisodeCalls, call: HeldCall) -> Answer:
        """Store a call that was sampled. If that fails, its row is tried again, and a retry of the client waits for it.

        Readers count a row once that is stored twice.
        """
        assert call.row is not None
        assert call.stored is not None
        assert call.answer is not None
        try:
            await self._log.append(call.row)
        except (StoreError, FencedError) as error:
            call.state = "unstored"
            logger.warning("call %s waits to be stored: %s", call.call_id, error)
            sentence = "the call was sampled, and can't be stored now; try again"
            raise refused("stopping", sentence, retry_after_s=RETRY_S) from error
        calls.finish(call, call.stored, call.answer, base_of(call.row))
        return call.answer

    async def _failed(
        self, work: Work, calls: EpisodeCalls, error: BaseException, engine_s: float | None
    ) -> RefusedCallError:
        """Store a failed call, and return the error that its client gets."""
        refusal = self._refusal(error)
        work.call.state, work.call.row, work.call.stored = "failed", None, None
        row = failed_row(work, self.backend, refusal, engine_s, calls.earlier)
        if calls.rows is not None:
            calls.rows.append(without_messages(row))
        try:
            try:
                await self._log.append(without_messages(row) if isinstance(error, InvalidBatchError) else row)
            except InvalidBatchError:
                await self._log.append(without_messages(row))
        except LudicError as failure:
            logger.warning("the failure of call %s is not stored yet: %s", work.call.call_id, failure)
        return refusal

    def _refusal(self, error: BaseException) -> RefusedCallError:
        if isinstance(error, RefusedCallError):
            return error
        if isinstance(error, asyncio.CancelledError):
            return refused("sealed", "the episode ended before this call was answered")
        if isinstance(error, InvalidBatchError):
            return refused("invalid", f"the call can't be stored: {one_line(error)}")
        if isinstance(error, LudicError):
            self.engine_error = error
            logger.warning("the engine failed: %s", one_line(error))
            return refused("engine", f"the engine failed: {one_line(error)}")
        logger.error("a call failed", exc_info=error)
        return refused("engine", "the gateway failed; its log says why")

    def _shortened(self, request: CallRequest) -> SamplingParams:
        """Return the run's sampling settings, with the client's max_tokens if it is less."""
        if request.max_tokens is None or request.max_tokens >= self.sampling.max_tokens:
            return self.sampling
        return replace(self.sampling, max_tokens=request.max_tokens)

    def _check_running(self) -> None:
        if self._is_stopping:
            raise refused("stopping", "the gateway stops; try again later", retry_after_s=RETRY_S)

    def _check_room(self) -> None:
        self._check_running()
        if len(self._working) >= self.settings.max_in_flight:
            sentence = f"{len(self._working)} calls are in flight, the gateway's limit (--max-in-flight); try again"
            raise refused("full", sentence, retry_after_s=RETRY_S)


async def _result(call: HeldCall) -> Answer:
    """Return the answer of a call; wait for it if it is in flight, and leave it going if the waiter is cancelled."""
    if call.work is None or (call.work.done() and call.state == "stored"):
        assert call.answer is not None
        return call.answer
    try:
        return await asyncio.shield(call.work)
    except asyncio.CancelledError:
        if call.work.cancelled():
            raise refused(
                "stopping", "the gateway stopped before the answer; try again", retry_after_s=RETRY_S
            ) from None
        raise
