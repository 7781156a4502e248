"""Keep the calls of one episode in memory: which call a request repeats, replays of a stored run, what a call extends.

A retry gets the answer of the call that it repeats. In a replay, an agent that was started again gets the stored
answers of its earlier run, as long as it asks what it asked then. Pure; no I/O, and no clock. Raises RefusedCallError.
"""

import asyncio
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from ludic.gateway.calls import Answer, Caller, CallRequest, Delivery, StoredCall, refused
from ludic.gateway.dialects import continued
from ludic.gateway.episodes import CallCounts
from ludic.records import Message, Row, new_id


@dataclass(slots=True, kw_only=True, eq=False)
class HeldCall:
    """A call of an episode."""

    request_digest: str
    idempotency_key: str | None = None
    call_id: str = field(default_factory=new_id)
    number: int = 0
    """Calls of the episode before it, from 0; the call's seed follows from it. A call that repeats one without an
    answer has its number."""
    retry_count: int = 0
    """Highest retry count of the requests that it answers."""
    retry_of: str | None = None
    """call_id of the failed or unfinished call that it repeats, or of an equal one whose answer may be lost."""
    state: Literal["running", "unstored", "stored", "failed", "unfinished"] = "running"
    """unstored: it was sampled, and its row could not be stored yet. unfinished: its intent was stored by a life of the
    gateway that has ended."""
    work: asyncio.Task[Answer] | None = None
    """Samples and stores it; None for a call of an earlier life."""
    deliveries: list[Delivery] = field(default_factory=list)
    """Of the requests that it answers; none of a call of an earlier life that nobody asked for again."""
    is_masked: bool = False
    """Whether a secret is masked in what is stored of its answer, so that it can't be given again."""
    answer: Answer | None = None
    stored: StoredCall | None = None
    """Both once it is stored."""
    base: tuple[str, int] | None = None
    """call_id of the call that begins as its prompt does, and in how many tokens."""
    row: Mapping[str, Any] | None = None
    """Its row while it is unstored."""

    @property
    def was_answered(self) -> bool:
        """Whether a client got its answer; a retry then more likely repeats another one."""
        return any(each.state == "sent" for each in self.deliveries)

    async def is_answer_lost(self) -> bool:
        """Return whether no client got its answer, nor waits for it; also if only an earlier life knew."""
        return not self.was_answered and all([await each.is_lost() for each in self.deliveries])


class EpisodeCalls:
    """The calls of one episode."""

    def __init__(
        self, found: Sequence[HeldCall] = (), *, is_replay: bool = False, rows: "list[Row] | None" = None
    ) -> None:
        """found: calls of earlier lives, in the order of their arrival. is_replay: the agent was started again, too.

        rows: gets the rows of calls that were answered or failed; None keeps none.
        """
        self.rows = rows
        self.last_answer: Message | None = None
        """The answer that came last."""
        self.counts = CallCounts()
        self.left_behind: tuple[str, ...] = ()
        """call_ids of stored calls that a replay did not reach."""
        self._next = 0
        self._by_digest: dict[str, list[HeldCall]] = {}
        self._by_key: dict[str, HeldCall] = {}
        self._by_id: dict[str, HeldCall] = {}
        self._stored: list[HeldCall] = []
        self._tool_call_ids: set[str] = set()
        self._tokens = _SharedTokens()
        self._to_replay: list[HeldCall] = []
        _number(found)
        if is_replay:
            self._to_replay = [*found]
        else:
            self._next = max((call.number + 1 for call in found), default=0)
            for call in found:
                self._add(call)
                if call.state == "stored":
                    self._show(call)

    @property
    def running(self) -> list[asyncio.Task[Answer]]:
        """Tasks of the calls that are sampled or stored now."""
        return [call.work for call in self._by_id.values() if call.work is not None and not call.work.done()]

    @property
    def earlier(self) -> list[StoredCall]:
        """The stored calls that a new one may extend, in the order of their arrival."""
        return [call.stored for call in self._stored if call.stored is not None]

    def has(self, call_id: str) -> bool:
        """Return whether a call was answered in this episode."""
        return call_id in self._by_id and self._by_id[call_id].state == "stored"

    @property
    def is_replaying(self) -> bool:
        """Whether stored calls of the agent's earlier run are left."""
        return bool(self._to_replay)

    def find(self, caller: Caller) -> HeldCall | None:
        """Return the call that a request repeats; None if it is a new one.

        Without an Idempotency-Key, only a retry count tells a retry from a second call with the same body. Raises
        RefusedCallError if the same key came with another body.
        """
        if caller.idempotency_key is not None:
            call = self._by_key.get(caller.idempotency_key)
            if call is not None and call.request_digest != caller.request_digest:
                raise refused("invalid", "this Idempotency-Key came with another body before; use a new key for a call")
            if call is not None:
                return call
        if caller.retry_count:
            same = (each for each in self._by_digest.get(caller.request_digest, ()))
            repeated = [each for each in same if each.retry_count < caller.retry_count]
            if repeated:
                call = min(repeated, key=lambda each: (each.was_answered, each.number))
                call.retry_count = caller.retry_count
                return call
        return None

    def replay(self, caller: Caller) -> HeldCall | None:
        """Return the stored call of the agent's earlier run that a request repeats, which it then belongs to; None
        outside a replay, or if no call had this request.

        Calls that were sampled at the same time may come in another order. A request that the earlier run did not make
        ends the replay: the calls that are left are `left_behind`. One that it made and got no answer to, or one that
        `is_masked`, is sampled.
        """
        same = [call for call in self._to_replay if call.request_digest == caller.request_digest]
        if not same:
            self.end_replay()
            return None
        call = next((each for each in same if each.state == "stored"), same[0])
        self._to_replay.remove(call)
        if call.is_masked:
            self.left_behind += (call.call_id,)
        self._next = max(self._next, call.number + 1)
        call.idempotency_key = caller.idempotency_key
        self._add(call)
        if call.state == "stored" and call.answer is not None and not call.is_masked:
            self.last_answer = call.answer.message
            self._show(call)
            self.counts = replace(
                self.counts,
                num_replayed_calls=self.counts.num_replayed_calls + 1,
                replayed_tokens=self.counts.replayed_tokens + call.answer.completion_length,
            )
        return call

    def end_replay(self) -> None:
        """Leave behind what the agent did not ask for again."""
        self.left_behind += tuple(call.call_id for call in self._to_replay)
        self._to_replay = []

    def begin(self, caller: Caller, repeats: HeldCall | None) -> HeldCall:
        """Add a call that is sampled now. repeats: the failed or unfinished call that it repeats."""
        call = HeldCall(
            request_digest=caller.request_digest,
            idempotency_key=caller.idempotency_key,
            retry_count=caller.retry_count or 0,
            number=self._next if repeats is None else repeats.number,
            retry_of=None if repeats is None else repeats.call_id,
        )
        self._next = max(self._next, call.number + 1)
        if repeats is not None:
            self._by_digest[repeats.request_digest].remove(repeats)
            self._by_id.pop(repeats.call_id, None)
        self._add(call)
        return call

    async def maybe_repeated(self, call: HeldCall, caller: Caller) -> str | None:
        """Return the call_id of an earlier call with an equal request whose answer is lost; None if there is none.

        Several requests in a chain name the first. A client that counts no retry asks for another answer, whatever
        became of those before. Ask when the call is sampled: a client that gives up may hang up after it asked again.
        """
        if caller.retry_count == 0 or call.retry_of is not None:
            return call.retry_of
        for each in self._by_digest[call.request_digest]:
            if each is call:
                break
            is_sampled = each.state in ("running", "unstored", "stored")
            if is_sampled and each.idempotency_key == call.idempotency_key and await each.is_answer_lost():
                first = self._by_id.get(each.retry_of or "")
                return each.call_id if first is None or first.state in _UNANSWERED else first.call_id
        return None

    def finish(self, call: HeldCall, stored: StoredCall, answer: Answer, base: tuple[str, int] | None) -> None:
        """Keep a call that was sampled, once it is stored."""
        row, call.row = call.row, None
        call.stored, call.answer, call.base, call.state = stored, answer, base, "stored"
        self.last_answer = answer.message
        self._show(call)
        if self.rows is not None and row is not None:
            # With the shared tokens, so that a conversation of n turns takes linear memory.
            self.rows.append({**row, "prompt_tokens": call.stored.prompt_tokens})
        self.counts = replace(
            self.counts,
            num_calls=self.counts.num_calls + 1,
            sampled_tokens=self.counts.sampled_tokens + answer.completion_length,
        )

    def with_earlier(self, request: CallRequest) -> CallRequest:
        """Return a request with the messages and the answer of the call that it names before its own messages.

        Its `instructions` replace those of that call. Raises RefusedCallError if the episode has no such call.
        """
        if request.previous_id is None:
            return request
        call = self._by_id.get(request.previous_id)
        if call is None or call.stored is None or call.state != "stored":
            sentence = f"previous_response_id {request.previous_id!r} is no stored response of this episode"
            raise refused("not_found", sentence, field="previous_response_id")
        return continued(request, call.stored)

    def with_unique_ids(self, call: HeldCall, message: Message) -> Message:
        """Return an answer whose tool calls have ids that no other call of the episode has, and reserve them."""
        if not message.tool_calls:
            return message
        calls = []
        for index, each in enumerate(message.tool_calls):
            name, count = each.id, 0
            while not name or name in self._tool_call_ids:
                # Nine letters and digits, as Mistral's templates want them.
                digest = blake2b(f"{call.number}/{index}/{count}".encode(), digest_size=4)
                name, count = f"c{digest.hexdigest()}", count + 1
            self._tool_call_ids.add(name)
            calls.append(replace(each, id=name))
        return replace(message, tool_calls=tuple(calls))

    def _add(self, call: HeldCall) -> None:
        self._by_id[call.call_id] = call
        self._by_digest.setdefault(call.request_digest, []).append(call)
        if call.idempotency_key is not None:
            self._by_key[call.idempotency_key] = call

    def _show(self, call: HeldCall) -> None:
        """Let later calls extend a stored call."""
        assert call.stored is not None
        self._tool_call_ids.update(each.id for each in call.stored.answer.tool_calls)
        if call.stored.prompt_tokens is not None:
            base = None if call.base is None else self._by_id.get(call.base[0])
            of_base = None if base is None or base.stored is None else base.stored.prompt_tokens
            is_beginning = call.base is not None and of_base is not None and call.base[1] >= len(of_base)
            shared = self._tokens.keep(call.stored.prompt_tokens, of_base if is_beginning else None)
            call.stored = replace(call.stored, prompt_tokens=shared)
        insort(self._stored, call, key=lambda each: each.number)


_UNANSWERED = ("failed", "unfinished")


def _number(calls: Sequence[HeldCall]) -> None:
    """Number the calls of earlier lives; one that repeats a call without an answer has the number of that."""
    numbers: dict[str, int] = {}
    unanswered: set[str] = set()
    count = 0
    for call in calls:
        if call.retry_of in unanswered:
            call.number = numbers[call.retry_of]
        else:
            call.number, count = count, count + 1
        numbers[call.call_id] = call.number
        if call.state in _UNANSWERED:
            unanswered.add(call.call_id)


class _SharedTokens:
    """Holds growing prompts in shared arrays: those of a conversation of n turns take linear memory."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        """Tokens in use at the beginning of each array, by its id; the views keep the arrays alive."""

    def keep(self, tokens: np.ndarray, base: np.ndarray | None) -> np.ndarray:
        """Return a view of equal tokens, (n,) int32. base: a kept prompt that is their beginning."""
        owner = None if base is None else base.base
        if base is None or owner is None or self._used[id(owner)] != len(base) or len(tokens) > len(owner):
            owner = np.empty(2 * len(tokens), np.int32)
            owner[: len(tokens)] = tokens
        else:
            owner[len(base) : len(tokens)] = tokens[len(base) :]
        self._used[id(owner)] = len(tokens)
        view = owner[: len(tokens)]
        view.flags.writeable = False
        return view
