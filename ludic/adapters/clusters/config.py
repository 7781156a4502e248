"""Settings of `ludic launch`. Imports nothing slow, so that `--help` answers at once."""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from ludic.defaults import STOP_WITHIN_S
from ludic.errors import ConfigError
from ludic.settings import Processes, Range, SettingsError, StopWithin, check

System = Literal["slurm", "kubernetes", "skypilot"]

_ONLY_FOR: dict[str, tuple[System, ...]] = {
    "partition": ("slurm",),
    "account": ("slurm",),
    "namespace": ("kubernetes",),
    "secret": ("kubernetes",),
    "infra": ("skypilot",),
    "image": ("kubernetes", "skypilot"),
    "setup": ("slurm", "skypilot"),
    "max_hours": ("slurm", "kubernetes"),
}
"""Settings that apply to some systems only."""
_SHELL = "setup"
"""The setting that is shell code."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+*-]*")
"""Matches the other texts: names that mean the same in a shell, in YAML and in an #SBATCH line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Machines of a run on a cluster."""

    workers: Processes | None = None
    """Number of workers; None takes num_workers, all of the schedule."""
    nodes: Processes = 1
    """Number of machines of the trainer."""
    ranks: Processes = 1
    """Number of the trainer's processes on each of its machines."""
    gpus: bool = True
    """Reserve a GPU for each rank, and tensor_parallel GPUs for each worker."""
    gpu_type: str | None = None
    """Type of the GPUs as the cluster names it, such as h100, H100 or NVIDIA-H100-80GB-HBM3. SkyPilot needs it."""
    cpus: Annotated[int, Range(1, 10**4)] = 4
    """CPUs for each rank and each worker."""
    memory_gb: Annotated[int, Range(1, 10**5)] = 32
    """Memory for each rank and each worker, in GiB."""
    max_hours: Annotated[int, Range(1, 10**5)] | None = None
    """slurm, kubernetes: hours after which the cluster ends the jobs; None takes the cluster's limit."""
    stop_within_s: StopWithin = STOP_WITHIN_S
    """Seconds that a process may take to stop cleanly after SIGTERM, such as to finish a step and write a checkpoint;
    then it is killed. Slurm sends SIGTERM so long before the time limit."""
    setup: str | None = None
    """slurm, skypilot: shell code that makes `ludic` available on a machine, such as "source ~/ludic/bin/activate"."""
    image: str | None = None
    """kubernetes, skypilot: container image with ludic and the engine."""
    partition: str | None = None
    """slurm: partition of the jobs."""
    account: str | None = None
    """slurm: account of the jobs."""
    namespace: str | None = None
    """kubernetes: namespace of the JobSet."""
    secret: str | None = None
    """kubernetes: name of a Secret whose entries become environment variables, such as the bucket's credentials."""
    infra: str | None = None
    """skypilot: where the machines come from, such as aws, gcp/us-central1 or k8s."""
    trust_code: bool = False
    """Pass --trust-code to all processes: agree to run the Python files in the root, which machines refuse without."""

    def __post_init__(self) -> None:
        check(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and field.name != _SHELL and not _NAME.fullmatch(value):
                raise ConfigError(f"{field.name} is {value!r}, wanted a name of letters, digits and _ . : / @ + * -")

    def check_for(self, system: System) -> None:
        """Raise SettingsError for settings that the system does not use or lacks."""
        for name, systems in _ONLY_FOR.items():
            if getattr(self, name) is not None and system not in systems:
                raise SettingsError(f"{name} does not apply to {system}; leave it out")
        if system == "kubernetes" and self.image is None:
            raise SettingsError("image is missing: a container image with ludic and the engine; give --image")
        if system == "skypilot" and self.gpus and self.gpu_type is None:
            raise SettingsError("gpu_type is missing: SkyPilot chooses machines by it; give --gpu-type, or --no-gpus")
