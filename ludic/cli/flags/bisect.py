"""Flags of `ludic bisect`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ludic.cli.settings import RootUrl
from ludic.settings import Shown


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    predicate: Annotated[str, Shown("PREDICATE", by_position=True)]
    """SQL that is true or false of the rows of a step: an expression such as "reward_mean > 5", or an aggregate such as
    "avg(episode_reward) > 0.5". It should turn true once and stay true."""
    table: Literal["metrics", "rollouts", "evals", "batches"] = "metrics"
    """Rows of a step: the trainer's metrics, the rollouts it trained on, the evaluations of the version it published,
    or its ledger."""
    json: bool = False
    """Print JSON instead of text."""
