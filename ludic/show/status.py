"""Read the current state of a run from its files: the newest metrics, lease, policy and checkpoint.

A look costs a handful of small reads and three listings; no file of metrics is read twice. Raises MissingRootError
if the run is gone, StoreError if its filesystem fails, SchemaError if a file is damaged.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console

from ludic.results import Result
from ludic.show.balance import Balance, find_balance
from ludic.store import Attempt, MetricsTail, Root, latest_policy, read_attempt
from ludic.store.attempts import checkpoint_ids
from ludic.store.claims import LeaseState, LeaseWatch, newest_claim, read_lease
from ludic.store.policies import read_policy
from ludic.store.records import CheckpointId, Policy
from ludic.troubles import (
    Trouble,
    find_mismatch,
    find_sampling_troubles,
    find_shortage,
    find_training_troubles,
    find_truncated_support,
)

Row = Mapping[str, Any]
"""One row of the metrics table."""

WINDOW = timedelta(minutes=5)
"""Time window of the workers' rates."""
_MOST_STEPS = 1000
_BALANCE_STEPS = 20
_NEWEST_CALLS = 256
"""Number of engine calls, of any age, that are searched for troubles."""
_NEWEST_FILES = 64
"""Number of files of each writer that the first look reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The newest trainer of a run."""

    attempt_id: int
    owner: str
    lease_state: LeaseState | None
    """State of its lease; None if an older ludic, without leases, started it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its settings; empty until it has stored them."""

    @property
    def num_steps(self) -> int | None:
        return self.config.get("num_steps")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunStatus(Result):
    """State of a run at one moment. Prints as the panel of `ludic watch`."""

    root: Root
    at: datetime
    trainer: Trainer | None
    steps: list[Row]
    """Newest gradient steps that no later attempt has replaced, in order."""
    calls: list[Row]
    """Calls of the workers' engines within WINDOW, oldest first."""
    policy: Policy | None
    """Newest published policy."""
    checkpoint: CheckpointId | None
    """Newest complete checkpoint."""
    newest_calls: list[Row] = field(default_factory=list)
    """Newest calls of the workers' engines, of any age, oldest first."""

    def print_to(self, console: Console) -> None:
        """Print the panel of `ludic watch`."""
        from ludic.show.dashboard import draw  # imports this module

        console.print(draw(self, console.width))

    @property
    def balance(self) -> Balance | None:
        """Who waits for whom over the newest 20 steps, and how many workers would balance; None if it is not known."""
        calls = self.calls if len(self.calls) > len(self.newest_calls) else self.newest_calls
        return find_balance(self.steps[-_BALANCE_STEPS:], calls)

    def troubles(self) -> Iterator[Trouble]:
        """Yield the troubles of the run that its newest metrics show."""
        run, config = self.root.run, self.trainer.config if self.trainer else {}
        yield from find_sampling_troubles(self.newest_calls, run)
        # Steps of earlier trainers had other settings: sft, say, learns without advantages.
        own_steps = [row for row in self.steps if self.trainer and row["attempt_id"] == self.trainer.attempt_id]
        yield from find_truncated_support(run, config)
        yield from find_training_troubles(own_steps, config)
        yield from find_mismatch(own_steps, run, config)
        yield from find_shortage(self.steps, self.newest_calls, run, config)


class Watcher:
    """Reads the state of one run repeatedly."""

    def __init__(self, url: str, poll: Callable[[], Iterable[Row]] | None = None) -> None:
        """poll: returns rows of the metrics that are new since its last call; None reads the newest files."""
        self._url = url
        self._poll = poll or MetricsTail(Root.open(url), newest_files=_NEWEST_FILES).poll
        self._lease_watch = LeaseWatch()
        self._attempt: Attempt | None = None
        self._steps: dict[CheckpointId, Row] = {}
        self._calls: deque[Row] = deque()
        self._newest_calls: deque[Row] = deque(maxlen=_NEWEST_CALLS)

    def look(self) -> RunStatus:
        root = Root.open(self._url)  # raises if the run is gone
        now = datetime.now(UTC)
        self._take(self._poll(), now)
        latest = latest_policy(root)
        return RunStatus(
            root=root,
            at=now,
            trainer=self._find_trainer(root),
            steps=steps_that_count(self._steps),
            calls=list(self._calls),
            newest_calls=list(self._newest_calls),
            policy=read_policy(root, latest.version) if latest else None,
            checkpoint=max(checkpoint_ids(root), default=None),
        )

    def _take(self, rows: Iterable[Row], now: datetime) -> None:
        for row in sorted(rows, key=lambda row: row["created_at"]):
            if row["kind"] == "worker":
                self._calls.append(row)
                self._newest_calls.append(row)
            elif row["kind"] == "train" and None not in (row["attempt_id"], row["step"]):  # other writers may add kinds
                self._steps[row["attempt_id"], row["step"]] = row
        while self._calls and self._calls[0]["created_at"] < now - WINDOW:
            self._calls.popleft()
        for checkpoint_id in sorted(self._steps)[:-_MOST_STEPS]:
            del self._steps[checkpoint_id]

    def _find_trainer(self, root: Root) -> Trainer | None:
        attempt_id = newest_claim(root)
        lease, attempt = read_lease(root, attempt_id), self._find_attempt(root, attempt_id)
        known = lease or attempt
        if known is None:
            return None
        return Trainer(
            attempt_id=attempt_id,
            owner=known.owner,
            lease_state=self._lease_watch.look(lease) if lease else None,
            config=attempt.config if attempt else {},
        )

    def _find_attempt(self, root: Root, attempt_id: int) -> Attempt | None:
        """Return an attempt; None if it was claimed and has not begun. Each is read once: it never changes."""
        if self._attempt is None or self._attempt.attempt_id != attempt_id:
            try:
                self._attempt = read_attempt(root, attempt_id)
            except FileNotFoundError:
                return None
        return self._attempt


def steps_that_count(rows: Mapping[CheckpointId, Row]) -> list[Row]:
    """Return rows in order of steps, without steps that a later attempt has trained again."""
    kept: list[Row] = []
    for (_, step), row in sorted(rows.items(), reverse=True):
        if not kept or step < kept[-1]["step"]:
            kept.append(row)
    return kept[::-1]


def describe_step(row: Mapping[str, Any]) -> str:
    """Return a step's main metrics as one line."""
    reward = row.get("reward_mean")
    shown = "unscored" if reward is None else f"{reward:.3f}"
    mean = row.get("lag_mean")  # the stored name
    off_policy = "" if mean is None else f"off-policy steps {mean:.1f}  "
    return f"reward {shown}  loss {row['loss']:.4f}  {off_policy}{row['tokens_per_s']:,.0f} tokens/s"
