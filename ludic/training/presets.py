"""Algorithms by the names of their papers: TrainConfig's settings of advantage, filters and loss.

Reads ludic/training/algorithms/NAME.toml; docs/algorithms.md lists them. Imports no torch. Raises ConfigError
if a name is unknown.
"""

import tomllib
from importlib import resources
from typing import Any

from ludic.errors import ConfigError, unknown_name
from ludic.settings import settings_of
from ludic.training.config import TrainConfig

_OF_BATCH = ("advantage", "filters", "selection", "sql_params", "max_uses", "baseline_over")
_OF_MACHINE = ("reference", "reference_offload", "reference_cache")
_DEFAULTS = {
    each.name: each.default
    for each in settings_of(TrainConfig)
    if each.name in _OF_BATCH or (each.group == "loss" and each.name not in _OF_MACHINE)
}
DIALS = tuple(_DEFAULTS)
"""Settings that an algorithm decides: those of the loss, but where the reference is, and which rollouts a batch has.
Those missing in its file get TrainConfig's defaults, so that a run that changes its algorithm keeps no setting of the
earlier one."""


def algorithm_names() -> list[str]:
    files = resources.files("ludic.training").joinpath("algorithms").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_algorithm(name: str) -> dict[str, Any]:
    """Return the values of all DIALS: `TrainConfig.of(**load_algorithm("grpo"))`."""
    names = algorithm_names()
    if name not in names:
        raise ConfigError(unknown_name("algorithm", name, names))
    text = resources.files("ludic.training").joinpath("algorithms", f"{name}.toml").read_text(encoding="utf-8")
    return _DEFAULTS | tomllib.loads(text)
