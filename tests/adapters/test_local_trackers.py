"""MLflow and Trackio, each in its local store, read back by its own reader; `make trackers` installs both."""

import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import create_root, fill, make_model, query, train_here

from ludic.adapters import trackers
from ludic.errors import MissingPackageError
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.training.config import TrackerConfig
from ludic.training.tracking import Sample, TrackedRun

WHY = "`make trackers` makes an environment with mlflow and trackio"
mlflow = pytest.importorskip("mlflow", reason=WHY)
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp())  # Trackio reads it when it is imported
pytest.importorskip("trackio", reason=WHY)
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]  # theirs

SCRIPT = "<script>alert(1)</script>\x1b[2J"
HOSTILE = Sample(
    env_name=f"../{SCRIPT}",
    policy_version=3,
    prompt=SCRIPT,
    answer="x" * 100_000,
    wanted="=cmd()",
    correct=False,
    reward=0.5,
    components={SCRIPT: 0.5},
    advantage=None,
    response_length=7,
    rollout_id="r1",
)


class Stored:
    """What a tracker's own reader finds of the one run."""

    name: str
    settings: dict[str, str]
    curves: dict[str, list[tuple[int, float]]]
    samples: list[dict[str, Any]]


def read_mlflow(_: str) -> Stored:
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("cats").experiment_id])
    stored = Stored()
    stored.name, stored.settings = run.info.run_name, run.data.params
    assert run.info.status == "FINISHED"
    names = run.data.metrics
    stored.curves = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)] for name in names
    }
    home = Path(client.download_artifacts(run.info.run_id, ""))
    tables = [json.loads(file.read_text()) for file in sorted(home.glob("samples/*.json"))]
    stored.samples = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]
    stored.settings = json.loads((home / "settings.json").read_text())
    return stored


def read_trackio(name: str) -> Stored:
    from trackio.sqlite_storage import SQLiteStorage

    stored = Stored()
    (stored.name,) = [run for run in SQLiteStorage.get_runs("cats") if run.startswith(name)]
    stored.settings = SQLiteStorage.get_run_config("cats", stored.name)
    rows = SQLiteStorage.get_logs("cats", stored.name)
    names = {key for row in rows for key in row} - {"step", "timestamp", "samples"}
    stored.curves = {key: [(row["step"], row[key]) for row in rows if key in row] for key in names}
    stored.samples = [cells for row in rows if "samples" in row for cells in row["samples"]["_value"]]
    return stored


READERS = {"mlflow": read_mlflow, "trackio": read_trackio}


@pytest.fixture(params=READERS)
def log_to(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A tracker that may use no network, on a machine with an account of the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "cats")
    monkeypatch.setenv("TRACKIO_PROJECT", "cats")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **_: asked.append(host))
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: asked.append(address))
    yield request.param
    assert asked == []


@pytest.mark.slow
def test_a_run_and_its_resumed_trainer_are_one_run_with_all_curves_and_samples(log_to, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-s3")
    root = create_root(str(tmp_path / f"run-{log_to}"), make_model(tmp_path / "model"))
    fill(root, num_files=3)
    train_here(root, num_steps=2, log_to=log_to, checkpoint_every=2, tracker_samples_every=2)
    train_here(root, num_steps=4, log_to=log_to, tracker_samples_every=None, where="env_name <> 'secret-of-s3'")
    assert [record for record in caplog.records if record.name == "ludic.training.tracking"] == []

    stored = READERS[log_to](f"run-{log_to}")
    assert stored.name == {"mlflow": "run-mlflow", "trackio": f"run-trackio-{root.run_id[-8:]}"}[log_to]
    rewards = dict(query(root, "select step, reward_mean from metrics where kind = 'train'"))
    for name in ("reward_mean", "env/moar_cats/reward_mean", "env/moar_cats/component/num_cats"):
        assert [step for step, _ in stored.curves[name]] == [1, 2, 3, 4]
        assert dict(stored.curves[name]) == pytest.approx(rewards)
    rows = query(root, "select rollout_id, episode_reward, reward_components from rollouts")
    values = {rollout_id: (reward, components) for rollout_id, reward, components in rows}
    assert [(row["step"], row["env_name"]) for row in stored.samples] == [(2, "moar_cats")] * 4
    for row in stored.samples:
        assert (row["reward"], json.loads(row["components"])) == values[row["rollout_id"]]
        assert row["answer"].startswith("cat number ")
    assert stored.settings["learning_rate"] == 1e-3
    assert stored.settings["where"] == "env_name <> '***'"
    files = [*tmp_path.glob("ml*/**/*"), *tmp_path.glob("mlflow.db"), *Path(os.environ["TRACKIO_DIR"]).rglob("*")]
    written = b"".join(file.read_bytes() for file in files if file.is_file())
    assert b"learning_rate" in written
    for secret in (b"secret-of-s3", b"hf_abcdefgh"):
        assert secret not in written


def test_what_a_hostile_run_writes_is_kept_whole_and_as_text(log_to, tmp_path, caplog):
    root: Root = put_run(str(tmp_path / "a'b \"c"), RunConfig(model="m", env=("maths",)))
    settings = {"instruction": "y" * 10_000, "learning_rate": 0.1}
    run = TrackedRun(root=root, config=TrackerConfig(), settings=settings)
    names = [f"env/{SCRIPT}/reward_mean", "env/../reward_mean", "loss", "time", "project"]
    with caplog.at_level(logging.INFO), getattr(trackers, log_to)(run) as log:
        log.numbers(1, {name: float(number) for number, name in enumerate(names)} | {"step": 1.0})
        log.numbers(0, {"loss": float("nan")})
        log.samples(1, [HOSTILE])
    stored = READERS[log_to]("a'b")
    assert stored.settings["instruction"] == "y" * 10_000
    (row,) = stored.samples
    assert (row["prompt"], row["answer"]) == (SCRIPT, "x" * 100_000)
    assert json.loads(row["components"]) == {SCRIPT: 0.5}
    assert [step for step, _ in stored.curves["loss"]] in ([1, 0], [0, 1])
    found = sorted(curve[0][1] for name, curve in stored.curves.items() if name not in ("loss", "step"))
    assert found == [0.0, 1.0, 3.0, 4.0]
    if log_to == "mlflow":
        changed = [record.getMessage() for record in caplog.records if "does not take" in record.getMessage()]
        assert len(changed) == 2
        assert "\x1b" not in "".join(changed)


def test_what_mlflow_needs_for_its_database_is_named_before_a_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "alembic", None)
    with pytest.raises(
        MissingPackageError, match=r"writes to sqlite:///.*alembic is not installed.*ludic-rl\[mlflow\]"
    ):
        trackers.mlflow.require_account()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    trackers.mlflow.require_account()
