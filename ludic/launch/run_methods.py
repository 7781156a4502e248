"""Methods of `ludic.Run` that sample and train: in this process, or in processes of this machine or of a cluster.

Each imports what it needs when it is called, so that `import ludic` stays light.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from ludic.code.consent import CodeSettings
from ludic.defaults import ENGINE, ENV_TIMEOUT_S, STOP_WITHIN_S
from ludic.errors import ConfigError
from ludic.store import Root

if TYPE_CHECKING:
    from ludic.engines.config import EngineConfig
    from ludic.engines.engine import Engine
    from ludic.engines.registry import MakeEngine
    from ludic.records import RolloutBatch
    from ludic.sql.connect import HasRoot
    from ludic.training.config import TrainConfig


def work(
    self: "HasRoot",
    num_groups: int | None = None,
    *,
    engine: "str | EngineConfig | Engine | MakeEngine" = ENGINE,
    device: str | None = None,
    slot: int | None = None,
    in_flight: int | None = None,
    env_timeout_s: float | None = ENV_TIMEOUT_S,
    model: str | None = None,
    stop: threading.Event | None = None,
    report: "Callable[[RolloutBatch], None] | None" = None,
    trust_code: bool = False,
    update_code: bool = False,
) -> int:
    """Sample groups in this process and append them to the run; returns the number of committed groups.

    With `num_groups`, samples so many groups with the newest weights, whatever the trainer asks for; if nothing is
    published yet, the run's model is published first. Without it, samples what the trainer asks for, as `ludic
    worker` does, until it is stopped. Ctrl-C ends the call after the sampled groups are stored, and raises
    KeyboardInterrupt.

    engine: name of an engine, path/to/file.py:ClassName, its settings (EngineConfig), an engine, or a function that
    makes one from a folder of weights and their version. device: for an engine given by name; None takes CUDA if
    available. slot: part of the run's schedule; None takes the first one that no living worker holds. in_flight:
    episodes that run at a time; None keeps the engine full. model: location of the run's first model, if it is not
    where run.json says. stop: ends the call when it is set, instead of Ctrl-C. report: called with each batch, instead
    of the progress that is shown on stderr. trust_code, update_code: see `ludic.create`.
    """
    from ludic.launch.process import interruptible_unless
    from ludic.launch.work import free_slot, publish_first, work
    from ludic.rollouts.config import WorkerConfig

    config = WorkerConfig(
        slot=free_slot(self.root) if slot is None else slot,
        in_flight=in_flight,
        num_groups=num_groups,
        follow_budget=num_groups is None,
        env_timeout_s=env_timeout_s,
    )
    if num_groups is not None:
        publish_first(self.root, model)
    code = CodeSettings(trust_code=trust_code, update_code=update_code)
    with interruptible_unless(stop) as stopped:
        return work(self.root, config, stopped, engine=engine, device=device, model=model, code=code, report=report)


def serve(self: "HasRoot", *, stop: threading.Event | None = None, **settings: Any) -> None:
    """Run a vLLM server on this machine that follows the run's policies, until it is stopped, as `ludic serve` does.

    Restarts vLLM when it dies. Ctrl-C stops it and raises KeyboardInterrupt. stop: ends the call when it is set,
    instead of Ctrl-C. settings: fields of `ludic.launch.config.ServeConfig`: host, port, max_batch, tensor_parallel,
    gpu_memory, engine_options.

    Raises ConfigError if vLLM is missing or the port is in use, ChildError if vLLM dies repeatedly.
    """
    from ludic.launch.config import ServeConfig
    from ludic.launch.process import interruptible_unless
    from ludic.launch.serve import serve

    with interruptible_unless(stop) as stopped:
        serve(self.root, ServeConfig(**settings), stopped)


def train(
    self: "HasRoot",
    config: "TrainConfig | None" = None,
    *,
    algorithm: str | None = None,
    model: str | None = None,
    resume: bool = False,
    take_over: bool = False,
    stop: threading.Event | None = None,
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
    trust_code: bool = False,
    update_code: bool = False,
    **settings: Any,
) -> int:
    """Train in this process, or in this rank if torchrun started it; returns the last step trained.

    Continues from the last checkpoint, if there is one. Settings not given here are those of the run's last
    trainer, or of the run in `replay_batches`. `config` gives all settings instead. Ctrl-C ends the call after a
    checkpoint, and raises KeyboardInterrupt.

    algorithm: preset of settings (docs/algorithms.md). model: location of the run's first model, if it is not where
    run.json says. resume: refuse to start without a complete checkpoint. take_over: fence a live trainer. stop:
    ends the call when it is set, instead of Ctrl-C. report: called with each step and its metrics, instead of the
    progress that is shown on stderr. trust_code, update_code: see `ludic.create`. settings: fields of TrainConfig.

    Raises ConfigError, OwnedError if another live trainer owns the run, StalledError if rollouts do not come.
    """
    from ludic.launch.process import interruptible_unless
    from ludic.launch.train import open_to_train, train_here

    config = train_config(self.root, config, algorithm, settings)
    root = open_to_train(self.root.url, config, resume=resume)
    code = CodeSettings(trust_code=trust_code, update_code=update_code)
    with interruptible_unless(stop) as stopped:
        return train_here(
            root, config, stopped, code=code, model=model, resume=resume, take_over=take_over, report=report
        )


def launch(
    self: "HasRoot",
    config: "TrainConfig | None" = None,
    *,
    algorithm: str | None = None,
    local_workers: int | None = None,
    ranks: int = 1,
    engine: "str | EngineConfig" = ENGINE,
    trainer_gpus: str | None = None,
    worker_gpus: str | None = None,
    env_timeout_s: float | None = ENV_TIMEOUT_S,
    launcher: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    ray_cpus: int = 1,
    eval_every: int | None = None,
    eval_options: Mapping[str, Any] | None = None,
    model: str | None = None,
    take_over: bool = False,
    stop_within_s: int = STOP_WITHIN_S,
    trust_code: bool = False,
    update_code: bool = False,
    **settings: Any,
) -> int:
    """Run workers and a trainer until the trainer is done; returns its last step.

    Restarts processes that die. Ctrl-C stops all of them and raises KeyboardInterrupt; another call continues.

    local_workers: number of workers; None starts all of the schedule. ranks: processes that train together. engine:
    name, path/to/file.py:ClassName, or its settings (EngineConfig). trainer_gpus, worker_gpus: such as "0,1"; None
    divides the GPUs of this machine. env_timeout_s: limit of one call of an environment. launcher: "local" starts
    processes of this machine, "ray" actors on the Ray cluster at `ray_address` (docs/launch.md), each with `ray_cpus`
    CPUs. eval_every, eval_options: evaluate each version whose number is a multiple of this, in a process of its own
    with these settings of `evaluate`; the trainer never waits for it. stop_within_s: seconds that a process may take to
    stop cleanly after Ctrl-C, before it is killed. settings: fields of TrainConfig, and of StreamConfig for the
    workers (in_flight, swap, on_stop, episode_timeout_s). For the others see `train`.

    Raises ChildError if a process dies repeatedly, ConfigError, OwnedError or ConsentError.
    """
    from ludic.engines.config import EngineConfig
    from ludic.launch.config import LaunchConfig
    from ludic.launch.launching import launch
    from ludic.launch.local import check_launch
    from ludic.launch.roots import prepare_run_code
    from ludic.rollouts.config import StreamConfig

    of_workers = {each.name: settings.pop(each.name) for each in fields(StreamConfig) if each.name in settings}
    config = train_config(self.root, config, algorithm, settings, online=True)
    processes = LaunchConfig(
        local_workers=local_workers,
        ranks=ranks,
        trainer_gpus=trainer_gpus,
        worker_gpus=worker_gpus,
        env_timeout_s=env_timeout_s,
        take_over=take_over,
        stop_within_s=stop_within_s,
        launcher=launcher,
        ray_address=ray_address,
        ray_cpus=ray_cpus,
        eval_every=eval_every,
        eval_options=eval_options or {},
        **of_workers,
    )
    engine = EngineConfig(engine=engine) if isinstance(engine, str) else engine
    check_launch(config, processes, engine, self.root.run.num_workers)
    code = CodeSettings(trust_code=trust_code, update_code=update_code)
    prepare_run_code(self.root, config, code)
    return launch(self.root, config, processes, engine, model=model, code=code)


def train_config(
    root: Root,
    config: "TrainConfig | None",
    algorithm: str | None,
    settings: Mapping[str, Any],
    *,
    online: bool = False,
) -> "TrainConfig":
    """Return `config`, or the settings of the next trainer. Raises ConfigError if both are given."""
    from ludic.training.inherited_settings import next_config

    if config is None:
        return next_config(root.url, settings, algorithm, online=online)
    if settings or algorithm:
        raise ConfigError("config gives all settings of the trainer; give single settings instead of it, or none")
    return config
