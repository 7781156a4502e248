"""What a run starts on a cluster: the commands of its workers and its trainer, and what each needs.

The commands are those of any machine, `ludic worker` and `ludic train`. Only settings that differ from what these
commands take by themselves become flags, so that the files stay short.
"""

import logging
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ludic.app import (
    ENVIRONMENT,
    KILL_AFTER_S,
    ClusterConfig,
    LaunchConfig,
    Machine,
    ServeConfig,
    Settings,
    args_of_ranks,
    plan,
    stop_variables,
    url_anywhere,
)
from ludic.base import ENGINE, SAFE_ENVIRONMENT, python_words, secrets_of
from ludic.engines import EngineConfig
from ludic.errors import ConfigError, ModelError, one_line
from ludic.models import load_config
from ludic.root import Root
from ludic.root.weights import first_config
from ludic.run import run_of
from ludic.settings import SettingsError, settings_of, to_flags
from ludic.training import TrainConfig, next_config

logger = logging.getLogger(__name__)

MAX_RESTARTS = 1000
"""Restarts of a process that dies; each goes on from the root."""
PORT = 29500
"""Port on which the trainer's machines find each other."""


SERVER_PORT = 8000
"""Port of the server beside a worker, on a machine of its own."""
_HEADROOM = 1.25
"""Factor on the memory that is planned: for files in memory, rollouts of a batch, and what a plan does not know."""
_OF_SOME = (*("partition", "account", "namespace", "secret", "image", "setup", "max_hours", "log_folder", "line"),)
"""Settings that apply to some systems only."""
_UNKNOWN_GB = 32
"""GiB of a process whose model can't be looked at where the files are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Host memory of the machines of a run, in GiB."""

    trainer: int
    """Each of the trainer's machines, for all of its ranks."""
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A run on a cluster, as far as all systems describe it alike."""

    name: str
    """Name of the jobs: ludic- and the end of the run's id."""
    url: str
    workers: int
    cluster: ClusterConfig
    tensor_parallel: int
    """Number of GPUs of a worker."""
    num_steps: int
    worker_flags: Sequence[str]
    train_flags: Sequence[str]
    memory: Memory
    serve_flags: Sequence[str] = ()
    """Flags of `ludic serve`; used if cluster.serve is set."""

    def worker_command(self, slot: str, port: str = str(SERVER_PORT)) -> str:
        """Return the shell command of a worker. slot: shell expression, such as "$SLURM_ARRAY_TASK_ID".

        port: shell expression for the port of the server beside it, if there is one.
        """
        server = f" --engine server --server-url http://127.0.0.1:{port}" if self.cluster.serve else ""
        flags = shlex.join(self.worker_flags)
        return f"{shlex.join(['ludic', 'worker', self.url])} --slot {slot}{server} {flags}".rstrip()

    def serve_command(self, port: str = str(SERVER_PORT)) -> str | None:
        """Return the shell command that starts a worker's server in the background; None without servers."""
        if not self.cluster.serve:
            return None
        return (
            f"{shlex.join(['ludic', 'serve', self.url])} --port {port} {shlex.join(self.serve_flags)}".rstrip() + " &"
        )

    def train_command(self, host: str, port: str = str(PORT)) -> str:
        """Return the shell command of one machine of the trainer. host, port: shell expressions of the first one."""
        train = ["ludic", "train", self.url, *self.train_flags]
        if self.cluster.nodes == self.cluster.ranks == 1:
            return shlex.join(train)
        numbers = {"nnodes": self.cluster.nodes, "nproc-per-node": self.cluster.ranks, "max-restarts": MAX_RESTARTS}
        flags = [f"--{name}={value}" for name, value in numbers.items()]
        meeting = f"--rdzv-backend=c10d --rdzv-id={self.name} --rdzv-endpoint={host}:{port}"
        torchrun = python_words(["-m", "torch.distributed.run", *flags], python="python")
        return f"{shlex.join(torchrun)} {meeting} -m {shlex.join(args_of_ranks(train))}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of all processes. Logs should be readable while a process runs."""
        stops = stop_variables(self.cluster.stop_within_s)
        return {**ENVIRONMENT, **SAFE_ENVIRONMENT, **stops, "PYTHONUNBUFFERED": "1", **self.cluster.variables}

    @property
    def kill_after_s(self) -> int:
        """Seconds from SIGTERM until the cluster may kill; torchrun and the ranks themselves come before."""
        return self.cluster.stop_within_s + 2 * math.ceil(KILL_AFTER_S)

    @property
    def quoted_url(self) -> str:
        """The URL, quoted for a shell."""
        return shlex.quote(self.url)

    @property
    def worker_gpus(self) -> int:
        return self.tensor_parallel if self.cluster.gpus else 0

    @property
    def trainer_gpus(self) -> int:
        """GPUs of each machine of the trainer."""
        return self.cluster.ranks if self.cluster.gpus else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A ClusterSystem that is told by its files."""

    name: str
    start: str
    """Command that starts a file, with {} in its place."""
    make_files: Callable[[ClusterPlan], dict[str, str]]
    """Returns the texts of the files by name."""
    settings: tuple[str, ...] = ()
    """Those settings of ClusterConfig for some systems only that apply to this one."""
    missing: Callable[[ClusterConfig], str | None] = lambda cluster: None
    """Returns which setting is missing, and what to give; None if none is."""
    sees_folders: bool = False
    """Whether its machines share folders with this one."""

    def check(self, cluster: ClusterConfig) -> None:
        """Raise SettingsError for settings that the system does not use or lacks."""
        for name in _OF_SOME:
            if getattr(cluster, name) and name not in self.settings:
                raise SettingsError(f"{name} does not apply to {self.name}; leave it out")
        if (missing := self.missing(cluster)) is not None:
            raise SettingsError(missing)

    def files(self, root: Root, config: TrainConfig, engine: EngineConfig, cluster: ClusterConfig) -> dict[str, str]:
        """Return the text of each file by its name. Raises ConfigError if settings do not fit the system or the run."""
        return self.make_files(make_plan(root, self, config, engine, cluster))


def make_plan(
    root: Root, system: System, config: TrainConfig, engine: EngineConfig, cluster: ClusterConfig
) -> ClusterPlan:
    """Plan a run's processes. Raises ConfigError if the settings do not fit the system or the run."""
    system.check(cluster)
    if config.batch.is_stored:
        raise ConfigError("`ludic cluster` starts workers, which offline training and replays do not use")
    if root.is_local and not system.sees_folders:
        raise ConfigError(
            f"{root.url} is a folder, which machines of {system.name} do not see; create the run in a bucket"
        )
    if cluster.serve and engine.engine not in (ENGINE, "vllm"):
        raise ConfigError(f"serve starts vLLM servers, and engine is {engine.engine}; leave one of them out")
    shell = _words("\n".join([cluster.setup or "", *cluster.line]))
    secrets = list(secrets_of({**asdict(engine), **config.flat(), "setup": shell, "variable": [cluster.variables]}))
    if secrets:
        raise ConfigError(
            f"{secrets[0]} is or holds a secret, and `ludic cluster` writes none into a file; leave it out, and set an "
            "environment variable where the processes run"
        )
    of_engine = _differing(asdict(engine), asdict(EngineConfig()))
    shared = {each.name for each in settings_of(ServeConfig)} if cluster.serve else {"max_batch"}
    serve = {name: value for name, value in of_engine.items() if name in shared}
    # A worker that samples from its server takes requests as one that has the engine itself.
    of_server = (shared | {"engine"}) - {"max_batch"} if cluster.serve else set()
    trust = {"trust_code": True} if cluster.trust_code else {}
    # A trainer that goes over to another objective takes the defaults of its settings.
    defaults = {each.name: each.default for each in settings_of(TrainConfig)}
    by_itself = defaults | next_config(root.url, {}, online=True).flat()
    return ClusterPlan(
        name=f"ludic-{root.run_id.replace('-', '')[-8:]}",
        url=url_anywhere(root),
        workers=run_of(root).num_workers if cluster.workers is None else cluster.workers,
        cluster=cluster,
        tensor_parallel=engine.tensor_parallel,
        num_steps=config.num_steps,
        worker_flags=to_flags({**{k: v for k, v in of_engine.items() if k not in of_server}, **trust}),
        train_flags=to_flags({**_differing(config.flat(), by_itself), **trust}),
        serve_flags=to_flags(serve),
        memory=_memory(root, config, replace(engine, engine="vllm") if cluster.serve else engine, cluster),
    )


def _memory(root: Root, config: TrainConfig, engine: EngineConfig, cluster: ClusterConfig) -> Memory:
    """Return what `memory_gb` says, or what the run needs."""
    if cluster.memory_gb is not None:
        return Memory(trainer=cluster.memory_gb * cluster.ranks, worker=cluster.memory_gb)
    try:
        with first_config(root) as folder:
            model = load_config(str(folder))
    except ModelError as error:
        logger.warning(
            "the run's model can't be looked at here, so each process gets %d GiB; --memory-gb sets another number: %s",
            *(_UNKNOWN_GB, one_line(error)),
        )
        return Memory(trainer=_UNKNOWN_GB * cluster.ranks, worker=_UNKNOWN_GB)
    run = run_of(root)
    processes = LaunchConfig(ranks=cluster.nodes * cluster.ranks, local_workers=min(1, run.num_workers))
    settings = Settings(run=run, train=config, processes=processes, engine=engine)
    # Enough GPUs for the count; how large they are does not change the host's memory.
    num_gpus = processes.ranks + engine.tensor_parallel if cluster.gpus else 0
    found = plan(model, settings, Machine(gpus=num_gpus, gpu_bytes=10**12))
    needs = {need.process: need.total for need in found.needs if need.place == "host"}
    trainer = needs["rank 0"] + (cluster.ranks - 1) * needs.get("other ranks", 0)
    return Memory(trainer=_to_gib(trainer), worker=_to_gib(needs["each worker"]))


def _to_gib(num_bytes: int) -> int:
    return math.ceil(_HEADROOM * num_bytes / 2**30)


def _words(script: str) -> list[dict[str, str]]:
    """Return the words of a shell script as settings: NAME=VALUE by its name unless the shell finds the value."""
    words = (re.sub("[\"']", "", word).rpartition("=") for word in re.split(r"[\s;&|()]+", script))
    return [{name or "setup": "" if value.startswith(("$", "`")) else value} for name, _, value in words]


def _differing(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value != others[name]}
