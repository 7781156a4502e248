"""Algorithms by the names of their papers: TrainConfig's settings of advantage, filters and loss.

Reads ludic/training/algorithms/NAME.toml; docs/algorithms.md lists them. Imports no torch. Raises ConfigError
if a name is unknown.
"""

import tomllib
from importlib import resources
from typing import Any

from ludic.errors import ConfigError, unknown_name
from ludic.training.config import TrainConfig

DIALS = (
    "advantage",
    "filters",
    "selection",
    "sql_params",
    "max_uses",
    "baseline_over",
    "objective",
    "clip_low",
    "clip_high",
    "dual_clip",
    "is_ratio_cap",
    "is_ratio_bounds",
    "is_sequence_ratio_bounds",
    "mask_sequence_kl",
    "log_ratio_weight",
    "ratio_level",
    "sapo_tau_positive",
    "sapo_tau_negative",
    "dppo_low",
    "dppo_high",
    "vespo_k",
    "vespo_lambda",
    "dpo_beta",
    "orpo_weight",
    "whiten_advantages",
    "loss_normalization",
    "constant_tokens",
    "entropy_weight",
    "kl_weight",
    "kl_estimator",
    "kl_placement",
)
"""Settings that an algorithm decides; those missing in its file get TrainConfig's defaults. Every setting that a file
names is listed here, so that a run that changes its algorithm keeps no setting of the earlier one."""


def algorithm_names() -> list[str]:
    files = resources.files("ludic.training").joinpath("algorithms").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_algorithm(name: str) -> dict[str, Any]:
    """Return the values of all DIALS: `TrainConfig.of(**load_algorithm("grpo"))`."""
    names = algorithm_names()
    if name not in names:
        raise ConfigError(unknown_name("algorithm", name, names))
    text = resources.files("ludic.training").joinpath("algorithms", f"{name}.toml").read_text(encoding="utf-8")
    defaults = {name: value for name, value in TrainConfig().flat().items() if name in DIALS}
    return defaults | tomllib.loads(text)
