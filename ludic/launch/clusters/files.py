"""The files of a run for each system."""

from collections.abc import Callable, Mapping

from ludic.engines.config import EngineConfig
from ludic.launch.clusters.config import ClusterConfig, System
from ludic.launch.clusters.kubernetes import kubernetes_files
from ludic.launch.clusters.plan import ClusterPlan, make_plan
from ludic.launch.clusters.skypilot import skypilot_files
from ludic.launch.clusters.slurm import slurm_files
from ludic.store import Root
from ludic.training.config import TrainConfig

_FILES: Mapping[System, Callable[[ClusterPlan], dict[str, str]]] = {
    "slurm": slurm_files,
    "kubernetes": kubernetes_files,
    "skypilot": skypilot_files,
}


def cluster_files(
    root: Root, system: System, config: TrainConfig, engine: EngineConfig, cluster: ClusterConfig
) -> dict[str, str]:
    """Return the text of each file by its name. Raises ConfigError if the settings do not fit the system or the run."""
    return _FILES[system](make_plan(root, system, config, engine, cluster))
