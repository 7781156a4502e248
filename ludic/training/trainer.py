"""The trainer: stream batches from a root, step, publish weights back to it, checkpoint.

Runs on every rank alike; rank 0 alone talks to the store, save that each rank reads its own rows.
A killed trainer goes on from its last checkpoint: no group is used twice or skipped. While this one renews
its lease, another that starts on the same root is refused; one that takes over fences this one, which then
raises FencedError at its next write.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ludic.errors import ConfigError, StalledError
from ludic.sql.planner import Planner
from ludic.store import (
    Attempt,
    Cursor,
    MetricsLog,
    Root,
    RunConfig,
    check_not_fenced,
    count_uses,
)
from ludic.store.attempts import newest_attempt, record_attempt
from ludic.store.lease import Lease, await_free, claim, held, newest_claim
from ludic.training.checkpoint import (
    CheckpointInfo,
    Snapshot,
    checkpoint_to_resume,
    load_checkpoint,
    prune_checkpoints,
    take_snapshot,
    write_checkpoint,
)
from ludic.training.config import TrainConfig
from ludic.training.distributed import init_distributed, num_ranks, run_on_main, shut_down
from ludic.training.feed import PlanFeed, batch_rules
from ludic.training.flops import device_peak_flops, model_cost, step_flops
from ludic.training.lora import add_adapters
from ludic.training.metrics import step_metrics, trained_lengths
from ludic.training.model import compute_dtype, copy_tokenizer, full_state_dict, load_sharded, save_weights
from ludic.training.optimizer import build_optimizer, learning_rate
from ludic.training.plans import Feed
from ludic.training.publisher import Publisher
from ludic.training.reference import CachedReference, Reference, base_reference, fingerprint, model_reference
from ludic.training.step import train_step
from ludic.training.stored import StoredFeed, StoredPlans, open_stored
from ludic.training.stream import PlannedStream, TrainingBatch
from ludic.training.telemetry import open_log
from ludic.training.timing import StepTimer

logger = logging.getLogger(__name__)

Report = Callable[[int, Mapping[str, Any]], None]
"""Called on rank 0 after each step, with the row of the metrics table."""


def train(
    root: Root,
    config: TrainConfig,
    stop: threading.Event,
    report: Report | None = None,
    *,
    replaces: int | None = None,
) -> int:
    """Train up to step num_steps, or until `stop` is set on rank 0; returns the last step trained.

    Goes on from the newest checkpoint of the chain of attempts; a run that was trained so far already
    is left as it is. The last step is checkpointed, also when the rollouts stop coming.

    Where the newest attempt has not ended by itself, its lease is watched, for at most its length, before
    anything is written; not if it is `replaces`, which is known to be over, or is to be fenced. `stop` is set here
    too, once another trainer fences this one.

    Raises, on every rank, OwnedError, FencedError, StalledError, StoreError, QueryError, ModelError or TrainingError.
    """
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device here; set device to cpu or leave it out")
    with _process_group(device) as mesh:
        resumed = _agree_on_checkpoint(root)
        last_step = resumed.step if resumed else 0
        stored, config = _agree_on_stored(root, config, resumed)
        if last_step >= config.num_steps:
            return last_step
        predecessor = _agree_on_predecessor(root, stop, replaces)
        if predecessor is None:
            return last_step
        with _open_trainer(root, config, stored, mesh, predecessor, stop, report) as trainer:
            try:
                return _train_steps(trainer, config.num_steps)
            except StalledError:
                trainer.checkpoint_last()
                raise


def _train_steps(trainer: "_Trainer", num_steps: int) -> int:
    """The main loop; returns the last step trained."""
    step = trainer.first_step - 1
    while step < num_steps:
        timer = StepTimer(trainer.device)
        with timer.host("wait"):
            batch = trainer.stream.next_batch()
        if batch is None:
            break
        step += 1
        with timer.host("step"):
            trainer.start_next_plan(step)
            metrics = trainer.step(step, batch, timer)
        with timer.host("publish"):
            trainer.publish_if_due(step)
        with timer.host("checkpoint"):
            trainer.checkpoint_if_due(step, batch.plan.cursor)
        trainer.log(step, batch, metrics, timer.seconds())
    trainer.checkpoint_last()
    return step


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
    stored: StoredPlans | None,
    mesh: DeviceMesh,
    predecessor: int,
    stop: threading.Event,
    report: Report | None,
) -> Iterator["_Trainer"]:
    """Load, take ownership, resume, publish; and let go of everything at the end."""
    with ExitStack() as stack:
        # What can fail without the root comes before ownership is taken, so that it fences nobody.
        model, optimizer = _load(root, config, mesh)
        reference = _load_reference(root, config, mesh, model)
        trainer = _Trainer(root=root, config=config, model=model, optimizer=optimizer, reference=reference)

        def take_ownership() -> bytes:
            trainer.main = stack.enter_context(_open_main(root, config, stored, predecessor, stop, report))
            return _to_bytes(trainer.main.resumed)

        resumed = _from_bytes(run_on_main(take_ownership), root)
        # Before the lease is let go: its successor must see what is still being written.
        stack.callback(trainer.close)
        if resumed is not None:
            load_checkpoint(root, resumed, model, optimizer)
        trainer.first_step = resumed.step + 1 if resumed else 1
        trainer.stream = PlannedStream(root, config, trainer.main.feed if trainer.main else None)
        stack.callback(trainer.stream.close)
        trainer.publish(trainer.first_step - 1)
        if trainer.first_step <= config.num_steps:
            trainer.stream.start_plan(trainer.first_step, trainer.version)
        yield trainer


def _agree_on_checkpoint(root: Root) -> CheckpointInfo | None:
    return _from_bytes(run_on_main(lambda: _to_bytes(checkpoint_to_resume(root, newest_attempt(root)))), root)


def _agree_on_stored(
    root: Root, config: TrainConfig, resumed: CheckpointInfo | None
) -> tuple[StoredPlans | None, TrainConfig]:
    """On rank 0 the plans that follow from what is stored, if any; and the settings, with the steps they are for."""
    opened: list[StoredPlans] = []

    def open_() -> bytes:
        stored = open_stored(root, config)
        if stored is None:
            return b""
        opened.append(stored)
        num_steps = stored.count_steps(resumed)
        return b"" if num_steps is None else str(num_steps).encode()

    num_steps = run_on_main(open_)
    return next(iter(opened), None), replace(config, num_steps=int(num_steps)) if num_steps else config


def _to_bytes(info: CheckpointInfo | None) -> bytes:
    return info.to_json() if info else b""


def _from_bytes(data: bytes, root: Root) -> CheckpointInfo | None:
    return CheckpointInfo.from_json(data, root.url) if data else None


def _agree_on_predecessor(root: Root, stop: threading.Event, replaces: int | None) -> int | None:
    """The claim to follow; None when told to stop while watching it."""

    def find() -> bytes:
        if replaces is not None and replaces == newest_claim(root):
            return str(replaces).encode()
        free = await_free(root, stop)
        return b"" if free is None else str(free).encode()

    data = run_on_main(find)
    return int(data) if data else None


def _load(root: Root, config: TrainConfig, mesh: DeviceMesh) -> tuple[PreTrainedModel, Optimizer]:
    model = load_sharded(
        root.run.model,
        mesh,
        prepare=partial(_prepare, root=root, config=config),
        compute_dtype=compute_dtype(config),
        activation_checkpointing=config.activation_checkpointing,
        compile_layers=config.compile,
    )
    return model, build_optimizer(model, config)


def _prepare(model: PreTrainedModel, root: Root, config: TrainConfig) -> None:
    if config.lora_rank is not None:
        add_adapters(
            model,
            source=root.run.model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=root.run.seed,
        )


def _load_reference(root: Root, config: TrainConfig, mesh: DeviceMesh, model: PreTrainedModel) -> Reference | None:
    """model: the one that trains, which is the reference as well where adapters come off."""
    if config.reference is None:
        return None
    device, dtype = torch.device(mesh.device_type), compute_dtype(config)
    if config.lora_rank is not None and _is_same_model(config.reference, root.run.model):
        if config.reference_offload:
            raise ConfigError(
                "reference is the model that LoRA trains, which can't be off-loaded; leave it on the device"
            )
        make_reference = base_reference
    else:
        model = load_sharded(config.reference, mesh, compute_dtype=dtype, offload=config.reference_offload)
        make_reference = model_reference
    reference = make_reference(model, device, chunk_tokens=config.logprob_chunk_tokens)
    if not config.reference_cache:
        return reference
    return CachedReference(reference, root, fingerprint(model, dtype or model.dtype), device)


def _is_same_model(one: str, other: str) -> bool:
    folders = [Path(source).expanduser() for source in (one, other)]
    return one == other or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Main:
    """What only rank 0 has."""

    attempt: Attempt
    resumed: CheckpointInfo | None
    feed: Feed
    publisher: Publisher
    write_metrics: Callable[[int, Mapping[str, Any]], None]


@contextmanager
def _open_main(
    root: Root,
    config: TrainConfig,
    stored: StoredPlans | None,
    predecessor: int,
    stop: threading.Event,
    report: Report | None,
) -> Iterator[_Main]:
    folder = f"{root.path}/tensorboard" if root.is_local else f"tensorboard/{root.run_id}"
    with open_log(config.log_to, folder=folder, run_id=root.run_id, settings=asdict(config)) as sink:
        # What can fail before ownership is taken does; stored plans were made already.
        planner = None if stored else _planner(root, config)
        _warn_of_bias(root.run)
        lease, attempt, resumed = _take(root, config, predecessor)
        publisher = Publisher(root, attempt, config.keep_policies)
        feed: Feed
        if planner is None:
            assert stored is not None
            stored.resume(resumed)
            feed = StoredFeed(root, attempt, stored, stop)
        else:
            planner.recall_uses(count_uses(root, (resumed.attempt_id, resumed.step) if resumed else None))
            cursor = Cursor.from_dict(dict(resumed.cursor)) if resumed else Cursor()
            feed = PlanFeed(root, attempt, config, planner, publisher, cursor, stop)
        log = MetricsLog(root, "train", str(attempt.attempt_id))

        def write_metrics(step: int, row: Mapping[str, Any]) -> None:
            log.write(attempt_id=attempt.attempt_id, step=step, **row)
            sink(step, {name: value for name, value in row.items() if isinstance(value, int | float)})
            if report is not None:
                report(step, row)

        with held(root, lease, on_fenced=stop.set, also=publisher.mend_latest), contextlib.closing(log):
            yield _Main(attempt=attempt, resumed=resumed, feed=feed, publisher=publisher, write_metrics=write_metrics)


def _planner(root: Root, config: TrainConfig) -> Planner:
    return Planner(batch_rules(config, root.run.groups_per_batch, root.run.seed), root.run.extra_columns)


def _take(root: Root, config: TrainConfig, predecessor: int) -> tuple[Lease, Attempt, CheckpointInfo | None]:
    """Claim the root, and only then choose the checkpoint to go on from; see ludic.store.attempts."""
    lease = claim(root, predecessor, lease_s=config.lease_s)
    previous = newest_attempt(root, before=lease.attempt_id)
    resumed = checkpoint_to_resume(root, previous)
    parent = (resumed.attempt_id, resumed.step) if resumed else None
    if previous and previous.parent and (parent is None or parent < previous.parent):
        logger.warning(
            "%s: attempt %d began from checkpoints/attempt=%d/step=%d, which is gone; going on from %s",
            *(root.url, previous.attempt_id, *previous.parent, resumed.name if resumed else "the first weights"),
        )
    return lease, record_attempt(root, lease, parent, asdict(config)), resumed


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
    stream: PlannedStream
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
        reference: Reference | None,
    ) -> None:
        self._root, self._config = root, config
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self.device = model.device
        self._cost = model_cost(model)
        self._peak_flops = device_peak_flops(model.device, compute_dtype(config) or torch.float32)
        self._unsaved: tuple[int, Mapping[str, Any]] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ludic-checkpoint")
        self._writing: Future[None] | None = None

    def start_next_plan(self, step: int) -> None:
        """While `step` trains, plan the step after it, which starts from the version published in between."""
        if step < self._config.num_steps:
            self.stream.start_plan(step + 1, self.version + 1 if self._is_publishing(step) else self.version)

    def step(self, step: int, batch: TrainingBatch, timer: StepTimer) -> dict[str, float]:
        return train_step(
            self._model,
            self._optimizer,
            batch.micro_batches,
            config=self._config,
            num_action_tokens=max(1, batch.num_action_tokens),
            num_ranks=num_ranks(),
            learning_rate=learning_rate(step, self._config),
            reference=self._reference,
            timer=timer,
        )

    def publish_if_due(self, step: int) -> None:
        if self._is_publishing(step):
            self.publish(step)

    def publish(self, step: int) -> None:
        """Make these weights the next version."""
        weights = full_state_dict(self._model, adapters_only=self._config.publish_lora == "adapter")

        def save(folder: Path) -> None:
            dtype, max_shard_size = compute_dtype(self._config), self._config.max_shard_size
            save_weights(self._model, weights, folder, dtype=dtype, max_shard_size=max_shard_size)
            copy_tokenizer(self._root.run.model, folder)

        def publish() -> bytes:
            assert self.main is not None
            num_ready = self.main.feed.count_ready_groups(self.main.publisher.version)
            return str(self.main.publisher.publish(save, step=step, num_ready_groups=num_ready)).encode()

        self.version = int(run_on_main(publish))

    def checkpoint_if_due(self, step: int, cursor: Mapping[str, Any]) -> None:
        """Also raises, on every rank, what the checkpoint before failed with, if that is known by now."""
        every = self._config.checkpoint_every
        self._unsaved = (step, cursor)
        run_on_main(partial(self._finish_writing, wait=False))
        if every is not None and step % every == 0:
            self._checkpoint()

    def checkpoint_last(self) -> None:
        """Checkpoint the last step, unless that is done, and wait until it is complete.

        Raises FencedError when a newer attempt owns the root.
        """
        self._checkpoint()
        run_on_main(partial(self._finish_writing, wait=True))

    def close(self) -> None:
        """Let a checkpoint in the making come to its end; it is complete or invisible, and nobody asks any more."""
        self._writer.shutdown(wait=True)

    def _checkpoint(self) -> None:
        """Copy the state and begin to write it, once the checkpoint before is complete."""
        attempt_id = int(run_on_main(self._own_attempt))
        if self._unsaved is None:
            return
        run_on_main(partial(self._finish_writing, wait=True))
        (step, cursor), self._unsaved = self._unsaved, None
        snapshot = take_snapshot(
            self._model,
            self._optimizer,
            attempt_id=attempt_id,
            step=step,
            policy_version=self.version,
            cursor=cursor,
            config=asdict(self._config),
        )
        if self.main is not None:
            self._writing = self._writer.submit(self._write, self.main, snapshot)
        if not self._config.async_checkpoint:
            run_on_main(partial(self._finish_writing, wait=True))

    def _write(self, main: _Main, snapshot: Snapshot) -> None:
        """In the writing thread: the look at the claims in `prune_checkpoints` must follow the marker."""
        write_checkpoint(self._root, snapshot, max_shard_size=self._config.max_shard_size)
        if self._config.keep_checkpoints is not None:
            every = self._config.keep_checkpoints_every
            prune_checkpoints(self._root, main.attempt, self._config.keep_checkpoints, every=every)

    def _finish_writing(self, *, wait: bool) -> bytes:
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()
        return b""

    def log(self, step: int, batch: TrainingBatch, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        if self.main is not None:
            row = step_metrics(batch.plan, metrics, num_tokens=batch.num_tokens, num_truncated=batch.num_truncated)
            row |= {f"{phase}_s": value for phase, value in seconds.items()}
            row |= {"read_s": batch.read_s, "pack_s": batch.pack_s}
            row |= {"tokens_per_s": batch.num_tokens / seconds["step"]}
            self.main.write_metrics(step, row | self._utilisation(batch, seconds["step"]))

    def _utilisation(self, batch: TrainingBatch, step_s: float) -> dict[str, float | None]:
        if self._cost is None:
            return {}
        flops = step_flops(self._cost, *trained_lengths(batch.plan, self._config.max_seq_len))
        peak = self._peak_flops
        return {"model_flops": flops, "mfu": flops / (step_s * num_ranks() * peak) if peak else None}

    def _is_publishing(self, step: int) -> bool:
        """What is trained from what is stored has no workers that wait for weights."""
        if step == self._config.num_steps:
            return True
        return not self._config.is_stored and step % self._root.run.steps_per_version == 0

    def _own_attempt(self) -> bytes:
        assert self.main is not None
        check_not_fenced(self._root, self.main.attempt)
        return str(self.main.attempt.attempt_id).encode()
