"""Flags of `ludic eval compare`."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from ludic.eval.config import MeasureConfig
from ludic.settings import Range, Seed, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    sides: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="ROOT@VERSION")]
    """The baseline, then what to compare it with: ROOT@VERSION, ROOT (its newest version with samples), or @VERSION of
    the root before."""
    measure: tyro.conf.OmitArgPrefixes[MeasureConfig] = field(default_factory=MeasureConfig)
    env: tuple[str, ...] = ()
    """Environments to compare; none are all that both sides have."""
    evaluation: str | None = None
    """Id of the settings to compare (view evaluations). None takes the newest that both sides were sampled with, or the
    newest of each side, with warnings of what differs."""
    difference: Annotated[float, Range(0, 10**6, above=True)] = 0.05
    """The difference that should be found, for power and the number of examples needed."""
    seed: Seed = 0
    """Seed of the permutation test."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        check(self)
