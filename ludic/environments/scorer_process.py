"""Score answers of one environment in a separate process, which ScorerProcesses starts (single_turn.py).

Reads messages from standard input and answers each on standard output, until standard input ends.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import msgspec

from ludic.base import end_with_parent
from ludic.environments.column_values import read_back
from ludic.environments.environment import Score, to_score
from ludic.environments.registry import load_scorer
from ludic.environments.single_turn import ScorerCall, ScorerResult, ScorerStart, encode, receive, send, to_file
from ludic.errors import ScorerError
from ludic.settings import failure_of, only_exceptions


def main() -> None:
    """Make the environment of the first message, then score until standard input ends."""
    end_with_parent()
    # Output of the user's code goes to standard error, so that it does not mix with messages.
    source, target = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    environment, loop = None, asyncio.new_event_loop()
    while (message := receive(source)) is not None:
        try:
            with only_exceptions():
                if environment is None:
                    environment = _make(msgspec.msgpack.decode(message, type=ScorerStart))
                    result = msgspec.msgpack.encode(ScorerResult())
                else:
                    call = msgspec.msgpack.decode(message, type=ScorerCall)
                    data, columns = map(read_back, (call.example.data, call.example.columns))
                    call.example = replace(call.example, data=data, columns=columns)
                    result = encode(ScorerResult(_scores(environment, call, loop)), "score")
        except Exception as error:
            failure = failure_of(error)
            known = dict(error.components) if isinstance(error, ScorerError) else {}
            result = msgspec.msgpack.encode(
                ScorerResult(error=failure.error, traceback=failure.traceback, components=known)
            )
        send(target, result)


def _make(start: ScorerStart) -> Any:
    files = {path: to_file(file) for path, file in start.files.items()}
    return load_scorer(start.name, start.options, start.seed, files)


def _scores(environment: Any, call: ScorerCall, loop: asyncio.AbstractEventLoop) -> list[Score]:
    function: Callable[[], Any] = partial(environment.score, call.example, call.answer)
    if call.answer is None:
        function = partial(environment.score_group, call.example, call.answers)
    found = function()
    if inspect.isawaitable(found):
        found = loop.run_until_complete(found)
    scores = [found] if call.answer is not None else found
    made = [to_score(score, "score" if call.answer is not None else "score_group") for score in scores]
    return [replace(score, info={str(name): str(value) for name, value in score.info.items()}) for score in made]


def _run() -> NoReturn:
    with suppress(BrokenPipeError, KeyboardInterrupt):
        main()
    sys.stderr.flush()
    os._exit(0)  # threads of the user's code must not delay the end


if __name__ == "__main__":
    _run()
