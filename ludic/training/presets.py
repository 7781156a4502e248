"""Algorithms by the names of their papers: TrainConfig's settings of advantage, filters and loss.

Reads ludic/training/algorithms/NAME.toml; docs/algorithms.md lists them. Imports no torch. Raises ConfigError
if a name is unknown.
"""

from collections.abc import Mapping
from typing import Any

from ludic.base import parse_config
from ludic.settings import ALGORITHM, find, settings_of
from ludic.training.config import TrainConfig

_DEFAULTS = {each.name: each.default for each in settings_of(TrainConfig) if each.role.of_algorithm}
DIALS = tuple(_DEFAULTS)
"""Settings that an algorithm decides: those of the loss, but where the reference is, and which rollouts a batch has.
Those missing in its file get TrainConfig's defaults, so that a run that changes its algorithm keeps no setting of the
earlier one."""


def load_algorithm(name: str) -> dict[str, Any]:
    """Return the values of all DIALS: `TrainConfig.of(**load_algorithm("grpo"))`."""
    return _DEFAULTS | parse_config(find(ALGORITHM, name).encode(), f"{name}.toml")


def nearest_algorithm(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the algorithm that a trainer's settings are nearest to, and those DIALS that differ from it.

    settings: by name, as in attempts/N.json, which does not store the name. None if no algorithm has the advantage and
    the objective.
    """
    found = []
    for name in ALGORITHM.names():
        preset = load_algorithm(name)
        if all(preset[dial] == settings.get(dial) for dial in ("advantage", "objective")):
            changed = {
                dial: settings[dial]
                for dial, value in preset.items()
                if dial in settings and _as_json(settings[dial]) != _as_json(value)
            }
            found.append((name, changed))
    return min(found, key=lambda pair: len(pair[1]), default=None)


def _as_json(value: Any) -> Any:
    """Return a value as a file of settings gives it back: a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value
