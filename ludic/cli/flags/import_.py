"""Flags of `ludic import`."""

from dataclasses import dataclass
from typing import Annotated

from ludic.cli.settings import RootUrl
from ludic.settings import GroupSize, GroupsPerBatch, Shown, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run; created if it does not exist and --model is given."""
    files: Annotated[tuple[str, ...], Shown("FILE", by_position=True)]
    """Files to import, paths or URLs."""
    from_: Annotated[str, Shown("FORMAT")]
    """Format of the files: jsonl, verl, trl, prime-rl, art, inspect, lm-eval, lighteval, or path/to/file.py:function
    (docs/interop.md)."""
    env: str | None = None
    """Environment name for records without one, and for all samples of inspect, lm-eval and lighteval instead of their
    task; None uses the task, or the name of the format or function."""
    tokenizer: str | None = None
    """Folder, Hugging Face id or URL of the tokenizer for texts; None uses the tokenizer of the run's model."""
    model: str | None = None
    """Folder, Hugging Face id or URL of the weights, for a run that is created."""
    group_size: GroupSize = 8
    """Group size in the settings of a run that is created. Imported groups keep their size."""
    groups_per_batch: GroupsPerBatch = 8
    """Groups per batch in the settings of a run that is created."""
    json: bool = False
    """Print the whole report as JSON."""

    def __post_init__(self) -> None:
        check(self)
