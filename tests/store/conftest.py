"""Roots whose connection the test controls, and files as a worker would write them."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from filesystems import UnreliableFileSystem
from strategies import make_batch

from ludic.records import RolloutBatch
from ludic.schema import to_table
from ludic.store.files import RolloutFile
from ludic.store.parquet import encode
from ludic.store.root import Root
from ludic.store.run import RunConfig

PutFile = Callable[..., list[str]]


@pytest.fixture
def unreliable_root(run_config: RunConfig) -> Iterator[Root]:
    """A root in memory; its `fs` is an UnreliableFileSystem."""
    root = Root.create(f"memory://{uuid.uuid4()}", run_config)
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
