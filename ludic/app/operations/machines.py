"""Machines: what a run needs, servers of its policies, the files of a cluster, the number of workers on it."""

import threading
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Unpack

from ludic.app.launch.config import ClusterConfig, ClusterSystem, LaunchConfig, ServeConfig
from ludic.app.operations.operation import operation
from ludic.app.operations.start import GROUPS, Algorithm, engine_config, train_config
from ludic.base import ENGINE, find_by_name
from ludic.engines import EngineConfig
from ludic.run import RunConfig
from ludic.settings import (
    CLUSTER_SYSTEM,
    FromFlag,
    Range,
    Role,
    Shown,
    convert,
    find,
    settings_of,
    split,
    without_tables,
)
from ludic.training import TrainConfig

if TYPE_CHECKING:
    from ludic.app.launch.plan import Machine
    from ludic.app.operations.outcomes import ClusterFiles, Planned
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import ClusterSettings, PlanSettings, ServeSettings

SystemName = Annotated[str, CLUSTER_SYSTEM]
Gigabytes = Annotated[float, Range(0, 10**6, above=True)]
"""10^9 bytes."""


@operation(
    group="Start",
    place=1,
    **GROUPS,
)
def plan(
    *,
    algorithm: Algorithm = None,
    gpus: Annotated[int | None, Range(0, 4096), Role(first_page=True)] = None,
    gpu: Annotated[str | None, Role(first_page=True)] = None,
    gpu_memory_gb: Annotated[Gigabytes | None, Role(first_page=True)] = None,
    host_memory_gb: Gigabytes | None = None,
    disk_gb: Gigabytes | None = None,
    **settings: Unpack["PlanSettings"],
) -> "Planned":
    """Say what memory and disk a run needs, and what does not fit.

    Takes the settings of `ludic run`, with --config too, but no root: of the model only config.json is read, and
    nothing is started. Raises ConfigError, ModelError.

    Args:
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        gpus: Number of GPUs to plan for, 0 for the CPU; None takes those of this machine.
        gpu: Type of the GPUs, such as H100, A100 or "RTX 4090", which says their memory.
        gpu_memory_gb: Memory of each GPU in GB, instead of its type.
        host_memory_gb: Memory in GB that all processes on a machine may take; None compares with none.
        disk_gb: Free space in GB where the root is; None compares with none.
    """
    from ludic.app.launch.plan import Settings, plan
    from ludic.app.operations.outcomes import Planned
    from ludic.models import load_config
    from ludic.root.weights import local_folder
    from ludic.training import load_algorithm

    parts = split(settings, **GROUPS)
    preset = load_algorithm(algorithm) if algorithm is not None else {}
    train = without_tables(parts["train"], {each.name: each for each in settings_of(TrainConfig)})
    run = convert(RunConfig, {"env": ("moar_cats",)} | parts["run"])
    wanted = Settings(
        run=run,
        train=convert(TrainConfig, {**preset, **train}),
        processes=convert(LaunchConfig, parts["launch"]),
        engine=convert(EngineConfig, parts["engine"]),
    )
    machine = _machine(gpus, gpu, gpu_memory_gb, host_memory_gb, disk_gb)
    with local_folder(run.model, with_weights=False) as folder:
        config = load_config(str(folder))
    found = plan(config, wanted, machine)
    return Planned(
        model=run.model,
        num_weights=found.sizes.num_weights,
        num_trained=found.sizes.num_trained,
        memory=found.rows(),
        disk=found.disk,
        notes=found.remarks,
        problems=found.problems,
        advice=found.advice,
    )


def _machine(
    gpus: int | None,
    gpu: str | None,
    gpu_gb: float | None,
    host_gb: float | None,
    disk_gb: float | None,
) -> "Machine":
    """Return the machine to plan for; what is None is that of this machine, or unknown. Raises ConfigError."""
    from ludic.app.launch.plan import Machine, local_machine
    from ludic.errors import ConfigError
    from ludic.training import gpu_bytes

    if gpu is not None and gpu_gb is not None:
        raise ConfigError(f"gpu is {gpu} and gpu_memory_gb is {gpu_gb:g}; give one of them")
    given = gpu_bytes(gpu) if gpu is not None else None if gpu_gb is None else int(gpu_gb * 1e9)
    here = local_machine()
    if gpus is None:
        gpus = here.gpus or (1 if given is not None else 0)
    if gpus and given is None and not here.gpus:
        raise ConfigError(
            f"gpus is {gpus}, and this machine has none to look at; give gpu, such as H100, or gpu_memory_gb"
        )
    return Machine(
        gpus=gpus,
        gpu_bytes=given or here.gpu_bytes,
        host_bytes=None if host_gb is None else int(host_gb * 1e9),
        disk_bytes=None if disk_gb is None else int(disk_gb * 1e9),
    )


@operation(group="Start", place=5, on_sigterm="stop", serve=ServeConfig)
def serve(run: "Run", *, stop: threading.Event | None = None, **settings: Unpack["ServeSettings"]) -> None:
    """Run a vLLM server on this machine that follows a run's policies.

    Restarts vLLM when it dies, until it is stopped. Ctrl-C stops it and raises KeyboardInterrupt. settings: fields of
    ServeConfig. Raises ConfigError if vLLM is missing or the port is in use, ProcessDiedError if vLLM dies repeatedly.

    Args:
        stop: Ends the call when it is set, instead of Ctrl-C.
    """
    from ludic.app.launch.process import interruptible_unless
    from ludic.app.launch.serve import serve

    config = convert(ServeConfig, settings)
    with interruptible_unless(stop) as stopped:
        serve(run.root, config, stopped)


@operation()
def scale(run: "Run", num_workers: int, *, ray_address: str | None = None) -> None:
    """Change the number of workers of a run that `ludic run --launcher ray` has started, from any process.

    Raises ConfigError if no such run is found on the cluster.

    Args:
        ray_address: Address of the Ray cluster, as for `run`.
    """
    find_by_name("ludic.adapters.ray.launcher:scale")(run.root, num_workers, ray_address)


@operation(
    group="Start",
    place=6,
    only_in_file=(TrainConfig, EngineConfig),
    train=TrainConfig,
    engine=EngineConfig,
)
def cluster(
    run: "Run",
    system: Annotated[SystemName, Shown("SYSTEM", by_position=True)],
    config: "TrainConfig | None" = None,
    *,
    cluster: Annotated["ClusterConfig | None", FromFlag(ClusterConfig)] = None,
    engine: "str | EngineConfig" = ENGINE,
    algorithm: Algorithm = None,
    out: Annotated[str | PathLike[str] | None, Role(first_page=True)] = None,
    **settings: Unpack["ClusterSettings"],
) -> "ClusterFiles":
    """Make the files that start a run with Slurm or Kubernetes (docs/launch.md).

    Nothing is started. The command takes the settings of the trainer and the engine from the file of --config alone.
    settings: fields of TrainConfig and EngineConfig. Raises ConfigError, also if a file is there
    already.

    Args:
        run: Folder or URL of the run, which `ludic run --create-only` has made where the machines can reach it.
        system: slurm or kubernetes.
        config: All settings of the trainer, instead of single ones.
        cluster: Machines and jobs.
        engine: Engine of the workers, by name or by its settings.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        out: Folder for the files; None returns them, and the command prints them.
    """
    from ludic.app.launch.local import log_folder
    from ludic.app.launch.supervisor import make_log_folder
    from ludic.app.operations.outcomes import ClusterFiles

    found: ClusterSystem = find(CLUSTER_SYSTEM, system)
    cluster = cluster or ClusterConfig()
    found.check(cluster)
    parts = split(settings, train=TrainConfig, engine=EngineConfig)
    train = train_config(run.url, config, algorithm, parts["train"], online=True)
    files = found.files(run.root, train, engine_config(engine, parts["engine"]), cluster)
    if system == "slurm" and run.root.is_local:
        make_log_folder(log_folder(run.root))  # Slurm ends a job whose log file it can't open
    if out is not None:
        _write_new(str(out), files)
    return ClusterFiles(start=found.start, files=files, out=None if out is None else str(out))


def _write_new(out: str, files: Mapping[str, str]) -> None:
    """Write files into a folder. Raises ConfigError if one is there already."""
    from ludic.base import local_path
    from ludic.errors import ConfigError

    folder = local_path(out, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        try:
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(
                f"{folder / name} is there already; delete it, or choose another folder with --out"
            ) from None
