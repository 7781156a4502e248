"""Show a run in TensorBoard or Weights & Biases.

Each function is a Tracker (ludic.training.tracking). Events of TensorBoard lie in tensorboard/ of a local root, else in
tensorboard/RUN_ID of the working directory. W&B keeps its files in wandb/ of the working directory, or where WANDB_DIR
says: it links from there to other folders, and no link of a root may lead out.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from ludic.errors import ConfigError, one_line
from ludic.root import TENSORBOARD
from ludic.training import Sample, TrackedRun, Tracker, TrackerLog

logger = logging.getLogger(__name__)


# --- TensorBoard -----------------------------------------------------------------------------------------


@contextmanager
def tensorboard(run: TrackedRun) -> Iterator[TrackerLog]:
    """Write files of TensorBoard; samples are texts. Steps that are trained again take the place of earlier ones."""
    from torch.utils.tensorboard import SummaryWriter

    root = run.root
    folder = root.folder_for_others(TENSORBOARD.folder) if root.is_local else Path(TENSORBOARD.folder, root.run_id)
    purge_step = None if run.after_step is None else run.after_step + 1
    with SummaryWriter(str(folder), purge_step=purge_step) as writer:
        if run.settings:
            writer.add_text("settings", "\n".join(f"- {name}: {value}" for name, value in run.settings.items()))
        yield _Events(writer)


class _Events:
    """A TrackerLog that writes events."""

    def __init__(self, writer: Any) -> None:
        """writer: a SummaryWriter."""
        self._writer = writer

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for env_name in dict.fromkeys(sample.env_name for sample in samples):
            texts = [_markdown(sample) for sample in samples if sample.env_name == env_name]
            self._writer.add_text(f"samples/{env_name}", "\n\n---\n\n".join(texts), step)


def _markdown(sample: Sample) -> str:
    """Return a sample as Markdown; its texts are indented, so that nothing in them is formatted."""
    facts = {
        "reward": f"{sample.reward:g}",
        **{name: f"{value:g}" for name, value in sample.components.items()},
        "correct": {True: "yes", False: "no", None: None}[sample.correct],
        "advantage": None if sample.advantage is None else f"{sample.advantage:.3g}",
        "tokens": sample.response_length,
        "version": sample.policy_version,
        "rollout": sample.rollout_id,
    }
    head = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    texts = {"prompt": sample.prompt, "answer": sample.answer, "wanted": sample.wanted}
    shown = [f"{name}:\n\n{_indent(text)}" for name, text in texts.items() if text is not None]
    return "\n\n".join([head, *shown])


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


# --- Weights & Biases ------------------------------------------------------------------------------------

_STEP = "step"
"""Metric that is the x-axis of all others: W&B's own counter can't go back, for an evaluation of an earlier step."""
_FINISH_S = 60.0
"""Seconds that W&B may take to upload the rest when training is over."""


def require_account() -> None:
    """Raise ConfigError if W&B would upload and knows no account here; asks neither a person nor the service."""
    import wandb

    mode = wandb.setup().settings.mode
    try:
        is_known = mode != "online" or wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise ConfigError(f"log_to is wandb: {one_line(error)}") from error
    if not is_known:
        raise ConfigError(
            "log_to is wandb, and W&B has no account on this machine; `wandb login` stores one, WANDB_MODE=offline "
            "needs none"
        )


class _WandbRun(Protocol):
    """The parts of wandb.Run that are used."""

    def log(self, data: dict[str, Any]) -> None: ...


@contextmanager
def _log_to_wandb(run: TrackedRun) -> Iterator[TrackerLog]:
    """Log to W&B. A resumed trainer continues the run of the same id: the root's run_id, or WANDB_RUN_ID.

    Project, name, entity and tags are those of W&B's own environment variables and settings file.
    """
    import wandb

    require_account()  # else W&B would ask for one, in a thread
    known = wandb.setup().settings
    root = run.root
    with wandb.init(
        project=known.project or "ludic",
        name=known.run_name or root.url.rstrip("/").rpartition("/")[2],
        id=known.run_id or root.run_id,
        resume="allow",
        config=dict(run.settings),
        settings=wandb.Settings(silent="WANDB_SILENT" not in os.environ or known.silent, finish_timeout=_FINISH_S),
    ) as opened:
        where = f"offline, in {opened.settings.sync_dir}" if opened.offline else opened.url
        logger.info("W&B run %s of project %s: %s", opened.id, opened.project, where)
        opened.define_metric(_STEP)
        opened.define_metric("*", step_metric=_STEP)
        yield _Wandb(opened, wandb.Table)


class _Wandb:
    """A TrackerLog that logs to a run of W&B."""

    def __init__(self, run: _WandbRun, table: Any) -> None:
        """table: wandb.Table."""
        self._run, self._table = run, table

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **values})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        columns = [_STEP, *(field.name for field in fields(Sample))]
        self._run.log({_STEP: step, "samples": self._table(columns=columns, data=[_cells(step, s) for s in samples])})


def _cells(step: int, sample: Sample) -> list[Any]:
    """Return a row of the table; the components of the reward are JSON."""
    return [step, *(json.dumps(value) if isinstance(value, dict) else value for value in astuple(sample))]


@dataclass(frozen=True, slots=True)
class _WithAccount:
    """A Tracker whose program needs an account."""

    open: Callable[[TrackedRun], AbstractContextManager[TrackerLog]]
    require_account: Callable[[], None]

    def __call__(self, run: TrackedRun) -> AbstractContextManager[TrackerLog]:
        return self.open(run)


wandb = _WithAccount(_log_to_wandb, require_account)
_fit: tuple[Tracker, Tracker] = (tensorboard, wandb)
