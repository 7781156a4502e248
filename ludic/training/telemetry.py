"""Log metrics to TensorBoard or Weights & Biases, in addition to the metrics table.

Raises ConfigError, which names the extra to install, if the library is missing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from ludic.errors import ConfigError

Log = Callable[[int, Mapping[str, float]], None]
"""Function that logs the metrics of a step."""


@contextmanager
def open_log(
    log_to: Literal["none", "tensorboard", "wandb"], *, folder: str, run_id: str, settings: Mapping[str, Any]
) -> Iterator[Log]:
    """Yield a log that is flushed and closed at the end of the block; open it on rank 0 only.

    folder: local folder for the library's files. run_id: with the same id, a resumed trainer continues its W&B
    curves. settings: logged with the curves.
    """
    if log_to == "tensorboard":
        with _tensorboard(folder, settings) as log:
            yield log
    elif log_to == "wandb":
        with _wandb(folder, run_id, settings) as log:
            yield log
    else:
        yield lambda step, metrics: None


@contextmanager
def _tensorboard(folder: str, settings: Mapping[str, Any]) -> Iterator[Log]:
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
def _wandb(folder: str, run_id: str, settings: Mapping[str, Any]) -> Iterator[Log]:
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb") from error
    with wandb.init(project="ludic", id=run_id, resume="allow", dir=folder, config=dict(settings)) as run:
        yield lambda step, metrics: run.log(dict(metrics), step=step)


def _missing(library: str) -> ConfigError:
    return ConfigError(f"log_to is {library}, which is not installed; pip install 'ludic-rl[telemetry]'")
