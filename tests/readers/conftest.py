"""Roots to be read by other tools: as workers leave them, compacted, and with files of an older schema."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_settings import VARIABLES
from strategies import make_batch

from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

GOLDEN = Path(__file__).parents[1] / "golden/v1.0"


def write(root: Root, worker_id: str, version: int, env_name: str = "moar_cats", seed: int = 0) -> None:
    """A file of two groups of three rows."""
    with RolloutWriter(root, worker_id) as writer:
        batch = make_batch(
            worker_id=worker_id, num_groups=2, group_size=3, policy_version=version, env_name=env_name, seed=seed
        )
        writer.append(batch)


def start(path: str, env: tuple[str, ...] = ("moar_cats",)) -> Root:
    return create_root(path, RunConfig(model="tiny", env=env, group_size=3))


def as_written(path: str) -> Root:
    """Two files in each of version 3 and 4."""
    root = start(path)
    for seed, (worker_id, version) in enumerate((worker, version) for worker in ("w0", "w1") for version in (3, 4)):
        write(root, f"{worker_id}-{version}", version, seed=seed)
    return root


def compacted(path: str) -> Root:
    root = as_written(path)
    compact(root)
    assert all(file.is_compacted for file in list_files(root))
    return root


def mixed(path: str) -> Root:
    """Version 3 and 4 of the golden store of schema 1.0, and a file of today's schema in each."""
    shutil.copytree(GOLDEN, path)
    root = Root.open(path)
    for version in (3, 4):
        write(root, f"new-{version}", version, seed=version)
    return root


MAKERS = (as_written, compacted, mixed)


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """A local run with rollouts of versions 3 and 4; its parameter is one of MAKERS."""
    make: Callable[[str], Root] = request.param
    return make(str(tmp_path / "run"))


@pytest.fixture
def s3_root(s3_bucket: str) -> Root:
    return as_written(f"{s3_bucket}/interop-{uuid.uuid4()}")


@pytest.fixture
def root_of(tmp_path: Path) -> Callable[[tuple[str, ...]], Root]:
    """root_of(("moar_cats", "007")): a local run with a file of each environment in version 3."""

    def make(env_names: tuple[str, ...]) -> Root:
        root = start(str(tmp_path / "run"), env_names)
        for seed, env_name in enumerate(env_names):
            write(root, f"w{seed}", 3, env_name, seed)
        return root

    return make


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray on this machine alone, with one worker."""
    os.environ.update(VARIABLES)
    ray = pytest.importorskip("ray", reason="ray is in the extra interop")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)  # even if this machine has a cluster
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def spark_session() -> Iterator[None]:
    """Spark in a Java process of its own, with one thread."""
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is in the extra interop")
    if shutil.which("java") is None:
        pytest.skip("Spark needs java, and there is none on the path")
    builder = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    yield
    session.stop()
