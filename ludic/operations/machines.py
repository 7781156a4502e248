"""Machines: servers of a run's policies, the files of a cluster, the number of workers on it."""

import threading
from typing import TYPE_CHECKING, Annotated, Unpack

from ludic.adapters.clusters.config import ClusterConfig, System
from ludic.defaults import ENGINE
from ludic.engines.config import EngineConfig
from ludic.launch.config import ServeConfig
from ludic.operations.start import Algorithm, RootUrl, train_config
from ludic.settings import Shown, convert, operation
from ludic.training.config import TrainConfig

if TYPE_CHECKING:
    from ludic.operations.typed import ClusterFilesSettings, ServeSettings, WriteClusterFilesSettings
    from ludic.run import Run

_NEXT = {"slurm": "sbatch {}", "kubernetes": "kubectl apply -f {}", "skypilot": "sky jobs launch {}"}
"""Command that starts a file, by system."""


@operation(serve=ServeConfig)
def serve(run: "Run", *, stop: threading.Event | None = None, **settings: Unpack["ServeSettings"]) -> None:
    """Run a vLLM server on this machine that follows a run's policies.

    Restarts vLLM when it dies, until it is stopped. Ctrl-C stops it and raises KeyboardInterrupt. settings: fields of
    ServeConfig. Raises ConfigError if vLLM is missing or the port is in use, ChildError if vLLM dies repeatedly.

    Args:
        stop: Ends the call when it is set, instead of Ctrl-C.
    """
    from ludic.launch.process import interruptible_unless
    from ludic.launch.serve import serve

    config = convert(ServeConfig, settings)
    with interruptible_unless(stop) as stopped:
        serve(run.root, config, stopped)


@operation()
def scale(run: "Run", num_workers: int, *, ray_address: str | None = None) -> None:
    """Change the number of workers of a run that `ludic run --launcher ray` has started, from any process.

    Raises ConfigError if no such run is found on the cluster.

    Args:
        ray_address: Address of the Ray cluster, as for `launch`.
    """
    from ludic.adapters.ray.launcher import scale

    scale(run.root, num_workers, ray_address)


@operation(train=TrainConfig)
def cluster_files(
    run: "Run",
    system: System,
    config: "TrainConfig | None" = None,
    *,
    cluster: "ClusterConfig | None" = None,
    engine: "str | EngineConfig" = ENGINE,
    algorithm: Algorithm = None,
    **settings: Unpack["ClusterFilesSettings"],
) -> dict[str, str]:
    """Return the files that start this run on a cluster, by name; nothing is started (docs/launch.md).

    Raises ConfigError.

    Args:
        system: slurm, kubernetes or skypilot.
        config: All settings of the trainer, instead of single ones.
        cluster: Machines and jobs.
        engine: Engine of the workers, by name or by its settings.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
    """
    from ludic.adapters.clusters.systems import cluster_files

    train = train_config(run.root, config, algorithm, settings, online=True)
    engine = EngineConfig(engine=engine) if isinstance(engine, str) else engine
    return cluster_files(run.root, system, train, engine, cluster or ClusterConfig())


@operation(train=TrainConfig)
def write_cluster_files(
    system: Annotated[System, Shown("SYSTEM", by_position=True)],
    root: RootUrl,
    *,
    cluster: ClusterConfig,
    engine: EngineConfig,
    algorithm: Algorithm = None,
    out: str | None = None,
    **settings: Unpack["WriteClusterFilesSettings"],
) -> None:
    """Write the files that start a run with Slurm, Kubernetes or SkyPilot.

    Raises ConfigError if a file is there already.

    Args:
        system: slurm, kubernetes or skypilot.
        root: Folder or URL of the run, which `ludic create` has made where the machines can reach it.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        out: Folder for the files; None prints them.
    """
    import sys

    from ludic.errors import ConfigError
    from ludic.paths import local_path
    from ludic.printable import printable
    from ludic.run import open_run

    cluster.check_for(system)
    run = open_run(root)
    files = cluster_files(run, system, cluster=cluster, engine=engine, algorithm=algorithm, **settings)
    if out is None:
        sys.stdout.write("\n".join(files.values()))
        return
    folder = local_path(out, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        try:
            with (folder / name).open("x") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(
                f"{folder / name} is there already; delete it, or choose another folder with --out"
            ) from None
    for name in files:
        print(printable(_NEXT[system].format(folder / name)))
