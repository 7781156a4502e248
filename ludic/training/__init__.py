"""Training: batches streamed from the store, the step, checkpoints and the trainer that ties them together."""

from typing import TYPE_CHECKING, Any

from ludic.training.config import TrainConfig

if TYPE_CHECKING:
    from ludic.training.batch_stream import BatchStream

__all__ = ["BatchStream", "TrainConfig"]


def __getattr__(name: str) -> Any:
    """BatchStream, which imports torch, when it is asked for: the command line answers `--help` without."""
    if name == "BatchStream":
        from ludic.training.batch_stream import BatchStream

        return BatchStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
