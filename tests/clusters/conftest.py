"""Ray clusters of several nodes on this machine; each node is a raylet with the processes below it."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from ray_settings import VARIABLES

CPUS = 2
"""CPUs of a node: places for ranks and workers."""


class Nodes:
    """A cluster whose head node has no room for ranks and workers, and two nodes that have."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.nodes = [self.add(), self.add()]

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=CPUS)

    def node_of(self, pid: int) -> Any:
        """The node that a process runs on, by its ancestors."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        return next(node for node in self.nodes if raylet(node) in ancestors)

    def kill(self, node: Any) -> None:
        """SIGKILL to all processes of a node, as when its machine loses power; another node joins afterwards."""
        processes = [psutil.Process(raylet(node)), *psutil.Process(raylet(node)).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)
        self.nodes.append(self.add())


def raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    os.environ.update(VARIABLES)
    pytest.importorskip("ray.train", reason="ray is in the extra ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield Nodes(cluster)
    finally:
        cluster.shutdown()


def wait_until(is_so: Callable[[], bool], is_alive: Callable[[], bool], within_s: float = 400) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert is_alive(), "the run ended by itself; its log says why"
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.02)
