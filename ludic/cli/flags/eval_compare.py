"""Flags of `ludic eval compare`."""

from dataclasses import dataclass, field
from typing import Annotated

from ludic.eval.config import MeasureConfig
from ludic.settings import Range, Seed, Shown, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    sides: Annotated[tuple[str, ...], Shown("ROOT@VERSION", by_position=True)]
    """The baseline, then what to compare it with: ROOT@VERSION, ROOT (its newest version with samples), or @VERSION of
    the root before."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
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
