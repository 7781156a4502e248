"""Show a run in TensorBoard, Weights & Biases, MLflow or Trackio.

Each function is a Tracker (ludic.training.tracking). Events of TensorBoard lie in tensorboard/ of a local root, else in
tensorboard/RUN_ID of the working directory. The others show runs of several roots side by side, so they write where
their own variables say: W&B into wandb/ of the working directory, MLflow into mlflow.db there, Trackio below HF_HOME.
A name that a program does not take is changed, and the change is logged.
"""

import json
import logging
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import xxhash

from ludic.base import mask, require
from ludic.errors import ConfigError, one_line
from ludic.root import TENSORBOARD, Root
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


def _name_of(root: Root) -> str:
    """Return the last part of the root's location."""
    return root.url.rstrip("/").rpartition("/")[2]


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
        name=known.run_name or _name_of(root),
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
        table = self._table(columns=_columns(), data=[_cells(step, sample) for sample in samples])
        self._run.log({_STEP: step, "samples": table})


def _columns() -> list[str]:
    return [_STEP, *(field.name for field in fields(Sample))]


def _cells(step: int, sample: Sample) -> list[Any]:
    """Return a row of the table; the components of the reward are JSON."""
    return [step, *(json.dumps(value) if isinstance(value, dict) else value for value in astuple(sample))]


# --- MLflow ----------------------------------------------------------------------------------------------

_RUN_ID_TAG = "ludic.run_id"
"""Tag by which a resumed trainer finds its run."""
_MOST_METRICS, _MOST_PARAMS = 1_000, 100
"""MLflow's limits for one call."""
_LONGEST_NAME, _LONGEST_PARAM = 250, 6_000
"""MLflow's limits, in characters. It would cut a longer value."""
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def _import_mlflow() -> Any:
    """Return the package, which sends nothing to its makers unless the user asks for it.

    MLFLOW_DISABLE_TELEMETRY is read when the package is imported.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    return mlflow


def _require_store() -> None:
    """Raise MissingPackageError if MLflow writes to a database, and a package that it needs for this is missing.

    Only the complete package mlflow installs them; mlflow-skinny doesn't.
    """
    uri = _import_mlflow().get_tracking_uri()
    if uri.partition(":")[0].partition("+")[0] in _DATABASES:
        for package in ("sqlalchemy", "alembic"):
            require(package, "mlflow", f"log_to is mlflow, which writes to {mask(uri)}")


@contextmanager
def _log_to_mlflow(run: TrackedRun) -> Iterator[TrackerLog]:
    """Log to MLflow. A resumed trainer continues the run whose tag is the root's run_id, or MLFLOW_RUN_ID.

    Server or database, experiment and login are those of MLflow's own environment variables.
    """
    _require_store()
    mlflow = _import_mlflow()
    uri = mlflow.get_tracking_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or _experiment(mlflow, client)
    run_id = os.environ.get("MLFLOW_RUN_ID") or _run_in(client, experiment, run.root.run_id)
    if run_id is None:
        tags = {_RUN_ID_TAG: run.root.run_id}
        run_id = client.create_run(experiment, run_name=_name_of(run.root), tags=tags).info.run_id
    else:
        client.update_run(run_id, status="RUNNING")
    logger.info("MLflow run %s of experiment %s: %s", run_id, experiment, mask(uri))
    log = _Mlflow(mlflow, client, run_id)
    if run.settings:
        log.settings(run.settings)
    yield log
    client.set_terminated(run_id)


def _experiment(mlflow: Any, client: Any) -> str:
    """Return the id of the experiment, which is created if it does not exist."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ludic"
    if (found := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except mlflow.MlflowException:  # another run created it since
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    return str(found.experiment_id)


def _run_in(client: Any, experiment: str, run_id: str) -> str | None:
    """Return MLflow's id of the run of a root; None if there is none yet."""
    if not re.fullmatch(r"[\w.:-]{1,250}", run_id):  # it becomes part of a filter
        raise ConfigError(f"run.json: run_id is {run_id!r}, and MLflow wants letters, digits, '.', ':', '-' and '_'")
    found = client.search_runs([experiment], f"tags.`{_RUN_ID_TAG}` = '{run_id}'", max_results=1)
    return found[0].info.run_id if found else None


class _Mlflow:
    """A TrackerLog that logs to a run of MLflow."""

    def __init__(self, mlflow: Any, client: Any, run_id: str) -> None:
        """client: a MlflowClient. run_id: MLflow's."""
        self._entities, self._client, self._run_id = mlflow.entities, client, run_id
        self._names: dict[str, str] = {}
        """Names in MLflow, by ludic's."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """Log settings as params, which can't change: a later value is in settings.json alone, and is logged."""
        known = self._client.get_run(self._run_id).data.params
        params = {name: _cut(str(value), _LONGEST_PARAM) for name, value in values.items()}
        changed = sorted(name for name, value in params.items() if known.get(name, value) != value)
        if changed:
            logger.info("MLflow keeps the first value of a param; settings.json has the new %s", ", ".join(changed))
        new = [self._entities.Param(name, value) for name, value in params.items() if name not in known]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + _MOST_PARAMS])
        self._client.log_text(self._run_id, json.dumps(dict(values), indent=2, default=str), "settings.json")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._entities.Metric(self._name(name), value, now_ms, step) for name, value in values.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write a file for the step, which pandas.read_json(..., orient="split") reads as a table."""
        table = {"columns": _columns(), "data": [_cells(step, sample) for sample in samples]}
        self._client.log_text(self._run_id, json.dumps(table), f"samples/step-{step}.json")

    def _name(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = taken = mlflow_name(name)
            if taken != name:
                logger.warning("MLflow does not take the name %r; it shows %s", name, taken)
        return self._names[name]


def mlflow_name(name: str) -> str:
    """Return the name of a metric in MLflow, the same for each run: two names stay two.

    MLflow takes letters, digits and `_ - . : space /` in at most 250 characters that are a normal path. Other
    characters become _, and each changed part of the path ends with a digest of its own.
    """
    taken = "/".join(_mlflow_part(part) for part in name.split("/"))
    if len(taken) > _LONGEST_NAME:
        taken = f"{taken[: _LONGEST_NAME - 17]}-{_digest(name)}"
    return taken


def _mlflow_part(part: str) -> str:
    taken = re.sub(r"[^\w.\- :]", "_", part)
    return (
        taken if taken == part and posixpath.normpath(part) == part not in (".", "..") else f"{taken}-{_digest(part)}"
    )


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


# --- Trackio ---------------------------------------------------------------------------------------------


def _require_login() -> None:
    """Raise ConfigError if Trackio would create or fill a Space of the Hub, and knows no account here."""
    import huggingface_hub

    if os.environ.get("TRACKIO_SPACE_ID") and huggingface_hub.get_token() is None:
        raise ConfigError(
            "log_to is trackio, TRACKIO_SPACE_ID names a Space, and the Hub has no account on this machine; "
            "`hf auth login` stores one, and without the variable Trackio writes to this machine alone"
        )


@contextmanager
def _log_to_trackio(run: TrackedRun) -> Iterator[TrackerLog]:
    """Log to Trackio. A resumed trainer continues the run of the same name, which ends with the root's run_id.

    Folder, Space and server are those of Trackio's own environment variables.
    """
    import trackio

    _require_login()
    if not os.environ.get("TRACKIO_SPACE_ID") and not os.environ.get("TRACKIO_SERVER_URL"):
        # It asks the Hub for the name of the user, also for a run that stays on this machine.
        trackio.Run._get_username = lambda _: None
    opened = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT") or "ludic",
        name=f"{_name_of(run.root)}-{run.root.run_id[-8:]}",
        resume="allow",
        private=True,
        embed=False,
        config={**run.settings, "run_id": run.root.run_id},
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    try:
        yield _Trackio(opened, trackio.Table)
    finally:
        opened.finish()


class _TrackioRun(Protocol):
    """The part of trackio.Run that is used."""

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None: ...


class _Trackio:
    """A TrackerLog that logs to a run of Trackio."""

    def __init__(self, run: _TrackioRun, table: Any) -> None:
        """table: trackio.Table."""
        self._run, self._table = run, table

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Trackio has the step itself."""
        self._run.log({name: value for name, value in values.items() if name != _STEP}, step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = self._table(columns=_columns(), data=[_cells(step, sample) for sample in samples])
        self._run.log({"samples": table}, step=step)


# --- Trackers that need something of the machine ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _WithAccount:
    """A Tracker whose program needs an account, or more packages than its own."""

    open: Callable[[TrackedRun], AbstractContextManager[TrackerLog]]
    require_account: Callable[[], None]

    def __call__(self, run: TrackedRun) -> AbstractContextManager[TrackerLog]:
        return self.open(run)


wandb = _WithAccount(_log_to_wandb, require_account)
mlflow = _WithAccount(_log_to_mlflow, _require_store)
trackio = _WithAccount(_log_to_trackio, _require_login)
_fit: tuple[Tracker, ...] = (tensorboard, wandb, mlflow, trackio)
