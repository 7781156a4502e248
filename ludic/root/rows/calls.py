"""Append the events of agents' model calls to calls/, and read them back whole.

CallLog writes calls/{worker_id}-{sequence}.parquet, and before them prompts/{sha256}.json, in threads. A call is stored
as its difference to the call that it extends: new prompt tokens, new messages; tools and system messages by digest.
`whole_prompts`, `whole_messages` and `whole_columns` put them together again. Raises StoreError for a write that
failed, which is tried again; InvalidBatchError for a bad row; SchemaError if stored calls do not fit together.
"""

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import mask_values
from ludic.errors import InvalidBatchError, SchemaError, StoreError
from ludic.records import (
    ArrayColumn,
    Columns,
    Message,
    Row,
    arrow_schema,
    check_schema,
    conform,
    load_table,
    plain_rows,
    reasons_against,
    reasons_of_row,
    to_arrow,
    values_of,
)
from ludic.root.catalogue import CALLS, EPISODES, PROMPTS, PromptName, SequenceName
from ludic.root.gateways import Life
from ludic.root.json_records import COMPACTED, EpisodeClaim
from ludic.root.root import Root
from ludic.root.rows.parquet import decode, encode_plain, plain_options
from ludic.root.rows.writer import commit

logger = logging.getLogger(__name__)

EVENTS = ("intent", "call", "failed")
PROMPT_TOKENS, TOOLS = "prompt_tokens", "tools"
"""Keys of an appended row beside the columns: the whole prompt, and the tools' schemas."""

_ARRAYS = {each.name: ArrayColumn.of(each) for each in load_table("calls").columns if "along" in each.catalogue}
_SAMPLED = tuple(name for name, column in _ARRAYS.items() if column.set_by == "sampler")
"""Columns that the table includes from rollouts: arrays that the sampler sets."""
_TOKENS = {
    name: replace(_ARRAYS["response_tokens"], name=name, is_nullable=True)
    for name in ("new_prompt_tokens", "response_tokens", "undelivered_tokens")
}
_MESSAGES = ("messages", "answer")
_TEXTS = (
    *(*_MESSAGES, "asked", "error", "path", "stop", "hints", "declared_parent", "user_agent", "model_asked"),
    "stop_sequence",
)
"""Columns with texts that come from a client or a model, in which secrets are masked."""

# --- Prompts --------------------------------------------------------------------------------------------------
# prompts/{sha256}.json: tools' schemas, or system messages, which an agent sends with each call.


def prompt_text(value: Any) -> bytes:
    """Return the JSON text of tools' schemas or system messages, with secrets masked."""
    return _prompt_of(msgspec.json.encode(value, enc_hook=dict))[0]


def prompt_digest(value: Any) -> str:
    """Return the digest under which a value is stored in prompts/: SHA-256 of its text, hexadecimal."""
    return _prompt_of(msgspec.json.encode(value, enc_hook=dict))[1]


@lru_cache(maxsize=256)
def _prompt_of(raw: bytes) -> tuple[bytes, str]:
    """Return the text of a prompt and its digest; an agent sends the same one with each call."""
    # In the order of the client: a chat template shows the keys so.
    text = json.dumps(mask_values(json.loads(raw)), separators=(",", ":")).encode()
    return text, hashlib.sha256(text).hexdigest()


def put_prompt(root: Root, value: Any) -> str:
    """Store tools' schemas or system messages once, and return their digest. value: JSON values, or messages."""
    return _put_prompt(root, prompt_text(value))


def _put_prompt(root: Root, text: bytes) -> str:
    digest = hashlib.sha256(text).hexdigest()
    commit(root, PROMPTS.name(PromptName(digest)), text)
    return digest


def read_prompt(root: Root, digest: str) -> Any:
    """Return a stored value, as JSON values. Raises SchemaError if it is missing or damaged."""
    name = PROMPTS.name(PromptName(digest))
    try:
        text = root.read(name)
    except FileNotFoundError:
        raise SchemaError(f"{root.url}/{name} is missing, which calls name") from None
    if hashlib.sha256(text).hexdigest() != digest:
        raise SchemaError(f"{root.url}/{name} does not match the digest in its name; put a sound copy in its place")
    return json.loads(text)


def _builtins(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=lambda each: each.item() if isinstance(each, np.generic) else dict(each))


# --- One row --------------------------------------------------------------------------------------------------


def check_row(row: Row) -> None:
    """Raise InvalidBatchError unless a row may be stored; see CallLog.append."""
    problems = list(_problems(row))
    if problems:
        raise InvalidBatchError(f"call {row.get('call_id')}: {'; '.join(problems)}; the row was not stored")


def _problems(row: Row) -> Iterable[str]:
    unknown = row.keys() - {*_FIELDS, PROMPT_TOKENS, TOOLS}
    assert not unknown, f"no such columns of calls: {unknown}"
    if row["event"] not in EVENTS:
        yield f"event is {row['event']!r}, wanted one of {', '.join(EVENTS)}"
    tokens = row.get("response_tokens")
    columns = {name: row[name] for name in _SAMPLED if row.get(name) is not None}
    if tokens is None:
        if columns:
            yield f"{', '.join(columns)} without response_tokens"
        return
    prompt = row.get(PROMPT_TOKENS)
    if prompt is None:
        yield "prompt_tokens is None, wanted the whole prompt, since response_tokens are given"
        return
    for name, reason in reasons_against({**columns, "response_tokens": tokens}, len(prompt), len(tokens)):
        yield f"{name} {reason}"
    for name, values in columns.items():
        for reason in reasons_of_row(_ARRAYS[name], values, tokens, None):
            yield f"{name} {reason}"
    if not 0 <= (row.get("base_length") or 0) <= len(prompt):
        yield f"base_length is {row['base_length']}, wanted 0 to {len(prompt)}, the length of the prompt"


def stored_rows(rows: Sequence[Row]) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return rows as they are stored, with secrets masked and without what their bases have, and texts for prompts/.

    The texts are by digest.
    """
    prompts: dict[str, bytes] = {}
    made = [_without_known(row, prompts) for row in rows]
    # Masked together, which takes a tenth of the time for many short texts.
    masked = mask_values([{name: row[name] for name in _TEXTS if row.get(name) is not None} for row in made])
    for row, texts, given in zip(made, masked, rows, strict=True):
        if texts.get("answer") != row.get("answer"):
            row["is_masked"] = True
        row |= texts
        if row["event"] == "call":
            row["call_digest"] = digest_of(row)
            if given.get(PROMPT_TOKENS) is not None and row.get("response_tokens") is not None:
                row["chain_digest"] = chain_digest_of(given[PROMPT_TOKENS], row["response_tokens"])
    return made, prompts


def _without_known(row: Row, prompts: dict[str, bytes]) -> dict[str, Any]:
    """Return a row without what its bases have, and add its tools and system messages to the prompts, by digest."""
    stored = {name: value for name, value in row.items() if name not in (PROMPT_TOKENS, TOOLS)}
    if row.get(TOOLS):
        stored["tools_digest"] = _add_prompt(row[TOOLS], prompts)
    if row.get("messages") is not None:
        messages, known = row["messages"], row.get("base_num_messages") or 0
        num_system = next((n for n, each in enumerate(messages) if each.role not in _SYSTEM), len(messages))
        if num_system:
            stored["system_digest"] = _add_prompt(messages[:num_system], prompts)
        stored["base_num_messages"] = known
        stored["messages"] = _builtins(messages[known or num_system :])
    if row.get("answer") is not None:
        stored["answer"] = _builtins([row["answer"]])
    if (prompt := row.get(PROMPT_TOKENS)) is not None:
        base_length = row.get("base_length") or 0
        stored |= {"base_length": base_length, "prompt_length": len(prompt), "new_prompt_tokens": prompt[base_length:]}
        for name in _SAMPLED:
            if stored.get(name) is not None and _ARRAYS[name].along == "read":
                stored[name] = stored[name][_num_read(base_length) :]
    return stored


def _add_prompt(value: Any, prompts: dict[str, bytes]) -> str:
    text, digest = _prompt_of(msgspec.json.encode(value, enc_hook=dict))
    prompts[digest] = text
    return digest


def _num_read(base_length: int) -> int:
    """Return how many values along the tokens read are those of the base: its last token may not have been read."""
    return max(0, base_length - 1)


_SYSTEM = ("system", "developer")


def digest_of(stored: Row) -> str:
    """Return the digest of what a stored row adds: SHA-256, hexadecimal. Columns that are null do not count.

    stored: with arrays as in Completion.columns, and messages as dictionaries.
    """
    found = hashlib.sha256()
    own = [stored.get(name) for name in _DIGESTED]
    messages = [[_without_nulls(each) for each in stored.get(name) or ()] for name in _MESSAGES]
    found.update(json.dumps([own, messages], sort_keys=True, separators=(",", ":")).encode())
    for name in (*_TOKENS, *sorted(_SAMPLED)):
        values = stored.get(name)
        if values is not None:
            found.update(f"\n{name} {list(np.shape(values))}".encode())
            array = values.values if hasattr(values, "bounds") else np.asarray(values, _dtype_of(name))
            found.update(np.ascontiguousarray(array).tobytes())
            if hasattr(values, "bounds"):
                found.update(values.bounds.astype(np.int64).tobytes())
    return found.hexdigest()


def digests_of(calls: pa.Table) -> list[str]:
    """Return the digest of each row of calls, as `digest_of` made it before the row was stored."""
    rows = plain_rows(calls.select([*_DIGESTED, *_MESSAGES]))
    for name in (*_TOKENS, *_SAMPLED):
        values = values_of(_TOKENS.get(name) or _ARRAYS[name], calls[name])
        for row, each in zip(rows, values, strict=True):
            row[name] = each
    return [digest_of(row) for row in rows]


_DIGESTED = (
    *("episode_id", "attempt", "call_id", "request_digest", "base_call_id", "base_length", "base_messages_call_id"),
    *("base_num_messages", "model", "capture", "system_digest", "tools_digest", "finish_reason", "stop_sequence"),
)


def _dtype_of(name: str) -> np.dtype:
    return (_TOKENS.get(name) or _ARRAYS[name]).dtype


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each not in (None, [], ())}
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value


def chain_digest_of(prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> str:
    """Return the digest of all tokens of a call: SHA-256 of prompt and completion as int32, hexadecimal."""
    found = hashlib.sha256(np.ascontiguousarray(prompt_tokens, np.int32).tobytes())
    found.update(np.ascontiguousarray(response_tokens, np.int32).tobytes())
    return found.hexdigest()


def chain_digests_of(calls: pa.Table) -> dict[str, str]:
    """Return the digest of the tokens of each call that has some, by call_id. Raises as `whole_prompts` does."""
    rows, prompts = _answered(calls), whole_prompts(calls)
    sampled = values_of(_TOKENS["response_tokens"], rows["response_tokens"])
    pairs = zip(rows["call_id"].to_pylist(), sampled, strict=True)
    return {
        call_id: chain_digest_of(prompts[call_id], each)
        for call_id, each in pairs
        if call_id in prompts and each is not None
    }


# --- Files ----------------------------------------------------------------------------------------------------


_FIELDS = {each.name: each for each in arrow_schema("calls")}


def to_calls_table(rows: Sequence[Row]) -> pa.Table:
    """Return stored rows (`stored_rows`) in exactly the schema of calls, built column by column."""
    columns = [_to_column(name, type_.type, [row.get(name) for row in rows]) for name, type_ in _FIELDS.items()]
    return pa.Table.from_arrays(columns, schema=arrow_schema("calls"))


def _to_column(name: str, type_: pa.DataType, values: list[Any]) -> pa.Array:
    if (array := _TOKENS.get(name) or _ARRAYS.get(name)) is not None:
        return to_arrow(array, values)
    if all(value is None for value in values):
        return pa.nulls(len(values), type_)
    if name == "weight_versions":
        values = _builtins(values)
    return pa.array(values, type_)


def encode_calls(rows: Sequence[Row]) -> bytes:
    """Return the bytes of a file of calls/. rows: as `stored_rows` returns them."""
    return encode_plain(to_calls_table(rows), **plain_options(CALLS.table))


# --- Appending ------------------------------------------------------------------------------------------------


MAX_WAIT_S = 0.1
"""Seconds after which a commit begins although others are under way."""
_REMOTE_WAIT_S = 0.02
"""The same on an object store, where a put takes some 50 ms and several may be under way."""
_INTENT_WAIT_S = 0.02
"""Seconds for which intents alone wait for other rows; an answer that is ready by then shares their file."""
_LOCAL_IN_FLIGHT, _REMOTE_IN_FLIGHT = 2, 8
_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0
MOST_WAITING_BYTES = 256 << 20
"""Bytes of unwritten files at which further rows are refused: the filesystem fails, or is slower than the calls."""
_CHECK_RUN_S = 5.0


@dataclass(slots=True)
class _Waiting:
    """Rows of one `append`, and the future that it awaits."""

    rows: Sequence[Row]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[None]"


@dataclass(slots=True)
class _File:
    """A file that was begun. It stays in the queue until it and all files before it are stored."""

    name: str
    data: bytes
    texts: Mapping[str, bytes]
    """Texts for prompts/, by digest."""
    waiting: list[_Waiting]
    is_stored: bool = False
    error: BaseException | None = None
    retry_at: float = 0.0
    retry_s: float = _RETRY_S
    is_busy: bool = field(default=True)


class CallLog:
    """Appends rows of calls under one life of a gateway. Close it, or use it in `async with`.

    Rows that wait are committed together: at once when no commit is under way, else once one has ended, or after
    MAX_WAIT_S. Intents alone, whose calls are still sampled, wait a little longer. Files are numbered without gaps, and
    a row is acknowledged only when the files before its own are stored, too. A file that failed stays in the queue and
    is tried again under its name.
    """

    def __init__(self, root: Root, life: Life) -> None:
        """Start the threads."""
        self._root, self._life = root, life
        num_threads = _LOCAL_IN_FLIGHT if root.is_local else _REMOTE_IN_FLIGHT
        self._wait_s = MAX_WAIT_S if root.is_local else _REMOTE_WAIT_S
        self._waiting: list[_Waiting] = []
        self._due_at = 0.0
        """time.monotonic() at which waiting rows are committed if no commit is under way."""
        self._late_at = 0.0
        """The same although some are."""
        self._num_encoding = 0
        self._files: deque[_File] = deque()
        self._sequence = 0
        self._unwritten_bytes = 0
        self._closed = False
        self._broken: BaseException | None = None
        self._known_prompts: set[str] = set()
        self._checked_run = 0.0
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"ludic-calls-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    async def append(self, *rows: Row) -> None:
        """Store rows, and return when they are stored and this life may still answer.

        A row has the columns of schemas/calls.v1.json by name; those left out are null. Instead of what the log derives
        (new_prompt_tokens, prompt_length, system_digest, tools_digest, the digests, run_id, worker_id, created_at) it
        has prompt_tokens, (prompt_length,) int32, the whole prompt; messages, all of the request as Message; answer,
        one Message; tools, their schemas; weight_versions, of WeightSpan; and arrays whole, as in Completion.columns.

        Raises InvalidBatchError for a bad row, before anything is stored; StoreError if the file could not be stored
        yet: it is tried again, so the rows may be stored later; FencedError if this life was lost.
        """
        await self.submit(*rows)
        self._life.check()

    def submit(self, *rows: Row) -> "asyncio.Future[None]":
        """Take rows, and return what ends when they are stored, as `append` does; rows of later calls are stored later.

        Raises InvalidBatchError for a bad row, and as a log that failed for good does.
        """
        for row in rows:
            check_row(row)
        created_at = datetime.now(UTC)
        stamped = [{"created_at": created_at, **row} for row in rows]
        loop = asyncio.get_running_loop()
        waiting = _Waiting(stamped, loop, loop.create_future())
        with self._changed:
            assert not self._closed, "append after close"
            if self._broken is not None:
                raise self._broken
            if self._unwritten_bytes > MOST_WAITING_BYTES:
                raise StoreError(
                    f"{self._root.url}: {self._unwritten_bytes:,} bytes of calls could not be stored yet; no further "
                    "call is accepted until they are"
                )
            now = time.monotonic()
            due_at = now + (_INTENT_WAIT_S if all(row["event"] == "intent" for row in rows) else 0.0)
            if not self._waiting:
                self._late_at = now + self._wait_s
            if not self._waiting or due_at < self._due_at:
                self._due_at = due_at
                self._changed.notify()
            self._waiting.append(waiting)
        return waiting.future

    def close(self) -> None:
        """Store the remaining rows, try failed files once more, and end the threads. Raises StoreError."""
        with self._changed:
            self._closed = True
            for file in self._files:
                file.retry_at = 0.0
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        left = next((file for file in self._files if not file.is_stored), None)
        if left is not None and left.error is not None:
            raise left.error

    async def __aenter__(self) -> "CallLog":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- In the threads --------------------------------------------------------------------------------------

    def _run(self) -> None:
        pa.array([0])  # imports pandas if it is there, which would take the first call a second
        while True:
            with self._changed:
                while (work := self._next()) is None:
                    if self._closed and not self._waiting:
                        return
                    self._changed.wait(self._patience())
            if isinstance(work, _File):
                self._store(work)
            else:
                self._begin(work)

    def _next(self) -> "_File | list[_Waiting] | None":
        """Return a failed file that is due, or the rows that wait if they are due. Call it with the lock."""
        now = time.monotonic()
        for file in self._files:
            if file.error is not None and not file.is_busy and now >= file.retry_at:
                file.is_busy = True
                if self._closed:
                    file.retry_at = float("inf")
                return file
        if self._waiting and (self._closed or now >= self._begin_at()):
            taken, self._waiting = self._waiting, []
            self._num_encoding += 1
            return taken
        return None

    def _begin_at(self) -> float:
        """Return when the waiting rows are to be committed, unless a commit ends before. Call it with the lock."""
        is_idle = not self._num_encoding and not any(file.is_busy for file in self._files)
        return self._due_at if is_idle else self._late_at

    def _patience(self) -> float | None:
        """Return seconds until something is due; None if nothing is until a notice."""
        times = [file.retry_at for file in self._files if file.error is not None and not file.is_busy]
        if self._waiting:
            times.append(self._begin_at())
        return max(0.0, min(times) - time.monotonic()) if times and min(times) < float("inf") else None

    def _begin(self, taken: list[_Waiting]) -> None:
        """Encode rows, and store them as the next file."""
        try:
            data, texts = self._encode(taken)
        except BaseException as error:
            with self._changed:
                self._num_encoding -= 1
                self._changed.notify_all()
            if len(taken) == 1:
                _settle(taken, _refusal(error))
                return
            for each in taken:  # one of them is bad: find it
                with self._changed:
                    self._num_encoding += 1
                self._begin([each])
            return
        with self._changed:
            name = CALLS.name(SequenceName(self._life.worker_id, self._sequence))
            self._sequence += 1
            self._num_encoding -= 1
            file = _File(name, data, texts, taken)
            self._files.append(file)
            self._unwritten_bytes += len(data)
        self._store(file)

    def _encode(self, taken: Iterable[_Waiting]) -> tuple[bytes, dict[str, bytes]]:
        stamp = {"run_id": self._root.run_id, "worker_id": self._life.worker_id}
        rows, prompts = stored_rows([{**row, **stamp} for each in taken for row in each.rows])
        return encode_calls(rows), prompts

    def _store(self, file: _File) -> None:
        try:
            self._check_run()
            for digest, text in file.texts.items():
                if digest not in self._known_prompts:
                    _put_prompt(self._root, text)
                    self._known_prompts.add(digest)
            commit(self._root, file.name, file.data)
        except BaseException as error:
            self._failed(file, error)
            return
        with self._changed:
            file.is_stored, file.is_busy, file.error = True, False, None
            self._unwritten_bytes -= len(file.data)
            file.data = b""
            settled: list[_Waiting] = []
            while self._files and self._files[0].is_stored:
                settled += self._files.popleft().waiting
            first = self._files[0].error if self._files else None
            if first is not None:  # stored, but an earlier file is not: its number would be missing for readers
                _settle(file.waiting, first)
                file.waiting = []
            self._changed.notify_all()
        _settle(settled, None)

    def _failed(self, file: _File, error: BaseException) -> None:
        if not isinstance(error, StoreError):
            logger.error("the log of calls stops: %s", error)
        else:
            logger.warning("%s could not be stored, trying again: %s", file.name, error)
        with self._changed:
            file.error, file.is_busy = error, False
            file.retry_at = max(file.retry_at, time.monotonic() + file.retry_s)
            file.retry_s = min(2 * file.retry_s, _LONGEST_RETRY_S)
            failed, file.waiting = file.waiting, []
            for later in self._files:
                if later.is_stored:
                    failed += later.waiting
                    later.waiting = []
            if not isinstance(error, StoreError):
                self._broken, file.retry_at = error, float("inf")
                failed += self._waiting
                self._waiting = []
            self._changed.notify_all()
        _settle(failed, error)

    def _check_run(self) -> None:
        """Check at times that the root is still this run."""
        if time.monotonic() - self._checked_run >= _CHECK_RUN_S:
            self._root.check_same_run()
            self._checked_run = time.monotonic()


def _refusal(error: BaseException) -> BaseException:
    if isinstance(error, Exception) and not isinstance(error, InvalidBatchError | StoreError):
        return InvalidBatchError(f"a call can't be stored: {type(error).__name__}: {error}")
    return error


def _settle(waiting: Sequence[_Waiting], error: BaseException | None) -> None:
    """Wake what awaits these rows, by one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for each in waiting:
        by_loop.setdefault(each.loop, []).append(each.future)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set, futures, error)
        except RuntimeError:  # the loop was closed: nobody waits
            continue


def _set(futures: Iterable["asyncio.Future[None]"], error: BaseException | None) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(None)


# --- Reading --------------------------------------------------------------------------------------------------


_CONCURRENT_READS = 8


def read_all_calls(root: Root, workers: Collection[str] | None = None) -> pa.Table:
    """Return all rows of calls/ in the table's own schema, in order of call_id and time.

    workers: worker_ids of the lives whose rows are wanted; None is all. Raises SchemaError for a broken file.
    """
    return sorted_calls(_read_files(root, workers))


def read_calls(root: Root, episode_id: str, attempt: int) -> pa.Table:
    """Return the rows of one attempt at an episode, in order of call_id and time."""
    claims = [EPISODES.read(root, *name) for name in EPISODES.listed(root, episode_id=episode_id, attempt=attempt)]
    workers = {claim.worker_id for claim in claims if isinstance(claim, EpisodeClaim)}
    rows = _read_files(root, workers)
    mine = pc.and_(pc.equal(rows["episode_id"], episode_id), pc.equal(rows["attempt"], attempt))
    return sorted_calls(rows.filter(mine))


def sorted_calls(rows: pa.Table) -> pa.Table:
    """Sort rows, and leave out the second of two equal events: a compacted file and its sources may both be there."""
    rows = rows.take(pc.sort_indices(rows, [("call_id", "ascending"), ("created_at", "ascending")]))
    keys = zip(rows["call_id"].to_pylist(), rows["event"].to_pylist(), strict=True)
    first: dict[tuple[str, str], int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    return rows if len(first) == rows.num_rows else rows.take(pa.array(list(first.values()), pa.int64()))


def _read_files(root: Root, workers: Collection[str] | None) -> pa.Table:
    """Return the rows of these lives in all files. Lists again if a compaction moved rows to another file meanwhile."""
    known: dict[str, pa.Table] = {}
    while True:
        listed = [found for found in CALLS.listed(root) if workers is None or _may_hold(found.worker_id, workers)]
        names = [CALLS.name(found) for found in listed]
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            new = [name for name in names if name not in known]
            found = dict(zip(new, pool.map(partial(_read_file, root, workers), new), strict=True))
        known |= {name: rows for name, rows in found.items() if rows is not None}
        if None not in found.values():
            return pa.concat_tables([arrow_schema(CALLS.table).empty_table(), *(known[name] for name in names)])


def _may_hold(committer: str, workers: Collection[str]) -> bool:
    return committer in workers or committer.startswith(COMPACTED)


def _read_file(root: Root, workers: Collection[str] | None, name: str) -> pa.Table | None:
    """Return the rows of these lives in a file; None if it is gone."""
    where = f"{root.url}/{name}"
    try:
        rows = decode(root.read(name), where, CALLS.table)
    except FileNotFoundError:
        return None
    check_schema(rows.schema, CALLS.table, where)
    rows = conform(rows, CALLS.table)
    if workers is None:
        return rows
    return rows.filter(pc.is_in(rows["worker_id"], pa.array(sorted(workers), pa.string())))


def _answered(calls: pa.Table) -> pa.Table:
    return calls.filter(pc.equal(calls["event"], "call"))


def whole_prompts(calls: pa.Table) -> dict[str, np.ndarray]:
    """Return the prompt of each call that has tokens, by call_id: (prompt_length,) int32.

    calls: rows of whole episodes. Raises SchemaError if the call that another one extends is missing or too short.
    """
    rows = _answered(calls)
    names = ("new_prompt_tokens", "response_tokens")
    new, sampled = (values_of(_TOKENS[name], rows[name]) for name in names)
    base_of, length_of = rows["base_call_id"].to_pylist(), rows["base_length"].to_pylist()
    ids = rows["call_id"].to_pylist()
    index_of = {call_id: index for index, call_id in enumerate(ids) if new[index] is not None}
    found: dict[str, np.ndarray] = {}
    for call_id in _bases_first(ids, base_of, index_of):
        index = index_of[call_id]
        if base_of[index] is None:
            found[call_id] = new[index]
            continue
        of_base = [found[base_of[index]], sampled[index_of[base_of[index]]]]
        known = np.concatenate([each for each in of_base if each is not None])
        if len(known) < length_of[index]:
            raise SchemaError(
                f"call {call_id} extends {length_of[index]} tokens of call {base_of[index]}, which has {len(known)}"
            )
        found[call_id] = np.concatenate([known[: length_of[index]], new[index]])
    return found


def _bases_first(ids: Sequence[str], base_of: Sequence[str | None], index_of: Mapping[str, int]) -> list[str]:
    """Return the ids of `index_of`, each after the call that it extends. Raises SchemaError if one is missing."""
    done: dict[str, None] = {}
    for call_id in index_of:
        path: dict[str, None] = {}
        while call_id not in done:
            if call_id not in index_of or call_id in path:
                what = "extends itself" if call_id in path else "is missing, which another one extends"
                raise SchemaError(f"call {call_id} {what}, so its prompt can't be put together")
            path[call_id] = None
            base = base_of[index_of[call_id]]
            if base is None:
                break
            call_id = base
        done.update(dict.fromkeys(reversed(path)))
    return list(done)


def whole_messages(calls: pa.Table, prompts: Mapping[str, Any]) -> dict[str, tuple[Message, ...]]:
    """Return the messages of each call's request, by call_id; calls without messages are left out.

    prompts: system messages by digest, as `read_prompt` returns them. Raises SchemaError as `whole_prompts` does.
    """
    rows = _answered(calls).select(
        ["call_id", "base_messages_call_id", "base_num_messages", "system_digest", "messages", "answer"]
    )
    of_call = {row["call_id"]: row for row in plain_rows(rows) if row["messages"] is not None}
    ids = list(of_call)
    bases = [row["base_messages_call_id"] for row in of_call.values()]
    found: dict[str, tuple[Message, ...]] = {}
    for call_id in _bases_first(ids, bases, {each: index for index, each in enumerate(ids)}):
        row = of_call[call_id]
        base, number = row["base_messages_call_id"], row["base_num_messages"] or 0
        if base is None:
            system = prompts[row["system_digest"]] if row["system_digest"] else []
            known = _messages(system)
        else:
            known = (*found[base], *_messages(of_call[base]["answer"] or []))
            if len(known) < number:
                raise SchemaError(f"call {call_id} extends {number} messages of call {base}, which has {len(known)}")
            known = known[:number]
        found[call_id] = (*known, *_messages(row["messages"]))
    return found


def _messages(values: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return msgspec.convert(values, tuple[Message, ...])


def whole_columns(calls: pa.Table) -> Mapping[str, Columns]:
    """Return the sampler's arrays of each call with tokens, by call_id, as in Completion.columns; absent ones are left
    out. Arrays along the tokens read are put together from the calls that a call extends.
    """
    rows = _answered(calls)
    ids, base_of = rows["call_id"].to_pylist(), rows["base_call_id"].to_pylist()
    length_of = rows["base_length"].to_pylist()
    tokens = values_of(_TOKENS["response_tokens"], rows["response_tokens"])
    index_of = {call_id: index for index, call_id in enumerate(ids) if tokens[index] is not None}
    stored = {name: values_of(_ARRAYS[name], rows[name]) for name in _SAMPLED}
    found: dict[str, dict[str, Any]] = {}
    for call_id in _bases_first(ids, base_of, index_of):
        index = index_of[call_id]
        own = {name: values[index] for name, values in stored.items() if values[index] is not None}
        num_known = _num_read(length_of[index] or 0)
        for name in [name for name in own if _ARRAYS[name].along == "read" and num_known]:
            of_base = found[base_of[index]].get(name)
            if of_base is None or len(of_base) < num_known:
                del own[name]  # as a row of rollouts whose earlier calls have none
            else:
                own[name] = _ARRAYS[name].concatenate([of_base[:num_known], own[name]])
        found[call_id] = own
    return found
