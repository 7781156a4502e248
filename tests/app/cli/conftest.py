"""A small run as workers and a trainer leave it, and the `ludic` command in this process."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from strategies import make_batch
from tiny_runs import create_root, make_model, train_here

from ludic.app.cli.main import main
from ludic.records.rollout import RolloutBatch
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter

# Groups of four in two versions. The one without variance is dropped by the filter, the last one
# waits for a partner: a batch is two groups.
REWARDS = {0: [[1.0, 0.0, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25]], 1: [[1.0, 1.0, 0.0, 0.0], [None, 1.0, 0.0, 0.0]]}


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


Ludic = Callable[..., Result]


@pytest.fixture
def ludic(capfdbinary: pytest.CaptureFixture[bytes]) -> Ludic:
    """ludic("watch", root, "--totals"): run the command here."""

    def run(*args: str | Path) -> Result:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        out, err = capfdbinary.readouterr()
        return Result(int(ended.value.code or 0), out.decode(errors="replace"), err.decode())

    return run


def batch_of(version: int) -> RolloutBatch:
    return make_batch(worker_id="w0-test", rewards=REWARDS[version], seed=version, policy_version=version)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def make_trained(model_folder: str) -> Callable[[str], Root]:
    """make_trained(url): two files of REWARDS, then one gradient step over the first and the third group."""

    def make(url: str) -> Root:
        root = create_root(url, model_folder)
        with RolloutWriter(root, "w0-test") as writer:
            for version in REWARDS:
                writer.append(batch_of(version))
                writer.flush()
        train_here(root, num_steps=1, filters=("drop_zero_variance_groups",))
        return root

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, make_trained: Callable[[str], Root]) -> Root:
    """A run that was trained for a step; not to be changed."""
    return make_trained(str(tmp_path_factory.mktemp("trained") / "run"))


@pytest.fixture(scope="session")
def first_batch() -> RolloutBatch:
    """What the run holds of version 0."""
    return batch_of(0)


@pytest.fixture
def breakable(trained: Root, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    return Path(shutil.copytree(trained.path, tmp_path / "run"))


@pytest.fixture
def started(tmp_path: Path, model_folder: str) -> Root:
    """A run of which there is nothing but run.json."""
    return create_root(str(tmp_path / "started"), model_folder)
