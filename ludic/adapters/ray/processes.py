"""The processes of a run on a Ray cluster: the trainer's ranks, and an actor for each worker.

Ray Train starts the ranks and their process group; each rank runs the same loop as under torchrun. Ray's own
checkpoints are not used: a lost rank ends the attempt, and the next one resumes from the checkpoint in the root.

An actor for each slot of the schedule keeps one `ludic worker` process alive. The process is the same as on any
machine, so that time limits interrupt environments and a crash of an engine leaves the actor alive. Ray restarts the
actor of a lost node on another node, or on the next one that joins. It takes the slot again, and so samples first what
its lost life owed. Only a URL and settings travel to the actors. Importing this module imports Ray.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import train as ray_train
from ray.train.torch import TorchConfig, TorchTrainer

from ludic.app import (
    ENVIRONMENT,
    KILL_AFTER_S,
    ProcessDiedError,
    newest_checkpoint,
    predecessor,
    stop_variables,
    supervise,
    train_in_process,
    worker_process,
)
from ludic.base import BACKENDS, temporary_folder
from ludic.errors import FencedError, LudicError, OwnedError, one_line
from ludic.root import Root
from ludic.settings import CodeSettings
from ludic.training import TrainConfig

logger = logging.getLogger(__name__)


# --- The trainer -----------------------------------------------------------------------------------------


_MOST_DEATHS = 3
"""Number of failures in a row without a new checkpoint that ends the run. Lost nodes are not counted."""
_LOSSES = ("RayActorError", "PreemptionError")
"""Classes of Ray's errors for a process or a node that is gone, or that its cloud takes back. By name: some versions of
Ray lack the second one."""
_WRAPPED = ("_base_exc", "health_check_failure", "controller_failure", "cause")
"""Attributes of Ray's errors that hold the error which they report."""
_POLL_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTrainer:
    """Settings of the trainer's ranks."""

    root: Root
    config: TrainConfig
    ranks: int
    """CPUs reserved for each rank."""
    use_gpu: bool
    """Reserve a GPU for each rank."""
    model: str | None
    """Location of the run's first model, if it is not where run.json says."""
    code: CodeSettings

    def run(self, replaces: int, control: Any) -> None:
        """Train until the run is done or stopped; start the ranks again after each loss.

        replaces: attempt to follow at the first start. control: handle of a Control actor. Raises FencedError if
        another trainer took the run over, ProcessDiedError after repeated failures.
        """
        deaths = Deaths(progress=partial(newest_checkpoint, self.root))
        with temporary_folder("ray") as scratch:
            for start in itertools.count():
                try:
                    # Ray Train would continue a run of the same folder.
                    self._fit(replaces, control, f"{scratch}/{start}")
                    return
                except (ray_train.TrainingFailedError, ray.exceptions.RayActorError) as error:
                    failures = list(_failures(error))
                    if fenced := next((failure for failure in failures if isinstance(failure, FencedError)), None):
                        raise fenced from None
                    deaths.count(failures)
                    if ray.get(control.is_stopping.remote()):
                        return
                replaces = _await_predecessor(self.root)

    def _fit(self, replaces: int, control: Any, scratch: str) -> None:
        device = "cuda" if self.use_gpu else "cpu"
        settings = {
            "url": self.root.url,
            "config": self.config.flat(),
            "model": self.model,
            "trust_code": self.code.trust_code,
            "replaces": replaces,
            "control": control,
        }
        trainer = TorchTrainer(
            train_rank,
            train_loop_config=settings,
            torch_config=TorchConfig(backend=BACKENDS[device]),
            scaling_config=ray_train.ScalingConfig(
                num_workers=self.ranks,
                use_gpu=self.use_gpu,
                resources_per_worker={"CPU": 1, **({"GPU": 1} if self.use_gpu else {})},
            ),
            # Ray would also restart a trainer for ever that fails by a wrong setting; `run` above counts.
            run_config=ray_train.RunConfig(
                name=f"ludic-{self.root.run_id}",
                storage_path=scratch,
                failure_config=ray_train.FailureConfig(max_failures=0),
            ),
        )
        trainer.fit()


def train_rank(settings: Mapping[str, Any]) -> None:
    """Train as one rank, in a process of Ray Train. Raises the errors of ludic.training.trainer.train."""
    root = Root.open(settings["url"], writable=True)
    with _stop_on_request(settings["control"]) as stop:
        train_in_process(
            root,
            TrainConfig.of(**settings["config"]),
            stop,
            code=CodeSettings(trust_code=settings["trust_code"]),
            model=settings["model"],
            replaces=settings["replaces"],
        )


@contextlib.contextmanager
def _stop_on_request(control: Any) -> Iterator[threading.Event]:
    """Give an event that is set when the launcher asks to stop, or is gone. Only rank 0's is looked at."""
    stop, done = threading.Event(), threading.Event()

    def poll() -> None:
        while not done.wait(_POLL_EVERY_S):
            try:
                if ray.get(control.is_stopping.remote()):
                    stop.set()
            except ray.exceptions.RayError:
                stop.set()

    if ray_train.get_context().get_world_rank() == 0:
        ray.get(control.begin_training.remote())
        threading.Thread(target=poll, name="ludic-stop", daemon=True).start()
    try:
        yield stop
    finally:
        done.set()


class Deaths:
    """Counts failures of the trainer; lost processes and nodes are no failures."""

    def __init__(self, progress: Callable[[], object]) -> None:
        """progress: returns a value that a new checkpoint changes."""
        self._progress = progress
        self._last: object = progress()
        self._number = 0

    def count(self, failures: Sequence[BaseException]) -> None:
        """Take the errors of an attempt's ranks.

        Raises ProcessDiedError after 3 failures without a new checkpoint, and after a mistake that a new start would
        meet again.
        """
        if any(kind.__name__ in _LOSSES for failure in failures for kind in type(failure).__mro__):
            logger.warning("a rank of the trainer was lost; starting again from the root")
            return
        mistake = next((each for each in failures if isinstance(each, LudicError) and each.is_lasting), None)
        if mistake is not None:
            error = ProcessDiedError(f"the trainer failed and is not started again: {one_line(mistake)}")
            error.detail = mistake.detail
            raise error
        now = self._progress()
        self._number = self._number + 1 if now == self._last else 1
        self._last = now
        words = next((str(failure) for failure in failures if isinstance(failure, LudicError)), None)
        words = words or next(map(repr, failures), "no rank said why")
        if self._number >= _MOST_DEATHS:
            raise ProcessDiedError(f"the trainer failed {self._number} times without a new checkpoint: {words}")
        logger.warning("the trainer failed, starting again from the root: %s", words)


def _failures(error: BaseException) -> Iterator[BaseException]:
    """Yield what ended an attempt: of each rank, and of Ray Train's own processes, without what Ray wrapped around it.

    Ray Train says that it noticed a lost rank when it checked the rank's health, and keeps why.
    """
    inner = [getattr(error, name, None) for name in _WRAPPED]
    within = [*getattr(error, "worker_failures", {}).values(), *(each for each in inner if each is not None)]
    if within:
        for failure in within:
            yield from _failures(failure)
    else:
        yield error


def _await_predecessor(root: Root) -> int:
    """Wait until the lost trainer is proven dead or its lease has expired; returns its attempt.

    A trainer on a node that is only cut off from Ray renews its lease until Ray's daemon there ends it.
    """
    while True:
        try:
            return predecessor(root)
        except OwnedError as error:
            logger.warning("waiting until the lost trainer has ended: %s", error)
            time.sleep(_POLL_EVERY_S)


# --- The workers -----------------------------------------------------------------------------------------


_ANSWER_WITHIN_S = 5.0
"""Seconds in which an actor answers that runs on a node; one that waits for a node does not."""


class _StopAskedError(Exception):
    """The launcher wants no more of this worker."""


class WorkerActor:
    """Runs `ludic worker` for one slot, and restarts it when it dies."""

    def __init__(self, url: str, slot: int, settings: Mapping[str, Any], stop_within_s: int) -> None:
        """settings: of `ludic worker`, by the names of its flags. stop_within_s: seconds that it has to stop."""
        self._environment = {**ENVIRONMENT, **stop_variables(stop_within_s)}
        self._child = worker_process(Root.open(url), slot, settings, environment={})
        self._stop = threading.Event()

    def run(self) -> None:
        """Sample until `stop` is called. Raises ProcessDiedError if the process dies repeatedly."""
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

    def __init__(self, root: Root, settings: Mapping[str, Any], *, num_gpus: int, stop_within_s: int) -> None:
        """settings: of `ludic worker`. num_gpus: of each worker, beside a CPU. stop_within_s: time to stop."""
        self._root, self._settings, self._stop_within_s = root, settings, stop_within_s
        self._actor_class = ray.remote(WorkerActor).options(
            num_cpus=1,
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
        """Raise ProcessDiedError if the process of a worker died repeatedly, or if its node can't start it."""
        ended = _ended(list(self._runs.values()), 0)
        for slot, run in self._runs.items():
            if run in ended:
                try:
                    ray.get(run)
                except ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", error)
                    raise (
                        cause if isinstance(cause, ProcessDiedError) else ProcessDiedError(f"worker {slot}: {cause}")
                    ) from None

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
