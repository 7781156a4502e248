"""Record the trainer of another program: `ludic.record`, and the Recorder that it returns.

A mistake of the caller raises at the call. A failing store raises only with stop_on_failure: a thread stores the data
in the order of the calls, and counts and names the data that it can't store.
"""

import atexit
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from ludic.base import mask, mask_fields, public_values
from ludic.errors import ConfigError, InvalidBatchError, StoreError, one_line
from ludic.records import RolloutBatch, RolloutGroup, RolloutMetadata, load_table, to_table, validate
from ludic.root import RECORDED
from ludic.root.rows import Folder
from ludic.run.config import RunConfig
from ludic.run.recording.groups import Defaults, plain, read_groups
from ludic.run.recording.life import (
    MOST_KNOWN_ROWS,
    Find,
    KnownGroup,
    KnownRow,
    LedgerRow,
    LedgerStep,
    RecorderLife,
    StepNumbers,
    StoredRows,
)
from ludic.run.recording.losses import Lost, Waiting
from ludic.run.recording.queue import Queue
from ludic.run.recording.rows import SAMPLED_WITH

logger = logging.getLogger(__name__)

OPEN_S = 20.0
STEP_S = 10.0
CLOSE_S = 30.0
"""Maximum seconds that record(), append() and step(), and close() wait for the store."""

_MOST_OPEN_STEPS = 1000
"""Maximum future steps whose metrics are kept until then."""
Advantages = Mapping[str, Any] | Iterable[Any] | None

_METRICS = {column.name: column.type for column in load_table("metrics").columns if column.catalogue.get("recorded")}
"""Type by name of the columns of the metrics table that a caller's numbers go to; all others go to the map `other`."""


def record(
    root: str | os.PathLike[str],
    *,
    model: str | None = None,
    env: str | None = None,
    trainer: str | None = None,
    settings: Mapping[str, Any] | None = None,
    model_folder: str | os.PathLike[str] | None = None,
    stop_on_failure: bool = False,
    take_over: bool | None = None,
    group_size: int | None = None,
    groups_per_batch: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    extra_columns: Mapping[str, str] | None = None,
) -> "Recorder":
    """Record the rollouts and the steps of another program's trainer in a root.

        with ludic.record("runs/mine", model="Qwen/Qwen3-0.6B") as recorder:
            recorder.append(groups)
            recorder.step(1, advantages=..., metrics={"loss": 0.1})

    Creates the root, or continues as its next life. The newest life owns the steps: its first step takes them over from
    an earlier life, and steps that it repeats supersede the earlier ones, whose rows stay.

    Args:
        root: Folder or URL of the run.
        model: Folder or Hugging Face id of the model that is trained; None is that of an existing root.
        env: Environment of rows that name none; None is that of the root, and `recorded` for a new one.
        trainer: Name and version of the program, such as "trl 1.16.0".
        settings: Its settings, for people; secrets are masked, and values that do not fit JSON are stored as text.
        model_folder: Folder with the model's configuration and tokenizer, which the root keeps; None is `model`.
        stop_on_failure: Raise StoreError from append, step and flush if the store fails.
        take_over: What to do if another live process of this machine records the steps here. False refuses the root.
        Otherwise rows are added beside it, and the first step takes over its steps, with a warning. group_size,
        groups_per_batch: Of a new root, for people and for `ludic train`; None is 8. temperature, top_p, top_k,
        max_tokens: Sampling parameters of rows that leave them out. None takes those of the root, for a new one 1, 1,
        off and 256; a top_k of 0 is off.
        extra_columns: Extra columns of the run's rollouts, type by name, such as {"x_source": "string"}; None takes
            those of an existing root.

    Raises:
        ConfigError: A setting is wrong; or the root has another model or other extra columns, or is a run that ludic
            itself trains. A store that can't be reached raises no error: it is retried.
        OwnedError: A trainer of ludic trains this root now; or take_over is False, and another live process of this
            machine records its steps.
    """
    sampled = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
    of_rows = _given({"env": env and (env,), **sampled})
    columns = None if extra_columns is None else dict(_mapping("extra_columns", extra_columns))
    given = _given({"model": model, "extra_columns": columns})
    sizes = _given({"group_size": group_size, "groups_per_batch": groups_per_batch})
    run = _with({"model": "unknown", "env": ("recorded",), **given, **sizes}, of_rows)
    config = {RECORDED: {"trainer": trainer, "settings": _as_json(_mapping("settings", settings))}}
    folder = _model_folder(model_folder)
    life = RecorderLife(os.fspath(root), run if model else None, given, config, folder, take_over=take_over)
    return Recorder(life, os.fspath(root), run, of_rows, stop_on_failure=stop_on_failure)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _with(settings: Mapping[str, Any], of_rows: Mapping[str, Any]) -> RunConfig:
    """Return settings of a run with the defaults of its rows. Raises ConfigError for a wrong setting."""
    off = {"top_k": None} if of_rows.get("top_k") == 0 else {}
    return RunConfig(**{**settings, **of_rows, **off})


def _model_folder(folder: str | os.PathLike[str] | None) -> str | None:
    """Return the path of a model's folder. Raises ConfigError if it holds no model."""
    if folder is not None and not (Path(folder).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"model_folder is {os.fspath(folder)!r}, which holds no config.json; wanted the folder of a model"
        )
    return None if folder is None else os.fspath(folder)


class Recorder:
    """Stores the rollouts and steps of one process; returned by `ludic.record`. Safe from several threads.

    Close it, or use it in `with`. Several processes record into one run with one recorder each, of which one calls
    `step`. A process forked later opens its own recorder.
    """

    def __init__(
        self, life: RecorderLife, url: str, run: RunConfig, of_rows: Mapping[str, Any], *, stop_on_failure: bool
    ) -> None:
        """Use `ludic.record`. run: settings until the root is open. of_rows: the caller's settings of rows."""
        self.root = url
        """Folder or URL of the run."""
        self._life, self._run, self._of_rows, self._stop_on_failure = life, run, of_rows, stop_on_failure
        self._pid, self._is_closed = os.getpid(), False
        self._lock = threading.RLock()
        self._episode_numbers = itertools.count()
        self._known: OrderedDict[str, KnownRow] = OrderedDict()
        self._group_ids: set[str] = set()
        self._fresh: deque[KnownRow] = deque(maxlen=MOST_KNOWN_ROWS)
        """The newest rows appended since the last step."""
        self._num_fresh = 0
        """Number of all rows appended since the last step."""
        self._step: LedgerStep | None = None
        """The newest step, whose metrics are not stored yet."""
        self._numbers: dict[int, dict[str, Any]] = {}
        self._version: int | None = None
        """None before the first step, unless the caller set it."""
        self._queue = Queue(life, url)
        self._is_open = False
        self._queue.wait_until_open(OPEN_S)
        self._follow_root()
        if not self._is_open and (stop_on_failure or not life.can_start):
            self._queue.close(0.0)
            if stop_on_failure:
                raise StoreError(f"{url}: {self._queue.failure}") from self._queue.failure
            raise ConfigError(f"{url} can't be reached, so the name of the model is needed: model='...'")
        atexit.register(self.close)

    def describe(self) -> str:
        """Describe on one line where this records, and the present state of the root."""
        if (number := self._life.number) is None:
            return f"records to {self.root} as soon as it can be reached: {self.waiting.reason}"
        if not (newest := self._life.newest_step):
            return f"records to {self.root}, life {number}"
        there = f"the root has steps up to {newest}; steps that this life repeats supersede them"
        return f"records to {self.root}, life {number}; {there}"

    @property
    def version(self) -> int:
        """Version of the sampling weights for rows that leave it out; after `step`, the following version.

        At first it is the newest step of the root. A loop that resumes from an earlier checkpoint sets it; raises
        ConfigError for anything but a whole number from 0.
        """
        return self._life.newest_step if self._version is None else self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = _whole("version", version, least=0)

    @property
    def lost(self) -> Lost:
        """Data that could not be stored, counted and named; false if there is none.

        While the store fails, `Lost.waiting` also counts the waiting data, until it is stored.
        """
        waiting = self.waiting
        return replace(self._queue.lost, waiting=waiting if waiting.reason else Waiting())

    @property
    def waiting(self) -> Waiting:
        """Data that is not stored yet, and the reason if the store fails; false if nothing waits."""
        return self._queue.waiting

    def append(self, groups: Any) -> list[str]:
        """Store complete groups; return the rollout_id of each row, in the order of the rows.

        groups: a sequence of groups, each a RolloutGroup, or a sequence of Rollouts or of dictionaries; or one Arrow
        table, or anything with `__arrow_c_stream__`, whose column group_id says which rows are a group. Keys of a
        dictionary are columns of the rollouts table (docs/schemas.md) or extra columns. It needs prompt_tokens (P,)
        int32, response_tokens (R,) int32 and episode_reward; response_logprobs (R,) float32 are nats. Without them
        capture is `ids`. Other columns that are left out get the defaults of an import.

        Returns before the rows are stored. Raises InvalidBatchError, and stores none of them, for rows that do not fit
        the table, the run's model or its vocabulary, and for a group or row that was appended before.
        """
        self._check()
        until = time.monotonic() + STEP_S
        with self._lock:
            self._follow_root()
            defaults = Defaults(
                sampled_with={name: getattr(self._run, name) for name in SAMPLED_WITH},
                env_name=self._run.env[0],
                extra_columns=self._run.extra_columns,
                max_column_characters=self._run.max_column_characters,
                policy_version=self.version,
                episode_numbers=self._episode_numbers,
            )
            found, rollout_ids = read_groups(groups, defaults)
            if found:
                self._append(found, until)
        self._raise_failure()
        return rollout_ids

    def step(
        self,
        n: int,
        *,
        advantages: Advantages = None,
        metrics: Mapping[str, Any] | None = None,
        version: int | None = None,
        dropped: Mapping[str, str] | None = None,
    ) -> None:
        """Store the rows that a gradient step trains on; call it before the optimizer step.

        Waits until its ledger is stored, for at most 10 seconds, and not while the store fails. A step that is not
        above the previous one supersedes the recorded steps from it on.

        Args:
            n: The step, from 1.
            advantages: Of the rows that it uses, by rollout_id: a number, or (R,) one for each response token; or a
                sequence, for all rows that were appended since the last step, in order; None uses these, without
                advantages. An advantage that is not finite is stored as null, with a warning.
            metrics: As for `metrics`.
            version: Version of the weights that the step started from; None is n - 1.
            dropped: Reasons of rows that it leaves out, by rollout_id. A sequence of advantages includes their places.

        Raises ConfigError for a row that this recorder does not know, and for advantages that fit no row.
        """
        self._check()
        since = time.monotonic()
        n = _whole("n", n, least=1)
        version = _whole("version", n - 1 if version is None else version, least=0)
        numbers, dropped = _read_numbers(_mapping("metrics", metrics)), _mapping("dropped", dropped)
        advantages, dropped = self._find(n, advantages, dropped, since)
        with self._lock:
            self._follow_root()
            if not isinstance(advantages, Mapping) and self._num_fresh > len(self._fresh):
                raise ConfigError(
                    f"step {n}: {self._num_fresh} rows were appended since the step before, and the newest "
                    f"{len(self._fresh)} are known; give a mapping of rollout_id to advantage"
                )
            rows = _considered(n, advantages, dropped, self._known, list(self._fresh))
            for group in {row.row.group for row in rows if row.reason is None}:
                group.num_uses += 1
            for row in rows:
                row.num_uses = row.row.group.num_uses
            size = sum(512 + (4 * len(row.token_advantages) if row.token_advantages is not None else 0) for row in rows)
            job = LedgerStep(step=n, version=version, rows=rows, size_bytes=size)
            number = self._queue.add(job, patience_s=_left(since + STEP_S))
            self._put_numbers()
            self._step, self._version = job, version + 1
            for early in [each for each in self._numbers if each < n]:
                self._lose_numbers(early)
            self._add_numbers(n, numbers)
            self._fresh.clear()
            self._num_fresh = 0
        self._wait(number, since)
        self._raise_failure()

    def metrics(self, n: int, numbers: Mapping[str, Any]) -> None:
        """Add metrics of a step; they are stored at the next step, or at the end.

        numbers: by name. The name of a column of the metrics table, such as loss, grad_norm or learning_rate, is that
        column; all others go to its map `other`, also those of columns that ludic computes from the ledger, such as
        reward_mean. None, infinities and NaN are left out. Raises ConfigError for a value that is not a number.
        """
        self._check()
        _whole("n", n, least=1)
        found = _read_numbers(_mapping("numbers", numbers))
        with self._lock:
            if self._step is not None and n < self._step.step:
                self._queue.lose_numbers(n, "they came after a later step had begun")
            else:
                self._add_numbers(n, found)
            if len(self._numbers) > _MOST_OPEN_STEPS:
                self._lose_numbers(max(self._numbers), f"more than {_MOST_OPEN_STEPS} later steps had numbers")

    def lose(self, num_groups: int, num_rollouts: int, reason: str) -> None:
        """Count groups that the caller could not provide, so that `lost` includes them.

        reason: why, on one line; secrets in it are masked.
        """
        self._queue.lose_groups(num_groups, num_rollouts, mask(reason))

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all appended data is stored or finally lost, for at most timeout_s seconds; return whether it is.

        If not, `waiting` has the rest and the reason. The metrics of the newest step still wait for more.
        """
        self._check()
        is_done = self._queue.wait(None, timeout_s, is_patient=True)
        self._raise_failure()
        return is_done

    def close(self) -> None:
        """Store the waiting data in at most 30 seconds, and end this life; the rest is counted as lost and logged.

        Does nothing the second time, and in a forked process. Raises StoreError only with stop_on_failure.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._put_numbers()
            for n in list(self._numbers):
                self._lose_numbers(n)
        atexit.unregister(self.close)
        try:
            self._queue.close(CLOSE_S)
        finally:
            if self.lost:
                logger.warning("%s: %s", self.root, self.lost)
        if self.lost and self._stop_on_failure:
            raise StoreError(f"{self.root}: {self.lost}")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StoreError:
            if error is None:  # otherwise it was logged, and must not hide the trainer's own error
                raise

    # --- What the calls share ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ConfigError(
                f"{self.root}: this recorder belongs to process {self._pid}, from which process {os.getpid()} was "
                "forked; call ludic.record in each process"
            )
        if self._is_closed:
            raise ConfigError(f"{self.root}: this recorder was closed; call ludic.record again")
        if self._queue.mistake is not None:
            raise self._queue.mistake

    def _raise_failure(self) -> None:
        if not self._stop_on_failure:
            return
        if self._queue.failure is not None:
            raise StoreError(f"{self.root}: {self._queue.failure}") from self._queue.failure
        if self.lost:
            raise StoreError(f"{self.root}: {self.lost}")

    def _follow_root(self) -> None:
        """Take over the settings of the root, as soon as it is open."""
        if self._is_open or not self._life.is_open:
            return
        stored = self._life.run
        assert stored is not None
        self._run = _with({each.name: getattr(stored, each.name) for each in fields(stored)}, self._of_rows)
        self._is_open = True

    def _wait(self, number: int, since: float) -> None:
        """Wait for a job of a step that began then, in seconds of time.monotonic()."""
        if not self._queue.wait(number, _left(since + STEP_S), is_patient=self._stop_on_failure):
            self._queue.suspect()

    def _append(self, groups: Sequence[RolloutGroup], until: float) -> None:
        """Add groups to the queue. until: when to stop waiting for room, in seconds of time.monotonic()."""
        metadata = RolloutMetadata(worker_id=self._life.worker_id)
        extra_columns = self._run.extra_columns
        whole = RolloutBatch(groups=tuple(groups), metadata=metadata)
        tokens = validate(whole, extra_columns, vocab_size=self._life.vocab_size)
        self._check_new(groups)
        batches: dict[Folder, list[RolloutGroup]] = {}
        for group in groups:
            batches.setdefault("evals" if group.rollouts[0].purpose == "eval" else "rollouts", []).append(group)
        jobs = []
        for folder, of_folder in batches.items():
            batch = RolloutBatch(groups=tuple(of_folder), metadata=metadata)
            joined = tokens if len(batches) == 1 else None
            try:
                table = to_table(batch, run_id="", sequence=0, extra_columns=extra_columns, tokens=joined)
            except pa.ArrowException as error:  # a number that fits neither float nor int64
                raise InvalidBatchError(f"a column can't hold a value of its rows: {one_line(error)}") from error
            known = [row for group in of_folder for row in _known_rows(group)]
            group_ids = [group.rollouts[0].group_id for group in of_folder]
            jobs.append(StoredRows(table=table, known=known, group_ids=group_ids, folder=folder))
        for job in jobs:  # all rows are valid here, so all or none are added
            self._queue.add(job, patience_s=_left(until))
            if job.folder == "rollouts":
                self._know({row.rollout_id: row for row in job.known})
                self._group_ids.update(row.group.group_id for row in job.known)
                self._fresh.extend(job.known)
                self._num_fresh += len(job.known)

    def _know(self, rows: Mapping[str, KnownRow], needed: Set[str] = frozenset()) -> None:
        """Keep rows that steps may name; forget the oldest beyond MOST_KNOWN_ROWS, except needed ones."""
        self._known.update(rows)
        for name in needed & self._known.keys():
            self._known.move_to_end(name)
        while len(self._known) > max(MOST_KNOWN_ROWS, len(rows), len(needed)):
            _, oldest = self._known.popitem(last=False)
            self._group_ids.discard(oldest.group.group_id)

    def _check_new(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise InvalidBatchError for rows of another model, and for rows and groups that were appended before."""
        for group in groups:
            for rollout in group.rollouts:
                where = f"rollout {rollout.rollout_id}"
                if rollout.model != self._run.model:
                    raise InvalidBatchError(
                        f"{where}: model is {rollout.model!r}, and {self.root} records {self._run.model!r}"
                    )
                if rollout.rollout_id in self._known or rollout.group_id in self._group_ids:
                    raise InvalidBatchError(
                        f"{where}: it or its group, {rollout.group_id}, was appended before; "
                        "append a group once, with all its rows"
                    )

    def _find(
        self, n: int, advantages: Advantages, dropped: Mapping[str, str], since: float
    ) -> tuple[Advantages, Mapping[str, str]]:
        """Look for rows that this recorder did not append; return what names rows that are known then, or nowhere."""
        named = set(dropped) | (set(advantages) if isinstance(advantages, Mapping) else set())
        with self._lock:
            unknown = {name for name in named - self._known.keys() if isinstance(name, str)}
            job = Find(rollout_ids=unknown, until=since + STEP_S)
        if not job.rollout_ids:
            return advantages, dropped
        self._wait(self._queue.add(job, patience_s=_left(job.until)), since)
        is_complete, found = job.is_complete, job.found
        with self._lock:
            self._know(found, named)
        if not is_complete and (missing := job.rollout_ids - found.keys()):
            self._queue.lose_rows_of_step(n, "the search for rows that it names timed out")
            named -= missing
        if isinstance(advantages, Mapping):
            advantages = {name: value for name, value in advantages.items() if name in named}
        return advantages, {name: reason for name, reason in dropped.items() if name in named}

    def _add_numbers(self, n: int, found: Mapping[str, Any]) -> None:
        known = self._numbers.setdefault(n, {"other": {}})
        known.update(
            {name: value for name, value in found.items() if name != "other"}, other=known["other"] | found["other"]
        )

    def _put_numbers(self) -> None:
        """Store the metrics of the newest step, which is complete now."""
        if self._step is not None:
            values = self._numbers.pop(self._step.step)
            self._queue.add(
                StepNumbers(of=self._step, values={**values, "other": values["other"] or None}), patience_s=0
            )
            self._step = None

    def _lose_numbers(self, n: int, reason: str = "no such step was recorded") -> None:
        del self._numbers[n]
        self._queue.lose_numbers(n, reason)


def _known_rows(group: RolloutGroup) -> list[KnownRow]:
    known = KnownGroup(group.rollouts[0].group_id, group.rollouts[0].env_name)
    return [
        KnownRow(
            rollout_id=rollout.rollout_id,
            group=known,
            policy_version=rollout.policy_version,
            policy_version_last=rollout.policy_version_last,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            episode_reward=rollout.episode_reward,
            truncated=rollout.truncated,
            truncation_reason=rollout.truncation_reason,
        )
        for rollout in group.rollouts
    ]


def _left(until: float) -> float:
    """Return the seconds until a time of time.monotonic(), at least 0."""
    return max(0.0, until - time.monotonic())


# --- Arguments -----------------------------------------------------------------------------------------------------


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 10**18:
        raise ConfigError(f"{name} is {value!r}, wanted a whole number from {least}")
    return int(value)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {type(value).__name__}, wanted a mapping")
    return value or {}


def _considered(
    n: int,
    advantages: Advantages,
    dropped: Mapping[str, str],
    known: Mapping[str, KnownRow],
    fresh: Sequence[KnownRow],
) -> list[LedgerRow]:
    """Return the rows of a step, used ones first, each with its advantage."""
    if isinstance(advantages, Mapping):
        if both := sorted(advantages.keys() & dropped.keys()):
            raise ConfigError(f"step {n}: rollout {both[0]} has an advantage and is dropped, wanted one of the two")
        found = {_find(n, "advantages", name, known).rollout_id: value for name, value in advantages.items()}
        rows = [(known[name], value) for name, value in found.items()]
    else:
        given = plain(advantages)
        if given is not None and not hasattr(given, "__iter__"):
            raise ConfigError(
                f"step {n}: advantages is {given!r}, wanted a mapping of rollout_id to advantage, or a sequence"
            )
        values = [None] * len(fresh) if given is None else list(given)
        if len(values) != len(fresh):
            raise ConfigError(
                f"step {n}: there are {len(values)} advantages, and {len(fresh)} rows were appended since the step "
                "before; give a mapping of rollout_id to advantage, or one for each of these rows"
            )
        rows = list(zip(fresh, values, strict=True))
    of_rows = {row.rollout_id for row, _ in rows}
    rows += [(_find(n, "dropped", name, known), None) for name in dropped if name not in of_rows]
    return [_ledger_row(n, row, plain(value), dropped.get(row.rollout_id)) for row, value in rows]


def _find(n: int, argument: str, rollout_id: str, known: Mapping[str, KnownRow]) -> KnownRow:
    if rollout_id not in known:
        raise ConfigError(
            f"step {n}: {argument} names rollout {rollout_id}, which was not appended and is in no file of the root; "
            "`append` returns the ids of train rows, and a recorder of another process has to flush them"
        )
    return known[rollout_id]


def _ledger_row(n: int, row: KnownRow, value: Any, reason: str | None) -> LedgerRow:
    if reason is not None and (not isinstance(reason, str) or not reason):
        raise ConfigError(f"step {n}: rollout {row.rollout_id} is dropped for {reason!r}, wanted a reason in words")
    if value is None:
        return LedgerRow(row=row, reason=reason)
    try:
        found = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"step {n}: the advantage of rollout {row.rollout_id} is {value!r}, wanted numbers"
        ) from error
    if found.ndim > 1 or (found.ndim == 1 and len(found) != row.response_length):
        raise ConfigError(
            f"step {n}: the advantages of rollout {row.rollout_id} have shape {found.shape}, wanted one number, or "
            f"({row.response_length},)"
        )
    tokens = found.astype(np.float32) if found.ndim else None
    if not np.isfinite(found if tokens is None else tokens).all():
        logger.warning("step %d: the advantage of rollout %s is not finite, and is stored as null", n, row.rollout_id)
        return LedgerRow(row=row, reason=reason)
    return LedgerRow(
        row=row,
        advantage=float(found.mean()) if found.size else 0.0,
        token_advantages=tokens,
        reason=reason,
    )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # for an integer that does not fit a float
        return False


def _as_json(settings: Mapping[str, Any]) -> Any:
    """Return settings as JSON values without secrets; other values, NaN and infinities become text."""
    try:
        text = json.dumps(public_values(settings), default=lambda value: mask_fields(str(value)))
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"settings hold a value that does not fit JSON: {one_line(error)}") from error
    return json.loads(text, parse_constant=str)


def _read_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of the metrics table with their values, and the others in `other`."""
    found: dict[str, Any] = {"other": {}}
    for name, value in metrics.items():
        value = plain(value)
        if value is None:
            continue
        if not isinstance(name, str) or not isinstance(value, int | float):
            raise ConfigError(f"metrics: {name!r} is {value!r}, wanted a number by its name")
        if not _is_finite(value):
            continue
        if name not in _METRICS:
            found["other"][name] = float(value)
        elif pa.types.is_integer(_METRICS[name]):
            found[name] = _whole(name, int(value) if value == int(value) else value, least=0)
        else:
            found[name] = float(value)
    return found
