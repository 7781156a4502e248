"""Roots whose connection the test controls, and files as a worker would write them."""

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import fsspec
import pytest
from filesystems import UnreliableFileSystem
from s3_proxy import S3Proxy
from strategies import make_batch

from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile
from ludic.root.rows.parquet import encode
from ludic.root.storage.failures import RETRY_LIMIT
from ludic.root.storage.s3 import S3
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

PutFile = Callable[..., list[str]]

_s3fs_asks: list[str] = []
"""The address of the server that s3fs' instances ask."""


@pytest.fixture(autouse=True)
def failures_surface_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried again, unless the test says for how long."""
    monkeypatch.setenv(RETRY_LIMIT, "0")


@pytest.fixture(params=["local", "memory", "s3", "s3fs"])
def root_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a root that nobody has used; S3 once through obstore, once through plain s3fs."""
    if request.param == "local":
        yield str(request.getfixturevalue("tmp_path") / "run")
        return
    parent = "memory:/" if request.param == "memory" else request.getfixturevalue("s3_bucket")
    if request.param == "s3fs":
        use_s3fs(monkeypatch)
    url = f"{parent}/{uuid.uuid4()}"
    yield url
    fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    if fs.exists(path):
        fs.rm(path, recursive=True)


def use_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of fsspec for s3 are s3fs' own, so that it serves s3:// itself; here it asks once, to be quick."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"retries": {"total_max_attempts": 1}}})
    # An instance keeps the address that it was made with. To make one takes botocore longer than most tests.
    if _s3fs_asks != [os.environ["AWS_ENDPOINT_URL"]]:
        S3.clear_instance_cache()
        _s3fs_asks[:] = [os.environ["AWS_ENDPOINT_URL"]]


@pytest.fixture(params=["obstore", "s3fs"])
def s3_proxy(request: pytest.FixtureRequest, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A proxy in front of the S3 server; it is where s3:// URLs lead, through one client and the other."""
    proxy = S3Proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    if request.param == "s3fs":
        use_s3fs(monkeypatch)
    yield proxy
    proxy.close()
    _s3fs_asks.clear()  # another proxy may get the same port


@pytest.fixture
def unreliable_root(run_config: RunConfig) -> Iterator[Root]:
    """A root in memory; its `fs` is an UnreliableFileSystem."""
    root = put_run(f"memory://{uuid.uuid4()}", run_config)
    yield replace(root, fs=UnreliableFileSystem())
    root.fs.rm(root.path, recursive=True)


@pytest.fixture
def next_batch() -> Callable[..., RolloutBatch]:
    """Batches of groups that no other batch of the test has."""
    seeds = itertools.count()

    def make(worker_id: str = "w0", num_groups: int = 1, **options) -> RolloutBatch:
        options = {"group_size": 2, "response_length": 4, **options}
        return make_batch(worker_id=worker_id, num_groups=num_groups, seed=next(seeds), **options)

    return make


@pytest.fixture
def put_file(next_batch: Callable[..., RolloutBatch]) -> PutFile:
    """put_file(root, worker_id, sequence): commit one file of new groups, in any order; returns the group_ids."""

    def put(
        root: Root, worker_id: str = "w0", sequence: int = 0, *, num_groups: int = 2, version: int = 0
    ) -> list[str]:
        batch = next_batch(worker_id, num_groups, policy_version=version)
        file = RolloutFile(version, "moar_cats", worker_id, sequence)
        assert root.put_if_absent(file.name, encode(to_table(batch, run_id=root.run_id, sequence=sequence)))
        return group_ids(batch)

    return put


def group_ids(batch: RolloutBatch) -> list[str]:
    return [group.rollouts[0].group_id for group in batch.groups]
