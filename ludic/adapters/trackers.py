"""Log metrics to TensorBoard or Weights & Biases, in addition to the metrics table.

Each function is a Tracker (ludic.training.ownership). Raises ConfigError, which names the extra to install, if the
library is missing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ludic.errors import ConfigError

if TYPE_CHECKING:
    from ludic.training.ownership import Log, Tracker


@contextmanager
def tensorboard(*, folder: str, run_id: str, settings: Mapping[str, Any]) -> "Iterator[Log]":
    """Write files of TensorBoard into the folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard") from error

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(folder) as writer:
        writer.add_text("settings", "\n".join(f"- {name}: {value}" for name, value in settings.items()))
        yield log


@contextmanager
def wandb(*, folder: str, run_id: str, settings: Mapping[str, Any]) -> "Iterator[Log]":
    """Log to W&B; a resumed trainer continues the curves of its run_id."""
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb") from error
    with wandb.init(project="ludic", id=run_id, resume="allow", dir=folder, config=dict(settings)) as run:
        yield lambda step, metrics: run.log(dict(metrics), step=step)


def _missing(library: str) -> ConfigError:
    return ConfigError(f"log_to is {library}, which is not installed; pip install 'ludic-rl[telemetry]'")


if TYPE_CHECKING:
    _fit: tuple[Tracker, Tracker] = (tensorboard, wandb)
