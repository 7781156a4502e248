"""Flags of `ludic eval contamination`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.cli.settings import RootUrl


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run with the evaluation."""
    also: tuple[str, ...] = ()
    """More runs: those that trained, or that hold the rollouts of this run's offline training."""
    env: tuple[str, ...] = ()
    """Environments whose prompts are compared; none are all."""
    evaluation: str | None = None
    """Id of the evaluation whose prompts are compared (view evaluations); None is all."""
    query: str = "ngrams"
    """A name in ludic/sql/contamination/, or the path of a .sql file."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of the query's parameters as JSON, such as {"n": 13, "common": 0.5}."""
    json: bool = False
    """Print JSON instead of tables."""
