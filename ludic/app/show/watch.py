"""Follow a run: read its state from files, and show it as a live panel, log lines or a progress bar.

Each update costs a handful of small reads and three listings; no file of metrics is read twice. A damaged file is
named, and the rest is shown. Raises MissingRootError if the run is gone, StoreError if its filesystem fails,
ConfigError or SchemaError if run.json is damaged.
"""

import itertools
import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import pyarrow as pa
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ludic.app.show.status import WINDOW, EvalMeans, RunStatus, Trainer, draw
from ludic.base import NOTEBOOK_COLUMNS, RECORDED_ENV, can_draw, log_handler, open_console, to_html
from ludic.base.results import printable
from ludic.errors import SchemaError, StoreError
from ludic.records import SCALAR_COLUMNS, RolloutBatch, Row
from ludic.rollouts import mean_reward
from ludic.root import (
    Attempt,
    CheckpointId,
    EpisodeClaim,
    LeaseWatch,
    Root,
    checkpoint_ids,
    episode_claims,
    newest_attempt_id,
    newest_claim,
    read_attempt,
    read_lease,
)
from ludic.root.rows import MetricsTail, list_files, list_versions, read_columns, steps_that_count
from ludic.root.weights import latest_policy, read_policy
from ludic.run import Diagnostic, DiagnosticLog, History, VersionSamples, run_of

logger = logging.getLogger("ludic.run")

Found = TypeVar("Found")

_MOST_STEPS = 1000
_NEWEST_CALLS = 256
"""Number of engine calls, of any age, that are searched for diagnostics."""
_NEWEST_FILES = 64
"""Number of files of each writer that the first update reads."""
_EVALS_EVERY_S = 10.0
"""Seconds between two checks for new evaluation rollouts, which cost two listings."""


class Watcher:
    """Reads the state of one run repeatedly."""

    def __init__(self, url: str, poll: Callable[[], Iterable[Row]] | None = None) -> None:
        """poll: returns rows of the metrics that are new since its last call; None reads the newest files."""
        self._url = url
        tail = MetricsTail(Root.open(url), newest_files=_NEWEST_FILES)
        self._poll = poll or tail.poll
        self._broken = tail.broken
        self._lease_watch = LeaseWatch()
        self._attempt: Attempt | None = None
        self._steps: dict[CheckpointId, Row] = {}
        self._calls: deque[Row] = deque()
        self._newest_calls: deque[Row] = deque(maxlen=_NEWEST_CALLS)
        self._sampled: dict[tuple[str, int], VersionSamples] = {}
        self._evals = _EvalTail()
        self._ended_episodes: dict[tuple[str, int], EpisodeClaim] = {}
        self.newest: RunStatus | None = None
        """What the last look saw."""

    def poll(self) -> RunStatus:
        """Return the state now. Raises MissingRootError if the run is gone."""
        root = Root.open(self._url)
        now = datetime.now(UTC)
        self._take(self._poll(), now)
        steps, unreadable = steps_that_count(self._steps), list(self._broken.values())
        latest = _if_sound(lambda: latest_policy(root), unreadable)
        trainer = self._find_trainer(root, unreadable)
        self.newest = RunStatus(
            root=root,
            at=now,
            trainer=trainer,
            steps=steps,
            calls=list(self._calls),
            newest_calls=list(self._newest_calls),
            policy=_if_sound(lambda: read_policy(root, latest.version), unreadable) if latest else None,
            checkpoint=max(checkpoint_ids(root), default=None),
            history=_history(self._sampled.values(), steps),
            evals=self._evals.poll(root),
            agent_episodes=_if_sound(lambda: self._find_episodes(root, trainer), unreadable) or (),
            unreadable=unreadable,
        )
        return self.newest

    def _take(self, rows: Iterable[Row], now: datetime) -> None:
        for row in sorted(rows, key=lambda row: row["created_at"]):
            if row["kind"] == "worker":
                self._calls.append(row)
                self._newest_calls.append(row)
                key = row["env_name"], row["policy_version"]
                self._sampled[key] = self._sampled.get(key, VersionSamples(env_name=key[0], version=key[1])).plus(row)
            elif row["kind"] == "train" and None not in (row["attempt_id"], row["step"]):  # other writers may add kinds
                self._steps[row["attempt_id"], row["step"]] = row
        while self._calls and self._calls[0]["created_at"] < now - WINDOW:
            self._calls.popleft()
        for checkpoint_id in sorted(self._steps)[:-_MOST_STEPS]:
            del self._steps[checkpoint_id]
        oldest = max((version for _, version in self._sampled), default=0) - _MOST_STEPS
        for key in [key for key in self._sampled if key[1] <= oldest]:
            del self._sampled[key]

    def _find_trainer(self, root: Root, unreadable: list[str]) -> Trainer | None:
        attempt_id = _if_sound(lambda: newest_claim(root), unreadable)
        if attempt_id is None:
            attempt_id = newest_attempt_id(root)
        lease = _if_sound(lambda: read_lease(root, attempt_id), unreadable)
        attempt = _if_sound(lambda: self._find_attempt(root, attempt_id), unreadable)
        known = lease or attempt
        if known is None:
            return None
        return Trainer(
            attempt_id=attempt_id,
            owner=known.owner,
            lease_state=self._lease_watch.poll(lease) if lease else None,
            config=attempt.config if attempt else {},
        )

    def _find_episodes(self, root: Root, trainer: Trainer | None) -> Sequence[EpisodeClaim]:
        """Return the episodes that gateways served, where no worker counts them; each that has ended is read once."""
        if trainer is not None and RECORDED_ENV not in run_of(root).env:
            return ()
        found = episode_claims(root, without=self._ended_episodes)
        known = list(self._ended_episodes.values())
        self._ended_episodes |= {(it.episode_id, it.attempt): it for it in found if it.sealed_at is not None}
        return known + found

    def _find_attempt(self, root: Root, attempt_id: int) -> Attempt | None:
        """Return an attempt; None if it was claimed and has not begun. Each is read once: it never changes."""
        if self._attempt is None or self._attempt.attempt_id != attempt_id:
            try:
                self._attempt = read_attempt(root, attempt_id)
            except FileNotFoundError:
                return None
        return self._attempt


def _if_sound(read: Callable[[], Found | None], unreadable: list[str]) -> Found | None:
    """Return the result of `read`; None for a damaged file, whose problem is added to `unreadable`."""
    try:
        return read()
    except SchemaError as error:
        unreadable.append(str(error))
        return None


def stored_diagnostics(root: Root, rows: Iterable[Row]) -> list[Diagnostic]:
    """Return the diagnostics of a run, those of far steps over all steps. rows: of its metrics."""
    return list(Watcher(root.url, lambda: rows).poll().diagnostics(of_all_steps=True))


def _history(sampled: Iterable[VersionSamples], steps: Sequence[Row]) -> History:
    """Return the samples by environment, in order of versions, with the step that trained each version."""
    versions = [row["policy_version"] for row in steps]
    reached = list(itertools.accumulate(versions, max))  # a later attempt may begin with an earlier version
    history: dict[str, list[VersionSamples]] = {}
    for it in sorted(sampled, key=lambda it: (it.env_name, it.version)):
        index = bisect_left(reached, it.version)
        is_known = index < len(steps) and (index > 0 or it.version == versions[0] or steps[0]["step"] == 1)
        history.setdefault(it.env_name, []).append(replace(it, step=steps[index]["step"] if is_known else None))
    return history


class _EvalTail:
    """Reads the evaluation rollouts of the newest evaluated version, each file once."""

    def __init__(self) -> None:
        self._looked = -math.inf
        self._rows: dict[str, pa.Table] = {}
        """Rows of each file."""
        self._means: list[EvalMeans] = []

    def poll(self, root: Root) -> list[EvalMeans]:
        """Return means by environment; [] without evaluations. Files that can't be read are left out."""
        if time.monotonic() - self._looked >= _EVALS_EVERY_S:
            version = max(list_versions(root, "evals"), default=None)
            if version is not None and self._read(root, version):
                self._means = _eval_means(version, pa.concat_tables(self._rows.values())) if self._rows else []
            self._looked = time.monotonic()
        return self._means

    def _read(self, root: Root, version: int) -> bool:
        """Read the new files of a version, and forget those of others; returns whether that changed anything."""
        names = [file.name for file in list_files(root, range(version, version + 1), "evals")]
        known, self._rows = self._rows, {name: rows for name, rows in self._rows.items() if name in names}
        for name in names:
            if name not in known:
                with suppress(SchemaError, FileNotFoundError):  # broken, or compacted just now
                    self._rows[name] = read_columns(root, name, SCALAR_COLUMNS)
        return self._rows.keys() != known.keys()


def _eval_means(version: int, rows: pa.Table) -> list[EvalMeans]:
    from ludic.root.sql import means_of_evaluation  # imports DuckDB, which workers do not need

    return [
        EvalMeans(
            version=version,
            env_name=row["env_name"],
            num_rollouts=row["num_rollouts"],
            reward_mean=row["reward_mean"],
            accuracy=row["accuracy"],
        )
        for row in means_of_evaluation(rows)
    ]


def describe_step(row: Mapping[str, Any]) -> str:
    """Return a step's main metrics as one line."""
    reward = row.get("reward_mean")
    shown = "unscored" if reward is None else f"{reward:.3f}"
    mean = row.get("off_policy_steps_mean")
    off_policy = "" if mean is None else f"off-policy steps {mean:.1f}  "
    loss = "" if row["loss"] is None else f"loss {row['loss']:.4f}  "
    speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f} tokens/s"
    return f"reward {shown}  {loss}{off_policy}{speed}".rstrip()


# --- A run in other processes: a live panel, or a log line a step ----------------------------------------------------

_LOGGED_CALLS = 16
"""Number of engine calls over which a step's share of answers cut at max_tokens is computed."""

_TICK_S = 0.1
_INTERVAL_S = 0.5
_NOTEBOOK_INTERVAL_S = 2.0
"""Seconds between two updates: each sends the whole panel to the browser."""

Update = Callable[[], None]
"""Refreshes a view if the last update is old enough; may be called often. Raises MissingRootError."""


def open_view(watcher: Watcher) -> AbstractContextManager[Update]:
    """Follow a run while the block lasts: in a panel in a terminal or a notebook, else in the log."""
    console = open_console(stderr=True)
    if console.is_jupyter:
        return notebook_panel(watcher)
    return live_panel(watcher, console) if console.is_terminal else step_log(watcher)


@contextmanager
def live_panel(watcher: Watcher, console: Console, interval_s: float = _INTERVAL_S) -> Iterator[Update]:
    """Show a panel that follows a run; StoreError and SchemaError are shown below the last frame."""
    with Live(console=console, refresh_per_second=4) as live:
        poll = _look_and_draw(watcher, lambda: console.width, live.update)
        poll()
        yield _at_most_every(interval_s, poll)
        poll()


@contextmanager
def notebook_panel(watcher: Watcher, interval_s: float = _NOTEBOOK_INTERVAL_S) -> Iterator[Update]:
    """Show the panel as an output of the notebook's cell, which is replaced at each update."""
    from IPython.display import HTML, display

    output = display(HTML(""), display_id=True)

    def show(frame: RenderableType) -> None:
        output.update(HTML(to_html(lambda console: console.print(frame))))

    poll = _look_and_draw(watcher, lambda: NOTEBOOK_COLUMNS, show)
    poll()
    yield _at_most_every(interval_s, poll)
    poll()


def _look_and_draw(watcher: Watcher, width: Callable[[], int], show: Callable[[RenderableType], None]) -> Update:
    """Return a function that reads the state of the run and shows its panel."""
    last: RunStatus | None = None

    def poll() -> None:
        nonlocal last
        try:
            last = watcher.poll()
            show(draw(last, width()))
        except (StoreError, SchemaError) as error:
            shown = draw(last, width()) if last else Text("nothing seen yet")
            show(Group(shown, Text(f"looking again: {printable(str(error))}", style="bold red")))

    return poll


@contextmanager
def log_shown() -> Iterator[None]:
    """Show ludic's log on stderr during the block, if there is no panel and the program shows no log itself."""
    log = logging.getLogger("ludic")
    if can_draw(open_console(stderr=True)) or log.hasHandlers():
        yield
        return
    handler, level = log_handler(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def step_log(watcher: Watcher, interval_s: float = _INTERVAL_S) -> Iterator[Update]:
    """Log one line per new gradient step, each diagnostic of the run when it begins, what can't be read, StoreError."""
    known = set(map(_checkpoint_id, watcher.poll().steps))
    logged: set[str] = set()
    diagnostics = DiagnosticLog(logger)

    def poll() -> None:
        try:
            status = watcher.poll()
        except (StoreError, SchemaError) as error:
            logger.warning("looking again: %s", error)
            return
        for problem in status.unreadable:
            if problem not in logged:
                logged.add(problem)
                logger.warning("%s", problem)
        num_steps = status.trainer.num_steps if status.trainer else None
        of_all = "" if num_steps is None else f" of {num_steps}"
        for row in status.steps:
            if _checkpoint_id(row) not in known:
                known.add(_checkpoint_id(row))
                logger.info("step %d%s  %s%s", row["step"], of_all, describe_step(row), _incomplete(status))
        diagnostics.report(status.diagnostics())

    yield _at_most_every(interval_s, poll)
    poll()


def watch(watcher: Watcher, console: Console, interval_s: float) -> None:
    """Print the state of a run until Ctrl-C: a live panel in a terminal, else one panel per update.

    Raises MissingRootError if the run is deleted.
    """
    with suppress(KeyboardInterrupt):
        if console.is_terminal:
            with live_panel(watcher, console, interval_s) as update:
                while True:
                    update()
                    time.sleep(_TICK_S)
        while True:  # stdout is a file or a pipe
            console.print(draw(watcher.poll(), console.width))
            time.sleep(interval_s)


def _at_most_every(interval_s: float, poll: Callable[[], None]) -> Update:
    """Return a function that calls `poll` unless its last call ended less than `interval_s` ago."""
    looked = time.monotonic() - interval_s

    def update() -> None:
        nonlocal looked
        if time.monotonic() - looked >= interval_s:
            poll()
            looked = time.monotonic()

    return update


def _checkpoint_id(row: Row) -> CheckpointId:
    return row["attempt_id"], row["step"]


def _incomplete(status: RunStatus) -> str:
    """Return the share of the newest rollouts with an answer cut at max_tokens, as text; "" if unknown."""
    calls = [row for row in status.newest_calls[-_LOGGED_CALLS:] if row["num_incomplete_completions"] is not None]
    num_rollouts = sum(row["num_rollouts"] for row in calls)
    if not num_rollouts:
        return ""
    return f"  cut at max_tokens {sum(row['num_incomplete_completions'] for row in calls) / num_rollouts:.1%}"


# --- Training and sampling in this process: a bar on stderr in a terminal or notebook, else log lines ----------------


@contextmanager
def training_progress(num_steps: int | None) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Yield a function that shows a step and its metrics. num_steps: the last step, None if unknown."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    console = open_console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not can_draw(console)) as progress:
        task = progress.add_task("waiting for rollouts", total=num_steps)

        def report(step: int, row: Mapping[str, Any]) -> None:
            progress.update(task, completed=step, description=describe_step(row))
            if progress.disable:
                logger.info("step %d%s  %s", step, f" of {num_steps}" if num_steps else "", describe_step(row))

        yield report


@contextmanager
def sampling_progress(num_groups: int | None) -> Iterator[Callable[[RolloutBatch], None]]:
    """Yield a function that shows a batch. num_groups: groups to sample, None if unknown."""
    columns = SpinnerColumn(), TextColumn("{task.completed} groups  {task.description}")
    console = open_console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not can_draw(console)) as progress:
        task = progress.add_task("waiting for a policy", total=num_groups)
        yield lambda batch: progress.update(task, advance=len(batch.groups), description=_describe(batch))


def _describe(batch: RolloutBatch) -> str:
    """Return the policy version and mean reward of an engine call as one line."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    reward = mean_reward(rollouts)
    shown = "unscored" if reward is None else f"{reward:.3f}"
    return f"version {rollouts[0].policy_version}  reward {shown}"
