"""Settings of `ludic cluster`. Imports nothing slow, so that `--help` answers at once."""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from ludic.defaults import STOP_WITHIN_S
from ludic.errors import ConfigError
from ludic.settings import Processes, Range, Role, SettingsError, StopWithin, check, settings_of
from ludic.values import annotations

System = Literal["slurm", "kubernetes", "skypilot"]


@dataclass(frozen=True, slots=True)
class _OnlyFor:
    """Systems that a setting applies to, if not to all."""

    systems: tuple[System, ...]


_SLURM, _KUBERNETES, _SKYPILOT = _OnlyFor(("slurm",)), _OnlyFor(("kubernetes",)), _OnlyFor(("skypilot",))
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
    """Type of the GPUs as the cluster names it, such as h100, H100 or NVIDIA-H100-80GB-HBM3. SkyPilot needs it."""
    cpus: Annotated[int, Range(1, 10**4)] = 4
    """CPUs for each rank and each worker."""
    memory_gb: Annotated[int, Range(1, 10**5)] | None = None
    """Memory for each rank and each worker, in GiB; None takes what `ludic plan` says, with a quarter more."""
    serve: bool = False
    """Run `ludic serve` beside each worker, on its GPUs; the worker samples from it, so that vLLM lives in a process of
    its own, which is restarted alone."""
    variable: tuple[str, ...] = ()
    """Environment variables of all processes, such as HF_HOME=/shared/hf NCCL_SOCKET_IFNAME=eth0; no secrets."""
    max_hours: Annotated[int | None, Range(1, 10**5), _OnlyFor(("slurm", "kubernetes")), Role(first_page=True)] = None
    """slurm, kubernetes: hours after which the cluster ends the jobs; None is 24 with slurm, no limit with
    kubernetes."""
    stop_within_s: StopWithin = STOP_WITHIN_S
    """Seconds that a process may take to stop cleanly after SIGTERM, such as to finish a step and write a checkpoint;
    then it is killed. Slurm sends SIGTERM so long before the time limit."""
    setup: Annotated[str | None, _OnlyFor(("slurm", "skypilot")), Role(first_page=True)] = None
    """slurm, skypilot: shell code that makes `ludic` available on a machine, such as "source ~/ludic/bin/activate"."""
    image: Annotated[str | None, _OnlyFor(("kubernetes", "skypilot")), Role(first_page=True)] = None
    """kubernetes, skypilot: container image with ludic and the engine."""
    partition: Annotated[str | None, _SLURM] = None
    """slurm: partition of the jobs."""
    account: Annotated[str | None, _SLURM] = None
    """slurm: account of the jobs."""
    log_folder: Annotated[str | None, _SLURM] = None
    """slurm: folder of the jobs' log files, there before they start; None is the root's logs/ if Slurm can
    read its name, else the folder in which sbatch runs."""
    line: Annotated[tuple[str, ...], _SLURM] = ()
    """slurm: lines for both files, such as "#SBATCH --qos=high" or "module load cuda"; others than #SBATCH run before
    ludic does."""
    namespace: Annotated[str | None, _KUBERNETES] = None
    """kubernetes: namespace of the JobSet."""
    secret: Annotated[str | None, _KUBERNETES] = None
    """kubernetes: name of a Secret whose entries become environment variables, such as the bucket's credentials."""
    infra: Annotated[str | None, _SKYPILOT] = None
    """skypilot: where the machines come from, such as aws, gcp/us-central1 or k8s."""
    trust_code: bool = False
    """Pass --trust-code to all processes: agree to run the Python files in the root, which machines refuse without."""

    def __post_init__(self) -> None:
        check(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and field.name not in _SHELL and not _is_name(field.name, value):
                raise ConfigError(f"{field.name} is {value!r}, wanted a name of letters, digits and _ . : / @ + * -")
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

    def check_for(self, system: System) -> None:
        """Raise SettingsError for settings that the system does not use or lacks."""
        for each in settings_of(ClusterConfig):
            only = next((one for one in annotations(each.kind) if isinstance(one, _OnlyFor)), None)
            if only is not None and getattr(self, each.name) and system not in only.systems:
                raise SettingsError(f"{each.name} does not apply to {system}; leave it out")
        if system == "kubernetes" and self.image is None:
            raise SettingsError("image is missing: a container image with ludic and the engine; give --image")
        if system == "skypilot" and self.gpus and self.gpu_type is None:
            raise SettingsError("gpu_type is missing: SkyPilot chooses machines by it; give --gpu-type, or --no-gpus")
