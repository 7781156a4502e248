"""The trainer: stream batches from a root, step, publish weights back to it, checkpoint.

Runs on every rank alike; rank 0 alone talks to the store, save that each rank reads its own rows.
A killed trainer goes on from its last checkpoint: no group is used twice or skipped. A newer
trainer on the same root fences this one, which then raises FencedError at its next write.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ludic.errors import ConfigError, StalledError, StoreError
from ludic.sql.planner import Planner
from ludic.store import (
    Attempt,
    Cursor,
    MetricsLog,
    Root,
    RunConfig,
    check_not_fenced,
    newest_attempt_id,
    read_attempt,
    start_attempt,
)
from ludic.training.checkpoint import (
    CheckpointInfo,
    complete_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from ludic.training.config import TrainConfig
from ludic.training.distributed import init_distributed, is_main, num_ranks, run_on_main, shut_down
from ludic.training.feed import PlanFeed, batch_rules
from ludic.training.metrics import step_metrics
from ludic.training.model import compute_dtype, copy_tokenizer, full_state_dict, load_model, save_weights, shard
from ludic.training.optimizer import build_optimizer, learning_rate
from ludic.training.publisher import Publisher
from ludic.training.step import train_step
from ludic.training.stream import BatchStream, TrainingBatch
from ludic.training.telemetry import open_log

logger = logging.getLogger(__name__)

Report = Callable[[int, Mapping[str, Any]], None]
"""Called on rank 0 after each step, with the row of the metrics table."""


def train(root: Root, config: TrainConfig, stop: threading.Event, report: Report | None = None) -> int:
    """Train up to step num_steps, or until `stop` is set on rank 0; returns the last step trained.

    Goes on from the newest checkpoint of the chain of attempts; a run that was trained so far already
    is left as it is. The last step is checkpointed, also when the rollouts stop coming. Raises, on
    every rank, StalledError, FencedError, StoreError, QueryError, ModelError or TrainingError.
    """
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device here; set device to cpu or leave it out")
    with _process_group(device) as mesh:
        resumed = _agree_on_checkpoint(root)
        if resumed is not None and resumed.step >= config.num_steps:
            return resumed.step
        with _open_trainer(root, config, mesh, resumed, stop, report) as trainer:
            try:
                return _train_steps(trainer, config.num_steps)
            except StalledError:
                trainer.checkpoint_last()
                raise


def _train_steps(trainer: "_Trainer", num_steps: int) -> int:
    """The main loop; returns the last step trained."""
    step = trainer.first_step - 1
    while step < num_steps:
        waiting_since = time.monotonic()
        batch = trainer.stream.next_batch()
        if batch is None:
            break
        step += 1
        stepping_since = time.monotonic()
        trainer.start_next_plan(step)
        metrics = trainer.step(step, batch)
        publishing_since = time.monotonic()
        trainer.stream.prefetch()
        trainer.publish_if_due(step)
        published = time.monotonic()
        trainer.checkpoint_if_due(step, batch.plan.cursor)
        trainer.log(
            step,
            batch,
            metrics,
            wait_s=stepping_since - waiting_since,
            step_s=publishing_since - stepping_since,
            publish_s=published - publishing_since,
        )
    trainer.checkpoint_last()
    return step


def checkpoint_to_resume(root: Root) -> CheckpointInfo | None:
    """The newest complete checkpoint on the chain of parents from the newest attempt; None to start anew.

    Not simply the newest: a trainer that was fenced may still have finished one that nobody continues.
    """
    found = {(info.attempt_id, info.step): info for info in complete_checkpoints(root)}
    attempt_id = newest_attempt_id(root)
    if attempt_id == 0:
        return None
    own_steps = [step for owner, step in found if owner == attempt_id]
    if own_steps:
        return found[attempt_id, max(own_steps)]
    attempt = read_attempt(root, attempt_id)
    if attempt.parent_attempt is None:
        return None
    assert attempt.parent_step is not None
    parent = (attempt.parent_attempt, attempt.parent_step)
    if parent not in found:
        raise StoreError(
            f"{root.url}: attempt {attempt_id} began from checkpoints/attempt={parent[0]}/step={parent[1]}, "
            "which is gone; restore it, or start another root"
        )
    return found[parent]


@contextmanager
def _process_group(device: str) -> Iterator[DeviceMesh]:
    """The ranks that train together; a group that the caller had joined stays."""
    was_there = dist.is_initialized()
    try:
        yield init_distributed(device)
    finally:
        if not was_there:
            shut_down()


@contextmanager
def _open_trainer(
    root: Root,
    config: TrainConfig,
    mesh: DeviceMesh,
    resumed: CheckpointInfo | None,
    stop: threading.Event,
    report: Report | None,
) -> Iterator["_Trainer"]:
    """Load, resume, take ownership, publish; and let go of everything at the end."""
    with ExitStack() as stack:
        model, optimizer = _load(root, config, mesh, resumed)
        reference = None
        if config.reference is not None:
            reference = load_model(config.reference, device=mesh.device_type)
            shard(reference, mesh, compute_dtype=compute_dtype(config))
        trainer = _Trainer(root=root, config=config, model=model, optimizer=optimizer, reference=reference)
        trainer.first_step = resumed.step + 1 if resumed else 1
        if is_main():
            trainer.main = stack.enter_context(_open_main(root, config, resumed, stop, report))
        trainer.stream = BatchStream(root, config, trainer.main.feed if trainer.main else None)
        stack.callback(trainer.stream.close)
        trainer.publish(trainer.first_step - 1)
        trainer.stream.start_plan(trainer.first_step, trainer.version)
        yield trainer


def _agree_on_checkpoint(root: Root) -> CheckpointInfo | None:
    def find() -> bytes:
        info = checkpoint_to_resume(root)
        return info.to_json() if info else b""

    data = run_on_main(find)
    return CheckpointInfo.from_json(data, root.url) if data else None


def _load(
    root: Root, config: TrainConfig, mesh: DeviceMesh, resumed: CheckpointInfo | None
) -> tuple[PreTrainedModel, Optimizer]:
    model = load_model(root.run.model, device=mesh.device_type)
    shard(model, mesh, compute_dtype=compute_dtype(config), activation_checkpointing=config.activation_checkpointing)
    optimizer = build_optimizer(model, config)
    if resumed is not None:
        load_checkpoint(root, resumed, model, optimizer)
    return model, optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Main:
    """What only rank 0 has."""

    attempt: Attempt
    feed: PlanFeed
    publisher: Publisher
    write_metrics: Callable[[int, Mapping[str, Any]], None]


@contextmanager
def _open_main(
    root: Root, config: TrainConfig, resumed: CheckpointInfo | None, stop: threading.Event, report: Report | None
) -> Iterator[_Main]:
    folder = f"{root.path}/tensorboard" if root.is_local else f"tensorboard/{root.run_id}"
    with open_log(config.log_to, folder=folder, run_id=root.run_id, settings=asdict(config)) as sink:
        # Before the attempt, so that a SQL text that can't run fences nobody.
        planner = Planner(batch_rules(config, root.run.groups_per_batch))
        _warn_of_bias(root.run)
        parent_attempt, parent_step = (resumed.attempt_id, resumed.step) if resumed else (None, None)
        attempt = start_attempt(root, parent_attempt=parent_attempt, parent_step=parent_step, config=asdict(config))
        publisher = Publisher(root, attempt, config.keep_policies)
        cursor = Cursor.from_dict(dict(resumed.cursor)) if resumed else Cursor()
        feed = PlanFeed(root, attempt, config, planner, publisher, cursor, stop)
        log = MetricsLog(root, "train", str(attempt.attempt_id))

        def write_metrics(step: int, row: Mapping[str, Any]) -> None:
            log.write(attempt_id=attempt.attempt_id, step=step, **row)
            sink(step, {name: value for name, value in row.items() if isinstance(value, int | float)})
            if report is not None:
                report(step, row)

        try:
            yield _Main(attempt=attempt, feed=feed, publisher=publisher, write_metrics=write_metrics)
        finally:
            log.close()


def _warn_of_bias(run: RunConfig) -> None:
    """The trainer divides by the temperature, but cannot know what top_p and top_k cut away."""
    for name, value in (("top_p", run.top_p if run.top_p < 1 else None), ("top_k", run.top_k)):
        if value is not None:
            logger.warning(
                "%s is %s: importance ratios are biased below 1, since the sampler left tokens out", name, value
            )


class _Trainer:
    """The steps of the main loop; every method is collective."""

    first_step: int
    stream: BatchStream
    version = -1
    """The newest version published."""
    main: _Main | None = None

    def __init__(
        self,
        *,
        root: Root,
        config: TrainConfig,
        model: PreTrainedModel,
        optimizer: Optimizer,
        reference: PreTrainedModel | None,
    ) -> None:
        self._root, self._config = root, config
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self._unsaved: tuple[int, Mapping[str, Any]] | None = None

    def start_next_plan(self, step: int) -> None:
        """While `step` trains, plan the step after it, which starts from the version published in between."""
        if step < self._config.num_steps:
            self.stream.start_plan(step + 1, self.version + 1 if self._is_publishing(step) else self.version)

    def step(self, step: int, batch: TrainingBatch) -> dict[str, float]:
        return train_step(
            self._model,
            self._optimizer,
            batch.micro_batches,
            config=self._config,
            num_action_tokens=max(1, batch.num_action_tokens),
            num_ranks=num_ranks(),
            learning_rate=learning_rate(step, self._config),
            reference_model=self._reference,
        )

    def publish_if_due(self, step: int) -> None:
        if self._is_publishing(step):
            self.publish(step)

    def publish(self, step: int) -> None:
        """Make these weights the next version."""
        weights = full_state_dict(self._model)

        def save(folder: Path) -> None:
            save_weights(self._model, weights, folder, dtype=compute_dtype(self._config))
            copy_tokenizer(self._root.run.model, folder)

        def publish() -> bytes:
            assert self.main is not None
            num_ready = self.main.feed.count_ready_groups(self.main.publisher.version)
            return str(self.main.publisher.publish(save, step=step, num_ready_groups=num_ready)).encode()

        self.version = int(run_on_main(publish))

    def checkpoint_if_due(self, step: int, cursor: Mapping[str, Any]) -> None:
        every = self._config.checkpoint_every
        self._unsaved = (step, cursor)
        if every is not None and step % every == 0:
            self.checkpoint_last()

    def checkpoint_last(self) -> None:
        """Checkpoint the last step, unless that is done."""
        if self._unsaved is None:
            return
        (step, cursor), self._unsaved = self._unsaved, None
        attempt_id = int(run_on_main(self._own_attempt))
        save_checkpoint(
            self._root,
            self._model,
            self._optimizer,
            attempt_id=attempt_id,
            step=step,
            policy_version=self.version,
            cursor=cursor,
            config=asdict(self._config),
        )
        if is_main() and self._config.keep_checkpoints is not None:
            prune_checkpoints(self._root, self._config.keep_checkpoints)

    def log(self, step: int, batch: TrainingBatch, metrics: Mapping[str, float], **seconds: float) -> None:
        if self.main is not None:
            row = step_metrics(batch.plan, metrics, num_tokens=batch.num_tokens, num_truncated=batch.num_truncated)
            row |= seconds | {"tokens_per_s": batch.num_tokens / seconds["step_s"]}
            self.main.write_metrics(step, row)

    def _is_publishing(self, step: int) -> bool:
        return step % self._root.run.steps_per_version == 0 or step == self._config.num_steps

    def _own_attempt(self) -> bytes:
        """Raises FencedError: a checkpoint of a fenced trainer would prune one that its successor needs."""
        assert self.main is not None
        check_not_fenced(self._root, self.main.attempt)
        return str(self.main.attempt.attempt_id).encode()
