"""Runs over a tiny model that answers sums; a worker in a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model

from ludic.engines.transformers_engine import TransformersEngine
from ludic.rollouts.worker import WorkerConfig, run_worker
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

WaitUntil = Callable[[Callable[[], bool]], None]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture
def run_config(folder: str) -> Callable[..., RunConfig]:
    """Groups of two answers of at most 8 tokens, so that a group takes some milliseconds."""

    def make(**options: Any) -> RunConfig:
        return RunConfig(**{"model": folder, "env": ("addition",), "group_size": 2, "max_tokens": 8} | options)

    return make


@pytest.fixture
def root(tmp_path: Path, run_config: Callable[..., RunConfig]) -> Root:
    return create_root(str(tmp_path / "run"), run_config())


def make_engine(folder: str, version: int) -> TransformersEngine:
    return TransformersEngine(folder, device="cpu", version=version)


@pytest.fixture
def work() -> Callable[..., int]:
    """A worker that ends by itself, since its settings say num_groups; returns what run_worker does."""

    def work(root: Root, **settings: Any) -> int:
        return run_worker(root, WorkerConfig(**{"slot": 0} | settings), make_engine, threading.Event())

    return work


@pytest.fixture
def working() -> Callable[..., AbstractContextManager[WaitUntil]]:
    """A worker in a thread, told to stop at the end; yields a function that waits until something holds."""

    @contextmanager
    def working(root: Root, **settings: Any) -> Iterator[WaitUntil]:
        stop, config = threading.Event(), WorkerConfig(**{"slot": 0} | settings)
        with ThreadPoolExecutor(1) as pool:
            worker = pool.submit(run_worker, root, config, make_engine, stop)

            def wait_until(holds: Callable[[], bool]) -> None:
                while not holds():
                    assert not worker.done(), f"the worker ended: {worker.exception() or worker.result()}"
                    time.sleep(0.01)

            try:
                yield wait_until
            finally:
                stop.set()
                worker.result()

    return working
