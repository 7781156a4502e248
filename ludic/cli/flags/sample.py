"""Flags of `ludic sample`."""

from dataclasses import dataclass
from typing import Annotated

from ludic.rollouts.config import Question
from ludic.settings import Index, Shown, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    source: Annotated[str, Shown("ROOT|MODEL", by_position=True)]
    """Folder or URL of a run, or folder, Hugging Face id or URL of a model."""
    question: Question
    version: Index | None = None
    """Policy version of the run; None uses the latest."""
    json: bool = False
    """Print JSON with text, tokens and logprobs of each answer."""

    def __post_init__(self) -> None:
        check(self)
