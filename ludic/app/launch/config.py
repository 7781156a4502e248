"""Settings of the processes that `ludic run` starts, and of those on a cluster.

Imports nothing slow, so that `--help` answers at once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from ludic.base import LOCAL_HOST, STOP_WITHIN_S
from ludic.engines import EngineConfig
from ludic.errors import ConfigError
from ludic.eval import EvalConfig
from ludic.rollouts import StreamConfig
from ludic.run import RunConfig
from ludic.settings import (
    LAUNCHER,
    GpuMemory,
    MaxBatch,
    Port,
    PositiveCount,
    Processes,
    Range,
    Role,
    SettingsError,
    StopWithin,
    TensorParallel,
    arguments,
    check_names,
)
from ludic.settings.table import check
from ludic.training import TrainConfig

if TYPE_CHECKING:
    from ludic.root import Root


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
    eval_every: Annotated[PositiveCount | None, Role(first_page=True)] = None
    """Evaluate version 0, every version whose number is a multiple of this, and the last one, in a process of its own
    (docs/evaluation.md). The trainer never waits for it. None evaluates nothing."""
    eval_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `ludic eval` for that process as JSON, such as {"num_examples": 64, "n": 4, "temperature": 0}."""
    take_over: bool = False
    """Fence the trainer that owns the run, even if it is alive; without this flag, a live owner refuses the start."""

    stop_within_s: StopWithin = STOP_WITHIN_S
    """Seconds that a process may take to stop cleanly after Ctrl-C, such as to finish a step and write a checkpoint;
    then it is killed."""

    launcher: Annotated[str, LAUNCHER] = "local"
    """local: processes of this machine; ray: actors on the nodes of a Ray cluster, which must reach the root: that
    of RAY_ADDRESS, such as node1:6379, else the cluster of this machine, else one that is started on it."""

    def __post_init__(self) -> None:
        check(self)
        if self.launcher != "local" and {self.trainer_gpus, self.worker_gpus} != {None}:
            raise ConfigError(
                f"trainer_gpus and worker_gpus name GPUs of this machine; {self.launcher} assigns its own"
            )
        if self.eval_options and self.eval_every is None:
            raise ConfigError("eval_options has no effect without eval_every; add it, or leave out eval_options")
        if self.launcher != "local" and self.eval_every is not None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayProcess:
    """Settings of the process of `ludic gateway`."""

    host: str = LOCAL_HOST
    """Address to listen at. Any but the default is open to other machines, and the connection is not encrypted."""
    port: Port = 8000
    """Port to listen at."""
    upstream: str | None = None
    """Base URL of a server that speaks OpenAI's chat completions, such as http://127.0.0.1:8001/v1: record its answers,
    instead of sampling from the run's weights. Needs no torch. None samples."""
    command: str | None = None
    """Command to run as an agent, with the variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY of an episode, which is sealed at its end; then the gateway ends. It is split into words, no shell
    reads it, and it runs with your rights."""

    def __post_init__(self) -> None:
        check(self)


# --- Clusters --------------------------------------------------------------------------------------------------------


_SHELL = ("setup", "line")
"""Settings that are shell code."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\n]*")
MAX_HOURS = 24
"""Hours of a Slurm job without max_hours: a partition's own default may be minutes."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+*-]*")
"""Matches the other texts: names that mean the same in a shell, in YAML and in an #SBATCH line."""


def _is_name(field: str, value: str) -> bool:
    return NAME.fullmatch(value.removeprefix("/") if field == "log_folder" else value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Machines of a run on a cluster."""

    workers: Annotated[Processes | None, Role(first_page=True)] = None
    """Number of workers; None takes num_workers, all of the schedule."""
    nodes: Annotated[Processes, Role(first_page=True)] = 1
    """Number of machines of the trainer."""
    ranks: Annotated[Processes, Role(first_page=True)] = 1
    """Number of the trainer's processes on each of its machines."""
    gpus: Annotated[bool, Role(first_page=True)] = True
    """Reserve a GPU for each rank, and tensor_parallel GPUs for each worker."""
    gpu_type: Annotated[str | None, Role(first_page=True)] = None
    """Type of the GPUs as the cluster names it, such as h100, H100 or NVIDIA-H100-80GB-HBM3."""
    cpus: Annotated[int, Range(1, 10**4)] = 4
    """CPUs for each rank and each worker."""
    memory_gb: Annotated[int, Range(1, 10**5)] | None = None
    """Memory for each rank and each worker, in GiB; None takes what `ludic plan` says, with a quarter more."""
    serve: bool = False
    """Run `ludic serve` beside each worker, on its GPUs; the worker samples from it, so that vLLM lives in a process of
    its own, which is restarted alone."""
    variable: tuple[str, ...] = ()
    """Environment variables of all processes, such as HF_HOME=/shared/hf NCCL_SOCKET_IFNAME=eth0; no secrets."""
    max_hours: Annotated[int | None, Range(1, 10**5), Role(first_page=True, only_with=("slurm", "kubernetes"))] = None
    """Hours after which the cluster ends the jobs; None is 24 with slurm, no limit with kubernetes."""
    stop_within_s: StopWithin = STOP_WITHIN_S
    """Seconds that a process may take to stop cleanly after SIGTERM, such as to finish a step and write a checkpoint;
    then it is killed. Slurm sends SIGTERM so long before the time limit."""
    setup: Annotated[str | None, Role(first_page=True, only_with=("slurm",))] = None
    """slurm: shell code that makes `ludic` available on a machine, such as "source ~/ludic/bin/activate"."""
    image: Annotated[str | None, Role(first_page=True, only_with=("kubernetes",))] = None
    """kubernetes: container image with ludic and the engine."""
    partition: Annotated[str | None, Role(only_with=("slurm",))] = None
    """slurm: partition of the jobs."""
    account: Annotated[str | None, Role(only_with=("slurm",))] = None
    """slurm: account of the jobs."""
    log_folder: Annotated[str | None, Role(only_with=("slurm",))] = None
    """slurm: folder of the jobs' log files, there before they start; None is the root's logs/ if Slurm can
    read its name, else the folder in which sbatch runs."""
    line: Annotated[tuple[str, ...], Role(only_with=("slurm",))] = ()
    """slurm: lines for both files, such as "#SBATCH --qos=high" or "module load cuda"; others than #SBATCH run before
    ludic does."""
    namespace: Annotated[str | None, Role(only_with=("kubernetes",))] = None
    """kubernetes: namespace of the JobSet."""
    secret: Annotated[str | None, Role(only_with=("kubernetes",))] = None
    """kubernetes: name of a Secret whose entries become environment variables, such as the bucket's credentials."""
    trust_code: bool = False
    """Pass --trust-code to all processes: agree to run the Python files in the root, which machines refuse without."""

    def __post_init__(self) -> None:
        check(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str) and each.name not in _SHELL and not _is_name(each.name, value):
                raise ConfigError(f"{each.name} is {value!r}, wanted a name of letters, digits and _ . : / @ + * -")
        for text in self.variable:
            if not _VARIABLE.fullmatch(text):
                raise ConfigError(f"variable has {text!r}, wanted NAME=VALUE on one line")
        for text in self.line:
            if "\n" in text:
                raise ConfigError(f"line has {text!r}, wanted one line; give several lines one by one")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by name."""
        return dict(text.split("=", 1) for text in self.variable)


class ClusterSystem(Protocol):
    """A program that starts processes on machines, such as Slurm: a part of the kind CLUSTER_SYSTEM."""

    @property
    def start(self) -> str:
        """Command that starts a file, with {} in its place, such as sbatch {}."""
        ...

    def check(self, cluster: ClusterConfig) -> None:
        """Raise SettingsError for settings that the system does not use or lacks."""
        ...

    def files(self, root: "Root", config: TrainConfig, engine: EngineConfig, cluster: ClusterConfig) -> dict[str, str]:
        """Return the texts of the files that start a run, by name. Raises ConfigError if settings do not fit."""
        ...
