"""Run workers and a trainer of a run on a Ray cluster, and change the number of workers while it goes on.

This process starts them, watches them and stops them with itself; the nodes need ludic and the root, nothing else. What
a lost node costs is what a kill costs: the groups being sampled, and the steps since the last checkpoint.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ludic.app import (
    LaunchConfig,
    Watcher,
    check_launch,
    last_step,
    open_view,
    other_location,
    predecessor,
    url_anywhere,
    worker_settings,
)
from ludic.base import require
from ludic.engines import EngineConfig
from ludic.errors import ConfigError
from ludic.root import Root
from ludic.run import run_of
from ludic.settings import CodeSettings
from ludic.training import TrainConfig

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ludic.adapters.ray.processes import RayWorkers
    from ludic.app import Launcher

_NAMESPACE = "ludic"
_POLL_S = 0.5
_SETTINGS_OF_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray would report the use of its libraries to its makers
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the same as in other processes
}
"""Environment variables that are set unless the user has set them."""


class Control:
    """What the launcher wants; an actor that other processes find by the run's id."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._is_stopping, self._is_training = num_workers, False, False

    def num_workers(self) -> int:
        return self._num_workers

    def scale(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def begin_training(self) -> None:
        self._is_training = True

    def is_training(self) -> bool:
        """Return whether a trainer has begun on some node."""
        return self._is_training

    def is_stopping(self) -> bool:
        return self._is_stopping

    def stop(self) -> None:
        self._is_stopping = True


def launch(
    root: Root,
    config: TrainConfig,
    processes: LaunchConfig,
    engine: EngineConfig,
    *,
    model: str | None = None,
    code: CodeSettings | None = None,
) -> int:
    """Run all processes on a Ray cluster until the trainer is done; returns the last step trained.

    Raises as ludic.app.launch.local.launch does, and ConfigError if Ray is not installed or the cluster is not found.
    """
    num_workers = run_of(root).num_workers
    check_launch(config, processes, engine, num_workers)
    model = other_location(root, model)
    root = Root.open(url_anywhere(root))  # processes of Ray have another working directory
    if last_step(root) < config.num_steps:
        with connected():
            from ludic.adapters.ray.processes import RayTrainer, RayWorkers

            has_gpus = config.model.device != "cpu" and _has_gpus()
            code = code or CodeSettings()
            trainer = RayTrainer(
                root=root,
                config=config,
                ranks=processes.ranks,
                use_gpu=has_gpus or config.model.device == "cuda",
                model=model,
                code=code,
            )
            workers = RayWorkers(
                root,
                {**worker_settings(processes, model), **asdict(engine), "trust_code": code.trust_code},
                num_gpus=engine.tensor_parallel if _has_gpus() else 0,
                stop_within_s=processes.stop_within_s,
            )
            replaces = predecessor(root, take_over=processes.take_over)
            with _control(root, processes.workers_of(num_workers)) as control:
                _warn_of_room(processes, processes.workers_of(num_workers))
                _watch(root, control, workers, lambda: trainer.run(replaces, control), processes.stop_within_s)
    return last_step(root)


def _watch(root: Root, control: Any, workers: "RayWorkers", train: Callable[[], None], stop_within_s: float) -> None:
    """Train in a thread, show the run and keep the number of workers, until training ends or an error; then stop all.

    Raises the error of `train`, ProcessDiedError if a worker's process dies repeatedly, KeyboardInterrupt.
    """
    import ray

    trainer = _Call(train)
    is_training = False
    try:
        with open_view(Watcher(root.url)) as update_view:
            trainer.start()
            while trainer.is_alive():
                # Workers have nothing to sample with before the trainer publishes, and must not take its place.
                is_training = is_training or ray.get(control.is_training.remote())
                workers.scale(ray.get(control.num_workers.remote()) if is_training else 0)
                workers.check()
                update_view()
                trainer.join(_POLL_S)
            update_view()
    finally:
        ray.get(control.stop.remote())
        trainer.join(stop_within_s if is_training else 0)
        workers.stop()
    trainer.raise_error()


class _Call(threading.Thread):
    """A thread that keeps the error of its function. It ends with the process: Ray may wait for a node without end."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__(name="ludic-ray-trainer", daemon=True)
        self._function = function
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def raise_error(self) -> None:
        """Raise the error of the function, if there was one."""
        if self._error is not None:
            raise self._error


@contextmanager
def _control(root: Root, num_workers: int) -> Iterator[Any]:
    """Start the Control actor on this process's node, which the run depends on anyway.

    Raises ConfigError if another process of the cluster runs this run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        control = (
            ray.remote(Control)
            .options(name=_name(root), namespace=_NAMESPACE, num_cpus=0, scheduling_strategy=here)
            .remote(num_workers)
        )
    except ValueError:
        raise ConfigError(f"{root.url} already runs on this Ray cluster; stop that `ludic run` first") from None
    try:
        yield control
    finally:
        ray.kill(control)


def _warn_of_room(processes: LaunchConfig, num_workers: int) -> None:
    """Warn if the cluster has too few CPUs now: what finds no room waits, without an error, until a node joins."""
    import ray

    wanted, found = processes.ranks + num_workers, ray.cluster_resources().get("CPU", 0)
    if wanted > found:
        logger.warning(
            "the Ray cluster has %g CPUs, and %d ranks and %d workers want %d (--ray-cpus each); the trainer comes "
            "first, and what finds no room waits until nodes join",
            *(found, processes.ranks, num_workers, wanted),
        )


def _name(root: Root) -> str:
    return f"run {root.run_id}"


def _has_gpus() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def scale(root: Root, num_workers: int, address: str | None = None) -> None:
    """Change the number of workers of a run that `ludic run --launcher ray` has started, from any process.

    Workers beyond the schedule sample beyond it. Raises ConfigError if no such run is found on the cluster.
    """
    if not 0 <= num_workers <= 4096:
        raise ConfigError(f"num_workers is {num_workers}, wanted 0 to 4096")
    with connected(address):
        import ray

        try:
            control = ray.get_actor(_name(root), namespace=_NAMESPACE)
        except ValueError:
            raise ConfigError(
                f"no `ludic run {root.url} --launcher ray` is found on this Ray cluster; start it, or give the address"
            ) from None
        ray.get(control.scale.remote(num_workers))


def _safe_job() -> Any:
    """Return the settings of a connection whose processes import no module from this one's working directory.

    Ray puts that folder first into the sys.path of all its processes, unless the job brings a folder of its own.
    """
    from ray.job_config import JobConfig

    config = JobConfig()
    config._runtime_env_has_working_dir = lambda: True
    return config


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """Connect this process to a Ray cluster while the block lasts, unless it is connected already.

    address: None takes RAY_ADDRESS, else a cluster of this machine, else starts one. Raises ConfigError.
    """
    require("ray", "ray", "--launcher ray")
    for name, value in _SETTINGS_OF_RAY.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, job_config=_safe_job(), log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster is found at {address or os.environ.get('RAY_ADDRESS')}: {error}; "
            "start one with `ray start --head`, or unset RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


if TYPE_CHECKING:
    _fits: Launcher = launch
