"""Flags of `ludic sample`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ludic.bounds import check_numbers


@dataclass(frozen=True, kw_only=True)
class Settings:
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT|MODEL")]
    """Folder or URL of a run, or folder, Hugging Face id or URL of a model."""
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
    version: int | None = None
    """Policy version of the run; None uses the latest."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to sample on; None uses CUDA if available."""
    json: bool = False
    """Print JSON with text, tokens and logprobs of each answer."""

    def __post_init__(self) -> None:
        check_numbers(self)
