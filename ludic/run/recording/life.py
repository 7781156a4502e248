"""Write the files of one recorder in one thread: its claims, rollouts, ledgers and metrics.

A life opens the root and claims a slot of workers/ at its first job, and an attempt at its first step. A job that fails
because of the filesystem is retried under the same names until it succeeds or is given up.
"""

import itertools
import logging
import os
import re
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import LEASE_S
from ludic.errors import ConfigError, FencedError, ModelError, NameTakenError, OwnedError, SchemaError, StoreError
from ludic.records import Row, arrow_schema, new_id
from ludic.root import (
    METRICS,
    RUN,
    Attempt,
    Lease,
    MetricsName,
    Root,
    SlotClaim,
    change_claim,
    check_not_fenced,
    claim,
    claim_free_slot,
    describe_process,
    has_ended,
    held,
    is_alive,
    newest_attempt,
    newest_claim,
    read_attempt,
    read_cut,
    read_lease,
    record_attempt,
)
from ludic.root.rows import (
    Folder,
    RolloutFile,
    attempt_of_steps,
    commit,
    encode_rows,
    file_parts,
    ledger_steps,
    list_files,
    metrics_row,
    open_parquet,
    put_table,
    read_row_groups,
    row_counts,
    row_group_bounds,
    stamped,
    step_numbers,
    write_ledger,
)
from ludic.root.storage import Storage
from ludic.root.weights import identify, keep_model, latest_policy, read_identity, vocabulary_of
from ludic.run.config import RunConfig
from ludic.run.recording.losses import Lost
from ludic.run.run_json import run_of, to_json
from ludic.settings import check_urls

logger = logging.getLogger(__name__)

MOST_KNOWN_ROWS = 1 << 16
"""Maximum rows that a step can name: the newest appended rows, and those found in files."""
_LONGEST_HOST = 100
"""Characters of the machine's name in a worker_id, which has at most 200 in all."""

# --- Jobs ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class KnownGroup:
    """An appended group whose rows are still known."""

    group_id: str
    env_name: str
    num_uses: int = 0
    """Steps that trained on it."""


@dataclass(slots=True, eq=False, kw_only=True)
class KnownRow:
    """Ledger values of an appended row, and its address once it is stored."""

    rollout_id: str
    group: KnownGroup
    policy_version: int
    policy_version_last: int
    prompt_length: int
    response_length: int
    episode_reward: float | None
    truncated: bool
    truncation_reason: str | None
    address: tuple[str, int, int] | None = None
    """File, row group and row; None if it is not stored yet, or was lost."""


@dataclass(slots=True, eq=False, kw_only=True)
class StoredRows:
    """Groups to store."""

    table: pa.Table
    known: Sequence[KnownRow]
    """Arrays or rows in the order of the table."""
    group_ids: Sequence[str]
    folder: Folder

    @property
    def size_bytes(self) -> int:
        return self.table.get_total_buffer_size()


@dataclass(slots=True, eq=False, kw_only=True)
class LedgerRow:
    """A row that a step considered."""

    row: KnownRow
    advantage: float | None = None
    token_advantages: np.ndarray | None = None
    """(response_length,) float32."""
    reason: str | None = None
    """Why the step did not use it; None if it did."""
    num_uses: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class LedgerStep:
    """A step whose ledger is to be stored."""

    step: int
    version: int
    rows: Sequence[LedgerRow]
    size_bytes: int
    numbers: Row | None = None
    """Metrics of the step that follow from its ledger, by column; None until the ledger is stored."""
    lacks_rows: bool = False
    """True if some of its rows were lost, so that its ledger is without them."""


@dataclass(slots=True, eq=False, kw_only=True)
class StepNumbers:
    """Additional metrics of a step whose own job comes before."""

    of: LedgerStep
    values: Row
    row: Row | None = None
    """The encoded row of the table, so that a retry stores the same bytes."""
    size_bytes: int = 4096


@dataclass(slots=True, eq=False, kw_only=True)
class Find:
    """A search by id for rows that other recorders, or earlier lives, have stored."""

    rollout_ids: Set[str]
    until: float
    """Deadline in seconds of time.monotonic(), after which no caller waits for the result."""
    found: Mapping[str, KnownRow] = field(default_factory=dict)
    """Rows found in the files read so far."""
    is_complete: bool = False
    """True if all files that may hold the missing rows were read."""
    size_bytes: int = 4096


Job = StoredRows | LedgerStep | StepNumbers | Find


def new_worker_id() -> str:
    """Return an id that is unique to one recorder. It follows no schedule, so it does not begin like a worker's id."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:_LONGEST_HOST]
    return f"recorder-{host}-{os.getpid()}-{new_id()[-12:]}"


# --- A life --------------------------------------------------------------------------------------------------------


class RecorderLife:
    """The files of one recorder. Its methods are called by one thread, in the order in which files are to appear."""

    def __init__(
        self,
        url: str,
        run: RunConfig | None,
        given: Mapping[str, Any],
        config: Mapping[str, Any],
        folder: str | None,
        *,
        take_over: bool | None,
    ) -> None:
        """run: settings of a new root; None if it can't be made without its model. given: settings that an existing
        root must have, by name. config: the settings of attempts. folder: of the model's configuration and tokenizer.
        take_over: False refuses a root whose steps another live process of this machine records.
        """
        self.worker_id = new_worker_id()
        self.vocab_size: int | None = None
        """Vocabulary size of the model; None if its configuration is unknown, and before the root was opened."""
        self.newest_step = 0
        """Newest step of the root's ledger when it was opened."""
        self._url, self._run, self._given, self._config, self._folder = url, run, given, config, folder
        self._take_over = take_over
        self._root: Root | None = None
        self._claim: SlotClaim | None = None
        self._sequences: Mapping[Folder, Iterator[int]] = {"rollouts": itertools.count(), "evals": itertools.count()}
        self._lost = Lost()
        self._prepared: list[_Prepared] = []
        self._others: OrderedDict[str, KnownRow] = OrderedDict()
        self._read: set[str] = set()
        """Files whose rows are, or were, in `_others`."""
        self._attempt: Attempt | None = None
        self._held = ExitStack()
        self._fenced = Event()
        self._last_step = 0
        self._is_first = True
        """True if this life has taken no step."""
        self._num_metrics: Counter[int] = Counter()

    @property
    def can_start(self) -> bool:
        """True if this life can create a new root."""
        return self._run is not None

    @property
    def is_open(self) -> bool:
        return self._claim is not None

    @property
    def number(self) -> int | None:
        """Number of this life among those of its slot, from 1; None before the root was opened."""
        return self._claim.life if self._claim else None

    @property
    def run(self) -> RunConfig | None:
        """Settings in run.json; None before the root was opened."""
        return run_of(self._root) if self._root else None

    def open(self) -> Root:
        """Open or create the root, and claim a slot; does nothing the second time.

        Raises ConfigError or OwnedError for a root that can't be recorded into, StoreError if it can't be reached.
        """
        if self._root is None:
            self._root = _open_root(self._url, self._run, self._given, take_over=self._take_over)
        if self._claim is None:
            self._keep_model(self._root)
            self.newest_step = max(attempt_of_steps(self._root), default=0)
            self._claim = claim_free_slot(self._root, self.worker_id)
        return self._root

    def _keep_model(self, root: Root) -> None:
        """Keep the model's configuration and tokenizer if the root has none; the trainer's weights are not known."""
        path = Path(self._folder or root.record.model).expanduser()
        try:
            if (path / "config.json").is_file() and read_identity(root) is None:
                at = str(path.resolve())
                keep_model(root, path, identify(path, root.record.model, at=at, with_weights=False))
            self.vocab_size = vocabulary_of(root)
        except (ModelError, ImportError) as error:  # transformers knows the default vocabulary size of a family
            logger.warning("%s: token ids are not compared with the model's vocabulary: %s", root.url, error)

    # --- Rollouts ------------------------------------------------------------------------------------------------

    def put_rows(self, jobs: Sequence[StoredRows]) -> None:
        """Store groups of one folder. Called again after a failure, it goes on where it failed."""
        root = self.open()
        if not self._prepared:
            table = stamped(_joined([job.table for job in jobs]), "run_id", root.run_id)
            parts = file_parts(table, self.worker_id, self._sequences[jobs[0].folder], jobs[0].folder)
            known = {row.rollout_id: row for job in jobs for row in job.known}
            self._prepared = [_Prepared(file, rows, encode_rows(rows), known) for file, rows in parts]
        root.check_same_run()
        while self._prepared:
            self._prepared[0].put(root)
            self._prepared.pop(0)

    def forget_rows(self) -> None:
        """Give up the groups that `put_rows` failed to store."""
        self._prepared = []

    def find(self, job: Find) -> None:
        """Find stored rows that are not known here; files of other processes first, newest first.

        A file that can't be read is skipped, since it would block all later jobs.
        """
        root = self.open()
        found = {name: self._others[name] for name in job.rollout_ids if name in self._others}
        missing, is_complete = job.rollout_ids - found.keys(), True
        files = list_files(root) if missing else []
        for file in sorted(files, key=lambda file: (file.worker_id == self.worker_id, -file.version)):
            if not missing or time.monotonic() > job.until:
                break
            if file.name in self._read:
                continue
            try:
                rows = _read_known(root, file, missing)
            except (SchemaError, FileNotFoundError):  # broken, or compacted just now
                rows = {}
            except StoreError:
                is_complete = False
                continue
            found |= {name: rows[name] for name in missing if name in rows}
            missing -= rows.keys()
            self._note_read(file, rows)
        job.found, job.is_complete = found, not missing or (is_complete and time.monotonic() <= job.until)

    def _note_read(self, file: RolloutFile, rows: Mapping[str, KnownRow]) -> None:
        """Keep the rows of a file for later steps; old rows are read again if a step names them."""
        self._others.update(rows)
        self._read.add(file.name)
        while len(self._others) > MOST_KNOWN_ROWS:
            self._others.popitem(last=False)
            self._read.clear()

    # --- Steps ---------------------------------------------------------------------------------------------------

    def put_step(self, job: LedgerStep) -> None:
        """Store the ledger of a step, of the rows that are stored.

        Raises FencedError if another recorder took the steps over, OwnedError if a trainer of ludic did.
        """
        root = self.open()
        attempt = self._attempt_for(root, job.step)
        rows = _ledger(job, attempt.attempt_id)
        try:
            write_ledger(root, attempt, job.step, rows)
        except FencedError as error:  # its message is for trainers, which stop then
            raise _taken_over(root, attempt) from error
        self._last_step = job.step
        job.lacks_rows = len(rows) < len(job.rows)
        job.numbers = {**_numbers(job, rows), "attempt_id": attempt.attempt_id}

    def put_numbers(self, job: StepNumbers) -> None:
        """Store a row of metrics. Raises FencedError if the step has no ledger."""
        root = self.open()
        if job.of.numbers is None:
            raise FencedError("the step has no ledger")
        if job.row is None:
            job.row = metrics_row(**job.of.numbers, **job.values, kind="train", run_id=root.run_id)
        root.check_same_run()
        attempt_id = job.of.numbers["attempt_id"]
        name = MetricsName("train", str(attempt_id), self._num_metrics[attempt_id])
        if not put_table(root, METRICS, name, pa.Table.from_pylist([job.row], arrow_schema(METRICS.table))):
            raise NameTakenError(f"{root.url}/{METRICS.name(name)} exists with other content")
        self._num_metrics[attempt_id] += 1

    def _attempt_for(self, root: Root, step: int) -> Attempt:
        """Return the attempt of a step: the first, and each that is not above the last one, begins a new one."""
        if self._fenced.is_set():
            raise _taken_over(root, self._attempt)
        if self._attempt is not None and step > self._last_step:
            return self._attempt
        if self._attempt is not None:
            try:
                check_not_fenced(root, self._attempt)
            except FencedError as error:
                raise _taken_over(root, self._attempt) from error
            logger.warning(
                "%s: step %d follows step %d; the recorded steps from %d on are superseded",
                *(root.url, step, self._last_step, step),
            )
            self._release()
        earlier = attempt_of_steps(root) if self._is_first else {}
        lease = _claim(root)  # retried after a failure: an attempt without steps does no harm
        previous = newest_attempt(root, before=lease.attempt_id)
        parent = (previous.attempt_id, step - 1) if previous is not None and step > 1 else None
        self._attempt, self._last_step = record_attempt(root, lease, parent, self._config), step - 1
        self._is_first = False
        for attempt_id in sorted(set(earlier.values())):
            if again := [each for each, of in earlier.items() if of == attempt_id and each >= step]:
                steps = f"step {again[0]}" if len(again) == 1 else f"steps {min(again)} to {max(again)}"
                logger.warning("%s: this life supersedes %s of attempt %d", root.url, steps, attempt_id)
        self._fenced = Event()
        self._held.enter_context(held(root, lease, on_fenced=self._fenced.set, also=lambda: None, level=logging.DEBUG))
        return self._attempt

    def _release(self) -> None:
        """End the attempt, and mark its lease as released."""
        self._attempt = None
        self._held.close()

    # --- The end -------------------------------------------------------------------------------------------------

    def say_lost(self, lost: Lost) -> None:
        """Store the losses in the claim, if they have changed."""
        if self._root is not None and self._claim is not None and lost != self._lost:
            self._claim = change_claim(self._root, self._claim, lost=_as_json(lost))
            self._lost = lost

    def end(self, lost: Lost) -> None:
        """Release the attempt, and record the end of this life and its losses in the claim."""
        self._release()
        if self._root is not None and self._claim is not None:
            ended_at = datetime.now(UTC).isoformat(timespec="seconds")
            change_claim(self._root, self._claim, ended_at=ended_at, lost=_as_json(lost))


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Return tables as one; those made before the root was open may lack its extra columns, which are null then."""
    return pa.concat_tables(tables, promote_options="default")


def _as_json(lost: Lost) -> dict[str, Any] | None:
    found = {
        name: value for name, value in asdict(lost).items() if name != "waiting"
    }  # a claim holds only final losses
    return found if lost else None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An encoded file of rollouts that is not written yet."""

    file: RolloutFile
    rows: pa.Table
    data: bytes
    known: Mapping[str, KnownRow]

    def put(self, root: Root) -> None:
        commit(root, self.file.name, self.data)
        ids = self.rows["rollout_id"].to_pylist()
        for row_group, (start, stop) in enumerate(row_group_bounds(self.rows)):
            for row in range(start, stop):
                self.known[ids[row]].address = self.file.name, row_group, row - start


_OF_KNOWN = (
    "rollout_id",
    *(each.name for each in fields(KnownRow) if each.name not in ("rollout_id", "group", "address")),
)


def _read_known(root: Root, file: RolloutFile, wanted: Set[str]) -> dict[str, KnownRow]:
    """Return the rows of a stored file by rollout_id; of a file of more than MOST_KNOWN_ROWS only those wanted."""
    with open_parquet(root, file.name) as parquet:
        counts = row_counts(parquet)
        where = f"{root.url}/{file.name}"
        table = read_row_groups(parquet, range(len(counts)), [*_OF_KNOWN, "group_id", "env_name"], where)
    addresses = [(row_group, row) for row_group, count in enumerate(counts) for row in range(count)]
    if len(addresses) > MOST_KNOWN_ROWS:
        kept = pc.indices_nonzero(pc.is_in(table["rollout_id"], pa.array(wanted, pa.string())))
        table, addresses = table.take(kept), [addresses[row] for row in kept.to_pylist()]
    groups: dict[str, KnownGroup] = {}
    found: dict[str, KnownRow] = {}
    for values, place in zip(table.to_pylist(), addresses, strict=True):
        group_id, env_name = values.pop("group_id"), values.pop("env_name")
        group = groups.setdefault(group_id, KnownGroup(group_id, env_name))
        found[values["rollout_id"]] = KnownRow(**values, group=group, address=(file.name, *place))
    return found


# --- Roots and attempts --------------------------------------------------------------------------------------------


def _open_root(url: str, run: RunConfig | None, given: Mapping[str, Any], *, take_over: bool | None) -> Root:
    no_retries = Event()
    no_retries.set()  # the queue retries, and warns less often
    try:
        storage = replace(Storage.connect(url), stop=no_retries)
    except StoreError as error:  # the scheme is not supported here, so a retry would not help
        raise ConfigError(str(error)) from error
    if not storage.exists(RUN.template):
        if run is None:
            raise ConfigError(f"{storage.url} holds no run yet, so it needs the name of the model: model='...'")
        check_urls(run)
        Root.create(url, to_json(run, new_id()), stop=no_retries)
    root = Root.open(url, writable=True, stop=no_retries)
    _check_settings(root, given)
    _check_recorded(root)
    if take_over is False:
        _check_not_alive(root)
    return root


def _check_settings(root: Root, given: Mapping[str, Any]) -> None:
    stored = run_of(root)
    for name, value in given.items():
        if (found := getattr(stored, name)) != value:
            raise ConfigError(
                f"{root.url} was started with {name} {found!r}, and {value!r} was given; record into another root"
            )


def _check_recorded(root: Root) -> None:
    """Raise ConfigError for a root that ludic itself trains, or that is a cut; OwnedError while it trains."""
    if read_cut(root) is not None:
        raise ConfigError(f"{root.url} is a cut, which replays steps of another run; record into another root")
    attempt = newest_attempt(root)
    if attempt is not None and attempt.other_trainer is None:
        lease = read_lease(root, attempt.attempt_id)
        if lease is not None and not has_ended(lease):
            raise OwnedError(
                f"{root.url}: ludic trains this run, as attempt {attempt.attempt_id} of {attempt.owner}; record into "
                "another root"
            )
        raise ConfigError(
            f"{root.url} is a run that ludic trained, last as attempt {attempt.attempt_id}, and its steps and "
            "policies depend on each other; record into another root"
        )
    if latest_policy(root) is not None:
        raise ConfigError(f"{root.url} has policies, which ludic's workers sample from; record into another root")


def _taken_over(root: Root, attempt: Attempt | None) -> FencedError:
    """Return the reason why an attempt fenced by a newer one records no more steps."""
    newer = read_lease(root, attempt.attempt_id + 1) if attempt is not None else None
    who = f"attempt {newer.attempt_id} of {newer.owner}" if newer is not None else "another process"
    return FencedError(f"{who} has taken the steps over, and this process records no more steps")


def _check_not_alive(root: Root) -> None:
    """Raise OwnedError if another process of this machine provably records the steps now."""
    newest = newest_claim(root)
    lease = read_lease(root, newest)
    if lease is None or lease.released or lease.process is None or lease.process == describe_process(os.getpid()):
        return
    if is_alive(lease.process):
        raise OwnedError(
            f"{root.url}: {lease.owner} runs, and records the steps here as attempt {newest} since {lease.since}; stop "
            "it, or record into another root, or pass take_over=True, which takes the steps over from it"
        )


def _claim(root: Root) -> Lease:
    """Claim the next attempt, which fences an earlier recorder at once, with a warning if it may be alive.

    Raises OwnedError if a trainer of ludic owns the root.
    """
    newest = newest_claim(root)
    earlier = read_lease(root, newest)
    if earlier is not None and not has_ended(earlier):
        with suppress(FileNotFoundError):
            if read_attempt(root, newest).other_trainer is None:
                raise OwnedError(f"{root.url}: ludic trains this run, as attempt {newest} of {earlier.owner}")
        if ledger_steps(root, newest):
            logger.warning(
                "%s: attempt %d of %s, since %s, has not released its lease; this recorder takes over its steps",
                *(root.url, newest, earlier.owner, earlier.since),
            )
    try:
        return claim(root, newest, lease_s=LEASE_S)
    except OwnedError:  # another recorder was faster, and is fenced in turn
        return _claim(root)


# --- The ledger of a step ------------------------------------------------------------------------------------------


def _ledger(job: LedgerStep, attempt_id: int) -> pa.Table:
    """Return the rows of a step's ledger: used rows first, in the order in which they were given, then dropped ones."""
    stored = [each for each in job.rows if each.row.address is not None]
    rows = [_ledger_row(each, job) for each in sorted(stored, key=lambda each: each.reason is not None)]
    of_step = {"attempt_id": attempt_id, "step": job.step, "trainer_version": job.version}
    return pa.Table.from_pylist(
        [{**row, **of_step, "batch_index": index} for index, row in enumerate(rows)], arrow_schema("batches")
    )


def _ledger_row(each: LedgerRow, job: LedgerStep) -> dict[str, Any]:
    row, used = each.row, each.reason is None
    assert row.address is not None
    file, row_group, place = row.address
    return {
        "rollout_id": row.rollout_id,
        "group_id": row.group.group_id,
        "env_name": row.group.env_name,
        "policy_version": row.policy_version,
        "lag": job.version - row.policy_version,
        "lag_last": job.version - row.policy_version_last,
        "file": file,
        "row_group": row_group,
        "row": place,
        "prompt_length": row.prompt_length,
        "response_length": row.response_length,
        "episode_reward": row.episode_reward,
        "advantage": each.advantage,
        "token_advantages": each.token_advantages if used else None,
        "weight": float(used),
        "used": used,
        "reason": each.reason,
        "num_uses": each.num_uses,
        "seq_len_truncated": False,
        "truncated": row.truncated,
        "truncation_reason": row.truncation_reason,
    }


def _numbers(job: LedgerStep, rows: pa.Table) -> dict[str, Any]:
    """Return the metrics of a step that follow from its ledger."""
    used = rows.filter(rows["used"])
    num_tokens = pc.sum(used["prompt_length"]).as_py() or 0
    num_tokens += pc.sum(used["response_length"]).as_py() or 0
    return {"step": job.step, "policy_version": job.version, "num_tokens": num_tokens, **step_numbers(rows)}
