"""Combine several vLLM servers: choose the server of each request, and keep all servers at the wanted weights.

Each server has a task that brings it to the wanted weights after new weights, a restart or a failed load. A server gets
requests only while its label names the wanted version, or a newer one of the same run. A missing or unusable answer is
not stored, and its request is sent again; while no server is ready, requests wait. A request goes to the server with
the longest prefix of it in its cache, or to the one with the fewest requests if the former is clearly busier. Raises
NoServerError, ConfigError, ModelError or EngineError if no server can serve the requests.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from xxhash import xxh3_64_intdigest

from ludic.engines.engine import Completion, GenerationRequest, why_no_answer
from ludic.engines.server_http import (
    SERVE_NAME,
    BadAnswerError,
    LabelSpan,
    RefusedError,
    Server,
    ServerCompletion,
    UnreachableError,
)
from ludic.engines.server_loading import HALF_LOADED, ServerFacts, Wanted, inspect, is_claim, load, weights_of
from ludic.engines.vllm_options import to_completion, to_experts, to_vllm_params
from ludic.errors import ConfigError, LudicError, ModelError, NoServerError
from ludic.records import Routing, WeightSpan, array_columns

logger = logging.getLogger(__name__)

_POLL_EVERY_S = 2.0
_POLL_AGAIN_S = 0.5
"""Seconds between two checks of a server that gets no requests."""
_LOAD_AGAIN_S = 10.0
"""Seconds after which a load that failed is tried again."""
_PATIENCE_S = 20.0
"""Seconds within which a server must hold the wanted weights, unless it is loading them."""
_ABANDONED_S = 15.0
"""Seconds after which an unchanged claim, or an unclaimed pause, is investigated."""
_MOST_ATTEMPTS = 8
"""Maximum number of unusable answers before a request fails."""
_MORE, _TIMES = 16, 1.5
"""The server with a request's prefix gets the request unless it exceeds the server with the fewest requests by this
number and by this factor. SGLang's router uses the same rule with 64 and 1.5; batches here are smaller."""
_EXTRA_SHARE = 1 / 16
"""Requests above max_batch, as a share of it, that a server gets if it has their prefix and another server has room.
Without it, when all batches are full, a request would go to any server that has just finished one."""


class _NanError(BadAnswerError):
    """A server reports that its weights give NaN; if true, all further answers will, too."""


@dataclass(slots=True, eq=False)
class _Member:
    """One server of the pool."""

    server: Server
    facts: ServerFacts | None = None
    """Facts of the server; None before its inspection, and after it did not answer, since it may have been restarted
    with other flags."""
    is_ready: bool = False
    must_load: bool = False
    """Load in any case: the wanted version is not newer than the previous one."""
    error: LudicError | None = None
    """Reason why it gets no requests; reset when it does, and when other weights are wanted."""
    said: str | None = None
    """The last warning about it."""
    seen: tuple[str, bool, float] = ("", False, 0.0)
    """Its last label, whether it was paused, and when both were first seen (monotonic, in seconds)."""
    calls: set[asyncio.Task] = field(default_factory=set)
    """Requests in progress on it."""
    prefixes: "Prefixes" = field(default_factory=lambda: Prefixes())
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ServerPool:
    """Samples on several servers. Belongs to one event loop; `want` comes first."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        vocab_size: int,
        max_length: int,
        check_served: Callable[[int, str], None] = lambda max_model_len, where: None,
        eos_token_ids: Sequence[int],
        max_batch: int = 256,
        loads_all: bool = False,
        routing: Routing | None = None,
    ) -> None:
        """vocab_size, max_length, eos_token_ids: of the model. check_served: raises ConfigError, which begins with
        `where`, for a max_model_len of a server. max_batch: requests that a server has at a time, apart from a few more
        whose prefix it has.

        loads_all: load servers of `ludic serve` too. routing: of the model, for requests that ask for experts.
        """
        self._routing, self._check_served = routing, check_served
        self.max_length = max_length
        """Maximum tokens of prompt and completion; fixed when the first server is ready."""
        self.version = "unknown"
        """Version of vLLM on the server inspected last."""
        self._vocab_size, self._eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._max_batch, self._loads_all = max_batch, loads_all
        self._members = [_Member(server) for server in servers]
        self._keepers: list[asyncio.Task] = []
        self._wanted: Wanted | None = None
        self._wanted_since = 0.0
        self._is_started = False
        self._changed = asyncio.Event()
        """Event that is set, and replaced, whenever a server becomes ready or has an error."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """One for each request that waits for a server, in order."""

    async def want(self, wanted: Wanted) -> None:
        """Bring all servers to these weights; returns once one of them holds them, or newer ones of the same run.

        Raises NoServerError if no server answers for some time, ConfigError or ModelError if none can have them, and
        then returns to the previous weights.
        """
        before = self._wanted
        self._set_wanted(wanted)
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(member)) for member in self._members]
        try:
            await self._one_ready()
            self._is_started = True
        except BaseException:
            if before is not None:
                self._set_wanted(before, goes_back=False)
            raise

    def _set_wanted(self, wanted: Wanted, *, goes_back: bool | None = None) -> None:
        if goes_back is None:
            goes_back = self._wanted is not None and wanted.weights.version <= self._wanted.weights.version
        self._wanted, self._wanted_since = wanted, time.monotonic()
        for member in self._members:
            member.is_ready, member.must_load, member.error = False, goes_back, None
            member.wake.set()

    async def _one_ready(self) -> None:
        since = time.monotonic()
        while not any(member.is_ready for member in self._members):
            errors = [member.error for member in self._members if member.error is not None]
            lasting = [error for error in errors if not isinstance(error, NoServerError)]
            if len(errors) == len(self._members) and (lasting or time.monotonic() - since > _PATIENCE_S):
                raise (lasting or errors)[0]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)

    async def sample(self, request: GenerationRequest) -> Completion:
        """Return a completion; see ludic.engines.engine.Engine.

        Raises EngineError if answers can't be used, ModelError if they show that the weights give NaN.
        """
        try:
            return await self._sample_again(request)
        except _NanError as error:
            raise ModelError(str(error)) from error

    async def _sample_again(self, request: GenerationRequest) -> Completion:
        params = to_vllm_params(request, self._eos_token_ids, self._vocab_size)
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(BadAnswerError),
            wait=wait_random_exponential(max=5.0),
            stop=stop_after_attempt(_MOST_ATTEMPTS),
            reraise=True,
        ):
            with attempt:
                return await self._sample_anywhere(request, params)
        raise AssertionError("the last attempt returns or raises")

    async def _sample_anywhere(self, request: GenerationRequest, params: Mapping[str, Any]) -> Completion:
        while True:
            member = await self._next_server(request)
            assert member.facts is not None, "it is ready"
            salt = self._salt
            call = asyncio.create_task(self._sample_on(member.server, member.facts, request, params, salt))
            member.calls.add(call)
            try:
                completion = await call
                if len(self._members) > 1:  # the last token has no keys and values yet
                    member.prefixes.add(
                        hash_blocks(np.concatenate([request.prompt_tokens, completion.tokens[:-1]]), salt)
                    )
                return completion
            except UnreachableError as error:
                self._set_out(member, error)
            except RefusedError as error:
                raise ConfigError(str(error)) from error
            except BadAnswerError as error:
                self._set_out(member, error)
                raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not call.cancelled() or (task is not None and task.cancelling()):
                    raise
                # The server no longer answers: `_drop_calls`.
            finally:
                call.cancel()
                member.calls.discard(call)
                self._wake(1)

    async def _next_server(self, request: GenerationRequest) -> _Member:
        """Return the ready server that should get a request; wait for one with room."""
        while True:
            ready = [member for member in self._members if member.is_ready]
            if any(len(member.calls) < self._max_batch for member in ready):
                return ready[0] if len(self._members) == 1 else self._with_most_of(request, ready)
            gone = [member.error for member in self._members if isinstance(member.error, ModelError)]
            if len(gone) == len(self._members):
                raise gone[0]  # their weights are gone; a restarted worker uses newer ones
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(1)
                raise

    @property
    def _salt(self) -> str:
        """Prompts under other weights have other keys and values, and vLLM keeps those that a running request holds."""
        assert self._wanted is not None
        return self._wanted.weights.label

    def _with_most_of(self, request: GenerationRequest, ready: Sequence[_Member]) -> _Member:
        """Return the server with the longest prefix of a prompt, among those that are not clearly busier than another
        one.

        Among equal ones, return the one with the fewest requests, which has room if any has.
        """
        blocks = hash_blocks(request.prompt_tokens, self._salt)
        fewest = min(len(member.calls) for member in ready)
        most = min(max(fewest + _MORE, _TIMES * fewest), self._max_batch * (1 + _EXTRA_SHARE) - 1)
        found = max(
            (member for member in ready if len(member.calls) <= most),
            key=lambda member: (member.prefixes.count(blocks), -len(member.calls)),
        )
        found.prefixes.add(
            blocks
        )  # record it now, since the other requests of its group arrive before the first answer
        return found

    def _wake(self, count: int) -> None:
        """Let waiting requests choose a server again."""
        while count > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    async def _sample_on(
        self, server: Server, facts: ServerFacts, request: GenerationRequest, params: Mapping[str, Any], salt: str
    ) -> Completion:
        if facts.has_generate:
            answer = await server.generate(request, params, salt)
        else:
            before = await server.label()
            answer = await server.complete(request, params, salt, facts.model)
            answer.spans = _same_weights(server, before, await server.label(), len(answer.tokens))
        if (found := _why_no_candidates(answer)) is not None:
            raise _bad_answer(server, found)
        versions = self._versions(server, answer)
        experts = None
        if answer.experts is not None:
            assert self._routing is not None, "ServerEngine refuses such requests"
            experts = to_experts(answer.experts, self._routing)
        try:
            completion = to_completion(
                request,
                tokens=answer.tokens,
                logprobs=answer.logprobs,
                finish_reason=answer.finish_reason,
                weight_versions=versions,
                candidates=answer.candidates,
                experts=experts,
            )
        except OverflowError as error:
            raise _bad_answer(server, f"a number that is not a token id ({error})") from error
        except ModelError as error:
            raise _NanError(f"{server.name}: {error}") from error
        if (found := why_no_answer(request, completion, self._vocab_size)) is not None:
            raise _bad_answer(server, found)
        return completion

    def _versions(self, server: Server, answer: ServerCompletion) -> list[WeightSpan]:
        assert self._wanted is not None
        spans: list[WeightSpan] = []
        for span in answer.spans or ():
            weights = weights_of(span.version)
            if weights is None or weights.run != self._wanted.weights.run:
                raise BadAnswerError(
                    f"{server.name} sampled with weights {span.version!r}, which are not of this run; if another run "
                    "uses this server, give each run servers of its own"
                )
            if spans and spans[-1].version == weights.version:
                spans[-1] = WeightSpan(version=weights.version, start=spans[-1].start, end=span.end)
            else:
                spans.append(WeightSpan(version=weights.version, start=span.start, end=span.end))
        if not spans:
            raise BadAnswerError(f"{server.name} does not say which weights it sampled with")
        return spans

    async def _keep(self, member: _Member) -> None:
        """Manage a server until the pool is closed."""
        while True:
            member.wake.clear()
            try:
                await self._look_after(member)
            except LudicError as error:
                self._set_out(member, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(member.wake.wait(), _pause_s(member))

    async def _look_after(self, member: _Member) -> None:
        server, wanted = member.server, self._wanted
        assert wanted is not None
        try:
            await server.check_health()
        except NoServerError:
            _drop_calls(member)
            raise
        label = await server.label()
        # For a known server, a pause matters only to requests.
        is_paused = (member.facts is None or len(member.calls) > 0) and await server.is_paused()
        if member.facts is None and not is_paused:
            await self._inspect(member)
        is_abandoned = self._is_abandoned(member, label, is_paused)
        if is_abandoned and not is_claim(label):  # the worker that paused it has died before the resume
            label = HALF_LOADED
            await server.set_label(label)
        if member.must_load or not wanted.is_met_by(label) or is_abandoned:
            member.is_ready = False
            member.prefixes.clear()  # the server has them under another salt, or was restarted
            await self._bring(member, wanted, label)
        if member.facts is None:
            if await server.is_paused():
                raise NoServerError(f"{server.name} is paused, perhaps while another worker loads weights")
            await self._inspect(member)
        if wanted is self._wanted and not member.must_load:
            self._set_ready(member)

    async def _inspect(self, member: _Member) -> None:
        facts = await inspect(member.server, vocab_size=self._vocab_size)
        length = self.max_length
        if facts.max_length is not None:
            length = facts.max_length
            self._check_served(length, f"{member.server.name} has")
        if length < self.max_length and self._is_started:
            raise ConfigError(
                f"{member.server.name} takes {length} tokens, the servers before took {self.max_length}; start it with "
                f"--max-model-len {self.max_length}"
            )
        self.max_length = min(length, self.max_length)
        member.facts, self.version = facts, facts.version

    async def _bring(self, member: _Member, wanted: Wanted, label: str) -> None:
        """Load the wanted weights, or wait for them. Raises NoServerError if a server does not load them itself."""
        model = member.facts.model if member.facts else (await member.server.model()).id
        loads_itself = model == SERVE_NAME
        if not loads_itself or self._loads_all:
            await load(member.server, wanted, is_forced=member.must_load)
            if wanted is self._wanted:
                member.must_load = False
            return
        since = time.monotonic()
        while not wanted.is_met_by(label):
            if time.monotonic() - max(since, self._wanted_since) > _PATIENCE_S:
                raise NoServerError(
                    f"{member.server.name} holds weights {label!r}, wanted {wanted.weights.label!r} or newer; does its "
                    "`ludic serve` run, for this root?"
                )
            if wanted is not self._wanted:
                return
            await asyncio.sleep(0.1)
            label = await member.server.label()
        member.must_load = False

    def _is_abandoned(self, member: _Member, label: str, is_paused: bool) -> bool:
        """Return whether the server has been paused, or claimed, for some time without a change of its label."""
        if member.seen[:2] != (label, is_paused):
            member.seen = label, is_paused, time.monotonic()
        return (is_paused or is_claim(label)) and time.monotonic() - member.seen[2] > _ABANDONED_S

    def _set_ready(self, member: _Member) -> None:
        if member.error is not None or member.said is not None:
            logger.warning("%s gets requests again", member.server.name)
        member.is_ready, member.error, member.said = True, None, None
        self._notify()

    def _set_out(self, member: _Member, error: LudicError) -> None:
        member.is_ready, member.error = False, error
        member.facts = None
        member.prefixes.clear()
        if str(error) != member.said:
            member.said = str(error)
            others = any(other.is_ready for other in self._members)
            logger.warning("%s; its requests %s", error, "go to the other servers" if others else "wait for a server")
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._wake(len(self._waiting) if any(member.error for member in self._members) else self._max_batch)

    async def close(self) -> None:
        for task in [*self._keepers, *(call for member in self._members for call in member.calls)]:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)


def _pause_s(member: _Member) -> float:
    """Return the seconds until the next check of a server."""
    if isinstance(member.error, ModelError):
        return _LOAD_AGAIN_S
    return _POLL_EVERY_S if member.is_ready else _POLL_AGAIN_S


def _drop_calls(member: _Member) -> None:
    """Cancel the requests of a server that does not answer, so that they are sent to others."""
    for call in member.calls:
        call.cancel()


def _same_weights(server: Server, before: str, after: str, length: int) -> list[LabelSpan]:
    """Return one span, if the weights did not change. Labels that differ only in a claim name the same weights."""
    if weights_of(before) != weights_of(after):
        raise BadAnswerError(
            f"{server.name} changed its weights within a completion, and does not say at which token; start it with "
            "--enable-scale-out, and it does"
        )
    return [LabelSpan(before, 0, length)]


def _bad_answer(server: Server, found: str) -> BadAnswerError:
    return BadAnswerError(f"an answer of {server.name} can't be used: {found}; is it a server of another model?")


def _why_no_candidates(answer: ServerCompletion) -> str | None:
    """Return the problem with the most likely tokens that a server reports; None if there is none."""
    highest = array_columns()["response_logprobs"].highest or 0.0
    found = max((logprob for _, logprobs in answer.candidates or () for logprob in logprobs), default=0.0)
    return f"logprob {found:g} of a kept token, wanted at most 0" if found > highest else None


# --- Prefixes of prompts in a server's cache -------------------------------------------------------------
# Prefixes of prompts in a server's cache, as far as a worker knows. Pure.
#
# vLLM keeps the keys and values of whole blocks of tokens. It names a block by a hash over its tokens, the hash of the
# block before it, and, in the first block, the salt of the request. A worker does the same with what it sends to each
# server, so the next turn of an episode and the other rollouts of a group go to the server that has computed their
# beginning. A wrong guess only costs time: vLLM itself decides what it uses from its cache.

_BLOCK = 16
"""Tokens of a block; vLLM's own size on GPUs."""
_MOST_BLOCKS = 1 << 16
"""Blocks of a server that are remembered: a million tokens, in some 10 MB. A large GPU holds about as many."""


class Prefixes:
    """The blocks that were sent to one server or came from it, at most _MOST_BLOCKS; those used last are kept."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int]) -> None:
        """Remember blocks, from `hash_blocks`."""
        for block in reversed(blocks):  # so that the last block of a sequence is forgotten first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def count(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks, from the first one on, the server has."""
        return next((index for index, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def clear(self) -> None:
        """Forget all blocks, like a restarted server."""
        self._blocks.clear()


def hash_blocks(tokens: np.ndarray, salt: str) -> list[int]:
    """Return a hash of each whole block of tokens, which depends on all tokens up to its end.

    tokens: (length,) int32. salt: names the weights, so that no block is found again under others.
    """
    data, hashes, last = np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), [], xxh3_64_intdigest(salt.encode())
    size = _BLOCK * np.dtype(np.int32).itemsize
    for end in range(size, len(data) + 1, size):
        last = xxh3_64_intdigest(data[end - size : end], seed=last)
        hashes.append(last)
    return hashes
