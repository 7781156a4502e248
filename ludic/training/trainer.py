"""Run the trainer's loop: stream batches from a root, take gradient steps, publish weights, write checkpoints.

Runs on every rank. Each rank reads the rows that it trains on and writes its token_stats (keep_token_stats); rank 0
does the rest of the work on the store. A restarted trainer resumes from the last checkpoint: no group is used twice
or skipped. While a trainer renews its lease, another one that starts on the same root is refused. A trainer that takes
over fences this one, which then raises FencedError at its next write.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel

from ludic.base import (
    init_distributed,
    is_url,
    num_ranks,
    open_on_main,
    path_on_main,
    peak_memory,
    rank,
    run_on_all,
    run_on_main,
    shut_down,
)
from ludic.errors import ConfigError, StalledError, StoreError
from ludic.models import add_adapters, load_config
from ludic.root import CheckpointInfo, Root, check_not_fenced, check_not_replaced, folder_of, prune_checkpoints
from ludic.root.rows import ReferenceIndex, TokenStatsLog
from ludic.root.weights import first_config, first_model, local_folder, remember_model, write_files
from ludic.run import run_of
from ludic.training.batches.offline import OfflineSource
from ludic.training.batches.reading import RankBatch
from ludic.training.batches.stream import PlannedStream
from ludic.training.checkpoint import TrainerState, load_checkpoint, take_snapshot, write_checkpoint
from ludic.training.computed_logprobs import compute_logprobs
from ludic.training.config import TrainConfig
from ludic.training.device_defaults import follow_device
from ludic.training.flops import device_peak_flops, model_cost, step_flops
from ludic.training.model import compute_dtype, detached, full_state_dict, load_sharded, publish_dtype, save_weights
from ludic.training.numerics import agree_on_numerics
from ludic.training.ownership import (
    Ownership,
    StepCallback,
    agree_on_checkpoint,
    agree_on_newest,
    agree_on_predecessor,
    agree_on_steps,
    open_ownership,
    open_source,
)
from ludic.training.reference import CachedReference, Reference, base_reference, fingerprint, model_reference
from ludic.training.router_losses import keep_router_logits
from ludic.training.step import (
    StepTimer,
    TokenStats,
    build_optimizer,
    learning_rate,
    step_metrics,
    train_step,
    trained_lengths,
)

logger = logging.getLogger(__name__)


def train(
    root: Root,
    config: TrainConfig,
    stop: threading.Event,
    report: StepCallback | None = None,
    *,
    replaces: int | None = None,
    model: str | None = None,
    resume: bool = False,
) -> int:
    """Train up to step num_steps, or until `stop` is set on rank 0; returns the last step trained.

    Resumes from the newest checkpoint of the chain of attempts; a run that already reached num_steps is not changed.
    The last step is always checkpointed, also if no more rollouts arrive.

    If the newest attempt has not released its lease, the lease is watched, for at most its length, before anything but
    model/ is written. `replaces` skips this for one attempt that is known to have ended, or that must be fenced. `stop`
    is also set here when another trainer fences this one. `model`: another location of the run's first model; a
    different model is refused. `resume`: refuse to start if no checkpoint is sound.

    Raises OwnedError, FencedError, StalledError, StoreError, QueryError, ModelError, TrainingError or ConfigError on
    every rank.
    """
    device = config.model.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device here; set device to cpu or leave it out")
    with _process_group(device) as mesh:
        run_on_main(partial(remember_model, root, model))
        config = follow_device(config, run_of(root), partial(_model_config, root), mesh)
        newest = agree_on_newest(root)
        source = open_source(root, config, stop)
        if newest is not None and newest.step >= agree_on_steps(config, source, newest).num_steps:
            return newest.step  # without reading its weights, which may be many GB
        found = agree_on_checkpoint(root, required=resume)
        resumed = found.info
        last_step = resumed.step if resumed else 0
        config = agree_on_steps(config, source, resumed)
        predecessor = agree_on_predecessor(root, stop, replaces)
        if predecessor is None:
            return last_step
        numerics = agree_on_numerics(root, config, resumed)
        own = partial(open_ownership, root, config, source, predecessor, found, numerics, stop, report)
        with _open_trainer(FirstModel(root=root, given=model), config, mesh, resumed, own, stop) as trainer:
            try:
                return _train_steps(trainer, config.num_steps)
            except StalledError:
                trainer.checkpoint_last()
                raise


def _train_steps(trainer: "_Trainer", num_steps: int) -> int:
    """Run the main loop; returns the last step trained."""
    step = trainer.last_step
    while step < num_steps:
        timer = StepTimer(trainer.device)
        with timer.host("checkpoint"):
            trainer.finish_checkpoint()
        with timer.host("wait"):
            batch = trainer.stream.next_batch()
        if batch is None:
            trainer.publish_early_end(step)
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


def _model_config(root: Root) -> PreTrainedConfig:
    with first_config(root) as folder:
        return load_config(str(folder))


@contextmanager
def _process_group(device: str) -> Iterator[DeviceMesh]:
    """Join the process group of the ranks, and leave it at the end unless the caller had joined it before."""
    was_there = dist.is_initialized()
    try:
        yield init_distributed(device)
    finally:
        if not was_there:
            shut_down()


@contextmanager
def _open_trainer(
    first: "FirstModel",
    config: TrainConfig,
    mesh: DeviceMesh,
    found: CheckpointInfo | None,
    own: Callable[[], AbstractContextManager[Ownership]],
    stop: threading.Event,
) -> Iterator["_Trainer"]:
    """Load the model, take ownership, resume, publish, begin the first plan, and release everything at the end.

    found: the checkpoint to resume from, as it was before ownership was taken. own: takes ownership, on rank 0.
    """
    root = first.root
    with ExitStack() as stack:
        # Work that can fail without the root comes first, so that such a failure fences no other trainer.
        model, optimizer = load_trained(first, config, mesh, with_weights=found is None)
        reference = load_reference(first, config, mesh, model)
        main = open_on_main(lambda: stack.enter_context(own()))
        resumed, version = run_on_main(partial(_state_of, main), tuple[CheckpointInfo | None, int | None])
        if resumed is not None:
            load_checkpoint(root, resumed, model, optimizer)
        elif found is not None:
            raise StoreError(f"{root.url}/{folder_of(found)} was deleted since this trainer found it; start again")
        computed = _compute_logprobs(first, config, mesh, main) if config.batch.compute_logprobs else None
        trainer = _Trainer(
            root=root,
            config=config,
            model=model,
            optimizer=optimizer,
            reference=reference,
            main=main,
            stop=stop,
            last_step=resumed.step if resumed else 0,
            version=-1 if version is None else version,
            computed=computed,
        )
        # Runs before the lease is released: a successor must see the checkpoint that is still being written.
        stack.callback(trainer.close)
        trainer.begin()
        yield trainer


def _state_of(main: Ownership | None) -> tuple[CheckpointInfo | None, int | None]:
    """Return the checkpoint that rank 0 resumes from, and the newest version."""
    assert main is not None
    return main.resumed, main.publisher.version


def _compute_logprobs(
    first: "FirstModel", config: TrainConfig, mesh: DeviceMesh, main: Ownership | None
) -> ReferenceIndex:
    def find_rows() -> pa.Table:
        assert main is not None
        assert isinstance(main.source, OfflineSource), "compute_logprobs is offline"
        return main.source.rows_to_compute()

    return compute_logprobs(first.root, first.given, config, mesh, find_rows)


class _Trainer:
    """Methods of the main loop; every method is collective, also the constructor."""

    def __init__(
        self,
        *,
        root: Root,
        config: TrainConfig,
        model: PreTrainedModel,
        optimizer: Optimizer,
        reference: Reference | None,
        main: Ownership | None,
        stop: threading.Event,
        last_step: int,
        version: int,
        computed: ReferenceIndex | None,
    ) -> None:
        """main: on rank 0 only. last_step: in the weights. version: newest published, -1 before the first. computed:
        logprobs of rows without stored ones."""
        self._root, self._config = root, config
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self._main, self.last_step, self._version, self._stop = main, last_step, version, stop
        self.device = model.device
        source, attempt = (main.source, main.attempt) if main else (None, None)
        self.stream = PlannedStream(root, config.batch, source, attempt, stop, computed)
        self._cost = model_cost(model)
        self._peak_flops = device_peak_flops(model.device, compute_dtype(config) or torch.float32)
        self._unsaved: tuple[int, Mapping[str, Any]] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ludic-checkpoint")
        self._writing: Future[None] | None = None
        self._token_stats_log = TokenStatsLog(root, rank()) if config.keep_token_stats else None

    def begin(self) -> None:
        """Publish the weights that training starts from, unless the newest version has them; begin the first plan.

        Waits until workers can load them.
        """
        save = self._copy_weights()

        def begin() -> int:
            assert self._main is not None
            publisher = self._main.publisher
            num_ready_groups = self._main.source.count_ready_groups(publisher.version)
            return publisher.begin(save, step=self.last_step, num_ready_groups=num_ready_groups)

        self._version = run_on_main(begin)
        if self.last_step < self._config.num_steps:
            self.stream.start_plan(self.last_step + 1, self._version)

    def start_next_plan(self, step: int) -> None:
        """Plan the step after `step` while `step` trains; it starts from the version published in between."""
        if step < self._config.num_steps:
            self.stream.start_plan(step + 1, self._version + 1 if self._is_publishing(step) else self._version)

    def step(self, step: int, batch: RankBatch, timer: StepTimer) -> dict[str, float]:
        num_action_tokens = max(1, batch.num_action_tokens)
        token_stats = TokenStats(num_action_tokens / num_ranks()) if self._token_stats_log else None
        metrics = train_step(
            self._model,
            self._optimizer,
            batch.micro_batches,
            config=self._config,
            num_action_tokens=num_action_tokens,
            num_ranks=num_ranks(),
            learning_rate=learning_rate(step, self._config),
            reference=self._reference,
            timer=timer,
            token_stats=token_stats,
        )
        if self._token_stats_log is not None and token_stats is not None:
            token_stats.to_cpu()
            attempt_id = batch.plan.rows.column("attempt_id")[0].as_py()
            rows = partial(token_stats.to_table, attempt_id, step)
            run_on_all(partial(self._token_stats_log.append, rows))  # a rank that raised alone would hang the others
        return metrics

    def publish_if_due(self, step: int) -> None:
        if self._is_publishing(step):
            self.publish(step)

    def publish_early_end(self, step: int) -> None:
        """Publish the weights if stored rollouts were used up before num_steps: some could not be trained on."""
        has_ended = run_on_main(lambda: self._config.batch.offline and not self._stop.is_set())
        if has_ended and step > self.last_step:
            self.publish(step)

    def publish(self, step: int) -> None:
        """Begin to publish a copy of the current weights as the next version, after the previous version is
        complete."""
        run_on_main(self._finish_publishing)
        save = self._copy_weights()

        def start() -> int:
            assert self._main is not None
            return self._main.publisher.start(save, step=step)

        self._version = run_on_main(start)

    def _copy_weights(self) -> Callable[[Path], None]:
        """Copy the current weights; return the function that writes them into a folder as a version's files."""
        adapters_only = self._config.model.publish_lora == "adapter"
        weights = detached(full_state_dict(self._model, adapters_only=adapters_only), self._model.device)
        tokenizer = self._main.tokenizer if self._main else {}

        def save(folder: Path) -> None:
            dtype, max_shard_size = publish_dtype(self._config), self._config.checkpoint.max_shard_size
            save_weights(self._model, weights, folder, dtype=dtype, max_shard_size=max_shard_size)
            write_files(tokenizer, folder)

        return save

    def checkpoint_if_due(self, step: int, cursor: Mapping[str, Any]) -> None:
        """Checkpoint `step` if it is due. Raises, on every rank, the error of a checkpoint or a publish that failed."""
        every = self._config.checkpoint.checkpoint_every
        self._unsaved = (step, cursor)
        run_on_main(partial(self._finish_writing, wait=False))
        if every is not None and step % every == 0:
            self._checkpoint()

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint of the previous step, unless it is written while training continues."""
        if not self._config.checkpoint.async_checkpoint:
            run_on_main(partial(self._finish_writing, wait=True))

    def checkpoint_last(self) -> None:
        """Checkpoint the last step if that is not done yet, and wait until it and the last version are complete.

        Raises FencedError if a newer attempt owns the root.
        """
        self._checkpoint()
        run_on_main(partial(self._finish_writing, wait=True))
        run_on_main(self._finish_publishing)

    def close(self) -> None:
        """Abandon the next batch, and wait for files that are being written; they are complete or invisible."""
        with ExitStack() as stack:
            stack.callback(self._writer.shutdown, wait=True)
            if self._main is not None:
                stack.callback(self._main.log.end)
                stack.callback(self._main.publisher.close)
            stack.callback(self.stream.close)
        if self._token_stats_log is not None:
            self._token_stats_log.close()

    def _checkpoint(self) -> None:
        """Copy the state and start to write it, after the previous checkpoint is complete."""
        attempt_id = run_on_main(self._own_attempt)
        if self._unsaved is None:
            return
        run_on_main(partial(self._finish_writing, wait=True))
        (step, cursor), self._unsaved = self._unsaved, None
        snapshot = take_snapshot(
            self._model,
            self._optimizer,
            attempt_id=attempt_id,
            step=step,
            policy_version=self._version,
            cursor=cursor,
            config=self._config.flat(),
        )
        if self._token_stats_log is not None:
            run_on_all(self._token_stats_log.flush)
        if self._main is not None:
            self._writing = self._writer.submit(self._write, self._main, snapshot)

    def _write(self, main: Ownership, snapshot: TrainerState) -> None:
        """Write and prune, in the writing thread: `prune_checkpoints` must read the claims after the marker is put.

        Waits for the version that the checkpoint names.
        """
        main.publisher.finish()
        write_checkpoint(
            self._root,
            snapshot,
            max_shard_size=self._config.checkpoint.max_shard_size,
            check=partial(check_not_replaced, self._root, main.attempt),
            before_marker=partial(main.log.wait, snapshot.info.step),
        )
        if self._config.checkpoint.keep_checkpoints is not None:
            prune_checkpoints(self._root, main.attempt, self._config.checkpoint.keep_checkpoints)

    def _finish_publishing(self, *, wait: bool = True) -> None:
        assert self._main is not None
        self._main.publisher.finish(wait=wait)

    def _finish_writing(self, *, wait: bool) -> None:
        self._finish_publishing(wait=False)
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()

    def log(self, step: int, batch: RankBatch, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        if self._main is not None:
            row = step_metrics(batch.plan, metrics, num_tokens=batch.num_tokens, num_truncated=batch.num_truncated)
            row |= {f"{phase}_s": value for phase, value in seconds.items()}
            row |= {"read_s": batch.read_s, "pack_s": batch.pack_s, "token_imbalance": batch.token_imbalance}
            row |= {"tokens_per_s": batch.num_tokens / seconds["step"], **self._main.publisher.take_costs()}
            device = self._model.device
            is_on_gpu = device.type == "cuda"
            row |= {"memory_bytes": torch.cuda.max_memory_allocated(device) if is_on_gpu else peak_memory()}
            self._main.write_metrics(step, row | self._utilisation(batch, seconds["step"]), batch.plan.rows)

    def _utilisation(self, batch: RankBatch, step_s: float) -> dict[str, float | None]:
        if self._cost is None:
            return {}
        flops = step_flops(self._cost, *trained_lengths(batch.plan, self._config.batch.max_seq_len))
        peak = self._peak_flops
        return {"model_flops": flops, "mfu": flops / (step_s * num_ranks() * peak) if peak else None}

    def _is_publishing(self, step: int) -> bool:
        """Return whether `step` publishes; offline and in a replay only the last step does, as no worker waits."""
        if step == self._config.num_steps:
            return True
        return not self._config.batch.is_stored and step % run_of(self._root).steps_per_version == 0

    def _own_attempt(self) -> int:
        assert self._main is not None
        check_not_fenced(self._root, self._main.attempt)
        return self._main.attempt.attempt_id


# --- The trained model with its optimizer, and the reference model -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstModel:
    """The run's first model, for all ranks."""

    root: Root
    given: str | None = None
    """Another location of the model than the one in run.json."""

    @contextmanager
    def weights(self) -> Iterator[str]:
        """Yield a folder with the first weights, which only rank 0 reads. Raises ModelError on every rank."""
        with path_on_main(partial(first_model, self.root, self.given)) as folder:
            yield folder

    @contextmanager
    def config(self) -> Iterator[str]:
        """Yield a folder with the configuration, which only rank 0 reads."""
        with path_on_main(partial(first_config, self.root)) as folder:
            yield folder

    def is_named(self, source: str) -> bool:
        """Return whether a folder, an id or a URL names this model."""
        names = (self.root.record.model, self.given)
        return source in names or any(_is_same_folder(source, name) for name in names if name is not None)


def load_trained(
    first: FirstModel, config: TrainConfig, mesh: DeviceMesh, *, with_weights: bool = True
) -> tuple[PreTrainedModel, Optimizer]:
    """Load, shard and prepare the trained model, and build its optimizer.

    with_weights: if false, the caller must load a checkpoint's weights next. With LoRA, weights are always loaded.
    """
    run = run_of(first.root)
    # Frozen weights need no more precision than the dtype that they are computed in.
    dtype = None if config.model.lora_rank is None else compute_dtype(config)
    with_weights = with_weights or config.model.lora_rank is not None
    with first.weights() if with_weights else first.config() as folder:
        model = load_sharded(
            folder,
            mesh,
            dtype=dtype or torch.float32,
            prepare=partial(_prepare, source=first.given or run.model, seed=run.seed, config=config),
            with_weights=with_weights,
            compute_dtype=compute_dtype(config),
            activation_checkpointing=bool(config.model.activation_checkpointing),
            compile_layers=bool(config.model.compile),
            float32_head=run.float32_head,
            longrope=run.longrope,
        )
    return model, build_optimizer(model, config)


def _prepare(model: PreTrainedModel, source: str, seed: int, config: TrainConfig) -> None:
    if config.model.lora_rank is not None:
        add_adapters(
            model,
            source=source,
            rank=config.model.lora_rank,
            alpha=config.model.lora_alpha,
            targets=config.model.lora_targets,
            seed=seed,
        )
    if config.loss.has_router_losses:
        keep_router_logits(model, source)


def load_reference(
    first: FirstModel, config: TrainConfig, mesh: DeviceMesh, model: PreTrainedModel
) -> Reference | None:
    """Load the reference; returns None if there is none in the settings.

    model: the trained model; with its adapters off it can be the reference. Raises ConfigError if that model
    is to be off-loaded.
    """
    if config.loss.reference is None:
        return None
    run = run_of(first.root)
    device, dtype = torch.device(mesh.device_type), compute_dtype(config)
    if config.model.lora_rank is not None and first.is_named(config.loss.reference):
        if config.loss.reference_offload:
            raise ConfigError(
                "reference is the model that LoRA trains, which can't be off-loaded; leave it on the device"
            )
        make_reference = base_reference
    else:
        weights, offload = dtype or torch.float32, config.loss.reference_offload
        named = partial(local_folder, config.loss.reference)
        with first.weights() if first.is_named(config.loss.reference) else path_on_main(named) as folder:
            model = load_sharded(
                folder,
                mesh,
                dtype=weights,
                compute_dtype=dtype,
                offload=offload,
                float32_head=run.float32_head,
                longrope=run.longrope,
            )
        make_reference = model_reference
    reference = make_reference(model, device, chunk_tokens=config.model.logprob_chunk_tokens)
    if not config.loss.reference_cache:
        return reference
    sources = [Root.open(url) for url in (*config.batch.sources, config.batch.replay_batches) if url is not None]
    name = fingerprint(model, dtype or torch.float32, float32_head=run.float32_head, longrope=run.longrope)
    return CachedReference(reference, first.root, name, device, sources)


def _is_same_folder(one: str, other: str) -> bool:
    if is_url(one) or is_url(other):
        return False
    folders = [Path(source).expanduser() for source in (one, other)]
    return all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1])
