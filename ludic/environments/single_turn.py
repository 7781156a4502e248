"""Run environments with a question and a score as episodes of one step, and compute their scores in processes.

Processes are for scorers that crash, leak, or run without end in C code. Each process creates the environment again,
from its name, its options and the texts of users' files; examples, answers and scores are exchanged as MessagePack. A
process takes one call at a time. A process that ended, or whose call reached its time limit or was cancelled, is
replaced by a new one at a later call. Raises ScorerError.
"""

import asyncio
import inspect
import os
import signal
import struct
import subprocess
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, SupportsFloat

import msgspec
import numpy as np

from ludic.base import describe_end, start_python
from ludic.environments.column_values import spelled
from ludic.environments.environment import (
    Example,
    GroupAnswer,
    Score,
    SingleTurnEnvironment,
    SpanReward,
    Split,
    Transition,
    to_score,
)
from ludic.errors import ScorerError
from ludic.records import Message
from ludic.settings import Files, RequestLimit, SideThread, UserFile


class SingleTurn:
    """Environment that holds one episode of a stateless environment, which many episodes may share."""

    max_steps = 1

    def __init__(
        self,
        environment: SingleTurnEnvironment,
        processes: "ScorerProcesses | None" = None,
        *,
        begins_here: bool = False,
    ) -> None:
        """processes: in which the answers are scored; None scores them here. begins_here: score here until
        `score_in_processes`."""
        self.environment = environment
        self._processes = processes
        self._scorer: SingleTurnEnvironment | ScorerProcesses = environment
        if not begins_here:
            self.score_in_processes()
        self._example: Example | None = None

    @property
    def has_processes(self) -> bool:
        """True if the answers can be scored in processes."""
        return self._processes is not None

    def score_in_processes(self) -> None:
        """Score answers in processes from now on, if there are any."""
        self._scorer = self._processes or self._scorer

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the environment, such as score_task and tools; private names are the adapter's
        own."""
        if name.startswith("_") or name == "environment":
            raise AttributeError(name)
        found = getattr(self.environment, name)
        return getattr(self._scorer, name) if name == "score_group" else found

    def example(self, index: int, split: Split) -> Example:
        return self.environment.example(index, split)

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._example = example
        return example.messages

    def step(self, action: str) -> Transition | Awaitable[Transition]:
        """Score the answer and end the episode; await the result if `score` is a coroutine.

        Raises RuntimeError if no episode is open: before reset, or at a second step.
        """
        if self._example is None:
            raise RuntimeError(
                f"{type(self.environment).__name__}: step() without an open episode; "
                "call reset(example) first, a single-turn episode ends at its first step"
            )
        score = self._scorer.score(self._example, action)
        self._example = None
        return _awaited(score) if inspect.isawaitable(score) else transition_of(score)


async def _awaited(score: Awaitable[Score]) -> Transition:
    return transition_of(await score)


def transition_of(found: Score | float) -> Transition:
    """Return a score, or a number, as the transition that ends an episode. Raises TypeError for anything else."""
    score = to_score(found, "score")
    return Transition(
        observation=None,
        reward=score.reward,
        span_rewards=score.span_rewards,
        reward_components=score.components,
        correct=score.correct,
        terminated=True,
        info=score.info,
        extra=score.extra,
    )


# --- Scores in processes ---------------------------------------------------------------------------------

MOST_PROCESSES = min(8, os.cpu_count() or 1)
"""Maximum processes of one environment, and so of concurrent calls; waiting for one does not count towards a call's
limit."""
_START_LIMIT_S = 120.0
"""Seconds in which a process imports its packages and makes the environment."""
_SENDABLE = "wanted texts, numbers, bytes, dates, lists and mappings"
_LENGTH = struct.Struct("<Q")
_PROGRAM = "ludic.environments.scorer_process"
"""Module that a process runs; it imports the registry, which imports this module."""


class SentFile(msgspec.Struct):
    """A user's file: its fields."""

    path: str
    source: bytes
    imports: "dict[str, SentFile]"


class ScorerStart(msgspec.Struct):
    """First message to a process: the environment that it makes."""

    name: str
    options: dict[str, Any]
    seed: int
    files: dict[str, SentFile]


class ScorerCall(msgspec.Struct):
    """Each later message to a process: what it scores."""

    example: Example
    answer: str | None = None
    """Answer to score; None scores the answers of a group together."""
    answers: list[GroupAnswer] = []


class ScorerResult(msgspec.Struct):
    """Answer of a process to a message; without scores to the first."""

    scores: list[Any] = []
    """Fields of each Score."""
    error: str | None = None
    traceback: str | None = None
    """Traceback of the user's code, if it raised the error."""
    components: dict[str, float] = {}
    """Components of the ScorerError."""


class ScorerProcesses:
    """Scores answers of one environment as its methods `score` and `score_group` do, in processes that start when they
    are needed."""

    def __init__(self, name: str, options: Mapping[str, Any], seed: int, files: Files) -> None:
        """The arguments of make_environment."""
        sent = {path: _to_message(file) for path, file in files.items()}
        self._start = encode(ScorerStart(name, dict(options), seed, sent), f"options of environment {name}")
        self._name = name
        self._free: list[_Process] = []
        self._all: set[_Process] = set()
        self._turns: tuple[asyncio.AbstractEventLoop, RequestLimit] | None = None
        weakref.finalize(self, _kill_all, self._all)

    async def score(self, example: Example, answer: str) -> Score:
        """Return the score of an answer. Raises ScorerError."""
        (score,) = await self._call(ScorerCall(example, answer))
        return score

    async def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> list[Score]:
        """Return the scores of all answers to an example. Raises ScorerError."""
        return await self._call(ScorerCall(example, answers=list(answers)))

    async def _call(self, call: ScorerCall) -> list[Score]:
        example = call.example
        sent = replace(example, data=spelled(example.data), columns=spelled(example.columns))
        message = encode(
            msgspec.structs.replace(call, example=sent),
            f"example {call.example.example_id!r} of environment {self._name}",
        )
        process: _Process | None = None

        async def start() -> None:
            nonlocal process
            process = await self._take()

        async with self._request_limit().turn(start):
            assert process is not None
            try:
                result = msgspec.msgpack.decode(await process.ask(message), type=ScorerResult)
            except BaseException as error:  # also at its time limit
                self._drop(process)
                if isinstance(error, _EndedError):
                    raise ScorerError(f"the process that scored for environment {self._name} {error}") from None
                raise
            self._free.append(process)
        if result.error is not None:
            raise _error(result.error, result.traceback, result.components)
        return [_to_score(fields) for fields in result.scores]

    async def _take(self) -> "_Process":
        """Return a process that is free, or a new one."""
        while self._free:
            if (free := self._free.pop()).is_alive():
                return free
            self._drop(free)
        process = _Process()
        self._all.add(process)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                result = msgspec.msgpack.decode(await process.start(self._start), type=ScorerResult)
            if result.error is not None:
                text = f"environment {self._name} can't be made in a process: {result.error}"
                raise _error(text, result.traceback, {})
        except BaseException as error:
            self._drop(process)
            if isinstance(error, _EndedError | TimeoutError):
                why = error if isinstance(error, _EndedError) else f"took more than {_START_LIMIT_S:g} s"
                raise ScorerError(f"the start of a process that scores for environment {self._name} {why}") from None
            raise
        return process

    def _drop(self, process: "_Process") -> None:
        self._all.discard(process)
        process.kill()

    def _request_limit(self) -> RequestLimit:
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, RequestLimit(MOST_PROCESSES)
        return self._turns[1]


def _error(text: str, failure_traceback: str | None, components: Mapping[str, float]) -> ScorerError:
    error = ScorerError(text)
    error.failure_traceback, error.components = failure_traceback, components
    return error


class _EndedError(Exception):
    """A process ended; the text says how."""


class _Process:
    """One process, with the thread that talks to it."""

    def __init__(self) -> None:
        self._thread = SideThread()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    async def start(self, message: bytes) -> bytes:
        """Start the process with its first message; returns the answer. Raises _EndedError."""
        return await self._thread.run(partial(self._start, message))

    async def ask(self, message: bytes) -> bytes:
        """Send a message and return the answer. Raises _EndedError."""
        assert self._process is not None
        return await self._thread.run(partial(_exchange, self._process, message))

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End the process and its children, without waiting for its answer."""
        self._is_killed = True
        if self._process is not None:
            _kill(self._process)
        self._thread.close(self._close_pipes)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout) if self._process is not None else ():
            assert pipe is not None
            pipe.close()

    def _start(self, message: bytes) -> bytes:
        # A session of its own: Ctrl-C at the terminal does not reach it.
        args = ["-m", _PROGRAM]
        self._process = start_python(
            args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        if self._is_killed:
            _kill(self._process)
        return _exchange(self._process, message)


def _kill_all(processes: set[_Process]) -> None:
    for process in processes:
        process.kill()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _exchange(process: "subprocess.Popen[bytes]", message: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    answer = None
    with suppress(BrokenPipeError, ConnectionResetError):
        send(process.stdin, message)
        answer = receive(process.stdout)
    if answer is None:
        raise _EndedError(describe_end(process.wait()) or "ended")
    return answer


# --- Messages ---------------------------------------------------------------------------------------------------------


def send(pipe: IO[bytes], message: bytes) -> None:
    """Write a message, with its length before it."""
    data = memoryview(_LENGTH.pack(len(message)) + message)
    while data:
        data = data[pipe.write(data) :]


def receive(pipe: IO[bytes]) -> bytes | None:
    """Return the next message; None at the end."""
    head = _read(pipe, _LENGTH.size)
    return None if head is None else _read(pipe, _LENGTH.unpack(head)[0])


def _read(pipe: IO[bytes], size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = pipe.read(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def encode(message: Any, what: str) -> bytes:
    """Encode a message. Raises ScorerError, which says what can't be sent."""
    try:
        return msgspec.msgpack.encode(message, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
        raise ScorerError(f"the {what} can't be sent to a process: {error}; {_SENDABLE}") from error


def _plain(value: Any) -> Any:
    """Return a NumPy value or a mapping as a MessagePack type."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, SupportsFloat):
        return float(value)
    raise NotImplementedError(f"it holds a {type(value).__name__}")


def _to_message(file: UserFile) -> SentFile:
    return SentFile(str(file.path), file.source, {name: _to_message(module) for name, module in file.imports.items()})


def to_file(file: SentFile) -> UserFile:
    """Return a user's file that a message holds."""
    imports = {name: to_file(module) for name, module in file.imports.items()}
    return UserFile(path=Path(file.path), source=file.source, imports=imports)


def _to_score(fields: dict[str, Any]) -> Score:
    spans = tuple(SpanReward(**span) for span in fields.pop("span_rewards"))
    return Score(**fields, span_rewards=spans)
