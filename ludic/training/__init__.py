"""Train on rollouts: the trainer's loop, the gradient step, losses, checkpoints and publishes."""

from typing import TYPE_CHECKING, Any

from ludic.batches.config import BatchConfig
from ludic.training.config import TrainConfig

if TYPE_CHECKING:
    from ludic.batches.stream import BatchStream

__all__ = ["BatchConfig", "BatchStream", "TrainConfig"]


def __getattr__(name: str) -> Any:
    """Import BatchStream on first use, since it imports torch, which would delay `--help`."""
    if name == "BatchStream":
        from ludic.batches.stream import BatchStream

        return BatchStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
