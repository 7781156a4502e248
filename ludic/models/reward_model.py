"""Score conversations with a reward model (AutoModelForSequenceClassification) in batches.

A process loads a model once for all users with the same settings, and runs it in its own thread. Rollouts end at
different times, so a conversation waits up to `max_wait_ms` for others, and they share a forward pass. Raises
ModelError if there is no such model, or it has no chat template or no head of labels; ConfigError for settings that
can't work.
"""

import atexit
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from ludic.errors import ConfigError, ModelError, ScorerError
from ludic.models.chat import load_tokenizer, render_prompt
from ludic.models.rope import max_positions
from ludic.models.weight_files import load_config, load_pretrained
from ludic.records import Message
from ludic.root.weights import local_folder
from ludic.settings.user_code import describe

# Shapes: B = conversations of a batch, T = tokens of the longest one, L = labels of the head.

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_HEAD = "ForSequenceClassification"
_SYNTHETIC_CHAT = (Message(role="user", content="made up"), Message(role="assistant", content="made up"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Location of a model, loading settings, and size of its batches."""

    source: str
    """Folder, Hugging Face id or URL."""
    revision: str | None
    device: str | None
    """cpu or cuda:N; None is the last GPU that the process sees, or the CPU."""
    dtype: Dtype
    max_batch_size: int
    max_batch_tokens: int
    """Maximum tokens of a batch, with its padding."""
    max_wait_ms: float


class RewardModel:
    """A model with a classification head. May be created anywhere; its weights are loaded at the first use."""

    def __init__(self, loading: Loading) -> None:
        """Read configuration and tokenizer, and check them. Raises ModelError, ConfigError."""
        self.loading = loading
        self._device = _device(loading)
        with local_folder(loading.source, revision=loading.revision, with_weights=False) as folder:
            config = load_config(str(folder))
            self._tokenizer = load_tokenizer(str(folder))
        _check_head(config, loading.source)
        self._tokenizer.name_or_path = loading.source
        render_prompt(self._tokenizer, _SYNTHETIC_CHAT, add_generation_prompt=False)
        self.labels: Mapping[int, str] = dict(config.id2label)
        """Names of the labels, by index."""
        self.max_length = min(max_positions(config, None), self._tokenizer.model_max_length)
        """Maximum tokens that the model supports; for a longrope model, with its short factors."""
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._loaded: Future[None] | None = None
        self._lock = Lock()
        finalize(self, self._queue.put, None).atexit = False  # _end_threads comes then

    def load(self) -> "Future[None]":
        """Load the weights, unless they are loaded; the result is set when they are, or raises ModelError."""
        with self._lock:
            if self._loaded is None:
                self._loaded = Future()
                self._loaded.set_running_or_notify_cancel()  # no caller cancels it for the others
                # The thread does not hold this object, so it ends with it.
                work = partial(_work, self.loading, self._device, self._queue, self._loaded)
                thread = Thread(target=work, daemon=True, name="ludic-reward-model")
                _threads[thread] = self._queue
                thread.start()
            return self._loaded

    def tokens_of(self, messages: Sequence[Message]) -> np.ndarray:
        """Return (length,) int32: the tokens of a conversation in the model's own chat template. Raises ModelError."""
        return render_prompt(self._tokenizer, messages, add_generation_prompt=False)

    def logits(self, tokens: np.ndarray) -> "Future[np.ndarray]":
        """Return (L,) float32 for (length,) tokens, from a batch with others that wait. Raises ScorerError."""
        self.load()
        item = _Item(tokens=tokens, logits=Future())
        self._queue.put(item)
        return item.logits


_models: "WeakValueDictionary[Loading, RewardModel]" = WeakValueDictionary()
_making = Lock()


def shared_model(loading: Loading) -> RewardModel:
    """Return this process's model with these settings, which exists as long as it is referenced."""
    with _making:
        model = _models.get(loading)
        if model is None:
            model = _models[loading] = RewardModel(loading)
        return model


# --- What can be checked without the weights -------------------------------------------------------------------------


def _device(loading: Loading) -> torch.device:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if loading.device is None:
        return torch.device(f"cuda:{num_gpus - 1}" if num_gpus else "cpu")
    try:
        device = torch.device(loading.device)
    except RuntimeError as error:
        raise ConfigError(
            f"reward model {loading.source}: device is {loading.device!r}, wanted cpu, or cuda:N for a GPU"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        seen = f"the {num_gpus} GPUs cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "no GPU"
        raise ConfigError(
            f"reward model {loading.source}: device is {loading.device}, and this process sees {seen}; each worker "
            "sees the GPUs that it was given"
        )
    return device


def _check_head(config: PretrainedConfig, source: str) -> None:
    names = config.architectures or []
    if names and not any(name.endswith(_HEAD) for name in names):
        raise ModelError(
            f"{source} is a {names[0]}, wanted a reward model: one with a head of labels, such as Qwen3{_HEAD}"
        )


# --- The thread of a model -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Item:
    tokens: np.ndarray
    logits: "Future[np.ndarray]"


_threads: "WeakKeyDictionary[Thread, SimpleQueue[_Item | None]]" = WeakKeyDictionary()
_END_WITHIN_S = 30.0


@atexit.register
def _end_threads() -> None:
    """Wait for forward passes before the process ends: Python would abort a thread that returns from torch later."""
    running = [(thread, queue) for thread, queue in _threads.items() if thread.is_alive()]
    for _, queue in running:
        queue.put(None)
    for thread, _ in running:
        thread.join(_END_WITHIN_S)


def _work(loading: Loading, device: torch.device, queue: "SimpleQueue[_Item | None]", loaded: "Future[None]") -> None:
    """Load the model, then answer batches until the queue gives None."""
    try:
        model = _load(loading, device)
    except Exception as error:
        loaded.set_exception(error)
        while (item := queue.get()) is not None:
            item.logits.set_exception(error)
        return
    loaded.set_result(None)
    while (first := queue.get()) is not None:
        waiting, is_last = _gather(first, loading, queue)
        for batch in _batches(waiting, loading.max_batch_tokens):
            _answer(model, batch, loading)
        del first, waiting
        if is_last:
            break
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _load(loading: Loading, device: torch.device) -> PreTrainedModel:
    dtype = None if loading.dtype == "auto" else getattr(torch, loading.dtype)
    with local_folder(loading.source, revision=loading.revision) as folder:
        model = load_pretrained(
            str(folder),
            dtype=dtype,
            where=loading.source,
            strict=False,  # a reward model may keep the head of its former language model
            kind=AutoModelForSequenceClassification,
        )
    model.config.get_text_config().use_cache = False
    try:
        return model.to(device)
    except RuntimeError as error:  # too little memory
        raise ModelError(f"reward model {loading.source} can't be put on {device}: {describe(error)}") from error


def _gather(first: _Item, loading: Loading, queue: "SimpleQueue[_Item | None]") -> tuple[list[_Item], bool]:
    """Return the first item and those that arrive within max_wait_ms, and whether None followed."""
    items = [first]
    until = time.monotonic() + loading.max_wait_ms / 1000
    while len(items) < loading.max_batch_size:
        try:
            item = queue.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            break
        if item is None:
            return items, True
        items.append(item)
    return items, False


def _batches(items: Sequence[_Item], max_tokens: int) -> Iterator[list[_Item]]:
    """Yield batches of items of similar lengths that fit with their padding, without cancelled items."""
    items = [item for item in items if item.logits.set_running_or_notify_cancel()]
    batch: list[_Item] = []
    for item in sorted(items, key=lambda each: len(each.tokens)):
        if batch and len(item.tokens) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _answer(model: PreTrainedModel, batch: Sequence[_Item], loading: Loading) -> None:
    try:
        logits = _forward(model, [item.tokens for item in batch])
    except Exception as error:
        why = ScorerError(
            f"reward model {loading.source} failed for {len(batch)} conversations of up to "
            f"{len(batch[-1].tokens):,} tokens: {describe(error)}"
        )
        for item in batch:
            item.logits.set_exception(why)
        return
    for item, row in zip(batch, logits, strict=True):
        item.logits.set_result(row)


def _forward(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return (B, L) float32: the logits of (length,) token ids each, padded on the right."""
    shape = len(sequences), max(map(len, sequences))
    config: Any = model.config.get_text_config()
    own_pad = config.pad_token_id
    # A decoder reads the logits at the last token that is not padding. If the model names no padding token, that is the
    # last token, and any id that no sequence contains works.
    pad = own_pad if own_pad is not None else _unused_id(sequences, config.vocab_size)
    tokens, mask = np.full(shape, pad, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, each in enumerate(sequences):
        tokens[row, : len(each)], mask[row, : len(each)] = each, 1
    config.pad_token_id = pad
    try:
        with torch.inference_mode():
            logits = model(
                input_ids=torch.from_numpy(tokens).to(model.device),
                attention_mask=torch.from_numpy(mask).to(model.device),
            ).logits
    finally:
        config.pad_token_id = own_pad
    found: np.ndarray = logits.float().cpu().numpy()
    return found


def _unused_id(sequences: Sequence[np.ndarray], vocab_size: int) -> int:
    used = set(np.concatenate(sequences).tolist())
    return next(number for number in range(vocab_size) if number not in used)
