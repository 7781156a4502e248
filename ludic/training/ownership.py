"""Take ownership of a root: agree on the checkpoint, claim the root, resume, and open the state of rank 0.

Reads attempts/ and checkpoints/, writes attempts/. `agree_on_...` are collective; the other functions run on rank 0.
While this trainer renews its lease, another one that starts on the same root is refused (OwnedError); one that takes
over fences it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ludic.errors import ConfigError
from ludic.sql.code import describe_rules
from ludic.sql.planner import Planner
from ludic.store import Attempt, Cursor, MetricsLog, Root, RunConfig, count_uses
from ludic.store.attempts import newest_attempt, record_attempt
from ludic.store.checkpoints import checkpoint_folder
from ludic.store.code import CodeRecord, to_dicts, warn_of_other_code
from ludic.store.lease import Lease, await_free, claim, held, newest_claim
from ludic.store.recall import recall_sources
from ludic.store.requests import recall_requests
from ludic.store.troubles import find_training_troubles, warn_of_rows
from ludic.training.checkpoint import CheckpointInfo, checkpoint_to_resume, last_checkpoint
from ludic.training.code import own_rules
from ludic.training.config import TrainConfig
from ludic.training.distributed import run_on_main
from ludic.training.feed import PlanFeed, window_of
from ludic.training.first_model import first_tokenizer, remember_model
from ludic.training.plans import Feed
from ludic.training.publisher import Publisher
from ludic.training.stored import StoredFeed, StoredPlans, open_stored
from ludic.training.telemetry import open_log

logger = logging.getLogger(__name__)

Report = Callable[[int, Mapping[str, Any]], None]
"""Function called on rank 0 after each step, with the step and its row of the metrics table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The checkpoint to resume from, as it was before ownership was taken."""

    info: CheckpointInfo | None
    """The checkpoint; None starts from the first weights."""
    verdicts: MutableMapping[str, bool]
    """For each checkpoint that rank 0 has read, by name: True if it is sound."""


def agree_on_newest(root: Root) -> CheckpointInfo | None:
    """The newest checkpoint on the chain of attempts, sound or not; only markers are read."""
    newest = run_on_main(lambda: checkpoint_to_bytes(last_checkpoint(root, newest_attempt(root))))
    return checkpoint_from_bytes(newest, root)


def agree_on_checkpoint(root: Root, *, required: bool = False) -> Found:
    """Find the checkpoint to resume from. Raises ConfigError, on every rank, where one is required and none sound."""
    verdicts: dict[str, bool] = {}

    def find() -> bytes:
        attempt = newest_attempt(root)
        found = checkpoint_to_resume(root, attempt, verdicts)
        if required and found is None:
            raise ConfigError(_explain_none(root, last_checkpoint(root, attempt)))
        return checkpoint_to_bytes(found)

    return Found(info=checkpoint_from_bytes(run_on_main(find), root), verdicts=verdicts)


def _explain_none(root: Root, damaged: CheckpointInfo | None) -> str:
    if damaged is None:
        return (
            f"{root.url} has no complete checkpoint to resume from; without --resume it starts from the first weights"
        )
    return (
        f"{root.url}/{damaged.name} is damaged, and there is no sound checkpoint to resume from; "
        "put a sound copy in its place, or leave out --resume to train from the first weights"
    )


def agree_on_model(root: Root, given: str | None) -> None:
    """Record the run's model in the root. Raises ModelError on every rank if `given` is another model."""

    def remember() -> bytes:
        remember_model(root, given)
        return b""

    run_on_main(remember)


def agree_on_stored(root: Root, config: TrainConfig) -> StoredPlans | None:
    """Open the plans of offline training or of a replay, on rank 0; None on other ranks and for online training."""
    opened: list[StoredPlans | None] = []

    def open_() -> bytes:
        opened.append(open_stored(root, config))
        return b""

    run_on_main(open_)
    return next(iter(opened), None)


def agree_on_steps(config: TrainConfig, stored: StoredPlans | None, resumed: CheckpointInfo | None) -> TrainConfig:
    """The settings with the steps that rank 0's stored plans are for, where they say so."""

    def count() -> bytes:
        num_steps = None if stored is None else stored.count_steps(resumed)
        return b"" if num_steps is None else str(num_steps).encode()

    num_steps = run_on_main(count)
    return replace(config, num_steps=int(num_steps)) if num_steps else config


def checkpoint_to_bytes(info: CheckpointInfo | None) -> bytes:
    return info.to_json() if info else b""


def checkpoint_from_bytes(data: bytes, root: Root) -> CheckpointInfo | None:
    return CheckpointInfo.from_json(data, root.url) if data else None


def agree_on_predecessor(root: Root, stop: threading.Event, replaces: int | None) -> int | None:
    """Return the number of the claim to follow; None if stopped while its lease was watched."""

    def find() -> bytes:
        if replaces is not None and replaces == newest_claim(root):
            return str(replaces).encode()
        free = await_free(root, stop)
        return b"" if free is None else str(free).encode()

    data = run_on_main(find)
    return int(data) if data else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Main:
    """State held only by rank 0."""

    attempt: Attempt
    resumed: CheckpointInfo | None
    feed: Feed
    publisher: Publisher
    write_metrics: Callable[[int, Mapping[str, Any]], None]
    tokenizer: Mapping[str, bytes]
    """Tokenizer files by name; every published version gets them."""


@contextmanager
def open_main(
    root: Root,
    config: TrainConfig,
    stored: StoredPlans | None,
    predecessor: int,
    found: Found,
    numerics: Mapping[str, Any],
    stop: threading.Event,
    report: Report | None,
) -> Iterator[Main]:
    """Take ownership of the root and hold it until the end of the block; on rank 0.

    predecessor: the claim to follow. found: the checkpoint from `agree_on_checkpoint`.
    """
    folder = f"{root.path}/tensorboard" if root.is_local else f"tensorboard/{root.run_id}"
    with open_log(config.log_to, folder=folder, run_id=root.run_id, settings=asdict(config)) as sink:
        # Work that can fail without the root comes first, so that such a failure fences no other trainer.
        plans, code = (stored, stored.code()) if stored else _planner(root, config)
        _warn_of_bias(root.run)
        tokenizer = first_tokenizer(root)
        lease = claim(root, predecessor, lease_s=config.lease_s)
        publishers: list[Publisher] = []

        def mend_latest() -> None:
            for publisher in publishers:
                publisher.mend_latest()

        # Renewed from the claim on: to read a checkpoint, or what a large root has used, may take longer than a lease.
        with held(root, lease, on_fenced=stop.set, also=mend_latest):
            attempt, resumed = _take(root, config, lease, found, numerics, code)
            publisher = Publisher(root, attempt, config.keep_policies)
            publishers.append(publisher)
            feed = _open_feed(root, config, plans, attempt, resumed, publisher, stop)
            log = MetricsLog(root, "train", str(attempt.attempt_id))
            warn = warn_of_rows(logger, partial(find_training_troubles, config=asdict(config)))

            def write_metrics(step: int, row: Mapping[str, Any]) -> None:
                log.write(attempt_id=attempt.attempt_id, step=step, **row)
                warn(row)
                sink(step, {name: value for name, value in row.items() if isinstance(value, int | float)})
                if report is not None:
                    report(step, row)

            with contextlib.closing(log):
                yield Main(
                    attempt=attempt,
                    resumed=resumed,
                    feed=feed,
                    publisher=publisher,
                    write_metrics=write_metrics,
                    tokenizer=tokenizer,
                )


def _open_feed(
    root: Root,
    config: TrainConfig,
    plans: Planner | StoredPlans,
    attempt: Attempt,
    resumed: CheckpointInfo | None,
    publisher: Publisher,
    stop: threading.Event,
) -> Feed:
    """Open the source of plans in its state at the resumed checkpoint."""
    if not isinstance(plans, Planner):
        plans.resume(resumed)
        return StoredFeed(root, attempt, plans, stop)
    num_uses = count_uses(root, (resumed.attempt_id, resumed.step) if resumed else None)
    plans.recall_uses(num_uses)
    cursor = Cursor.from_dict(dict(resumed.cursor)) if resumed else Cursor()
    if not cursor.knows_requests:
        recall_requests(root, cursor, num_uses)
    if resumed is not None:
        window = window_of(config, resumed.policy_version)
        first_version = 0 if window is None else window.start
        place = resumed.attempt_id, resumed.step
        recall_sources(root, cursor, first_version, place, forgets=window is not None)
    return PlanFeed(root, attempt, config, plans, publisher, cursor, stop)


def _planner(root: Root, config: TrainConfig) -> tuple[Planner, list[CodeRecord]]:
    rules = own_rules(root, config)
    return Planner(rules, root.run.extra_columns), describe_rules(rules)


def _take(
    root: Root,
    config: TrainConfig,
    lease: Lease,
    found: Found,
    numerics: Mapping[str, Any],
    code: Sequence[CodeRecord],
) -> tuple[Attempt, CheckpointInfo | None]:
    """After the claim, choose the checkpoint to go on from, and record the attempt; see ludic.store.attempts."""
    previous = newest_attempt(root, before=lease.attempt_id)
    resumed = checkpoint_to_resume(root, previous, found.verdicts)
    parent = (resumed.attempt_id, resumed.step) if resumed else None
    if previous and previous.parent and (parent is None or parent < previous.parent):
        logger.warning(
            "%s: attempt %d began from %s, which is gone; going on from %s",
            *(root.url, previous.attempt_id, checkpoint_folder(previous.parent)),
            resumed.name if resumed else "the first weights",
        )
    if previous:
        warn_of_other_code(previous.code, code, where=f"attempt {previous.attempt_id}")
    attempt = record_attempt(root, lease, parent, asdict(config), numerics, code=to_dicts(code))
    return attempt, resumed


def _warn_of_bias(run: RunConfig) -> None:
    """Warn of top_p and top_k: the trainer divides by the temperature, but can't know the tokens that they cut."""
    for name, value in (("top_p", run.top_p if run.top_p < 1 else None), ("top_k", run.top_k)):
        if value is not None:
            logger.warning(
                "%s is %s: importance ratios are biased below 1, since the sampler left tokens out", name, value
            )
