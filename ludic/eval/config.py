"""Define the settings of evaluations; imports nothing slow, to keep `--help` fast."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ludic.base import ENV_TIMEOUT_S
from ludic.errors import ConfigError
from ludic.run import RunConfig
from ludic.settings import (
    InFlight,
    NumSamples,
    Overrides,
    PositiveCount,
    Range,
    Role,
    SecondsOfADay,
    Seed,
    SettingsError,
)
from ludic.settings.table import check

LATEST = "latest"
DIFFERENCE = 0.05
"""The difference that a comparison should find, unless another is given: for power and the examples needed."""
WINDOW = 10
"""Steps over which a training reward is averaged, unless another number is given."""
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18}|latest)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Samples of an evaluation: of which weights, of which examples, and how they are sampled."""

    versions: Annotated[str, Role(first_page=True, of_call=True)] = LATEST
    """Policy versions, joined by commas: numbers, latest, and ranges such as 10-20 or 10-latest, which are the versions
    in between whose weights are stored. Version 0 is the run's first model."""
    every: Annotated[PositiveCount | None, Role(first_page=True, of_call=True)] = None
    """Follow a run while it trains: evaluate version 0, every version whose number is a multiple of this, as it is
    published, and the last one. None evaluates `versions`."""
    until_step: Annotated[PositiveCount | None, Role(of_call=True)] = None
    """With `every`: end when training has reached this step and its last version is evaluated. None follows the run
    until it is stopped."""
    env: Annotated[tuple[str, ...], Role(first_page=True)] = ()
    """Environments, as in `ludic run`; none are the run's."""
    env_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environments, by environment name; those of the run's environments are the run's unless
    given here."""
    num_examples: Annotated[int, Range(1, 10**7), Role(first_page=True)] = 256
    """Number of held-out examples of each environment, the first ones by the seed; fewer if it has fewer."""
    n: Annotated[NumSamples, Role(first_page=True)] = 1
    """Number of samples of each example."""
    run: Annotated[Mapping[str, Any], Overrides(RunConfig, "in_evaluations", "None is the run's.")] = field(
        default_factory=dict
    )
    """Settings of the run that the evaluation overrides, by name."""
    seed: Seed = 0
    """Decides which held-out examples come first, and seeds the samples. The same seed gives the same examples in every
    run, so that runs can be compared in pairs."""
    in_flight: Annotated[InFlight | None, Role(of_call=True)] = None
    """Number of episodes that run at a time; changes no sample. None runs as many as keep the engine's batch full
    (--max-batch), whatever they wait for."""
    examples_per_call: Annotated[int, Range(1, 10**5), Role(of_call=True)] = 32
    """Number of examples that one process samples and stores as one file; changes no sample."""
    env_timeout_s: Annotated[SecondsOfADay | None, Role(of_call=True)] = ENV_TIMEOUT_S
    """Maximum seconds of one call of an environment; an episode that takes longer fails. None is no limit."""
    episode_timeout_s: Annotated[SecondsOfADay | None, Role(of_call=True)] = None
    """Maximum seconds of an episode, which is then truncated. None is no limit."""

    def __post_init__(self) -> None:
        check(self)
        parse_versions(self.versions)
        if self.every is not None and self.versions != LATEST:
            raise ConfigError(f"every ({self.every}) and versions ({self.versions}) contradict each other; give one")
        if self.every is None and self.until_step is not None:
            raise ConfigError("until_step has no effect without every; add it, or leave out until_step")
        for name in self.env_options:
            if self.env and name not in self.env:
                raise ConfigError(f"env_options has options of {name!r}, which is not in env ({', '.join(self.env)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Measures on stored samples, and the confidence of their intervals."""

    measures: Annotated[tuple[str, ...], Role(first_page=True)] = ()
    """Measures, by a name in ludic/root/sql/measures/ or the path of a .sql file (docs/evaluation.md). None given: mean
    reward, success rate, pass@k for several samples, length and unscored samples; of a comparison the mean reward."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of the measures' parameters as JSON, such as {"k": 4, "threshold": 0.5, "unscored": 0}."""
    confidence: Annotated[float, Range(0.5, 0.999999)] = 0.95
    """Probability that an interval holds the true value."""

    def __post_init__(self) -> None:
        check(self)


IntervalMethod = Literal["korn_graubard", "clustered"]
"""Kinds of intervals (ludic.eval.statistics). Measures that are no shares are always clustered."""


def parse_versions(text: str) -> Sequence[int | str | tuple[int, int | str]]:
    """Parse `EvalConfig.versions`: numbers, "latest", and ranges as pairs. Raises SettingsError."""
    return [_parse_version(part.strip()) for part in text.split(",")]


def _parse_version(part: str) -> int | str | tuple[int, int | str]:
    if part == LATEST:
        return part
    if part.isascii() and part.isdecimal() and len(part) <= 18:
        return int(part)
    match = _RANGE.fullmatch(part)
    if match is None:
        raise SettingsError(
            f"versions has {part!r}, wanted a number, {LATEST}, or a range such as 10-20 or 10-{LATEST}"
        )
    first, last = int(match[1]), match[2] if match[2] == LATEST else int(match[2])
    if isinstance(last, int) and last < first:
        raise SettingsError(f"versions has {part!r}, whose end is before its begin")
    return first, last
