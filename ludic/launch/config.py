"""Settings of the processes that `ludic run` starts. Imports nothing slow, so that `--help` answers at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ludic.defaults import STOP_WITHIN_S
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError
from ludic.eval.config import EvalConfig
from ludic.rollouts.config import StreamConfig
from ludic.run_config import RunConfig
from ludic.settings import (
    Count,
    GpuMemory,
    MaxBatch,
    Port,
    Processes,
    Range,
    Role,
    SettingsError,
    StopWithin,
    TensorParallel,
    arguments,
    check,
    check_names,
)
from ludic.training.config import TrainConfig

if TYPE_CHECKING:
    from ludic.store import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig(StreamConfig):
    """Processes that `ludic run` starts, on this machine or on a Ray cluster, and settings of its workers."""

    local_workers: Annotated[int, Range(0, 4096)] | None = None
    """Number of workers to start on this machine, or on the Ray cluster, 0 for none; None starts num_workers, all of
    the schedule."""
    ranks: Annotated[Processes, Role(first_page=True)] = 1
    """Number of processes that train together."""
    trainer_gpus: str | None = None
    """GPUs of the trainer, such as 0,1, one for each rank; None takes the first ones."""
    worker_gpus: str | None = None
    """GPUs that the workers divide among them, such as 2,3; None takes those that the trainer does not use."""
    eval_every: Annotated[Count | None, Role(first_page=True)] = None
    """Evaluate version 0, every version whose number is a multiple of this, and the last one, in a process of its own
    (docs/evaluation.md). The trainer never waits for it. None evaluates nothing."""
    eval_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `ludic eval` for that process as JSON, such as {"num_examples": 64, "n": 4, "temperature": 0}."""
    take_over: bool = False
    """Fence the trainer that owns the run, even if it is alive; without this flag, a live owner refuses the start."""

    stop_within_s: StopWithin = STOP_WITHIN_S
    """Seconds that a process may take to stop cleanly after Ctrl-C, such as to finish a step and write a checkpoint;
    then it is killed."""

    launcher: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: actors on the nodes of a Ray cluster, which must reach the root: that
    of RAY_ADDRESS, such as node1:6379, else the cluster of this machine, else one that is started on it."""

    def __post_init__(self) -> None:
        check(self)
        if self.launcher == "ray" and {self.trainer_gpus, self.worker_gpus} != {None}:
            raise ConfigError(
                "trainer_gpus and worker_gpus name GPUs of this machine; with --launcher ray, Ray assigns"
            )
        if self.eval_options and self.eval_every is None:
            raise ConfigError("eval_options has no effect without eval_every; add it, or leave out eval_options")
        if self.launcher == "ray" and self.eval_every is not None:
            raise ConfigError("eval_every needs --launcher local; on a cluster, start `ludic eval ROOT --every K`")
        self.evaluation(until_step=1)

    def evaluation(self, until_step: int) -> dict[str, Any] | None:
        """Return the settings of the evaluation process, as fields of EvalConfig; None without one.

        until_step: the last step of training. Raises ConfigError.
        """
        if self.eval_every is None:
            return None
        options = dict(self.eval_options)
        check_names(options, EvalConfig, "setting of an evaluation (eval_options)")
        own = {"every": self.eval_every, "until_step": until_step}
        if taken := options.keys() & {"versions", *own}:
            raise ConfigError(
                f"eval_options has {', '.join(sorted(taken))}, which follows from eval_every; leave it out"
            )
        if "env" in options:
            options["env"] = (options["env"],) if isinstance(options["env"], str) else tuple(options["env"])
        options = {"env_timeout_s": self.env_timeout_s} | options
        EvalConfig(**arguments(EvalConfig, options))
        return {**own, **options}

    def workers_of(self, num_workers: int) -> int:
        """Return the number of workers to start. num_workers: workers of the run's schedule. Raises ConfigError."""
        if self.local_workers is None:
            return num_workers
        if not 0 <= self.local_workers <= num_workers:
            raise SettingsError(f"local_workers is {self.local_workers}, wanted 0 to num_workers ({num_workers})")
        return self.local_workers

    def engines_of(self, num_workers: int) -> int:
        """Return how many processes to start have an engine: workers and the evaluator. Raises ConfigError."""
        return self.workers_of(num_workers) + (self.eval_every is not None)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run that is about to start."""

    url: str
    run: RunConfig
    train: TrainConfig
    processes: LaunchConfig
    engine: EngineConfig
    root: "Root | None"
    """None if there is no root yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of the vLLM server that `ludic serve` runs."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is reachable from other machines. Whoever reaches the server can load weights into
    it, so open it only in a network that you trust."""
    port: Port = 8000
    """Port to listen at."""
    max_batch: MaxBatch = 256
    """Maximum number of sequences that vLLM decodes together; further requests wait."""
    tensor_parallel: TensorParallel = 1
    """Number of GPUs that hold one copy of the model."""
    gpu_memory: GpuMemory | None = None
    """Share of a GPU's memory that vLLM may take, from 0 to 1. None is vLLM's default."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """More options of vLLM as JSON, such as {"max_model_len": 8192}: arguments of AsyncEngineArgs."""

    def __post_init__(self) -> None:
        check(self)
