"""Run the workers and the trainer of a run on this machine, restarting those that die, or through a launcher."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ludic.app.launch.config import LaunchConfig
from ludic.app.launch.evaluate import log_missed
from ludic.app.launch.fork_server import StartServer, environment_of, forks_engine, forks_trainer
from ludic.app.launch.gpus import GpuPlan, gpu_plan
from ludic.app.launch.process import config_args
from ludic.app.launch.roots import other_location
from ludic.app.launch.supervisor import ChildProcess, finish, supervise
from ludic.app.launch.train import last_step, train_args
from ludic.app.show.watch import Watcher, open_view
from ludic.base import MEMORY_VARIABLE, VARIABLE, Gpus, private_folder, visible_gpus
from ludic.engines import EngineConfig, check_engine
from ludic.errors import LudicError, SchemaError, StoreError
from ludic.rollouts import StreamConfig
from ludic.root import LOGS, WORKERS, Root, await_free, is_over, newest_claim, newest_slot_claim, owner_name
from ludic.run import run_of
from ludic.settings import LAUNCHER, CodeSettings, SettingsError, find
from ludic.training import TrainConfig, send_evaluations

logger = logging.getLogger(__name__)


class Launcher(Protocol):
    """Runs all processes of a run until the trainer is done."""

    def __call__(
        self,
        root: Root,
        config: TrainConfig,
        processes: LaunchConfig,
        engine: EngineConfig,
        *,
        model: str | None = None,
        code: CodeSettings | None = None,
    ) -> int:
        """Return the last step trained.

        model: location of the run's first model, if it is not where run.json says. code: consent to the code in the
        root. Raises ProcessDiedError if a process dies repeatedly, ConfigError, OwnedError, KeyboardInterrupt.
        """
        ...


def launch(
    root: Root,
    config: TrainConfig,
    processes: LaunchConfig,
    engine: EngineConfig,
    *,
    model: str | None = None,
    code: CodeSettings | None = None,
    server: StartServer | None = None,
) -> int:
    """Run all processes, on this machine or with the launcher in `processes`; see Launcher and launch_processes."""
    if processes.launcher == "local":
        return launch_processes(root, config, processes, engine, model=model, server=server)
    launcher: Launcher = find(LAUNCHER, processes.launcher)
    return launcher(root, config, processes, engine, model=model, code=code)


def launch_processes(
    root: Root,
    config: TrainConfig,
    processes: LaunchConfig,
    engine: EngineConfig,
    *,
    model: str | None = None,
    server: StartServer | None = None,
) -> int:
    """Run all processes until the trainer is done, and show their progress; return the last step trained.

    model: location of the run's first model, if it is not where run.json says. server: forks processes (start_server).
    A run that already reached num_steps starts no process, except the one that evaluates. Raises ConfigError,
    ProcessDiedError if a process dies repeatedly, OwnedError if another live trainer owns the run, or KeyboardInterrupt
    after a clean stop.
    """
    num_workers = run_of(root).num_workers
    check_launch(config, processes, engine, num_workers)
    is_training = last_step(root) < config.num_steps
    evaluation = processes.evaluation(config.num_steps)
    if is_training or evaluation is not None:
        num_engines = processes.engines_of(num_workers)
        plan = plan_gpus(config, processes, engine, num_engines)  # the evaluator gets GPUs as one more worker
        engines = [limit_memory(engine, plan, slot) for slot in range(num_engines)]
        model = other_location(root, model)
        evaluator = evaluator_process(root, evaluation, engines.pop(), model, plan) if evaluation else None
        replaces = predecessor(root, take_over=processes.take_over) if is_training else None
        with open_view(Watcher(root.url)) as update_view:
            if replaces is not None:
                _supervise(root, config, processes, engines, model, replaces, plan, evaluator, update_view, server)
            if evaluator and evaluation:
                logger.info("training is done; the evaluation of its last version continues")
                finish(evaluator, environment=environment_of(1, processes), tick=update_view, server=server)
                log_missed(root, evaluation["every"])
        if evaluator:
            send_evaluations(root, config.tracker)
    return last_step(root)


def check_launch(config: TrainConfig, processes: LaunchConfig, engine: EngineConfig, num_workers: int) -> None:
    """Check the settings without running users' code. num_workers: workers of the schedule. Raises ConfigError."""
    if config.batch.is_stored:
        raise SettingsError(
            "`ludic run` trains on rollouts that its workers sample; `ludic train` trains on stored rollouts"
        )
    processes.workers_of(num_workers)
    check_engine(engine.chosen())


def predecessor(root: Root, *, take_over: bool = False) -> int:
    """Return the attempt that a trainer started here may replace; watches its lease if needed, unless take_over is set.

    Raises OwnedError if another live trainer owns the run, so that no second trainer is started, and ReplacedRootError
    if the root is another run by now.
    """
    root.check_same_run()
    free = newest_claim(root) if take_over else await_free(root, threading.Event())
    assert free is not None, "None only after a stop"
    return free


def _supervise(
    root: Root,
    config: TrainConfig,
    processes: LaunchConfig,
    engines: Sequence[EngineConfig],
    model: str | None,
    replaces: int,
    plan: GpuPlan | None,
    evaluator: ChildProcess | None,
    tick: Callable[[], None],
    server: StartServer | None,
) -> None:
    """Start and supervise all processes.

    engines: settings of each worker's engine. replaces: attempt that the trainer replaces at its first start.
    """
    logs = log_folder(root)

    def trainer_args() -> list[str]:
        follows = predecessor(root) if trainer.num_restarts else replaces
        return train_args(root.url, config, processes.ranks, follows, model)

    trainer = ChildProcess(
        name="trainer",
        args=trainer_args,
        log=logs / "trainer.log",
        progress=partial(newest_checkpoint, root),
        environment=_see_as_trainer(plan) if plan else {},
        may_fork=forks_trainer(processes),
    )
    shared = worker_settings(processes, model)
    workers = [
        worker_process(
            root,
            slot,
            {**shared, **asdict(engine)},
            _see(plan.workers[slot]) if plan else {},
            may_fork=forks_engine(engine),
        )
        for slot, engine in enumerate(engines)
    ]
    others = [*workers, *([evaluator] if evaluator else [])]
    environment = environment_of(processes.ranks + len(others), processes)
    supervise(trainer, others, environment=environment, tick=tick, server=server)


def plan_gpus(config: TrainConfig, processes: LaunchConfig, engine: EngineConfig, num_workers: int) -> GpuPlan | None:
    """Assign this machine's GPUs, as `gpu_plan` does, and log who gets which."""
    plan = gpu_plan(config, processes, engine, num_workers, visible_gpus())
    if plan is not None:
        logger.info("GPUs: %s", plan.describe())
        for line in plan.describe_shared():
            logger.info("%s", line)
    return plan


def limit_memory(engine: EngineConfig, plan: GpuPlan | None, worker: int) -> EngineConfig:
    """Return the settings with a limit of vLLM's memory if the worker shares a GPU, unless the user set one."""
    if plan is None or not engine.is_vllm or engine.gpu_memory is not None:
        return engine
    share = plan.memory_share(worker)
    if share is not None:
        logger.info("worker %d takes at most %g of its GPUs' memory; --gpu-memory changes that", worker, share)
    return replace(engine, gpu_memory=share)


def _see(gpus: Gpus) -> Mapping[str, str]:
    """Return the environment variable that limits a process to its GPUs."""
    return {VARIABLE: ",".join(gpus)}


def _see_as_trainer(plan: GpuPlan) -> Mapping[str, str]:
    """Return the variables of the trainer: its GPUs, and its share of their memory if workers use them, too."""
    share = plan.trainer_share()
    return {**_see(plan.trainer), **({} if share is None else {MEMORY_VARIABLE: str(share)})}


def worker_settings(processes: LaunchConfig, model: str | None) -> dict[str, Any]:
    """Return the settings of `ludic worker` that all workers share, without those of the engine."""
    return {"model": model} | {each.name: getattr(processes, each.name) for each in fields(StreamConfig)}


def worker_process(
    root: Root, slot: int, settings: Mapping[str, Any], environment: Mapping[str, str], *, may_fork: bool = False
) -> ChildProcess:
    """Return a `ludic worker` to supervise; if another worker takes its slot, it waits until that one has ended."""
    return ChildProcess(
        name=f"worker {slot}",
        args=partial(_args, root, "worker", f"worker-{slot}", {"slot": slot, **settings}),
        log=log_folder(root) / f"worker-{slot}.log",
        is_free=partial(_is_slot_free, root, slot),
        was_replaced=partial(was_replaced, root, slot),
        environment=environment,
        may_fork=may_fork,
    )


def evaluator_process(
    root: Root, settings: Mapping[str, Any], engine: EngineConfig, model: str | None, plan: GpuPlan | None
) -> ChildProcess:
    """Return a `ludic eval --every` to supervise. settings: fields of EvalConfig. It has the last GPUs of the plan."""
    return ChildProcess(
        name="evaluator",
        args=partial(_args, root, "eval", "evaluator", {**settings, "model": model, **asdict(engine)}),
        log=log_folder(root) / "evaluator.log",
        environment=_see(plan.workers[-1]) if plan else {},
        is_aside=True,
        may_fork=forks_engine(engine),
    )


def _args(root: Root, command: str, name: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a process to start. Raises ReplacedRootError: a new life would join the new run."""
    root.check_same_run()
    return ["ludic", command, root.url, *config_args(name, settings)]


def _is_slot_free(root: Root, slot: int) -> bool:
    try:
        holder = newest_slot_claim(root, slot)
    except StoreError:  # the supervisor calls again later
        return False
    except SchemaError:  # a new life claims the number after it
        return True
    return holder is None or is_over(holder)


def was_replaced(root: Root, slot: int, pid: int) -> bool:
    """Return True if a process of this machine claimed the slot, and another process claimed it later."""
    try:
        newest = newest_slot_claim(root, slot)
        lives = range(newest.life if newest else 0, 0, -1)
        claims = (WORKERS.read(root, slot, life) for life in lives)
        own = next((claim for claim in claims if claim and claim.owner == owner_name(pid)), None)
    except LudicError:  # `is_free` asks again before the next life
        return True
    return own is not None and newest is not None and newest.life > own.life


def newest_checkpoint(root: Root) -> int | None:
    """Return the step of the newest checkpoint, as `last_step`; None if the root can't be read now."""
    try:
        return last_step(root)
    except LudicError:
        return None


def log_folder(root: Root) -> Path:
    """Return the folder for the processes' output: `logs` in a local root, else a private one below temporary files.

    Raises StoreError if another user has made that folder, or may enter it.
    """
    if root.is_local:
        return Path(root.path, LOGS.folder)
    return private_folder(f"ludic-logs-{os.geteuid()}-{root.run_id}")
