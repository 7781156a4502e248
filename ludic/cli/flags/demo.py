"""Flags of `ludic demo`."""

from dataclasses import dataclass

from ludic.bounds import check_numbers


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: str = "runs/demo"
    """Folder or URL of the run; a stopped demo is resumed."""
    num_steps: int = 60
    """Number of gradient steps."""

    def __post_init__(self) -> None:
        check_numbers(self)
