"""Take ownership of a root for a trainer: choose the checkpoint, claim the root, resume, open the state of rank 0.

Reads attempts/ and checkpoints/, writes attempts/. `agree_on_...` and `open_source` are collective; the other functions
run on rank 0. While this trainer renews its lease, another one that starts on the same root is refused (OwnedError);
one that takes over fences it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from ludic.base import open_on_main, run_on_main
from ludic.errors import ConfigError, StoreError
from ludic.root import (
    NOTHING_TO_RESUME,
    Attempt,
    CheckpointInfo,
    CodeRecord,
    Lease,
    Root,
    await_free,
    check_not_recorded,
    checkpoint_folder,
    checkpoint_to_resume,
    claim,
    folder_of,
    held,
    last_checkpoint,
    newest_attempt,
    newest_claim,
    read_cut,
    record_attempt,
    to_dicts,
    warn_of_other_code,
)
from ludic.root.rows import MetricsLog
from ludic.root.weights import first_tokenizer
from ludic.run import (
    Diagnostic,
    RunConfig,
    find_mismatch,
    find_training_diagnostics,
    find_truncated_support,
    run_of,
    warn_of_rows,
)
from ludic.training.batches.offline import OfflineSource
from ludic.training.batches.online import OnlineSource
from ludic.training.batches.replay import ReplanSource, ReplaySource
from ludic.training.batches.source import PlanSource
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import check_replay
from ludic.training.publisher import Publisher
from ludic.training.tracking import Tracking

logger = logging.getLogger(__name__)

StepCallback = Callable[[int, Mapping[str, Any]], None]
"""Function called on rank 0 after each step, with the step and its row of the metrics table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The checkpoint to resume from, as it was before ownership was taken."""

    info: CheckpointInfo | None
    """The checkpoint; None starts from the first weights."""
    verdicts: MutableMapping[str, bool]
    """For each checkpoint that rank 0 has read, by name: True if it is sound."""


def agree_on_newest(root: Root) -> CheckpointInfo | None:
    """Return the newest checkpoint on the chain of attempts, sound or not; only markers are read."""
    return run_on_main(lambda: last_checkpoint(root, newest_attempt(root)), CheckpointInfo | None)


def agree_on_checkpoint(root: Root, *, required: bool = False) -> ResumePoint:
    """Find the checkpoint to resume from. Raises ConfigError, on every rank, if one is required and none is sound."""
    verdicts: dict[str, bool] = {}

    def find() -> CheckpointInfo | None:
        attempt = newest_attempt(root)
        found = checkpoint_to_resume(root, attempt, verdicts)
        if required and found is None:
            raise ConfigError(_explain_none(root, last_checkpoint(root, attempt)))
        return found

    return ResumePoint(info=run_on_main(find, CheckpointInfo | None), verdicts=verdicts)


def _explain_none(root: Root, damaged: CheckpointInfo | None) -> str:
    if damaged is None:
        return f"{root.url} {NOTHING_TO_RESUME}"
    return (
        f"{root.url}/{folder_of(damaged)} is damaged, and there is no sound checkpoint to resume from; "
        "put a sound copy in its place, or leave out --resume to train from the first weights"
    )


def open_source(root: Root, config: TrainConfig, stop: threading.Event) -> PlanSource | None:
    """Open the source of plans on rank 0; None on other ranks. Raises its errors on every rank.

    Offline training reads the scalars of all sources. Raises ConfigError if a source has no rollouts to train on, or
    if the run to replay began with another model or other settings; MissingRootError if a source is not a root.
    """

    def open_() -> PlanSource:
        check_not_recorded(root)
        batch, loss = config.batch, config.loss.of_batches
        if batch.offline:
            return OfflineSource(root, batch, **loss)
        if batch.replan_from is not None:
            return ReplanSource(root, batch, **loss)
        if batch.replay_batches is not None:
            return _open_replay(root, config, batch.replay_batches)
        return OnlineSource(root, batch, stop, **loss)

    return open_on_main(open_)


def _open_replay(root: Root, config: TrainConfig, url: str) -> ReplaySource:
    other = Root.open(url)
    last, num_steps = check_replay(root, other, config)
    cut = read_cut(other)
    needs_logprobs = config.loss.objective.needs_logprobs
    return ReplaySource(other, last, num_steps, first_step=cut.first_step if cut else 1, needs_logprobs=needs_logprobs)


def agree_on_steps(config: TrainConfig, source: PlanSource | None, resumed: CheckpointInfo | None) -> TrainConfig:
    """Return the settings, with rank 0's number of steps if its source sets one."""
    num_steps = run_on_main(lambda: source.count_steps(resumed) if source else None)
    return config if num_steps is None else config.replace(num_steps=num_steps)


def agree_on_predecessor(root: Root, stop: threading.Event, replaces: int | None) -> int | None:
    """Return the number of the claim to follow; None if stopped while its lease was watched."""
    return run_on_main(
        lambda: replaces if replaces is not None and replaces == newest_claim(root) else await_free(root, stop)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """State held only by rank 0."""

    attempt: Attempt
    resumed: CheckpointInfo | None
    source: PlanSource
    publisher: Publisher
    write_metrics: Callable[[int, Mapping[str, Any], pa.Table], None]
    """Writes a step's row of the metrics table; the third argument is its ledger."""
    log: "StepLog"
    """The metrics table, for which a checkpoint waits."""
    tokenizer: Mapping[str, bytes]
    """Tokenizer files by name; every published version gets them."""


@contextmanager
def open_ownership(
    root: Root,
    config: TrainConfig,
    source: PlanSource | None,
    predecessor: int,
    found: ResumePoint,
    numerics: Mapping[str, Any],
    stop: threading.Event,
    report: StepCallback | None,
) -> Iterator[Ownership]:
    """Take ownership of the root and hold it until the end of the block; on rank 0.

    predecessor: the claim to follow. found: the checkpoint from `agree_on_checkpoint`.
    """
    assert source is not None
    run = run_of(root)
    with ExitStack() as stack:
        # Closed after the lease is released, for which no successor waits.
        tracking = stack.enter_context(Tracking(root, config))
        # Work that can fail without the root comes first, so that such a failure fences no other trainer.
        code = source.keep_code()
        for diagnostic in find_truncated_support(run, config.flat()):
            logger.warning(diagnostic.text)
        tokenizer = first_tokenizer(root)
        lease = claim(root, predecessor, lease_s=config.lease_s)
        publisher: Publisher | None = None

        def repair_latest() -> None:
            if publisher is not None:
                publisher.repair_latest()

        # Renewed from the claim on, since reading a checkpoint, or the ledger of a large root, may take longer than a
        # lease.
        stack.enter_context(held(root, lease, on_fenced=stop.set, also=repair_latest))
        attempt, resumed = _take(root, config, lease, found, numerics, code)
        keep, full_every = config.checkpoint.keep_policies, config.checkpoint.full_version_every
        most_steps = config.batch.max_off_policy_steps
        publisher = Publisher(root, attempt, keep, full_every=full_every, max_off_policy_steps=most_steps)
        source.resume(resumed, publisher)
        tracking.start(resumed.step if resumed else 0)
        log = StepLog(stack.enter_context(closing(MetricsLog(root, "train", str(attempt.attempt_id)))), attempt)
        warn = warn_of_rows(logger, partial(_find_diagnostics, run, config.flat()))

        def write_metrics(step: int, row: Mapping[str, Any], ledger: pa.Table) -> None:
            log.write(step, row)
            warn({"step": step, **row})
            tracking.step(step, row, ledger)
            if report is not None:
                report(step, row)

        yield Ownership(
            attempt=attempt,
            resumed=resumed,
            source=source,
            publisher=publisher,
            write_metrics=write_metrics,
            log=log,
            tokenizer=tokenizer,
        )


class StepLog:
    """Writes the trainer's rows of the metrics table, and waits until a step's row is stored.

    No later attempt writes the row of a step before its checkpoint, so the row has to be there first.
    """

    def __init__(self, log: MetricsLog, attempt: Attempt) -> None:
        self._log, self._attempt_id = log, attempt.attempt_id
        self._newest, self._is_over = 0, False
        self._changed = threading.Condition()

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Write the row of a step."""
        self._log.write(attempt_id=self._attempt_id, step=step, **row)
        with self._changed:
            self._newest = step
            self._changed.notify_all()

    def wait(self, step: int) -> None:
        """Wait, in another thread, until the row of a step is stored. Raises StoreError if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= step or self._is_over)
            if self._newest < step:
                raise StoreError(f"training ended before the metrics of step {step} were written")
        self._log.flush()

    def end(self) -> None:
        """Mark that no row follows."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def _find_diagnostics(
    run: RunConfig, config: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]
) -> Iterator[Diagnostic]:
    yield from find_training_diagnostics(steps, config)
    yield from find_mismatch(steps, run, config)


def _take(
    root: Root,
    config: TrainConfig,
    lease: Lease,
    found: ResumePoint,
    numerics: Mapping[str, Any],
    code: Sequence[CodeRecord],
) -> tuple[Attempt, CheckpointInfo | None]:
    """After the claim, choose the checkpoint to resume from, and record the attempt; see ludic.root.attempts."""
    previous = newest_attempt(root, before=lease.attempt_id)
    resumed = checkpoint_to_resume(root, previous, found.verdicts)
    parent = (resumed.attempt_id, resumed.step) if resumed else None
    if previous and previous.parent and (parent is None or parent < previous.parent):
        logger.warning(
            "%s: attempt %d began from %s, which was deleted; resuming from %s",
            *(root.url, previous.attempt_id, checkpoint_folder(previous.parent)),
            folder_of(resumed) if resumed else "the first weights",
        )
    if previous:
        warn_of_other_code(previous.code, code, where=f"attempt {previous.attempt_id}")
    attempt = record_attempt(root, lease, parent, config.flat(), numerics, code=to_dicts(code))
    return attempt, resumed
