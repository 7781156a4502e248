"""Roots whose environments have names that paths and URLs must encode."""

import itertools
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from strategies import make_batch
from tiny_runs import make_model

from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

ENV_NAMES = ("moar_cats", "reasoning_gym/basic_arithmetic", "50% a=b ü?#&")

AddFiles = Callable[..., None]


@pytest.fixture(params=["local", "s3"])
def open_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a root that other programs can read: not memory://."""
    if request.param == "local":
        return str(tmp_path / "run 1")
    return f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4()}"


@pytest.fixture
def add_files() -> AddFiles:
    """add_files(root, versions, worker_id): a file of one group of two for each version and environment."""
    seeds = itertools.count()

    def add(root: Root, versions: Iterable[int], worker_id: str = "w0-test") -> None:
        with RolloutWriter(root, worker_id) as writer:
            for version, env_name in itertools.product(versions, ENV_NAMES):
                options = {"num_groups": 1, "group_size": 2, "env_name": env_name, "policy_version": version}
                writer.append(make_batch(worker_id=worker_id, seed=next(seeds), **options))
                writer.flush()

    return add


@pytest.fixture
def filled(open_url: str, run_config: RunConfig, add_files: AddFiles) -> Root:
    """Versions 0 and 1 of three environments: six files, twelve rows."""
    root = put_run(open_url, replace(run_config, env=ENV_NAMES, group_size=2))
    add_files(root, [0, 1])
    return root


@pytest.fixture
def golden_root(tmp_path: Path) -> Root:
    """A run that ludic stored under schema 1.0."""
    golden = Path(__file__).parents[1] / "golden" / "v1.0"
    return Root.open(str(shutil.copytree(golden, tmp_path / "golden")))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokenizer knows the words of the tests."""
    return make_model(tmp_path_factory.mktemp("tiny") / "model")
