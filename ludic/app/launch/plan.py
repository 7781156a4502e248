"""What a run needs before it starts: memory of each process, and disk.

From a model's configuration, a run's settings and a machine; pure, except `local_machine`. ludic.training.memory has
the figures of a model, ludic.app.launch.gpus says who gets which GPU. All sizes are bytes; a GB is 10^9 of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedConfig

from ludic.app.launch.config import LaunchConfig
from ludic.app.launch.gpus import WHOLE_SHARE, GpuPlan, gpu_plan
from ludic.base import ENGINE, host_bytes, size, visible_gpus
from ludic.engines import VLLM, EngineConfig
from ludic.models import max_positions
from ludic.run import RunConfig
from ludic.training import (
    PROMPT_TOKENS,
    USABLE,
    Activations,
    DeviceKind,
    Gpu,
    ModelSizes,
    Parts,
    TrainConfig,
    activations,
    checkpoint_bytes,
    host_memory,
    longest_sequence,
    model_sizes,
    rank_memory,
    reference_place,
    sampler_memory,
    version_bytes,
    with_defaults,
)

BYTES_A_TOKEN = 7.2
"""Bytes of a stored response token, all columns (benchmarks/README.md, store_size)."""
_WORKER_HOST = {"cpu": 10**9, "cuda": 6 * 10**9}
"""Bytes of host memory of a worker's process or processes without weights. Measured for cpu; assumed for cuda."""
_SERVER_HOST = 10**9
"""Bytes of host memory of a worker that uses servers."""

_ADVICE = (
    "to need less, try in this order: --dtype bfloat16, --activation-checkpointing, a smaller "
    "--max-tokens-per-micro-batch, --logprob-chunk-tokens or --max-batch, --reference-offload, more --ranks, "
    "--optimizer adamw_8bit, a larger --tensor-parallel, --lora-rank 32"
)


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

    @property
    def device(self) -> DeviceKind:
        return "cuda" if self.gpus else "cpu"


def local_machine() -> Machine:
    """Return this machine: its GPUs that processes may use, and the memory that they may take."""
    names = visible_gpus()
    gpu_bytes = 0
    if names:
        import torch

        gpu_bytes = min(torch.cuda.get_device_properties(number).total_memory for number in range(len(names)))
    return Machine(gpus=len(names), gpu_bytes=gpu_bytes, host_bytes=host_bytes())


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
class ResourcePlan:
    """Resources that a run needs."""

    sizes: ModelSizes
    needs: Sequence[Need]
    disk: Mapping[str, int]
    """Bytes below the root by part; the sum is the most at a time."""
    remarks: Sequence[str]
    problems: Sequence[str]
    """A sentence for each thing that does not fit."""

    @property
    def advice(self) -> str:
        """What to change if a process needs more memory than there is, the cheapest change first; else empty."""
        return "" if all(need.fits for need in self.needs) else _ADVICE

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


def plan(config: PreTrainedConfig, settings: Settings, machine: Machine) -> ResourcePlan:
    """Return what a run needs. config: of the model. Raises ConfigError for GPUs that can't be assigned, ModelError."""
    return _Planner(config, settings, machine).plan()


def resolved(config: PreTrainedConfig, settings: Settings, machine: Machine) -> Settings:
    """Return the settings with the values that processes would choose on this machine. The engine auto is vllm on
    GPUs."""
    is_on_cpu = machine.gpus == 0 or settings.train.model.device == "cpu"
    engine = settings.engine
    if engine.engine == ENGINE:
        engine = replace(engine, engine=VLLM if machine.gpus else "transformers")
    gpus = None if is_on_cpu else _gpu_plan(replace(settings, engine=engine), machine)
    is_shared = engine.engine != "server" and gpus is not None and gpus.trainer_share() is not None
    gpu = None if is_on_cpu else Gpu(free=machine.gpu_bytes // (2 if is_shared else 1))
    train = with_defaults(settings.train, settings.run, config, gpu, ranks=settings.processes.ranks)
    return replace(settings, train=train, engine=engine)


def _gpu_plan(settings: Settings, machine: Machine) -> GpuPlan | None:
    """Return who gets which GPU; the evaluator is the last of the workers."""
    num_engines = settings.processes.engines_of(settings.run.num_workers)
    gpus = [str(number) for number in range(machine.gpus)]
    return gpu_plan(settings.train, settings.processes, settings.engine, num_engines, gpus)


def _num_evaluators(settings: Settings) -> int:
    return int(settings.processes.eval_every is not None)


class _Planner:
    """One plan."""

    def __init__(self, config: PreTrainedConfig, settings: Settings, machine: Machine) -> None:
        settings = resolved(config, settings, machine)
        self._config, self._settings, self._machine = config, settings, machine
        self._run, self._train = settings.run, settings.train
        self._processes, self._engine = settings.processes, settings.engine
        is_on_cpu = machine.gpus == 0 or settings.train.model.device == "cpu"
        self._device: DeviceKind = "cpu" if is_on_cpu else "cuda"
        self._ranks = settings.processes.ranks
        self._num_workers = settings.processes.workers_of(settings.run.num_workers)

    def plan(self) -> ResourcePlan:
        needs = self.needs()
        return ResourcePlan(
            sizes=self._sizes,
            needs=needs,
            disk=self._disk(),
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
        return _gpu_plan(self._settings, self._machine)

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
        on_device = self._named_parts(rank_memory(self._sizes, self._passes, self._train, **place))
        names = ["rank 0", _OTHER_RANK][: self._ranks]
        if self._device == "cuda":
            yield Need(process="each rank", place="GPU", parts=on_device, limit=self._limit_of_trainer)
        for rank, name in enumerate(names):
            host = host_memory(self._sizes, self._train, rank=rank, **place)
            yield Need(process=name, place="host", parts={**(on_device if self._device == "cpu" else {}), **host})

    def _named_parts(self, parts: Parts) -> Parts:
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

    # --- Disk -------------------------------------------------------------------------------------------

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
_PLACES = {"GPU": "its GPU", "host": "the host's memory"}
