"""Define the settings of a worker and of `ludic sample`; imports no engine and no store, to keep `--help` fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ludic.base import ENV_TIMEOUT_S
from ludic.run import RunConfig
from ludic.settings import CountOr0, InFlight, NumSamples, Overrides, PositiveCount, SecondsOfADay, Seed
from ludic.settings.table import check

_NOT_GIVEN = "None is the run's, or for a model the default of a run."


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How a worker keeps episodes going."""

    in_flight: InFlight | None = None
    """Number of episodes that run at a time. None runs as many as keep the engine's batch full (--max-batch), whatever
    they wait for."""
    swap: Literal["token", "completion", "episode"] = "token"
    """When new weights replace those in use: between two tokens of the completions being sampled, or after these
    completions, or after the episodes. Later is more exact, and lets the engine wait for the longest one."""
    env_timeout_s: SecondsOfADay | None = ENV_TIMEOUT_S
    """Maximum seconds of one call of an environment; an episode that takes longer fails. None is no limit."""
    episode_timeout_s: SecondsOfADay | None = None
    """Maximum seconds of an episode, which is then truncated. None is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(StreamConfig):
    """Settings of one worker. Settings shared by all workers are in run.json."""

    slot: CountOr0 | None = None
    """Number of the part of the run's schedule that this worker samples; a restarted worker keeps its slot. None takes
    a random new slot."""
    num_groups: PositiveCount | None = None
    """Number of groups after which the worker stops; None samples until it is stopped."""
    follow_budget: bool = True
    """Start a group only within the trainer's budget of open groups. If off, sample with the newest version without
    limit."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and how to sample its answers. Without max_tokens, the model's length limits them, too."""

    prompt: str
    """Text of the user message."""
    system: str | None = None
    """Text of a system message before the prompt; None sends none."""
    n: NumSamples = 1
    """Number of answers to sample."""
    run: Annotated[Mapping[str, Any], Overrides(RunConfig, "of_sampling", _NOT_GIVEN)] = field(default_factory=dict)
    """Settings of the run that the answers override, by name."""
    seed: Seed = 0
    """Random seed; the same seed gives the same answers."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to sample on; None uses CUDA if available."""

    def __post_init__(self) -> None:
        check(self)
