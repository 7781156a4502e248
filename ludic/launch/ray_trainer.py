"""The trainer on a Ray cluster: ranks by Ray Train, restarted from the root when one is lost.

Ray Train starts the ranks and their process group; each rank runs the same loop as under torchrun. Ray's own
checkpoints are not used: a lost rank ends the attempt, and the next one resumes from the checkpoint in the root.
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

from ludic.code.consent import CodeSettings
from ludic.distributed import BACKENDS
from ludic.errors import FencedError, LudicError, OwnedError
from ludic.launch.local import newest_checkpoint, predecessor
from ludic.launch.supervisor import ChildError
from ludic.launch.train import train_here
from ludic.store import Root
from ludic.temporary import temporary_folder
from ludic.training.config import TrainConfig

logger = logging.getLogger(__name__)

_MOST_DEATHS = 3
"""Number of failures in a row without a new checkpoint that ends the run. Lost nodes are not counted."""
_LOSSES = ("RayActorError", "PreemptionError")
"""Classes of Ray's errors for a process or a node that is gone, or that its cloud takes back. By name: some versions of
Ray lack the second one."""
_WRAPPED = ("_base_exc", "health_check_failure", "controller_failure", "cause")
"""Attributes of Ray's errors that hold the error which they report."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTrainer:
    """Settings of the trainer's ranks."""

    root: Root
    config: TrainConfig
    ranks: int
    num_cpus: int
    """CPUs reserved for each rank."""
    use_gpu: bool
    """Reserve a GPU for each rank."""
    model: str | None
    """Location of the run's first model, if it is not where run.json says."""
    code: CodeSettings

    def run(self, replaces: int, control: Any) -> None:
        """Train until the run is done or stopped; start the ranks again after each loss.

        replaces: attempt to follow at the first start. control: handle of a Control actor. Raises FencedError if
        another trainer took the run over, ChildError after repeated failures.
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
                resources_per_worker={"CPU": self.num_cpus, **({"GPU": 1} if self.use_gpu else {})},
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
    with _stop_when_told(settings["control"]) as stop:
        train_here(
            root,
            TrainConfig.of(**settings["config"]),
            stop,
            code=CodeSettings(trust_code=settings["trust_code"]),
            model=settings["model"],
            replaces=settings["replaces"],
        )


@contextlib.contextmanager
def _stop_when_told(control: Any) -> Iterator[threading.Event]:
    """Give an event that is set when the launcher asks to stop, or is gone. Only rank 0's is looked at."""
    stop, done = threading.Event(), threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_EVERY_S):
            try:
                if ray.get(control.is_stopping.remote()):
                    stop.set()
            except ray.exceptions.RayError:
                stop.set()

    if ray_train.get_context().get_world_rank() == 0:
        ray.get(control.begin_training.remote())
        threading.Thread(target=look, name="ludic-stop", daemon=True).start()
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
        """Take the errors of an attempt's ranks. Raises ChildError after 3 failures without a new checkpoint."""
        if any(kind.__name__ in _LOSSES for failure in failures for kind in type(failure).__mro__):
            logger.warning("a rank of the trainer was lost; starting again from the root")
            return
        now = self._progress()
        self._number = self._number + 1 if now == self._last else 1
        self._last = now
        words = next((str(failure) for failure in failures if isinstance(failure, LudicError)), None)
        words = words or next(map(repr, failures), "no rank said why")
        if self._number >= _MOST_DEATHS:
            raise ChildError(f"the trainer failed {self._number} times without a new checkpoint: {words}")
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
            time.sleep(_LOOK_EVERY_S)
