"""Plan the resources of a run before it starts: memory of each process, disk, time for files, and settings that fit.

The plan follows from a model's configuration, a run's settings and a machine; pure, except `machine_here`.
ludic.training.memory has the figures of a model, ludic.launch.gpus assigns the GPUs. Raises ConfigError for GPUs that
can't be assigned, ModelError for a bad model. All sizes are bytes; a GB is 10^9 of them.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig

from ludic.defaults import ENGINE
from ludic.devices import parse_gpus, visible_gpus
from ludic.engines.config import VLLM, EngineConfig
from ludic.errors import ConfigError
from ludic.launch.config import LaunchConfig
from ludic.launch.gpus import WHOLE_SHARE, GpuPlan, assign_gpus
from ludic.models.rope import max_positions
from ludic.results import size
from ludic.run_config import RunConfig
from ludic.training.config import TrainConfig
from ludic.training.device_defaults import USABLE, Gpu, with_defaults
from ludic.training.memory import (
    PROMPT_TOKENS,
    Activations,
    Device,
    ModelSizes,
    Parts,
    activations,
    checkpoint_bytes,
    host_memory,
    longest_sequence,
    model_sizes,
    rank_memory,
    reference_place,
    sampler_memory,
    version_bytes,
)

BYTES_A_TOKEN = 7.2
"""Bytes of a stored response token, all columns (benchmarks/README.md, store_size)."""
_WORKER_HOST = {"cpu": 10**9, "cuda": 6 * 10**9}
"""Bytes of host memory of a worker's process or processes without weights. Measured for cpu; assumed for cuda."""
_SERVER_HOST = 10**9
"""Bytes of host memory of a worker that uses servers."""

# Bytes a second of one thread, measured on one core of an AMD EPYC; and from a GPU to memory that is not pinned, which
# vendors state as 3 to 6 GB/s for PCIe 4 and 5.
_TO_HOST = 4e9
_CONVERSION = 2.8e9
_DIGEST = 1.2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware that a run would use."""

    gpus: int
    """Number of GPUs; 0 plans for the CPU."""
    gpu_bytes: int = 0
    """Memory of each GPU."""
    host_bytes: int | None = None
    """Memory of the host for all processes; None is unknown, and is not compared."""
    disk_bytes: int | None = None
    """Free space where the root is; None is unknown, and is not compared."""
    bandwidth: float = 1e9
    """Bytes a second between a process and the root, and to the temporary folder."""

    @property
    def device(self) -> Device:
        return "cuda" if self.gpus else "cpu"


def machine_here() -> Machine:
    """Return this machine: its GPUs that processes may use, and the memory that they may take."""
    names = visible_gpus()
    gpu_bytes = 0
    if names:
        import torch

        gpu_bytes = min(torch.cuda.get_device_properties(number).total_memory for number in range(len(names)))
    return Machine(gpus=len(names), gpu_bytes=gpu_bytes, host_bytes=_host_bytes())


def _host_bytes() -> int | None:
    """Return the memory of the machine, or less if a container is limited to less; None if it is unknown."""
    known = []
    with suppress(ValueError, OSError, AttributeError):  # not on every system
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(ValueError, OSError):  # "max" without a limit
        known.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that determine the memory of a run."""

    run: RunConfig
    train: TrainConfig
    processes: LaunchConfig
    engine: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of one kind of process in one place."""

    process: str
    """Such as rank 0, other ranks, worker."""
    place: Literal["GPU", "host"]
    parts: Parts
    limit: int | None = None
    """Bytes that it may take; None is unknown."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Resources that a run needs."""

    sizes: ModelSizes
    needs: Sequence[Need]
    disk: Mapping[str, int]
    """Bytes below the root by part; the sum is the maximum at any time."""
    publish: Mapping[str, float]
    """Seconds of a publish by part, in order."""
    checkpoint: Mapping[str, float]
    """Seconds of a checkpoint by part, in order."""
    remarks: Sequence[str]
    problems: Sequence[str]
    """A sentence for each thing that does not fit."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each part of a need, and one for the whole."""
        rows: list[dict[str, Any]] = []
        for need in self.needs:
            own = {"process": need.process, "place": need.place}
            parts = need.parts.items() if len(need.parts) > 1 else ()
            rows += [
                {**own, "part": part, "needed_bytes": value, "limit_bytes": None, "fits": None} for part, value in parts
            ]
            whole = {"part": "all", "needed_bytes": need.total, "limit_bytes": need.limit, "fits": need.fits}
            rows.append({**own, **whole})
        return rows


def plan(config: PreTrainedConfig, settings: Settings, machine: Machine) -> Plan:
    """Return what a run needs. config: of the model. Raises ConfigError for GPUs that can't be assigned, ModelError."""
    return _Planner(config, settings, machine).plan()


def resolved(config: PreTrainedConfig, settings: Settings, machine: Machine) -> Settings:
    """Return the settings with the values that processes would choose on this machine. The engine auto is vllm on
    GPUs."""
    is_on_cpu = machine.gpus == 0 or settings.train.model.device == "cpu"
    engine = settings.engine
    if engine.engine == ENGINE:
        engine = replace(engine, engine=VLLM if machine.gpus else "transformers")
    gpus = None if is_on_cpu else _assigned(replace(settings, engine=engine), machine)
    is_shared = engine.engine != "server" and gpus is not None and gpus.trainer_share() is not None
    gpu = None if is_on_cpu else Gpu(free=machine.gpu_bytes // (2 if is_shared else 1))
    train = with_defaults(settings.train, settings.run, config, gpu, ranks=settings.processes.ranks)
    return replace(settings, train=train, engine=engine)


def _assigned(settings: Settings, machine: Machine) -> GpuPlan | None:
    """Return the assignment of GPUs by ludic.launch.local; the evaluator is the last of the workers."""
    is_spread = settings.engine.engine == VLLM or settings.engine.tensor_parallel > 1
    return assign_gpus(
        [str(number) for number in range(machine.gpus)],
        ranks=0 if settings.train.model.device == "cpu" else settings.processes.ranks,
        num_workers=settings.processes.engines_of(settings.run.num_workers),
        trainer=parse_gpus(settings.processes.trainer_gpus),
        workers=parse_gpus(settings.processes.worker_gpus),
        gpus_per_worker=settings.engine.tensor_parallel if is_spread else None,
    )


def _num_evaluators(settings: Settings) -> int:
    return int(settings.processes.eval_every is not None)


def settings_that_fit(config: PreTrainedConfig, settings: Settings, machine: Machine) -> dict[str, Any] | None:
    """Return changes of settings with which a run fits, by the names of the flags; None if none was found.

    The cheapest changes come first, each as far as needed: bfloat16, activation checkpointing, smaller micro-batches
    and chunks of logits, the reference in host memory, more ranks, moments in 8 bits, workers on several GPUs, and LoRA
    at last.
    """
    settings = resolved(config, settings, machine)

    def excess(changes: Mapping[str, Any]) -> float:
        return _excess(config, _with(settings, changes), machine)

    changed: dict[str, Any] = {}
    best = excess(changed)
    for name, values in _changes(settings, machine):
        for value in values:
            # More ranks take GPUs from the workers, so a later change may be sufficient only without them.
            for earlier in (changed, _without(changed, "ranks")):
                tried = {**earlier, name: value}
                if best > 0 and (found := excess(tried)) < best:
                    changed, best = tried, found
    if best > 0:
        return None
    for name in list(changed):  # a later change may be sufficient without an earlier one; bfloat16 costs nothing
        if name != "dtype" and excess(fewer := _without(changed, name)) == 0:
            changed = fewer
    return changed


def _without(changes: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in changes.items() if other != name}


def _excess(config: PreTrainedConfig, settings: Settings, machine: Machine) -> float:
    """Return the bytes that do not fit, of all processes; infinite for settings that contradict each other."""
    try:
        needs = _Planner(config, settings, machine).needs()
    except ConfigError:
        return math.inf
    return sum(max(0, need.total - need.limit) for need in needs if need.limit is not None)


def _changes(settings: Settings, machine: Machine) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield settings with the values to try, in order."""
    model, tokens = settings.train.model, settings.train.batch.max_tokens_per_micro_batch
    chunk = model.logprob_chunk_tokens
    assert tokens is not None
    assert chunk is not None
    if machine.gpus:
        yield "dtype", ["bfloat16"] if model.dtype == "float32" else []
    yield "activation_checkpointing", [] if model.activation_checkpointing else [True]
    least = min(tokens, settings.run.max_sequence_tokens or PROMPT_TOKENS + settings.run.max_tokens)
    yield "max_tokens_per_micro_batch", list(_halves(tokens, max(least, 1024)))
    yield "logprob_chunk_tokens", list(_halves(chunk, 128))
    if settings.train.loss.reference is not None and not settings.train.loss.reference_offload:
        yield "reference_offload", [True]
    # One GPU at least is left to the workers.
    several = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    yield "ranks", [ranks for ranks in several if settings.processes.ranks < ranks < machine.gpus]
    if machine.gpus and settings.train.optimizer.optimizer == "adamw":
        yield "optimizer", ["adamw_8bit"]
    if settings.engine.engine == VLLM:
        yield "tensor_parallel", [each for each in (2, 4, 8) if settings.engine.tensor_parallel < each < machine.gpus]
    yield "max_batch", list(_halves(settings.engine.max_batch, 16))
    if model.lora_rank is None:
        yield "lora_rank", [32]


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _with(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    of_launch = {name: value for name, value in changes.items() if name == "ranks"}
    of_engine = {name: value for name, value in changes.items() if name in ("tensor_parallel", "max_batch")}
    of_train = {name: value for name, value in changes.items() if name not in {*of_launch, *of_engine}}
    return replace(
        settings,
        train=settings.train.replace(**of_train) if of_train else settings.train,
        processes=replace(settings.processes, **of_launch),
        engine=replace(settings.engine, **of_engine),
    )


class _Planner:
    """One plan."""

    def __init__(self, config: PreTrainedConfig, settings: Settings, machine: Machine) -> None:
        settings = resolved(config, settings, machine)
        self._config, self._settings, self._machine = config, settings, machine
        self._run, self._train = settings.run, settings.train
        self._processes, self._engine = settings.processes, settings.engine
        is_on_cpu = machine.gpus == 0 or settings.train.model.device == "cpu"
        self._device: Device = "cpu" if is_on_cpu else "cuda"
        self._ranks = settings.processes.ranks
        self._num_workers = settings.processes.workers_of(settings.run.num_workers)

    def plan(self) -> Plan:
        needs = self.needs()
        return Plan(
            sizes=self._sizes,
            needs=needs,
            disk=self._disk(),
            publish=self._publish(),
            checkpoint=self._checkpoint(),
            remarks=list(self._remarks()),
            problems=list(self._problems(needs)),
        )

    # --- The model -----------------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> ModelSizes:
        return model_sizes(self._config, self._train.model)

    @property
    def _passes(self) -> Activations:
        tokens = self._train.batch.max_tokens_per_micro_batch
        assert tokens is not None
        return activations(
            self._config,
            self._train.model,
            num_tokens=tokens,
            length=self._length,
            device=self._device,
            float32_head=self._run.float32_head,
        )

    @property
    def _context(self) -> int:
        """Maximum tokens of the model's context."""
        return max_positions(self._config, self._run.longrope)

    @property
    def _length(self) -> int:
        return longest_sequence(self._config, self._run, self._train)

    # --- Memory --------------------------------------------------------------------------------------------------

    @cached_property
    def _gpus(self) -> GpuPlan | None:
        return _assigned(self._settings, self._machine)

    def needs(self) -> list[Need]:
        """Return the memory of each kind of process, on its GPU and on the host."""
        needs = [*self._of_trainer(), *self._of_workers()]
        whole = {}
        for need in needs:
            if need.place == "host":
                number = {_OTHER_RANK: self._ranks - 1, _WORKER: self._num_engines}.get(need.process, 1)
                evaluator = " and the evaluator" if need.process == _WORKER and _num_evaluators(self._settings) else ""
                whole[need.process + evaluator + (f", {number} times" if number > 1 else "")] = number * need.total
        return [*needs, Need(process="all processes", place="host", parts=whole, limit=self._machine.host_bytes)]

    @property
    def _num_engines(self) -> int:
        """Number of workers, and the evaluator if there is one, which has the same engine."""
        return self._num_workers + _num_evaluators(self._settings)

    def _of_trainer(self) -> Iterator[Need]:
        place: dict[str, Any] = {
            "ranks": self._ranks,
            "device": self._device,
            "reference": reference_place(self._run, self._train),
        }
        on_device = self._told(rank_memory(self._sizes, self._passes, self._train, **place))
        names = ["rank 0", _OTHER_RANK][: self._ranks]
        if self._device == "cuda":
            yield Need(process="each rank", place="GPU", parts=on_device, limit=self._limit_of_trainer)
        for rank, name in enumerate(names):
            host = host_memory(self._sizes, self._train, rank=rank, **place)
            yield Need(process=name, place="host", parts={**(on_device if self._device == "cpu" else {}), **host})

    def _told(self, parts: Parts) -> Parts:
        """Return a rank's parts under descriptive names."""
        model = self._train.model
        kept = "inputs of the layers" if model.activation_checkpointing else "all of the layers"
        names = {
            "activations": f"activations of {self._train.batch.max_tokens_per_micro_batch:,} tokens: {kept}",
            "logits, gradients on their way": (
                f"at the peak: a layer again, or logits of {model.logprob_chunk_tokens:,} tokens"
                if model.activation_checkpointing
                else f"at the peak: gradients, or logits of {model.logprob_chunk_tokens:,} tokens"
            ),
            "layers gathered by FSDP2": f"gathered by FSDP2 in {model.dtype}: embeddings, head, two layers",
        }
        return {names.get(part, part): value for part, value in parts.items()}

    @property
    def _limit_of_trainer(self) -> int:
        """Bytes of a GPU available to a rank, without the share of workers on the same GPU."""
        usable, gpus = int(USABLE * self._machine.gpu_bytes), self._gpus
        if gpus is None or self._engine.engine == "server":
            return usable
        taken = [sum(self._taken(slot) for slot, its in enumerate(gpus.workers) if gpu in its) for gpu in gpus.trainer]
        if self._engine.engine == VLLM:  # whose share leaves no memory free
            return int(USABLE * (self._machine.gpu_bytes - max(taken, default=0)))
        return usable - max(taken, default=0)

    def _taken(self, slot: int) -> int:
        """Return the bytes that a worker takes on each of its GPUs."""
        if self._engine.engine == VLLM:
            return int(self._share(slot) * self._machine.gpu_bytes)
        return sum(self._of_engine.values())

    def _share(self, slot: int) -> float:
        assert self._gpus is not None
        return self._engine.gpu_memory or self._gpus.memory_share(slot) or WHOLE_SHARE

    def _of_workers(self) -> Iterator[Need]:
        if self._num_workers == 0:
            return
        if self._engine.engine == "server":
            yield Need(process=_WORKER, place="host", parts={"Python and libraries": _SERVER_HOST})
            return
        host = {"Python and libraries": _WORKER_HOST[self._machine.device]}
        if self._machine.gpus:
            yield Need(process=_WORKER, place="GPU", parts=self._of_engine, limit=self._limit_of_worker)
            if self._engine.engine != VLLM:
                host["weights, while they are loaded"] = self._version
            yield Need(process=_WORKER, place="host", parts=host)
        else:
            yield Need(process=_WORKER, place="host", parts={**host, **self._of_engine})

    @property
    def _limit_of_worker(self) -> int:
        """Bytes of a GPU that the first worker's engine may take."""
        if self._engine.engine == VLLM:
            return self._taken(0)
        usable, gpus = int(USABLE * self._machine.gpu_bytes), self._gpus
        shares = gpus is not None and bool(gpus.workers) and bool(set(gpus.workers[0]) & set(gpus.trainer))
        if not shares:
            return usable
        return usable - next(need.total for need in self._of_trainer() if need.place == "GPU")

    @cached_property
    def _of_engine(self) -> Parts:
        """Bytes of one device of a worker's engine, with the cache of a full batch; for vLLM, which takes its share in
        any case, with the cache of as many sequences as fit, at least one."""
        dtype = self._sampler_dtype
        spread = self._engine.tensor_parallel
        parts = sampler_memory(
            self._config,
            self._sizes,
            dtype,
            max_batch=self._engine.max_batch,
            tensor_parallel=spread,
            device=self._machine.device,
        )
        sequence = -(-self._sizes.cache_bytes(self._length, dtype) // spread)
        number = self._engine.max_batch
        if self._engine.engine == VLLM and self._machine.gpus:
            number = max(1, (self._limit_of_worker - sum(parts.values())) // sequence)
        of = "1 sequence" if number == 1 else f"{number:,} sequences"
        return {**parts, f"key-value cache of {of} of {self._length:,} tokens": number * sequence}

    @property
    def _sampler_dtype(self) -> str:
        """Dtype of a worker's weights; vLLM on GPUs converts float32 to bfloat16."""
        model = self._train.model
        if not self._machine.gpus:
            return "float32"
        return "bfloat16" if self._engine.engine == VLLM else model.publish_dtype or str(model.dtype)

    # --- Disk and time -------------------------------------------------------------------------------------------

    @property
    def _version(self) -> int:
        return version_bytes(self._sizes, self._train.model)

    @property
    def _checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self._sizes, self._train.optimizer)

    def _disk(self) -> dict[str, int]:
        """Return bytes below the root. An old version or checkpoint is deleted after the new one is complete."""
        kept, run, num_steps = self._train.checkpoint, self._run, self._train.num_steps
        num_checkpoints = num_steps // (kept.checkpoint_every or num_steps)
        num_versions = num_steps // run.steps_per_version
        disk = {}
        for name, limit, number, each in (
            ("versions", kept.keep_policies, num_versions, self._version),
            ("checkpoints", kept.keep_checkpoints, num_checkpoints, self._checkpoint_bytes),
        ):
            held = min(limit or 10**9, number)
            disk[f"{name}: {held} that are kept, 1 being written"] = (held + 1) * each
        disk[f"rollouts of {num_steps:,} steps, at most"] = round(num_steps * self.tokens_a_step * BYTES_A_TOKEN)
        return disk

    @property
    def tokens_a_step(self) -> int:
        return self._run.groups_per_batch * self._run.group_size * self._run.max_tokens

    def _publish(self) -> dict[str, float]:
        """Return seconds: while all ranks wait, then in a thread of rank 0, then in each worker."""
        weights, version, model = 4 * self._sizes.num_weights, self._version, self._train.model
        if model.publish_lora == "adapter":
            weights = version
        converts = (model.publish_dtype or model.dtype) != "float32" and model.publish_lora == "merged"
        bandwidth = self._machine.bandwidth
        return {
            _WAIT: weights / _TO_HOST,
            f"{_THREAD}: conversion": weights / _CONVERSION if converts else 0.0,
            **self._files(version),
            "each worker: reads the files": version / bandwidth,
        }

    def _checkpoint(self) -> dict[str, float]:
        state = self._checkpoint_bytes
        return {_WAIT: state / _TO_HOST, **self._files(state)}

    def _files(self, size_bytes: int) -> dict[str, float]:
        """Return seconds of a thread of rank 0 that writes files."""
        return {
            f"{_THREAD}: files": size_bytes / self._machine.bandwidth,
            f"{_THREAD}: their digests": size_bytes / _DIGEST,
            _UPLOAD: size_bytes / self._machine.bandwidth,
        }

    # --- Sentences -----------------------------------------------------------------------------------------------

    def _remarks(self) -> Iterator[str]:
        if not self._passes.is_exact:
            yield (
                f"the passes of {self._config.model_type} can't run without memory, so its activations are estimated "
                "by a formula"
            )
        run = self._run
        if run.max_sequence_tokens or self._train.batch.max_seq_len:
            yield f"the longest sequence is taken to have {self._length:,} tokens"
        else:
            yield (
                f"the longest sequence is taken to have {self._length:,} tokens: max_tokens bounds an answer, here to "
                f"{run.max_tokens:,}, and a prompt is assumed to have up to {PROMPT_TOKENS:,}; max_sequence_tokens "
                "bounds both"
            )
        if self._gpus is not None:
            yield from self._of_gpus(self._gpus)
        if self._machine.gpus and self._engine.engine == VLLM and self._num_workers:
            yield from self._of_context()
        yield self._of_waits()
        versions = 2 * self._version if self._train.checkpoint.full_version_every else 0
        yield (
            f"TMPDIR for a root in a bucket: {size(self._checkpoint_bytes + self._version + versions)} of rank 0, "
            f"{size(3 * self._version)} of each worker; for a root in a folder: "
            + (f"{size(versions)} of rank 0, to compute differences" if versions else "nothing")
        )

    def _of_gpus(self, gpus: GpuPlan) -> Iterator[str]:
        num_workers = self._num_workers
        text = GpuPlan(trainer=gpus.trainer, workers=gpus.workers[:num_workers]).describe()
        evaluator = [f"evaluator: {','.join(each)}" for each in gpus.workers[num_workers:]]
        yield f"GPUs: {'; '.join([text, *evaluator])}"
        yield from gpus.describe_shared()
        used = {gpu for each in (gpus.trainer, *gpus.workers) for gpu in each}
        if idle := [str(gpu) for gpu in range(self._machine.gpus) if str(gpu) not in used]:
            yield f"no process uses GPU {', '.join(idle)}; raise num_workers or ranks"
        yield (
            f"of a rank's GPU, {USABLE:.0%} of {size(self._machine.gpu_bytes)} are planned for; the rest is for "
            "fragments and NCCL"
        )

    def _of_context(self) -> Iterator[str]:
        """Warn if vLLM, whose cache must hold a sequence of the model's whole context, would refuse to start."""
        context = self._engine.engine_options.get("max_model_len", self._context)
        *others, _ = self._of_engine.values()
        room = max(self._limit_of_worker - sum(others), 0)
        if not isinstance(context, int) or context < 1:
            return
        needed = -(-self._sizes.cache_bytes(context, self._sampler_dtype) // self._engine.tensor_parallel)
        if needed > room:
            limit = json.dumps({"max_model_len": self._length})
            yield (
                f"vLLM would not start: it wants a cache for a sequence of the model's whole context, {context:,} "
                f"tokens, {size(needed)}, and has {size(room)}; --engine-options '{limit}' asks for less"
            )

    def _of_waits(self) -> str:
        """Describe how long ranks are idle, and how short steps may be."""
        kept = self._train.checkpoint
        publish, checkpoint = self._publish(), self._checkpoint()

        def in_thread(seconds: Mapping[str, float]) -> float:
            return sum(value for name, value in seconds.items() if name.startswith(_THREAD) and name != _UPLOAD)

        every = f"every {kept.checkpoint_every:,} steps" if kept.checkpoint_every else "at the end"
        return (
            f"all ranks are idle for {_seconds(publish[_WAIT])} at a version (steps_per_version is "
            f"{self._run.steps_per_version:,}) and {_seconds(checkpoint[_WAIT])} at a checkpoint ({every}); for longer "
            f"if the files of the one before are not written yet, which takes {_seconds(in_thread(publish))} and "
            f"{_seconds(in_thread(checkpoint))}, to a bucket {_seconds(publish[_UPLOAD])} and "
            f"{_seconds(checkpoint[_UPLOAD])} more"
        )

    def _problems(self, needs: Sequence[Need]) -> Iterator[str]:
        for need in needs:
            if not need.fits and need.limit is not None:
                largest = max(need.parts, key=lambda part: need.parts[part])
                most = f"; {size(need.parts[largest])} of them: {largest}" if len(need.parts) > 1 else ""
                has = size(max(0, need.limit))
                yield f"{need.process} needs {size(need.total)} of {_PLACES[need.place]}, and has {has}{most}"
        free, needed = self._machine.disk_bytes, sum(self._disk().values())
        if free is not None and free < needed:
            yield (
                f"the disk has {size(free)} free, and checkpoints, versions and rollouts take up to {size(needed)}; "
                "lower keep_checkpoints or keep_policies"
            )


_OTHER_RANK, _WORKER = "other ranks", "each worker"
_WAIT = "all ranks wait: to the memory of rank 0"
_THREAD = "a thread"
_UPLOAD = f"{_THREAD}: upload, if the root is in a bucket"
_PLACES = {"GPU": "its GPU", "host": "the host's memory"}


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"
