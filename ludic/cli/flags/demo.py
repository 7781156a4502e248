"""Flags of `ludic demo`."""

from dataclasses import dataclass

from ludic.settings import Count, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    agents: bool = False
    """Teach a model to call a tool instead: demonstrations, a warm start, then RL. Takes some minutes."""
    root: str | None = None
    """Folder or URL of the run; a stopped demo is resumed. None is runs/demo, or runs/demo-agents with --agents."""
    num_steps: Count | None = None
    """Number of gradient steps of RL. None is 60, or 50 with --agents."""

    def __post_init__(self) -> None:
        check(self)
