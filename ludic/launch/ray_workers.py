"""Workers on a Ray cluster: an actor for each slot of the schedule, which keeps one `ludic worker` process alive.

The process is the same as on any machine, so that time limits interrupt environments and a crash of an engine leaves
the actor alive. Ray restarts the actor of a lost node on another node, or on the next one that joins. It takes the slot
again, and so samples first what its lost life owed. Only a URL and settings travel to the actors.
"""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import ray

from ludic.launch.local import worker_child
from ludic.launch.process import ENVIRONMENT, KILL_AFTER_S, stop_variables
from ludic.launch.supervisor import ChildError, supervise
from ludic.store import Root

_ANSWER_WITHIN_S = 5.0
"""Seconds in which an actor answers that runs on a node; one that waits for a node does not."""


class _StopAskedError(Exception):
    """The launcher wants no more of this worker."""


class WorkerActor:
    """Runs `ludic worker` for one slot, and restarts it when it dies."""

    def __init__(self, url: str, slot: int, settings: Mapping[str, Any], stop_within_s: int) -> None:
        """settings: of `ludic worker`, by the names of its flags. stop_within_s: seconds that it has to stop."""
        self._environment = {**ENVIRONMENT, **stop_variables(stop_within_s)}
        self._child = worker_child(Root.open(url), slot, settings, environment={})
        self._stop = threading.Event()

    def run(self) -> None:
        """Sample until `stop` is called. Raises ChildError if the process dies repeatedly."""
        with contextlib.suppress(_StopAskedError):
            while True:
                supervise(self._child, [], environment=self._environment, tick=self._check_stop)

    def stop(self) -> None:
        """Let `run` return once the sampled groups are stored."""
        self._stop.set()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _StopAskedError  # ends the supervision, which ends the process cleanly


class RayWorkers:
    """The workers of a run on the connected cluster; their number may change while the run goes on."""

    def __init__(
        self, root: Root, settings: Mapping[str, Any], *, num_cpus: int, num_gpus: int, stop_within_s: int
    ) -> None:
        """settings: of `ludic worker`. num_cpus, num_gpus: reserved for each worker. stop_within_s: time to stop."""
        self._root, self._settings, self._stop_within_s = root, settings, stop_within_s
        self._actor_class = ray.remote(WorkerActor).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=2,  # `stop` is called while `run` runs
        )
        self._actors: dict[int, Any] = {}
        self._runs: dict[int, ray.ObjectRef] = {}

    def scale(self, num_workers: int) -> None:
        """Start or stop workers, so that slots 0 to num_workers - 1 have one.

        A worker for which the cluster has no room waits; a cluster that scales automatically adds a node for it.
        """
        for slot in range(num_workers):
            if slot not in self._actors:
                actor = self._actor_class.remote(self._root.url, slot, dict(self._settings), self._stop_within_s)
                self._actors[slot], self._runs[slot] = actor, actor.run.remote()
        self._stop([slot for slot in self._actors if slot >= num_workers])

    def check(self) -> None:
        """Raise ChildError if the process of a worker died repeatedly, or if its node can't start it."""
        ended = _ended(list(self._runs.values()), 0)
        for slot, run in self._runs.items():
            if run in ended:
                try:
                    ray.get(run)
                except ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", error)
                    raise cause if isinstance(cause, ChildError) else ChildError(f"worker {slot}: {cause}") from None

    def stop(self) -> None:
        """Stop all workers; each stores its sampled groups first."""
        self._stop(list(self._actors))

    def _stop(self, slots: list[int]) -> None:
        answers = {slot: self._actors[slot].stop.remote() for slot in slots}
        answered = _ended(list(answers.values()), _ANSWER_WITHIN_S)
        stopping = [self._runs[slot] for slot in slots if answers[slot] in answered]
        _ended(stopping, self._stop_within_s + 2 * KILL_AFTER_S)  # the actor kills its process after one of them
        for slot in slots:
            ray.kill(self._actors.pop(slot))
            del self._runs[slot]


def _ended(refs: list["ray.ObjectRef"], within_s: float) -> list["ray.ObjectRef"]:
    """Wait for calls of actors for at most so many seconds; returns those that have ended."""
    return ray.wait(refs, num_returns=len(refs), timeout=within_s)[0] if refs else []
