"""Record what a trainer of TRL samples, scores and trains on into a root: `ludic.trl.record(trainer, "runs/mine")`.

Methods of this one trainer are wrapped, and a callback is added; nothing of TRL is changed. Each rank keeps the rows of
its generations until the loss of the next step is computed. Then all ranks send theirs to rank 0, which stores whole
groups and the ledger of the step (`ludic.record`) while gradients are computed, and waits for it before the optimizer
moves. So a group may lie across ranks.

A trainer's run is never ended, changed or held up by this: what fails here is caught, counted and named once in the
log. Ranks talk in a group of their own, with a limit of time, and always make the same calls in the same order.
"""

# Shapes: B = rows of one rank's generation, T = longest completion, F = reward functions.
import atexit
import functools
import json
import logging
import math
import shutil
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from transformers import TrainerCallback

from ludic.adapters.trl_rows import (
    LOGGED_STEPS,
    MASKED,
    Generation,
    Sampling,
    distinct,
    from_bytes,
    metrics_of,
    row_of,
    to_bytes,
)
from ludic.adapters.trl_sampling import COLUMNS, Captures, captures_of, has_processed_logprobs
from ludic.base import make_folder, mask
from ludic.base.printable import printable
from ludic.errors import ConfigError, InvalidBatchError, LudicError
from ludic.models import read_tokenizer
from ludic.records import MEDIA
from ludic.root.storage import Storage
from ludic.run import Recorder
from ludic.run.recording import recorder as recording

_log = logging.getLogger(__name__)

SUPPORTED = ("GRPOTrainer", "RLOOTrainer")
WRAPPED = (
    "_generate",
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
"""Methods that are wrapped; a version of TRL without one of them is refused."""
ROW = "ludic_row"
"""Key of the trainer's batches: (B,) int64, number of the generation * _MOST_ROWS + index of the row among all ranks.
TRL shuffles and splits it with the other tensors, so that each micro-batch says which rows it holds."""
_MOST_ROWS = 1 << 32
_MOST_GENERATIONS = 4
"""Generations whose rows a step may still use; TRL itself keeps one, and takes the next in the middle of a step."""
_MOST_EVAL_GENERATIONS = 8
"""Evaluation batches that ranks keep before they send them to rank 0."""
_A_ROW = "a row"
_PATIENCE = timedelta(minutes=10)
"""How long ranks wait for each other before recording stops, as long as PyTorch's own ranks do; training goes on."""
_FLUSH_S = 10.0
"""Longest wait for the store at the end of training, in seconds."""
_QUIET_S = 1.0
"""What of it nobody is told of."""


# --- What a rank holds -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Scored:
    """What the wrapped methods showed in one call of _generate_and_score_completions."""

    generated: Sequence[Any] = ()
    """What _generate returned."""
    inputs: Sequence[Mapping[str, Any]] = ()
    prompts: Sequence[Any] = ()
    completions: Sequence[Any] = ()
    completion_ids: Sequence[Sequence[int]] = ()
    rewards: torch.Tensor | None = None
    """(rows of all ranks, F) float32."""
    logged: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    logprobs: torch.Tensor | None = None
    """(B, T) float32 of the first forward pass."""


@dataclass(slots=True)
class _Rank:
    """Rows and used rows of one rank that rank 0 does not have yet. No communication."""

    trainer: Any
    captures: Captures
    generations: dict[int, Generation] = field(default_factory=dict)
    window: list[tuple[list[int], torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Of each micro-batch since the last optimizer step: its values of ROW, its advantages, (rows,) or (rows, T), and
    its completion_mask, (rows, T)."""

    def add_generation(self, number: int, scored: _Scored, output: dict[str, Any]) -> None:
        """Keep what was generated, and write the numbers of its rows into the trainer's batch.

        Raises LookupError if the batch holds other rows, as that of a trainer that chooses among them, or replays some.
        """
        trainer, is_training = self.trainer, self.trainer.model.training
        num_rows = len(scored.prompts)
        completion_ids = [np.asarray(ids, np.int32) for ids in scored.completion_ids]
        if not _are_rows(output["completion_ids"].cpu().numpy(), completion_ids):
            raise LookupError("the trainer's batch holds other rows than those that it generated")
        first = trainer.accelerator.process_index * num_rows
        assert scored.rewards is not None
        rewards = scored.rewards[first : first + num_rows].detach().float().cpu()
        totals = (rewards * trainer.reward_weights.to(rewards).unsqueeze(0)).nansum(dim=1)
        totals[torch.isnan(rewards).all(dim=1)] = math.nan
        by_environment = getattr(trainer, "_multi_environment", False)
        # GRPO: prompt ids, completion ids, tool mask, completions, logprobs and more. RLOO: prompt and completion ids.
        tool_masks, sampled = (scored.generated[2], scored.generated[4]) if len(scored.generated) > 4 else (None, None)
        self.generations[number] = Generation(
            number=number,
            first=first,
            version=trainer.state.global_step,
            purpose="train" if is_training else "eval",
            prompt_ids=scored.generated[0],
            completion_ids=completion_ids,
            tool_masks=tool_masks,
            prompts=scored.prompts,
            completions=scored.completions,
            inputs=scored.inputs,
            rewards=rewards.numpy(),
            reward_names=distinct(trainer.reward_func_names),
            totals=totals.numpy(),
            logged={name: of for name, of in scored.logged.items() if len(of) == num_rows},
            sampler_logprobs=sampled if self.captures.sampler_logprobs else None,
            trainer_logprobs=self._logprobs_at_generation(scored, output, num_rows),
            env_names=[row.get("environment") if by_environment else None for row in scored.inputs],
        )
        output[ROW] = torch.arange(first, first + num_rows) + number * _MOST_ROWS

    def _logprobs_at_generation(
        self, scored: _Scored, output: Mapping[str, Any], num_rows: int
    ) -> list[np.ndarray | None]:
        """Return the logprobs that the trainer computed when it generated: GRPO where it needs them, RLOO always."""
        found = output.get("old_per_token_logps")
        if found is None and "old_logps" in output:  # sums of the first forward pass
            found = scored.logprobs
        return [None] * num_rows if found is None or not self._keeps else _of_rows(found, output["completion_mask"])

    @property
    def _keeps(self) -> bool:
        return self.captures.train_logprobs if self.trainer.model.training else self.captures.eval_logprobs

    def add_micro_batch(self, inputs: Mapping[str, Any], logprobs: torch.Tensor | None) -> None:
        """Keep which rows the loss was computed of, and the logprobs of that pass, (rows, T), for rows without any."""
        if ROW not in inputs:
            raise LookupError("it does not say which rows it holds")
        rows = inputs[ROW].tolist()
        wanting = {
            position: (generation.trainer_logprobs, row % _MOST_ROWS - generation.first)
            for position, row in enumerate(rows)
            if (generation := self.generations.get(row // _MOST_ROWS)) is not None
            and generation.version == self.trainer.state.global_step
            and generation.trainer_logprobs[row % _MOST_ROWS - generation.first] is None
        }
        if wanting and logprobs is not None and self._keeps:
            found = _of_rows(logprobs, inputs["completion_mask"])
            for position, (kept, index) in wanting.items():
                kept[index] = found[position]
        if self.trainer.model.training:
            self.window.append((rows, inputs["advantages"].detach(), inputs["completion_mask"]))

    def take(self) -> list[Generation]:
        """Return all generations that are kept, and forget them."""
        taken, self.generations = self.generations, {}
        return [*taken.values()]

    def take_used(self) -> list[tuple[int, Any]]:
        """Return the rows of the window by their values of ROW, each with its advantage, and forget them.

        The advantage is a number, a list of numbers for the response, or None for a row that the trainer masks.
        """
        taken, self.window = self.window, []
        used: dict[int, Any] = {}
        for rows, advantages, completion_mask in taken:
            lengths = completion_mask.sum(dim=1).tolist()
            for row, advantage, length in zip(rows, advantages.float().cpu().tolist(), lengths, strict=True):
                of_tokens = advantage[:length] if isinstance(advantage, list) else advantage
                used[row] = of_tokens if length else None
        return [*used.items()]


def _are_rows(padded: np.ndarray, rows: Sequence[np.ndarray]) -> bool:
    """Return whether (B, T) token ids are these, padded on the right."""
    return len(padded) == len(rows) and all(
        np.array_equal(found[: len(row)], row) for found, row in zip(padded, rows, strict=True)
    )


def _rows(
    generations: Sequence[Generation], sampling: Sampling, fail: Callable[[str, Exception], None]
) -> list[dict[str, Any]]:
    """Return the rows of generations, each with its `position`: generation's number, index among all ranks' rows.

    fail: is told of a row that can't be made, by what failed and the error.
    """
    rows = []
    for generation in generations:
        for index in range(len(generation.completion_ids)):
            try:
                row = row_of(generation, index, sampling)
            except Exception as error:
                fail(_A_ROW, error)
            else:
                rows.append({**row, "position": [generation.number, generation.first + index]})
    return rows


def _of_rows(logprobs: torch.Tensor, completion_mask: torch.Tensor) -> list[np.ndarray | None]:
    """Return the logprobs of each row, (T,) float32; None for one that the trainer masks, of which it computes none."""
    is_seen = completion_mask.any(dim=1).tolist()
    rows = logprobs.detach().float().cpu().numpy()
    return [row if seen else None for row, seen in zip(rows, is_seen, strict=True)]


# --- All ranks -------------------------------------------------------------------------------------------------------


class _Ranks:
    """Messages between the ranks, on CPUs, in a group of their own: a failure here does not touch the trainer's."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        try:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"rank {rank} did not meet the other {num_ranks - 1} within {_PATIENCE}; call ludic.trl.record on "
                f"every rank, in a process group of torch.distributed: {error}"
            ) from error

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each rank sent, on rank 0; an empty list on the others."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        if not self._rank:
            return [data, *(self._receive(rank, int(sizes[rank])) for rank in range(1, self._num_ranks))]
        if data:
            dist.send(_tensor(data), dst=0, group=self._group)
        return []

    def _receive(self, rank: int, size: int) -> bytes:
        received = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(received, src=rank, group=self._group)
        return received.numpy().tobytes()

    def from_first_rank(self, data: bytes) -> bytes:
        """Return the data of rank 0 on all ranks."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._group)
        shared = torch.empty(int(size), dtype=torch.uint8) if self._rank else _tensor(data)
        dist.broadcast(shared, src=0, group=self._group)
        return shared.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _Store:
    """Rank 0: joins the rows of all ranks into groups, and gives them to the recorder."""

    def __init__(self, recorder: Recorder, group_sizes: Mapping[str, int]) -> None:
        """group_sizes: rows of a group, by purpose."""
        self._recorder, self._group_sizes = recorder, group_sizes
        self._ids: dict[int, dict[int, str]] = {}
        """rollout_id of each stored row of the newest generations, by its generation and its index there."""
        self._not_kept: set[str] = set()
        self._last_step = 0
        self.is_used = False
        """Whether the trainer trained or evaluated since it is recorded."""

    def end(self) -> None:
        """Say so at the end of the process if the trainer was not used."""
        if not self.is_used:
            _log.warning(
                "%s: nothing was recorded: call ludic.trl.record before trainer.train()", mask(self._recorder.root)
            )

    def note(self, note: Mapping[str, Any]) -> None:
        """Count what a rank could not record, and log the name of each column whose values rows can't hold once."""
        for what, number in note["failed"].items():
            self._recorder.lose(0, number if what == _A_ROW else 0, f"{what} could not be recorded")
        if new := sorted(set(note["not_kept"]) - self._not_kept):
            _log.warning("rows are recorded without %s: too long, no text, or not known", ", ".join(new))
            self._not_kept.update(new)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Store whole groups: rows at neighbouring places of one generation."""
        self.is_used = True
        groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: row["position"]):
            number, index = row["position"]
            groups.setdefault((number, index // self._group_sizes[row["purpose"]]), []).append(row)
        whole = [group for group in groups.values() if len(group) == self._group_sizes[group[0]["purpose"]]]
        if len(whole) < len(groups):
            self._recorder.lose(len(groups) - len(whole), len(rows) - sum(map(len, whole)), "a rank lost its rows")
        if not self._append(whole):
            for group in whole:
                self._append([group], is_alone=True)

    def _append(self, groups: Sequence[Sequence[dict[str, Any]]], *, is_alone: bool = False) -> bool:
        """Return whether groups were taken; one that is refused alone is counted."""
        columns = [[{name: row[name] for name in row if name != "position"} for row in group] for group in groups]
        try:
            ids = self._recorder.append(columns)
        except InvalidBatchError as error:
            if is_alone:
                self._recorder.lose(1, len(groups[0]), f"a group was refused: {mask(str(error))}")
            return False
        for row, rollout_id in zip((row for group in groups for row in group), ids, strict=True):
            if row["purpose"] == "train":  # no step uses the others
                number, index = row["position"]
                self._ids.setdefault(number, {})[index] = rollout_id
        return True

    def step(self, step: int, used: Iterable[tuple[int, Any]]) -> None:
        """Store the ledger of a step, before the optimizer moves. used: value of ROW and advantage of each row."""
        found = {
            self._ids[row // _MOST_ROWS][row % _MOST_ROWS]: advantage
            for row, advantage in used
            if row % _MOST_ROWS in self._ids.get(row // _MOST_ROWS, {})
        }
        self._last_step = step
        self._recorder.step(
            step,
            advantages={rollout_id: advantage for rollout_id, advantage in found.items() if advantage is not None},
            dropped={rollout_id: MASKED for rollout_id, advantage in found.items() if advantage is None},
            version=step - 1,
        )
        newest = sorted(self._ids)[-_MOST_GENERATIONS:]
        self._ids = {number: self._ids[number] for number in newest}

    def metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        """Store numbers of the newest step; before the first one there is none that could have them."""
        if step == self._last_step:
            self._recorder.metrics(step, numbers)

    def flush(self) -> None:
        """Wait for the store at the end of training, and say what is not stored."""
        recorder, quiet_s = self._recorder, min(_QUIET_S, _FLUSH_S)
        if not recorder.flush(quiet_s):
            left_s = _FLUSH_S - quiet_s
            _log.warning("%s: training has ended; waiting at most %g s for the store", recorder.root, left_s)
            recorder.flush(left_s)
        lost, waiting = recorder.lost, recorder.waiting
        if lost or waiting:
            said = "; ".join(map(str, filter(None, [lost, None if lost.waiting else waiting])))
            again = "; it is tried again until this process ends" if waiting else ""
            _log.warning("%s: at the end of training %s%s", recorder.root, said, again)


_Sent = tuple[list[dict[str, Any]], dict[str, Any]]
"""Rows of a rank, and a note of what it used and lost."""


class _Recording(TrainerCallback):
    """Wraps one trainer's methods and is called at its steps, on each rank.

    The ranks meet in `_join` alone, which each calls at the same points of training, whatever failed on it.
    """

    def __init__(
        self, trainer: Any, ranks: _Ranks | None, store: _Store | None, is_processed: bool, stop: bool
    ) -> None:
        self._trainer, self._ranks, self._store, self._stop = trainer, ranks, store, stop
        self._is_processed = is_processed
        self._rank = _Rank(trainer, captures_of(trainer, is_processed=is_processed))
        self._num_generations = self._num_eval_generations = 0
        self._scored: _Scored | None = None
        """Set while a generation is made."""
        self._is_in_loss = False
        self._loss_logprobs: torch.Tensor | None = None
        self._last_logged = 0
        self._failed: Counter[str] = Counter()
        """Number of failures by what failed, which rank 0 does not know yet."""
        self._warned: set[str] = set()
        self._background = ThreadPoolExecutor(1, "ludic-trl")
        self._keeping: Future[None] | None = None
        self._is_joined = False
        """Whether the rows of this step were sent, before its gradients were there."""
        self._is_apart = False
        """Whether the ranks could not be joined; then none tries again, since the others may wait elsewhere."""

    def install(self) -> None:
        """Wrap the methods of the trainer, and be called at its steps."""
        for name in WRAPPED:
            original = getattr(self._trainer, name)
            setattr(self._trainer, name, functools.wraps(original)(functools.partial(getattr(self, name), original)))
        self._trainer.add_callback(self)

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Keep an error of this recording from the trainer: it is logged once, and counted."""
        try:
            yield
        except Exception as error:
            self._fail(what, error)

    def _fail(self, what: str, error: Exception) -> None:
        if self._stop:
            raise error
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(
                "%s could not be recorded: %s: %s; the trainer goes on", what, type(error).__name__, mask(str(error))
            )
        self._failed[what] += 1

    # --- Wrapped methods. `original` is the trainer's own; its errors and its results pass unchanged.

    def _generate_and_score_completions(self, original: Callable[..., Any], inputs: Any) -> Any:
        self._num_generations += 1
        if self._num_eval_generations >= _MOST_EVAL_GENERATIONS:
            self._join(None)
        self._num_eval_generations += not self._trainer.model.training
        self._scored = scored = _Scored()
        try:
            output = original(inputs)
        finally:
            self._scored = None
        try:
            self._rank.add_generation(self._num_generations, scored, output)
        except Exception as error:
            self._fail("a generation", error)
            self._failed[_A_ROW] += len(inputs)
        return output

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generated = original(*args, **kwargs)
        if self._scored is not None:
            self._scored.generated = generated
        return generated

    def _calculate_rewards(self, original: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rewards = original(inputs, *args, **kwargs)
        if self._scored is not None:
            with self._guard("rewards"):
                prompts, completions, completion_ids = args
                self._scored.inputs, self._scored.prompts, self._scored.completions = inputs, prompts, completions
                self._scored.completion_ids, self._scored.rewards = completion_ids, rewards
                # TRL empties these after it has logged them.
                self._scored.logged = {name: [*of] for name, of in self._trainer._pending_extra_logs.items()}
        return rewards

    def _get_per_token_logps_and_entropies(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        with self._guard("logprobs"):
            if self._is_in_loss:
                self._loss_logprobs = found[0].detach()
            elif self._scored is not None and self._scored.logprobs is None:
                self._scored.logprobs = found[0]
        return found

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any) -> Any:
        self._is_in_loss, self._loss_logprobs = True, None
        try:
            loss = original(model, inputs)
        finally:
            self._is_in_loss = False
        with self._guard("a micro-batch"):
            if self._is_joined and self._trainer.model.training:
                raise RuntimeError("the loss is computed again after the last micro-batch of the step")
            self._rank.add_micro_batch(inputs, self._loss_logprobs)
        self._loss_logprobs = None
        is_last = self._trainer.model.training and self._trainer.accelerator.sync_gradients
        if is_last and not self._is_joined:
            self._is_joined = True
            self._join(self._trainer.state.global_step + 1, in_background=True)
        return loss

    # --- Steps of the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._store is not None:
            self._store.is_used = True
        self._join(None)  # rows of a run that was interrupted
        self._rank.window.clear()
        self._is_joined = False
        self._last_logged = state.global_step
        with self._guard("the settings of sampling"):
            captures = captures_of(self._trainer, is_processed=self._is_processed)
            self._rank.captures = captures
            if self._store is not None and not captures.has_sampler and not captures.train_logprobs:
                _log.warning(
                    "rows are recorded without logprobs (capture ids), which policy gradients do not train on: "
                    "with top_p, top_k, min_p, other cuts or dropout, TRL's own are of another distribution"
                )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_joined:
            self._join(state.global_step + 1)
        self._is_joined = False
        self._wait()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._join(None)

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._join(None)

    def finish(self) -> None:
        """Store the rows of which no step came."""
        self._join(None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._join(None)
        if self._store is not None:
            with self._guard("the last rows"):
                self._store.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._store is None or not logs or not state.global_step:
            return
        self._wait()
        with self._guard("metrics"):
            numbers = metrics_of(logs)
            if "loss" in logs:
                if state.global_step - self._last_logged > 1:
                    numbers[LOGGED_STEPS] = state.global_step - self._last_logged
                self._last_logged = state.global_step
            self._store.metrics(state.global_step, numbers)

    def _join(self, step: int | None, *, in_background: bool = False) -> None:
        """Bring the rows of all ranks to rank 0, which stores them, and the ledger of a step if there is one.

        in_background: rank 0 stores them in a thread, for which `_wait` waits; meanwhile the trainer goes backward.
        """
        self._wait()
        self._num_eval_generations = 0
        taken = self._rank.take()
        used: list[tuple[int, Any]] = []
        with self._guard("the rows of a step"):
            used = self._rank.take_used() if step is not None else []
        sent = None if self._ranks is None else self._gathered(self._ranks, *self._own(taken, used))
        if self._store is not None and in_background:
            self._keeping = self._background.submit(self._keep, self._store, step, taken, used, sent)
        elif self._store is not None:
            self._keep(self._store, step, taken, used, sent)

    def _own(self, taken: Sequence[Generation], used: Sequence[tuple[int, Any]]) -> _Sent:
        """Return the rows of this rank, and its note."""
        rows: list[dict[str, Any]] = []
        with self._guard("rows"):
            rows = _rows(taken, self._rank.captures.sampling, self._fail)
        failed, self._failed = self._failed, Counter()
        not_kept = sum((generation.not_kept for generation in taken), Counter[str]())
        return rows, {"used": used, "failed": failed, "not_kept": not_kept}

    def _keep(
        self,
        store: _Store,
        step: int | None,
        taken: Sequence[Generation],
        used: Sequence[tuple[int, Any]],
        sent: Sequence[_Sent | bytes] | None,
    ) -> None:
        """Store what ranks sent; None: this one is alone, and its rows are made here, beside the trainer."""
        found: list[_Sent] = []
        for each in [self._own(taken, used)] if sent is None else sent:
            with self._guard("the rows of a rank"):
                found.append(from_bytes(each) if isinstance(each, bytes) else each)
        with self._guard("rows"):
            for _, note in found:
                store.note(note)
            if rows := [row for of_rank, _ in found for row in of_rank]:
                store.append(rows)
        with self._guard("the ledger of a step"):
            if step is not None:
                store.step(step, [row for _, note in found for row in note["used"]])

    def _wait(self) -> None:
        """Wait until what was given to the background is stored, or not: the recorder says how long at most."""
        if (keeping := self._keeping) is not None:
            wait([keeping])  # interrupted, it is waited for again, so that steps are stored in order
            self._keeping = None
            keeping.result()

    def _gathered(self, ranks: _Ranks, rows: list[dict[str, Any]], note: dict[str, Any]) -> Sequence[_Sent | bytes]:
        """Return what all ranks bring to this call, on rank 0."""
        data = b""
        with self._guard("rows"):
            data = to_bytes(rows, note)
        if self._is_apart:
            return [([], {"used": [], "not_kept": {}, "failed": {_A_ROW: len(rows)}})]
        try:
            return [each for each in ranks.gather(data) if each]
        except Exception as error:
            self._is_apart = True
            self._fail("what the ranks hold", error)
            return []


# --- Start -----------------------------------------------------------------------------------------------------------


def record(
    trainer: Any,
    root: str | Path,
    *,
    env: str = "recorded",
    stop_on_failure: bool = False,
    take_over: bool = False,
) -> Recorder | None:
    """Record a trainer's rollouts, steps and metrics into a root, a folder or a URL, which is made if it is new.

    Call it once for each trainer, before `train`, on every rank. Returns the recorder on rank 0, which is closed when
    the process ends; None on the others.

    Args:
        trainer: GRPOTrainer or RLOOTrainer of TRL 1.16, or of a class of yours below them.
        root: Where the run is stored. A root that a trainer of the same model has recorded is gone on with.
        env: Name of the environment in its rows.
        stop_on_failure: Raise what can't be recorded in the trainer, which ends it; otherwise it is logged and counted.
        take_over: Take the steps over from another live process of this machine that records them into the root.

    Raises ConfigError for a trainer that can't be recorded, and what `ludic.record` raises, on every rank.
    """
    _check(trainer)
    rank, num_ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
    ranks = _Ranks(rank, num_ranks) if num_ranks > 1 else None
    recorder: Recorder | None = None
    said: dict[str, Any] = {"error": None, "processed": True}
    if not rank:
        try:
            said["processed"] = has_processed_logprobs(trainer)
            recorder = _start(trainer, root, env, stop_on_failure=stop_on_failure, take_over=take_over)
        except Exception as error:
            if ranks is None:
                raise
            said["error"] = mask(f"{type(error).__name__}: {error}")
    if ranks is not None:
        said = json.loads(ranks.from_first_rank(json.dumps(said).encode()))
    if said["error"]:
        raise ConfigError(f"rank 0 can't record into {mask(str(root))}: {said['error']}")
    if recorder is not None:
        print(printable(mask(f"ludic: {recorder.describe()}")), file=sys.stderr)
    sizes = {"train": trainer.num_generations, "eval": trainer.num_generations_eval}
    store = None if recorder is None else _Store(recorder, sizes)
    own = _Recording(trainer, ranks, store, said["processed"], stop_on_failure)
    own.install()
    if store is not None:
        atexit.register(store.end)
    if ranks is None:
        atexit.register(_finish, weakref.ref(own))
    return recorder


def _finish(reference: "weakref.ref[_Recording]") -> None:
    """Store the rows of a step that an error ended, before the recorder is closed; alone, ranks can't do so."""
    if (own := reference()) is not None:
        own.finish()


def _check(trainer: Any) -> None:
    """Raise ConfigError for a trainer that can't be recorded."""
    names = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    if not names:
        raise ConfigError(f"trainer is {type(trainer).__name__}, wanted a trainer of TRL: {' or '.join(SUPPORTED)}")
    if not set(SUPPORTED).intersection(names):
        raise ConfigError(
            f"{names[0]} can't be recorded, wanted {' or '.join(SUPPORTED)}; "
            "for a loop that samples, `ludic.record` takes its rows and steps from a callback of yours"
        )
    missing = [name for name in WRAPPED if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"{names[0]} of TRL {version('trl')} has no {', '.join(missing)}; "
            "install trl==1.16.0, for which ludic.trl.record is made, or call `ludic.record` from a callback of yours"
        )
    if any(isinstance(each, _Recording) for each in trainer.callback_handler.callbacks):
        raise ConfigError("this trainer is recorded already; make a new trainer for another root")
    images = sorted(set(MEDIA).intersection(getattr(trainer.train_dataset, "column_names", None) or ()))
    if images:
        raise ConfigError(f"the data set has the column {images[0]}, and a root holds texts and tokens alone")


def _start(trainer: Any, root: str | Path, env: str, *, stop_on_failure: bool, take_over: bool) -> Recorder:
    """Start the recorder, with the trainer's settings."""
    args = trainer.args
    _check_apart(root, args.output_dir)
    model = trainer.accelerator.unwrap_model(trainer.model)
    name = model.config.name_or_path or type(model).__name__
    sampled_with = captures_of(trainer, is_processed=True).sampling.columns
    folder = _model_folder(trainer, model, name)
    with suppress(LudicError):  # no tokenizer lies there
        if read_tokenizer(folder).chat_template != trainer.processing_class.chat_template:
            _log.warning(
                "the root keeps the tokenizer of %s, whose chat template is another one than the trainer's; "
                "what ludic samples of this model later has prompts by that one",
                name,
            )
    rows_a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return recording.record(
        root,
        model=name,
        env=env,
        trainer=f"trl {version('trl')}",
        settings=args.to_dict(),
        model_folder=folder,
        stop_on_failure=stop_on_failure,
        take_over=take_over,
        group_size=trainer.num_generations,
        groups_per_batch=max(1, rows_a_step // trainer.num_generations),
        **{name: sampled_with[name] for name in (*COLUMNS, "max_tokens")},
    )


def _check_apart(root: str | Path, output_dir: str) -> None:
    """Raise ConfigError for a root that is the folder of the trainer's checkpoints, or holds it."""
    storage = Storage.connect(str(root))
    if storage.is_local and Path(output_dir).resolve().is_relative_to(Path(storage.path).resolve()):
        raise ConfigError(
            f"root is {str(root)!r}, and the trainer writes checkpoints into {output_dir!r} (output_dir); wanted a "
            "folder of its own, such as 'runs/mine'"
        )


def _model_folder(trainer: Any, model: Any, name: str) -> str:
    """Return a folder with the configuration and the tokenizer of the model: its own one, where it was loaded from.

    `ludic train` finds the first weights by it. A model from nowhere gets a folder that lasts as long as this process.
    """
    with suppress(OSError, ValueError):  # errors of the Hub's client are among them
        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, local_files_only=True))
        if (folder / "config.json").is_file():
            return str(folder)
    own = make_folder("trl")
    # After the recorder's end: a root that can't be reached now is opened later.
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    model.config.save_pretrained(own)
    trainer.processing_class.save_pretrained(own)
    return str(own)
