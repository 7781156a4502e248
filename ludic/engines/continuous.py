"""Batch requests continuously: requests join a running batch, and leave it, between two tokens.

One thread runs the model and changes its weights, so the event loops of the callers stay free. It exists while its
`ContinuousBatch` does, and works only while there are requests. transformers' own continuous batching is not used: it
draws all tokens of a batch from one random generator, so a request's seed would not determine its tokens.

Below: `CachedSequences`, the batch in the model's key-value cache, and `sample`, which draws its next tokens. Both are
pure tensor code.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ludic.engines.engine import Completion, GenerationRequest, SamplingParams, nan_logits
from ludic.errors import ModelError
from ludic.models import Routers, TokensWithLogprobs, probe_sequences
from ludic.records import Columns, Ragged, WeightSpan

_JOIN_SHARE = 0.25
"""Requests join at once if they are at least this share of the running ones, since their prefill delays those."""
_MOST_STEPS_OF_WAITING = 4
"""Decoding steps after which a smaller number of requests joins, too."""
_LEAVE_SHARE = 0.25
"""Finished sequences leave once they are this share of the batch. Copying the cache without them costs about as much as
one step, which copies it too, since it appends to it."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request and its completion so far."""

    request: GenerationRequest
    stop_token_ids: frozenset[int]
    future: asyncio.Future[Completion]
    uniforms: Iterator[float]
    """The random number of each token, in [0, 1)."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_tokens: list[np.ndarray] = field(default_factory=list)
    """Ids that each token was drawn from, if the request asks for them."""
    experts: list[np.ndarray] = field(default_factory=list)
    """Experts of the tokens that the model has read, each (n, L, K) int16, if the request asks for them."""
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
            self.end(ModelError(nan_logits(version)))
        elif stopped or len(self.tokens) == self.request.params.max_tokens:
            completion = Completion(
                tokens=np.array(self.tokens, dtype=np.int32),
                finish_reason="stop" if stopped else "length",
                weight_versions=self._spans(),
                columns=self._columns(),
                first_token_s=self.first_token_s,
            )
            self.end(completion)

    def _columns(self) -> Columns:
        columns: dict[str, Any] = {"response_logprobs": np.array(self.logprobs, dtype=np.float32)}
        if self.request.params.wants_kept_tokens:
            columns["kept_tokens"] = Ragged.of(self.kept_tokens, np.int32)
        if self.request.params.return_experts:
            columns["experts"] = np.concatenate(self.experts)
        return columns

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
    """Waiting requests and those in the batch. Safe to call from several threads and event loops."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_length: int,
        max_batch: int,
        eos_token_ids: Sequence[int],
        usable_version: Callable[[], int],
        routers: Routers | None = None,
    ) -> None:
        """max_length: maximum tokens of a sequence. max_batch: maximum sequences that are decoded together.

        eos_token_ids: tokens that end every completion. usable_version: called before each step; returns the version of
        the weights, or raises if they can't be used, which fails all requests. routers: of the model, for requests that
        ask for experts.
        """
        self._routers = routers
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
        self._sequences: CachedSequences | None = None
        self._params: SamplingRows | None = None
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
        """Remove the calls that join the batch now from the waiting ones."""
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
        except BaseException as error:  # else the tasks would wait without end
            self._rows, self._sequences = [], None
            for call in calls:
                call.end(error)
        _settle([call for call in calls if call.result is not None])

    def _step(self, joining: list[_Call]) -> None:
        version = self._usable_version()
        self._drop_finished(now=len(joining) > 0)
        if self._sequences is not None:
            # A call cancelled during its prefill has no token yet; any token works, such as 0.
            tokens = [call.tokens[-1] if call.tokens else 0 for call in self._rows]
            self._sequences.extend(self._tensor(tokens, np.int64), self._recording(self._rows))
            _keep_experts(self._rows, self._sequences.experts)
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
        """Remove finished calls from the batch if that saves time. now: in any case, since others join."""
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
        sequences = CachedSequences(self._model, prompts, self._max_length, self._recording(joining))
        _keep_experts(joining, sequences.experts)
        if self._sequences is None:
            self._sequences = sequences
        else:
            self._sequences.join(sequences)
        self._rows = self._rows + joining
        self._params = make_rows([call.request.params for call in self._rows], self._model.device)

    def _recording(self, calls: Sequence[_Call]) -> Routers | None:
        """Return the model's routers if a call asks for experts."""
        return self._routers if any(call.request.params.return_experts for call in calls) else None

    def _tensor(self, values: Sequence[float], dtype: type[np.generic]) -> Tensor:
        # torch.tensor takes 20 µs for 64 numbers of a list, which is 1% of a step; through NumPy it is 4.
        return torch.from_numpy(np.array(values, dtype)).to(self._model.device)


def _keep_experts(calls: Sequence[_Call], experts: Sequence[np.ndarray] | None) -> None:
    for call, of_call in zip(calls, experts or (), strict=experts is not None):
        if call.request.params.return_experts and not call.is_over:
            call.experts.append(of_call)


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
            loop.call_soon_threadsafe(_settle_calls, its_calls)


def _settle_calls(calls: Sequence[_Call]) -> None:
    for call in calls:
        call.settle()


# --- Sequences in a key-value cache ----------------------------------------------------------------------
# Sequences that a model extends token by token. They may leave the batch and others join it; the caller draws the
# tokens.
#
# Shapes: B = sequences of the batch, L = tokens of the longest, V = vocabulary, H = heads, D = size of a head.


_State = LinearAttentionCacheLayerMixin
_JOINED = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers of a cache whose rows are known to be independent."""


class CachedSequences:
    """A batch of left-padded sequences in a model's key-value cache."""

    logits: Tensor
    """(B, V), of the next tokens, in the model's dtype."""
    experts: list[np.ndarray] | None = None
    """For each sequence, the experts of the tokens that the last call gave, (n, L, K) int16; None without routers."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[np.ndarray],
        max_length: int,
        routers: Routers | None = None,
    ) -> None:
        """Run the prompts, each int32; equal prompts, as in a group of rollouts, are run once.

        max_length: maximum tokens of a sequence. routers: record what they choose; None does not.
        """
        self._model = model
        self._last_position = max_length - 1
        self._cache = DynamicCache(config=model.config)
        unique = list({prompt.tobytes(): prompt for prompt in prompts}.values())
        # Padding would change a state, so only prompts of equal length run together.
        runs = _by_length(unique) if any(isinstance(each, _State) for each in self._cache.layers) else [unique]
        tokens, mask = (array.to(model.device) for array in _pad_left(runs[0]))
        self._mask = mask
        """(B, L) int64, 0 for padding."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        self._position = positions[:, -1:]
        """(B, 1) int64, of the last token."""
        self._forward(tokens, positions, routers)
        experts = self._experts_of(mask)
        for run in runs[1:]:
            others = CachedSequences(model, run, max_length, routers)
            experts += others.experts or []
            self.join(others)
        order = {prompt.tobytes(): index for index, prompt in enumerate(chain.from_iterable(runs))}
        if (indexes := [order[prompt.tobytes()] for prompt in prompts]) != list(range(len(self))):
            self._index(torch.tensor(indexes, device=model.device))
        self.experts = None if routers is None else [experts[index] for index in indexes]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._mask)

    @property
    def can_join(self) -> bool:
        """True if `join` supports all layers of the cache."""
        return all(type(layer) in _JOINED for layer in self._cache.layers)

    def select(self, indexes: Tensor) -> None:
        """Keep the sequences at `indexes`, (n,) int64, and drop padding that none of them needs."""
        self._index(indexes)
        padding = int(self._mask.any(dim=0).int().argmax())
        if padding > 0 and self.can_join:
            self._mask = self._mask[:, padding:]
            for layer in self._cache.layers:
                if isinstance(layer, DynamicLayer):
                    _drop_left(layer, padding)

    def extend(self, tokens: Tensor, routers: Routers | None = None) -> None:
        """Append one token, (B,) int64, to each sequence. routers: record what they choose; None does not."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        # A finished sequence may wait in the batch; the positions of its padding must stay in the model's range.
        self._position = (self._position + 1).clamp(max=self._last_position)
        self._forward(tokens[:, None], self._position, routers)
        self.experts = None if routers is None else self._experts_of(self._mask[:, -1:])

    def join(self, others: "CachedSequences") -> None:
        """Append other sequences of the same model to the batch; `others` must not be used afterwards."""
        length = max(self._mask.shape[1], others._mask.shape[1])
        self._mask = _stack_right_aligned(self._mask[..., None], others._mask[..., None], length)[..., 0]
        self._position = torch.cat([self._position, others._position])
        self.logits = torch.cat([self.logits, others.logits])
        for layer, other in zip(self._cache.layers, others._cache.layers, strict=True):
            _join_layers(layer, other)

    def _index(self, indexes: Tensor) -> None:
        self.logits, self._mask, self._position = self.logits[indexes], self._mask[indexes], self._position[indexes]
        self._cache.reorder_cache(indexes)

    def _forward(self, tokens: Tensor, positions: Tensor, routers: Routers | None) -> None:
        with nullcontext() if routers is None else routers.record() as recorded:
            output = self._model(
                input_ids=tokens,
                attention_mask=self._mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.logits = output.logits[:, -1]
        self._recorded = None if recorded is None else recorded()

    def _experts_of(self, mask: Tensor) -> list[np.ndarray]:
        """Return each sequence's experts of the last forward pass, without padding. mask: (B, n), of its tokens."""
        if self._recorded is None:
            return []
        experts = self._recorded.view(*mask.shape, *self._recorded.shape[1:]).cpu().numpy()
        return [of_row[-length:] for of_row, length in zip(experts, mask.sum(1).tolist(), strict=True)]


def _pad_left(prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask, each (B, L) int64; padding is token 0 with mask 0."""
    tokens = torch.zeros(len(prompts), max(len(prompt) for prompt in prompts), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = torch.from_numpy(np.array(prompt, dtype=np.int64))
        mask[row, -len(prompt) :] = 1
    return tokens, mask


def _drop_left(layer: DynamicLayer, padding: int) -> None:
    """Drop the first columns of the batch from a layer of the cache."""
    if isinstance(layer, DynamicSlidingWindowLayer):  # holds the last sliding_window - 1 columns only
        layer.cumulative_length -= padding
        padding = max(0, layer.keys.shape[-2] - layer.cumulative_length)
    layer.keys, layer.values = layer.keys[:, :, padding:], layer.values[:, :, padding:]


def _by_length(prompts: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    found: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    for prompt in prompts:
        found[len(prompt)].append(prompt)
    return list(found.values())


def _join_layers(layer: Any, other: Any) -> None:
    """Append the other layer's rows; in both, the last column is the last token."""
    if isinstance(layer, _State):
        for states, others in (
            (layer.conv_states, other.conv_states),
            (layer.recurrent_states, other.recurrent_states),
        ):
            states |= {
                number: torch.cat([state, others[number]]) for number, state in states.items() if state is not None
            }
    if not isinstance(layer, DynamicLayer):
        return
    length = max(layer.keys.shape[-2], other.keys.shape[-2])
    layer.keys = _stack_right_aligned(layer.keys, other.keys, length)
    layer.values = _stack_right_aligned(layer.values, other.values, length)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = max(layer.cumulative_length, other.cumulative_length)


def _stack_right_aligned(top: Tensor, bottom: Tensor, length: int) -> Tensor:
    """Concatenate tensors, (B, ..., L, D), along B; their L may differ and is filled up with zeros on the left."""
    stacked = top.new_zeros(len(top) + len(bottom), *top.shape[1:-2], length, top.shape[-1])
    stacked[: len(top), ..., length - top.shape[-2] :, :] = top
    stacked[len(top) :, ..., length - bottom.shape[-2] :, :] = bottom
    return stacked


def probe_batches(model: PreTrainedModel) -> TokensWithLogprobs:
    """Return the logprobs that a batch gives to the sequences of a probe, which join and leave it on the way.

    The first half of each is its prompt; their tokens are given, not drawn.
    """
    tokens = probe_sequences(model)
    half, longest = len(tokens) // 2, max(map(len, tokens))
    first, second = [list(range(half)), list(range(half, len(tokens)))]
    logprobs: list[list[float]] = [[] for _ in tokens]

    def begin(rows: list[int]) -> CachedSequences:
        return CachedSequences(model, [tokens[row][: len(tokens[row]) // 2] for row in rows], longest)

    def next_token(row: int) -> int:
        return int(tokens[row][len(tokens[row]) // 2 + len(logprobs[row])])

    def is_live(row: int) -> bool:
        return len(logprobs[row]) < len(tokens[row]) - len(tokens[row]) // 2

    def run(rows: list[int], joining: list[int]) -> None:
        batch = begin(rows)
        while True:
            given = [next_token(row) for row in rows]
            found = batch.logits.double().log_softmax(-1)
            for index, row in enumerate(rows):
                logprobs[row].append(found[index, given[index]].item())
            live = [index for index, row in enumerate(rows) if is_live(row)]
            if not live:
                return
            batch.select(torch.tensor(live, device=model.device))
            rows = [rows[index] for index in live]
            batch.extend(torch.tensor([given[index] for index in live], device=model.device))
            if joining and len(logprobs[rows[0]]) == 2:
                batch.join(begin(joining))
                rows, joining = rows + joining, []

    if begin(first).can_join:
        run(first, second)
    else:
        run(first, [])
        run(second, [])
    return list(zip(tokens, logprobs, strict=True))


# --- The next token of each sequence ---------------------------------------------------------------------
# Sample the next token of every row of a batch, each row with its own parameters and random numbers.
#
# Pure tensor code. A row's token depends only on its own logits, parameters and uniforms, so a request gives the same
# tokens whatever else is in its batch. Batches of another shape round logits differently (about 1e-6); that changes a
# token only if its uniform is this close to a boundary.
#
# Shapes: B = rows, V = vocabulary.


OFF = torch.iinfo(torch.int64).max
"""top_k of a row that keeps all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Parameters as tensors, one entry per row. A tensor is None if no row uses it, which skips the work."""

    temperature: Tensor
    """(B, 1) float32; 1 for greedy rows."""
    greedy: Tensor | None
    """(B,) bool: rows that take the most likely token."""
    top_k: Tensor | None
    """(B, 1) int64; OFF disables it for a row."""
    top_p: Tensor | None
    """(B, 1) float32; infinity disables it for a row, since a sum of probabilities may round to 1 too early."""
    wants_kept: Tensor | None
    """(B, 1) bool: rows whose kept tokens are asked for."""


class Drawn(NamedTuple):
    """Next tokens."""

    tokens: Tensor
    """(B,) int64."""
    logprobs: Tensor
    """(B,) float32, nats."""
    kept: Tensor | None
    """(B, V) bool: tokens that top_k and top_p kept, all False in rows that do not ask; None if no row asks."""


def make_rows(params: Sequence[SamplingParams], device: torch.device) -> SamplingRows:
    """Build rows from the parameters of at least one request."""

    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    greedy = [p.temperature == 0 for p in params]
    top_k = [p.top_k or OFF for p in params]
    top_p = [p.top_p if p.top_p < 1 else float("inf") for p in params]
    wants_kept = [p.wants_kept_tokens for p in params]
    return SamplingRows(
        temperature=column([[p.temperature or 1.0] for p in params], torch.float32),
        greedy=column(greedy, torch.bool) if any(greedy) else None,
        top_k=column(top_k, torch.int64)[:, None] if min(top_k) < OFF else None,
        top_p=column(top_p, torch.float32)[:, None] if min(top_p) < 1 else None,
        wants_kept=column(wants_kept, torch.bool)[:, None] if any(wants_kept) else None,
    )


def random_numbers(seed: int) -> np.random.Generator:
    """Return a request's random numbers: its n-th token takes the n-th call of `random`, a float64 in [0, 1)."""
    # Philox is designed for streams that differ only by their key (Salmon et al. 2011).
    return np.random.Generator(np.random.Philox(key=seed % 2**64))


def sample(logits: Tensor, rows: SamplingRows, uniforms: Tensor) -> Drawn:
    """Sample next tokens.

    logits: (B, V). uniforms: (B,) float64 in [0, 1), for inverting the cumulative distribution. The distribution is
    the softmax of logits / temperature, cut to top_k, then to top_p, and renormalised; logprobs are under this
    distribution. A row with NaN among its logits gets an arbitrary token and the logprob NaN.
    """
    scaled = logits.float() / rows.temperature
    if rows.top_k is not None or rows.top_p is not None:
        scaled = _cut(scaled, rows.top_k, rows.top_p)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # float64: the error of a float32 sum over 150,000 tokens exceeds the probability of most of them.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)  # only NaN goes past the end
    taken = logprobs.gather(-1, tokens)
    tokens, taken = tokens[:, 0], taken[:, 0]
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, logits.argmax(dim=-1), tokens)
        taken = torch.where(rows.greedy, taken - taken, taken)  # 0, or NaN if it was NaN
    return Drawn(tokens, taken, None if rows.wants_kept is None else scaled.isfinite() & rows.wants_kept)


def kept_ids(kept: Tensor) -> list[np.ndarray]:
    """Return the ids of each row's kept tokens, each (kept,) int32 ascending, on the CPU. kept: (B, V) bool."""
    ids = kept.nonzero()[:, 1].int().cpu().numpy()
    return np.split(ids, kept.sum(dim=1).cumsum(dim=0)[:-1].cpu().numpy())


def _cut(scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return (B, V) logits with -inf outside top_k and top_p; of equally likely tokens, the lower id comes first."""
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(scaled.shape[-1], device=scaled.device)
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    if top_p is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(scaled).scatter(-1, tokens, ordered)
