"""Flags of `ludic sample`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from ludic.rollouts.config import Question
from ludic.settings import Index, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT|MODEL")]
    """Folder or URL of a run, or folder, Hugging Face id or URL of a model."""
    question: tyro.conf.OmitArgPrefixes[Question]
    version: Index | None = None
    """Policy version of the run; None uses the latest."""
    json: bool = False
    """Print JSON with text, tokens and logprobs of each answer."""

    def __post_init__(self) -> None:
        check(self)
