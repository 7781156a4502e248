"""Settings of a worker, and of `ludic sample`. Imports no engine and no store, so that `--help` answers at once."""

from dataclasses import dataclass
from typing import Literal

from ludic.bounds import check_numbers, check_types
from ludic.defaults import ENV_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker. Settings shared by all workers are in run.json."""

    slot: int | None = None
    """Number of the part of the run's schedule that this worker samples; a restarted worker keeps its slot. None takes
    a random new slot."""
    groups_per_call: int = 8
    """Maximum number of groups sampled in one call of the engine and stored in one file."""
    num_groups: int | None = None
    """Number of groups after which the worker stops; None samples until it is stopped."""
    follow_quota: bool = True
    """Sample at most the number of groups per policy version that the trainer requests. If off, sample with the newest
    version without limit."""
    env_timeout_s: float | None = ENV_TIMEOUT_S
    """Maximum seconds of one call of an environment; an episode that takes longer fails. None is no limit."""
    episode_timeout_s: float | None = None
    """Maximum seconds of an episode, which is then truncated. None is no limit."""

    def __post_init__(self) -> None:
        check_types(self)
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and how to sample its answers."""

    prompt: str
    """Text of the user message."""
    system: str | None = None
    """Text of a system message before the prompt; None sends none."""
    n: int = 1
    """Number of answers to sample."""
    temperature: float | None = None
    """Divides the logits; 0 takes the likeliest tokens. None uses the run's setting, or 1 for a model."""
    top_p: float | None = None
    """Probability mass of nucleus sampling. None uses the run's setting; for a model it is off."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only. None uses the run's setting; for a model it is off."""
    max_tokens: int | None = None
    """Maximum tokens of an answer. None uses the run's setting, or 256 for a model, capped by the model's length."""
    seed: int = 0
    """Random seed; the same seed gives the same answers."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to sample on; None uses CUDA if available."""

    def __post_init__(self) -> None:
        check_types(self)
        check_numbers(self)
