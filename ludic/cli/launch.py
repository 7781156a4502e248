"""`ludic launch SYSTEM ROOT`: write the files that start a run with Slurm, Kubernetes or SkyPilot."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ludic
from ludic.cli.flags.launch import Settings
from ludic.errors import ConfigError
from ludic.paths import local_path
from ludic.training import inherited_settings as training_settings

_NEXT = {"slurm": "sbatch {}", "kubernetes": "kubectl apply -f {}", "skypilot": "sky jobs launch {}"}
"""Command that starts a file, by system."""


def earlier_settings(root_url: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the run's newest trainer, without offline settings."""
    return training_settings.earlier_settings(root_url, given, online=True)


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    files = run.cluster_files(settings.system, settings.train, cluster=settings.cluster, engine=settings.engine)
    if settings.out is None:
        sys.stdout.write("\n".join(files.values()))
        return
    for path in _write(files, local_path(settings.out, "--out")):
        print(_NEXT[settings.system].format(path))


def _write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write new files, and return their paths. Raises ConfigError if one is there already."""
    paths = [folder / name for name in files]
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, files.values(), strict=True):
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{path} is there already; delete it, or choose another folder with --out") from None
    return paths
