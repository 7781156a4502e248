"""Continuous batching: requests join a running batch, and leave it, between two tokens.

One thread runs the model and changes its weights, so the event loops of the callers stay free. It exists while its
`ContinuousBatch` does, and works only while there are requests. transformers' own continuous batching is not used: it
draws all tokens of a batch from one random generator, so a request's seed would not determine its tokens.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from math import isnan

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ludic.engines.engine import Completion, GenerationRequest
from ludic.engines.sampling import Rows, kept_ids, make_rows, random_numbers, sample
from ludic.engines.sequences import Sequences
from ludic.errors import ModelError
from ludic.records import WeightSpan

_JOIN_SHARE = 0.25
"""Requests join at once if they are at least this share of those that run: their prefill holds the others up."""
_MOST_STEPS_OF_WAITING = 4
"""Decoding steps after which fewer requests join too."""
_LEAVE_SHARE = 0.25
"""Finished sequences leave once they are this share of the batch. Copying the cache without them costs about as much as
one step, which copies it too, since it appends to it."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request, and its completion as far as it has come."""

    request: GenerationRequest
    stop_token_ids: frozenset[int]
    future: asyncio.Future[Completion]
    uniforms: Iterator[float]
    """The random number of each token, in [0, 1)."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_tokens: list[np.ndarray] = field(default_factory=list)
    """Ids that each token was drawn from, if the request asks for them."""
    began: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the weights, each with the index of its first token."""
    is_over: bool = False
    """True once the completion is whole, has failed or was cancelled."""
    result: Completion | BaseException | None = None

    def add(self, token: int, logprob: float, kept: np.ndarray | None, version: int) -> None:
        """Append a token, and set the result if it is the last one. kept: ids that it was drawn from."""
        if not self.tokens:
            self.first_token_s = time.monotonic() - self.began
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if kept is not None:
            self.kept_tokens.append(kept)
        stopped = token in self.stop_token_ids
        if isnan(logprob):
            self.end(ModelError(f"the weights of version {version} give NaN logits; did training diverge?"))
        elif stopped or len(self.tokens) == self.request.params.max_tokens:
            completion = Completion(
                tokens=np.array(self.tokens, dtype=np.int32),
                logprobs=np.array(self.logprobs, dtype=np.float32),
                finish_reason="stop" if stopped else "length",
                weight_versions=self._spans(),
                kept_tokens=tuple(self.kept_tokens) if self.request.params.wants_kept_tokens else None,
                first_token_s=self.first_token_s,
            )
            self.end(completion)

    def _spans(self) -> tuple[WeightSpan, ...]:
        ends = [*(start for _, start in self.versions[1:]), len(self.tokens)]
        pairs = zip(self.versions, ends, strict=True)
        return tuple(WeightSpan(version=version, start=start, end=end) for (version, start), end in pairs)

    def end(self, result: Completion | BaseException) -> None:
        self.is_over, self.result = True, result

    def settle(self) -> None:
        """Give the result to the waiting task; runs in its event loop."""
        if self.future.done():  # cancelled
            return
        if isinstance(self.result, BaseException):
            self.future.set_exception(self.result)
        else:
            assert self.result is not None
            self.future.set_result(self.result)


class ContinuousBatch:
    """Requests that wait, and those in the batch. Safe to call from several threads and event loops."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int,
        max_batch: int,
        eos_token_ids: Sequence[int],
        usable_version: Callable[[], int],
    ) -> None:
        """max_length: maximum tokens of a sequence. max_batch: maximum sequences that are decoded together.

        eos_token_ids: tokens that end every completion. usable_version: called before each step; returns the version of
        the weights, or raises if they can't be used, which fails all requests.
        """
        self._model, self._max_length, self._max_batch = model, max_length, max_batch
        self._eos_token_ids = frozenset(eos_token_ids)
        self._usable_version = usable_version
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ludic-engine")
        self._lock = threading.Lock()
        """Guards the four attributes that follow; all others belong to the thread."""
        self._arriving: list[_Call] = []
        self._waiting: list[_Call] = []
        self._tasks: list[Callable[[], None]] = []
        self._is_running = False
        self._rows: list[_Call] = []
        """Calls in the batch, in the order of the sequences, including those that are over and have not left yet."""
        self._sequences: Sequences | None = None
        self._params: Rows | None = None
        self._num_steps_waited = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return a completion. Raises ModelError if the weights give NaN."""
        loop = asyncio.get_running_loop()
        stop_token_ids = self._eos_token_ids.union(request.params.stop_token_ids)
        call = _Call(request, stop_token_ids, loop.create_future(), _uniforms(request.seed))
        with self._lock:
            self._arriving.append(call)
        # The callback runs after all tasks that are ready now, so tasks that start together share a batch.
        loop.call_soon(self._let_in)
        try:
            return await call.future
        finally:
            call.is_over = True

    def between_steps(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, between two steps, and wait for it; raises what it raises."""
        done: Future[None] = Future()

        def task() -> None:
            try:
                function()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            self._tasks.append(task)
            self._start()
        done.result()

    def _let_in(self) -> None:
        with self._lock:
            self._waiting += self._arriving
            self._arriving = []
            self._start()

    def _start(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._thread.submit(self._run)

    def _run(self) -> None:
        """Take steps until nothing is left to do."""
        while True:
            with self._lock:
                tasks, self._tasks = self._tasks, []
                joining = self._take_waiting()
                if not tasks and not joining and not self._live():
                    self._rows, self._sequences, self._is_running = [], None, False
                    return
            for task in tasks:
                task()
            self._try_step(joining)

    def _take_waiting(self) -> list[_Call]:
        """Remove from those that wait the calls that join the batch now."""
        self._waiting = [call for call in self._waiting if not call.is_over]
        num_live = len(self._live())
        num = min(len(self._waiting), self._max_batch - num_live)
        if num_live and self._sequences is not None and not self._sequences.can_join:
            num = 0
        if 0 < num < _JOIN_SHARE * num_live and self._num_steps_waited < _MOST_STEPS_OF_WAITING:
            self._num_steps_waited += 1
            return []
        self._num_steps_waited = 0
        joining, self._waiting = self._waiting[:num], self._waiting[num:]
        return joining

    def _live(self) -> list[_Call]:
        return [call for call in self._rows if not call.is_over]

    def _try_step(self, joining: list[_Call]) -> None:
        """Add one token to each call; an error fails all of them."""
        calls = self._live() + joining
        try:
            with torch.inference_mode():
                self._step(joining)
        except BaseException as error:  # else the tasks would wait for ever
            self._rows, self._sequences = [], None
            for call in calls:
                call.end(error)
        _settle([call for call in calls if call.result is not None])

    def _step(self, joining: list[_Call]) -> None:
        version = self._usable_version()
        self._drop_finished(now=len(joining) > 0)
        if self._sequences is not None:
            # A call cancelled while its prompt ran has no token yet; 0 is as good as any.
            tokens = [call.tokens[-1] if call.tokens else 0 for call in self._rows]
            self._sequences.extend(self._tensor(tokens, np.int64))
        if joining:
            self._join(joining)
        if self._sequences is None:
            return
        assert self._params is not None
        uniforms = [0.0 if call.is_over else next(call.uniforms) for call in self._rows]
        drawn = sample(self._sequences.logits, self._params, self._tensor(uniforms, np.float64))
        # One copy from the device; float64 holds tokens and float32 exactly.
        tokens, logprobs = torch.stack([drawn.tokens.double(), drawn.logprobs.double()]).tolist()
        kept = [None] * len(self._rows) if drawn.kept is None else kept_ids(drawn.kept)
        for call, token, logprob, ids in zip(self._rows, tokens, logprobs, kept, strict=True):
            if not call.is_over:
                call.add(int(token), logprob, ids, version)

    def _drop_finished(self, *, now: bool) -> None:
        """Take calls that are over out of the batch, if it pays. now: in any case, since others join."""
        live = [index for index, call in enumerate(self._rows) if not call.is_over]
        num_over = len(self._rows) - len(live)
        if num_over == 0 or (live and not now and num_over < _LEAVE_SHARE * len(self._rows)):
            return
        self._rows = [self._rows[index] for index in live]
        if not live:
            self._sequences = None
            return
        assert self._sequences is not None
        self._sequences.select(self._tensor(live, np.int64))
        self._params = make_rows([call.request.params for call in self._rows], self._model.device)

    def _join(self, joining: list[_Call]) -> None:
        prompts = [np.asarray(call.request.prompt_tokens, dtype=np.int32) for call in joining]
        sequences = Sequences(self._model, prompts, self._max_length)
        if self._sequences is None:
            self._sequences = sequences
        else:
            self._sequences.join(sequences)
        self._rows = self._rows + joining
        self._params = make_rows([call.request.params for call in self._rows], self._model.device)

    def _tensor(self, values: Sequence[float], dtype: type[np.generic]) -> Tensor:
        # torch.tensor takes 20 µs for 64 numbers of a list, which is 1% of a step; through NumPy it is 4.
        return torch.from_numpy(np.array(values, dtype)).to(self._model.device)


def _uniforms(seed: int) -> Iterator[float]:
    numbers = random_numbers(seed)
    while True:  # a draw of many is ten times as fast, and gives the same numbers
        yield from numbers.random(64).tolist()


def _settle(calls: Sequence[_Call]) -> None:
    """Wake the waiting tasks; those of one event loop wake together, so that their next requests arrive together."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Call]] = defaultdict(list)
    for call in calls:
        by_loop[call.future.get_loop()].append(call)
    for loop, its_calls in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(_settle_here, its_calls)


def _settle_here(calls: Sequence[_Call]) -> None:
    for call in calls:
        call.settle()
