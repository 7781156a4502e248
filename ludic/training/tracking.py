"""Send a run's metrics and samples to a tracker, such as TensorBoard, W&B, MLflow or Trackio, while it trains.

A thread of rank 0 sends each step to a tracker: its metrics, figures of its rollouts by environment and by component of
the reward, a few sampled answers, and the evaluations that other processes have finished. It reads rollouts and
evaluations from the root. Training never waits for it: steps that it can't keep up with are left out and counted. An
error of the tracker is logged once and ends its log, never the run. The root holds everything that a tracker shows.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from queue import Empty, Full, Queue
from typing import Any, Protocol

import pyarrow as pa

from ludic.base import mask, public_values, require
from ludic.errors import LudicError
from ludic.records import Row
from ludic.root import TENSORBOARD, Root
from ludic.root.rows import POPULATIONS, BlockClaims, RolloutFile, SampleBlock, list_files, list_versions, read_rollouts
from ludic.root.sql import (
    ask,
    ask_table,
    components_by_environment,
    connect,
    figure,
    open_duckdb,
    refresh,
    steps_by_environment,
)
from ludic.root.weights import read_policy
from ludic.run import run_of, trusted_files
from ludic.settings import TRACKER, CodeUse, find
from ludic.settings.kinds import check
from ludic.training.batches.source import names_in_root
from ludic.training.config import TrackerConfig, TrainConfig

logger = logging.getLogger(__name__)

# --- Trackers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled answer, as a tracker shows it. Prompt, answer and wanted are shortened."""

    env_name: str
    policy_version: int
    prompt: str
    """The user's first message."""
    answer: str
    """The model's last message."""
    wanted: str | None
    """The wanted answer; None if the example has none."""
    correct: bool | None
    reward: float
    components: Mapping[str, float]
    advantage: float | None
    """None if the rollout was dropped."""
    response_length: int
    """Tokens."""
    rollout_id: str


class TrackerLog(Protocol):
    """Receives the numbers and samples of one trainer, in one thread."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Show values by name at a step, which may be an earlier one than that of the call before."""
        ...

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show answers that a step considered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker shows, with its settings."""

    root: Root
    """Its run_id is the same for a resumed trainer."""
    config: TrackerConfig
    settings: Mapping[str, Any]
    """Settings of run and trainer by name, without secrets; shown with the curves."""
    after_step: int | None = None
    """Step that training resumes from; later steps, which an earlier trainer may have sent, are trained again. None if
    nothing is trained."""


class Tracker(Protocol):
    """Another program that shows a run; opened on rank 0 only, in a thread of its own.

    One of ludic's may also have a method `require_account`, which raises ConfigError, with the command to type, if this
    machine has no account, or lacks a package for the place where it writes.
    """

    def __call__(self, run: TrackedRun) -> AbstractContextManager[TrackerLog]:
        """Return a log, which is completely sent when its block ends. May raise any error, also on entering the
        block."""
        ...


_EXTRAS = {"tensorboard": "telemetry", "wandb": "telemetry"}
"""ludic's extra that installs a tracker; the others have extras of their own name."""


def require_tracker(log_to: str) -> None:
    """Raise ConfigError, with what to install, if the package of a tracker is missing; imports none."""
    check(TRACKER, log_to)
    if TRACKER.built_in.get(log_to) is not None:  # a tracker of ludic is called as the package that it needs
        require(log_to, _EXTRAS.get(log_to, log_to), f"log_to is {log_to}")


def require_account(log_to: str) -> None:
    """Raise ConfigError, with the command to type, if this machine has no account of a tracker that needs one, or lacks
    a package for the place where it writes."""
    if log_to in TRACKER.built_in and hasattr(tracker := find(TRACKER, log_to), "require_account"):
        tracker.require_account()


def tracker_uses(root: Root, log_to: str) -> list[CodeUse]:
    """Return the use of a tracker that is not ludic's, which the trainer before may have named in the root."""
    if not TRACKER.is_users(log_to):
        return []
    return [CodeUse(role=TRACKER.role, setting=log_to, named_by_root=log_to in names_in_root(root))]


def _find(root: Root, log_to: str) -> Tracker | None:
    """Return the tracker, None for none. Raises ConfigError, and ConsentError if only the root names it."""
    require_tracker(log_to)
    if uses := tracker_uses(root, log_to):
        trusted_files(root, uses)
    found: Tracker | None = find(TRACKER, log_to)
    return found


def _open(
    tracker: Tracker, root: Root, config: TrackerConfig, settings: Row, after_step: int | None
) -> AbstractContextManager[TrackerLog]:
    return tracker(TrackedRun(root=root, config=config, settings=public_values(settings), after_step=after_step))


# --- A trainer's thread ---------------------------------------------------------------------------------

_MOST_WAITING = 64
"""Maximum number of steps that wait for the thread; further steps are left out."""
_POLL_EVERY_S = 10.0
"""Seconds between checks for finished evaluations."""
_CLOSE_S = 90.0
"""Seconds that the end of training waits for unsent steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    step: int
    metrics: Row
    ledger: pa.Table
    """All rollouts that the step considered."""


class Tracking:
    """Sends a trainer's steps to its tracker, in a thread; does nothing if log_to is none. Use it in `with`."""

    def __init__(self, root: Root, config: TrainConfig) -> None:
        """Raises ConfigError if the tracker can't be imported, ConsentError if the user has not agreed to it.

        And SchemaError if its folder leads out of the root.
        """
        self._tracker = _find(root, config.tracker.log_to)
        root.at(TENSORBOARD.folder)
        self._root, self._config = root, config
        self._steps: Queue[_Step | None] = Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._num_left_out = 0

    def start(self, after_step: int) -> None:
        """Start the thread. after_step: step that training resumes from, 0 at the beginning."""
        if self._tracker is not None:
            self._thread = threading.Thread(target=self._run, args=(after_step,), daemon=True, name="ludic-tracker")
            self._thread.start()

    def step(self, step: int, metrics: Row, ledger: pa.Table) -> None:
        """Send a step. metrics: its row of the metrics table. ledger: all rollouts that it considered. Never waits."""
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self._steps.put_nowait(_Step(step=step, metrics=metrics, ledger=ledger))
        except Full:
            self._num_left_out += 1

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait, at most `_CLOSE_S`, until everything is sent."""
        log_to = self._config.tracker.log_to
        if self._thread is not None:
            deadline = time.monotonic() + _CLOSE_S
            while self._thread.is_alive() and time.monotonic() < deadline:
                try:
                    self._steps.put(None, timeout=0.1)
                    break
                except Full:  # the thread is sending them, or has ended
                    continue
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                logger.warning("%s did not accept everything within %.0f s; the rest is not sent", log_to, _CLOSE_S)
        if self._num_left_out:
            logger.warning("%s was slower than training: %d steps were not sent", log_to, self._num_left_out)

    def _run(self, after_step: int) -> None:
        assert self._tracker is not None
        with _warning_once(self._config.tracker.log_to):
            populations = {f"{column} is the mean of": rollouts for column, rollouts in POPULATIONS.items()}
            settings = {**asdict(run_of(self._root)), **self._config.flat(), **populations}
            with _open(self._tracker, self._root, self._config.tracker, settings, after_step) as log:
                self._follow(_Sender(self._root, self._config.tracker, log))

    def _follow(self, sender: "_Sender") -> None:
        """Send steps as they come, and evaluations as they are finished, until the end."""
        evaluations, looked = FinishedEvaluations(self._root), float("-inf")
        is_over = False
        while not is_over:
            try:
                step = self._steps.get(timeout=_POLL_EVERY_S)
                is_over = step is None
                if step is not None:
                    sender.send_step(step)
            except Empty:
                pass
            if is_over or time.monotonic() - looked >= _POLL_EVERY_S:
                looked = time.monotonic()
                sender.send_evaluations(evaluations)


def send_evaluations(root: Root, config: TrackerConfig) -> None:
    """Send the evaluations that were finished after the last step of training, when training and sampling are over.

    The trainer sent the earlier ones. Sending one twice does no harm: it has the same values at the same step.
    """
    with _warning_once(config.log_to):
        tracker = _find(root, config.log_to)
        if tracker is not None and (found := FinishedEvaluations(root).new(is_over=True)):
            with _open(tracker, root, config, {}, None) as log:
                _send_evaluations(log, found)


@contextmanager
def _warning_once(log_to: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any error of another program
        logger.warning(
            "%s stopped receiving this run, which continues; the root holds everything: %s: %s",
            *(log_to, type(error).__name__, mask(str(error))),
        )


# --- What is sent ----------------------------------------------------------------------------------------

_GROUPS = 2
"""Number of groups of each environment whose best and worst answers a table has."""
_MOST_CHARACTERS = 4_000
"""Maximum characters of a text in a table; the root holds the whole text."""
_SCALARS = ["rollout_id", "policy_version", "error", "reward_components"]
_TEXTS = ["rollout_id", "messages", "wanted", "correct", "reward_components"]


class _Sender:
    """Sends steps and evaluations to a log. An error of the root is logged once; other errors are the log's."""

    def __init__(self, root: Root, config: TrackerConfig, log: TrackerLog) -> None:
        self._root, self._config, self._log = root, config, log
        self._has_warned = False

    def send_step(self, step: _Step) -> None:
        values = _numbers(step.metrics)
        with self._reading("by environment"):
            values |= _by_environment(self._root, step.ledger)
        self._log.numbers(step.step, values)
        every = self._config.tracker_samples_every
        if every is not None and step.step % every == 0:
            samples: list[Sample] = []
            with self._reading("samples"):
                samples = _samples(self._root, step.ledger)
            if samples:
                self._log.samples(step.step, samples)

    def send_evaluations(self, evaluations: "FinishedEvaluations") -> None:
        """Send the evaluations that were finished since the last call."""
        found: list[Row] = []
        with self._reading("evaluations"):
            found = evaluations.new()
        _send_evaluations(self._log, found)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except LudicError as error:
            if not self._has_warned:
                logger.warning("%s: the tracker gets no %s: %s", self._root.url, what, error)
            self._has_warned = True


def _send_evaluations(log: TrackerLog, found: Sequence[Row]) -> None:
    """Send evaluations at the steps of their versions; a second one of an environment has its id in its name."""
    for row in found:
        own = "" if row["is_first"] else f"/{row['evaluation']}"
        log.numbers(row["step"], _numbers(row, f"eval/{row['env_name']}{own}/", _OF_EVALUATIONS))


_OF_ENVIRONMENTS = ("reward_mean", "response_length_mean", "signal", "truncated_fraction", "error_fraction")
_OF_EVALUATIONS = (
    *("num_samples", "reward_mean", "accuracy", "response_length_mean"),
    *("truncated_fraction", "error_fraction"),
)


def _numbers(row: Row, prefix: str = "", columns: Iterable[str] | None = None) -> dict[str, float]:
    """Return the numbers of a row, by name with the prefix; unknown values are left out."""
    values = {f"{prefix}{name}": row[name] for name in (row if columns is None else columns)}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _by_environment(root: Root, ledger: pa.Table) -> dict[str, float]:
    """Return the figures of a step's rollouts, by environment and by component of the reward."""
    rollouts = read_rollouts(root, ledger, _SCALARS)
    with open_duckdb() as con:
        con.execute("set threads = 1")  # the other threads train
        con.register("batches", ledger)
        con.register("rollouts", rollouts)
        environments, components = steps_by_environment(con, root), components_by_environment(con, root)
    values: dict[str, float] = {}
    for row in environments:
        values |= _numbers(row, f"env/{row['env_name']}/", _OF_ENVIRONMENTS)
    for row in components:
        values[f"env/{row['env_name']}/component/{row['component']}"] = row["value_mean"]
    return values


def _samples(root: Root, ledger: pa.Table) -> list[Sample]:
    """Return the best and the worst answer of a few groups of each environment."""
    with open_duckdb() as con:
        con.execute("set threads = 1")
        con.register("batches", ledger)
        chosen = ask_table(con, root, figure("samples_of_steps"), {"most": _GROUPS})
    if chosen.num_rows == 0:
        return []
    texts = read_rollouts(root, chosen, _TEXTS).to_pylist(maps_as_pydicts="lossy")
    return [_sample(row, text) for row, text in zip(chosen.to_pylist(), texts, strict=True)]


def _sample(row: Row, text: Row) -> Sample:
    said = {"user": [""], "assistant": [""]}
    for message in text["messages"] or ():
        said.setdefault(message["role"], []).append(message["content"])
    return Sample(
        env_name=row["env_name"],
        policy_version=row["policy_version"],
        prompt=_short(said["user"][:2][-1]),
        answer=_short(said["assistant"][-1]),
        wanted=None if text["wanted"] is None else _short(text["wanted"]),
        correct=text["correct"],
        reward=row["episode_reward"],
        components=text["reward_components"] or {},
        advantage=row["advantage"],
        response_length=row["response_length"],
        rollout_id=row["rollout_id"],
    )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


# --- Evaluations -----------------------------------------------------------------------------------------

_NEWEST_VERSIONS = 4
"""Number of newest evaluated versions that are checked again; older ones only if they are new here."""
_MARGIN = timedelta(minutes=1)
"""Maximum clock difference between trainer and evaluator."""


class FinishedEvaluations:
    """Finds the evaluations that other processes have finished.

    An evaluation of a version is finished if no live process claims a block of it, or a newer version has samples, and
    if its files have not changed since the previous check. One that gets more samples later is found again.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._claims = BlockClaims(root)
        self._con: Any = None
        self._seen: dict[int, frozenset[str]] = {}
        """Files of each version at the last check."""
        self._found: dict[int, frozenset[str]] = {}
        """Files of each version when it was found."""

    def new(self, *, is_over: bool = False) -> list[Row]:
        """Return the evaluations that are finished since the last call, in order of versions, each with its step.

        is_over: sampling is over, so all are finished; return those after the last step of training.
        """
        files = self._look()
        unfinished = set() if is_over else self._claimed(files)
        names = {version: frozenset(file.name for file in of_version) for version, of_version in files.items()}
        due = [
            version
            for version, found in names.items()
            if version not in unfinished
            and found != self._found.get(version)
            and (is_over or found == self._seen.get(version))
        ]
        self._seen |= names
        if not due:
            return []
        rows = self._means(due)
        self._found |= {version: names[version] for version in due}
        if is_over:
            since = self._last_step_at()
            rows = [row for row in rows if since is None or row["newest"] > since]
        return [{**row, "step": self._step_of(row["version"])} for row in rows]

    def _look(self) -> dict[int, list[RolloutFile]]:
        versions = list_versions(self._root, "evals")
        looked = {
            *(version for version in versions if version not in self._found),
            *sorted(versions)[-_NEWEST_VERSIONS:],
        }
        return {v: files for v in sorted(looked) if (files := list_files(self._root, range(v, v + 1), "evals"))}

    def _claimed(self, files: Mapping[int, Sequence[RolloutFile]]) -> set[int]:
        """Return the versions that a live process may still sample: the newest of each evaluation that it claims."""
        blocks = (SampleBlock.parse(text) for text in self._claims.of_others())
        claimed = {block.evaluation for block in blocks if block is not None}
        newest: dict[str, int] = {}
        for version, of_version in sorted(files.items()):
            for file in of_version:
                block = SampleBlock.parse(file.worker_id)
                if block is not None and block.evaluation in claimed:
                    newest[block.evaluation] = version
        return set(newest.values())

    def _means(self, versions: Sequence[int]) -> list[Row]:
        if self._con is None:
            self._con = connect(self._root)
            self._con.execute("set threads = 1")
        refresh(self._con)
        return list(ask(self._con, self._root, figure("evaluation_means"), {"versions": versions}))

    def _last_step_at(self) -> datetime | None:
        """Return the time of the trainer's last sent step, minus the time of one check; None before the first."""
        sql = "select max(created_at) as at from metrics where kind = 'train'"
        (row,) = ask(self._con, self._root, sql)
        return None if row["at"] is None else row["at"] - _MARGIN - timedelta(seconds=_POLL_EVERY_S)

    def _step_of(self, version: int) -> int:
        policy = read_policy(self._root, version)
        return version * run_of(self._root).steps_per_version if policy is None else policy.step
