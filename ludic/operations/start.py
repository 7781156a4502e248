"""Start the processes of a run: workers that sample rollouts, the trainer, or all of them."""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from ludic.code.consent import CodeSettings
from ludic.code.kinds import ALGORITHM
from ludic.defaults import ENGINE
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError, LudicError, MissingRootError, one_line
from ludic.launch.config import LaunchConfig, Start
from ludic.rollouts.config import WorkerConfig
from ludic.run_config import RunConfig
from ludic.settings import (
    CountOr0,
    Processes,
    Role,
    Shown,
    StopWithin,
    convert,
    given,
    operation,
    split,
)
from ludic.training.config import TrainConfig

if TYPE_CHECKING:
    from ludic.engines.engine import Engine
    from ludic.engines.registry import MakeEngine
    from ludic.launch.start_server import StartServer
    from ludic.operations.outcomes import Checked, Sampled, Trained
    from ludic.operations.run import Run
    from ludic.operations.typed import (
        CheckSettings,
        LaunchSettings,
        RunSettings,
        TrainerSettings,
        TrainSettings,
        WorkerSettings,
        WorkSettings,
    )
    from ludic.records import RolloutBatch
    from ludic.store import Root

logger = logging.getLogger(__name__)

Algorithm = Annotated[str | None, ALGORITHM, Role(first_page=True)]
"""Type of a parameter for the name of a preset; settings that are given override the preset's."""
RootUrl = Annotated[str | PathLike[str], Shown("ROOT", by_position=True)]
TrainerDevice = Literal["cpu", "cuda"] | None


@operation(
    trains="ludic run", run=RunConfig, train=TrainConfig, code=CodeSettings, engine=EngineConfig, launch=LaunchConfig
)
def run(
    root: RootUrl,
    *,
    algorithm: Algorithm = None,
    **settings: Unpack["RunSettings"],
) -> "Trained":
    """Start or resume a run: workers and trainer on this machine or a Ray cluster.

    Restarts processes that die. Settings that are not given are those that the root holds. Raises ProcessDiedError if a
    process dies repeatedly, ConfigError, OwnedError or ConsentError.

    Args:
        root: Folder or URL of the run; created if it does not exist.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
    """
    from functools import partial

    from ludic.launch.process import interrupt_on_sigterm
    from ludic.launch.start_server import start_server

    interrupt_on_sigterm()
    start, code = _start_of(str(root), algorithm, settings)
    with start_server(start) as server:
        from ludic.launch.before import check_code, check_start  # slow to import, and meanwhile the server imports
        from ludic.launch.roots import create_run

        check_start(start)
        made = create_run(start.url, start.run, start.train, code, partial(check_code, start))
        return _launch(made, start, start.run.model, code, server)


@operation(run=RunConfig, train=TrainConfig, code=CodeSettings, engine=EngineConfig, launch=LaunchConfig)
def check(
    run: "Run | str",
    *,
    algorithm: Algorithm = None,
    **settings: Unpack["CheckSettings"],
) -> "Checked":
    """Check what a run needs, before it starts: packages, model, servers, disk, environments, SQL.

    Starts nothing and makes no root. `ludic run` with the same settings makes the same checks first. Users' code runs
    only with consent, as there: an example of each environment is made, and for questions a made-up answer is scored.
    Raises ConfigError for settings that contradict each other.

    Args:
        run: Folder or URL of the run, which need not exist.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
    """
    from ludic.launch.before import checks, code_checks, consented_files, try_all
    from ludic.operations.outcomes import Checked

    start, code = _start_of(run if isinstance(run, str) else run.url, algorithm, settings)
    with checks(start) as of_settings:
        rows = try_all(of_settings)
    try:
        rows = try_all(code_checks(start, consented_files(start, code)), rows)
    except LudicError as error:
        rows.append({"check": "code", "state": "wrong", "found": one_line(error)})
    return Checked(root=start.url, rows=rows)


def _start_of(url: str, algorithm: str | None, settings: Mapping[str, Any]) -> "tuple[Start, CodeSettings]":
    """Return what is to start; settings that are not given are those that the root holds. Raises ConfigError."""
    from ludic.run_json import run_of
    from ludic.store import Root
    from ludic.store.root import check_scheme
    from ludic.training.inherited_settings import next_config

    check_scheme(url)
    parts = split(
        settings, run=RunConfig, train=TrainConfig, code=CodeSettings, engine=EngineConfig, launch=LaunchConfig
    )
    root, earlier = None, {}
    with suppress(MissingRootError):
        root = Root.open(url)
        earlier = given(asdict(run_of(root)), f"earlier settings of {url}", "stored")
    start = Start(
        url=url,
        run=convert(RunConfig, earlier | parts["run"]),
        train=next_config(url, parts["train"], algorithm, online=True),
        processes=convert(LaunchConfig, parts["launch"]),
        engine=convert(EngineConfig, parts["engine"]),
        root=root,
    )
    return start, convert(CodeSettings, parts["code"])


@operation(trains="Run.launch", train=TrainConfig, code=CodeSettings, launch=LaunchConfig)
def launch(
    run: "Run",
    config: "TrainConfig | None" = None,
    *,
    algorithm: Algorithm = None,
    engine: "str | EngineConfig" = ENGINE,
    model: str | None = None,
    **settings: Unpack["LaunchSettings"],
) -> "Trained":
    """Run workers and a trainer until the trainer is done; returns how training ended.

    Restarts processes that die. Ctrl-C stops all of them and raises KeyboardInterrupt; another call continues.
    settings: fields of TrainConfig and of LaunchConfig, such as local_workers, ranks, launcher and eval_every;
    trust_code and update_code. Raises ProcessDiedError if a process dies repeatedly, ConfigError, OwnedError or
    ConsentError.

    Args:
        config: All settings of the trainer, instead of single ones.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        engine: Engine of the workers, by name, path/to/file.py:ClassName, or its settings.
        model: Location of the run's first model, if it is not where run.json says.
    """
    from dataclasses import replace
    from functools import partial

    from ludic.launch.before import check_code, check_start
    from ludic.launch.roots import prepare_run_code
    from ludic.launch.start_server import start_server

    parts = split(settings, train=TrainConfig, code=CodeSettings, launch=LaunchConfig)
    train = train_config(run.root, config, algorithm, parts["train"], online=True)
    processes = convert(LaunchConfig, parts["launch"])
    engine = EngineConfig(engine=engine) if isinstance(engine, str) else engine
    code = convert(CodeSettings, parts["code"])
    config_here = run.config if model is None else replace(run.config, model=model)
    start = Start(url=run.url, run=config_here, train=train, processes=processes, engine=engine, root=run.root)
    with start_server(start) as server:
        check_start(start)
        prepare_run_code(run.root, train, code, partial(check_code, start))
        return _launch(run.root, start, model, code, server)


def _launch(
    root: "Root", start: Start, model: str | None, code: CodeSettings, server: "StartServer | None"
) -> "Trained":
    from ludic.launch.local import launch
    from ludic.operations.outcomes import Trained

    step = launch(root, start.train, start.processes, start.engine, model=model, code=code, server=server)
    evaluation = None
    if start.processes.eval_every is not None:
        from ludic.eval.config import MeasureConfig
        from ludic.eval.numbers import Chosen
        from ludic.show.evaluations import measure_stored

        evaluation = measure_stored(root, MeasureConfig(measures=("mean_reward",)), Chosen())
    hint = f"; `ludic stats {root.url}` shows a summary"
    return Trained(root=root.url, step=step, num_steps=start.train.num_steps, evaluation=evaluation, hint=hint)


def train_config(
    root: "Root",
    config: "TrainConfig | None",
    algorithm: str | None,
    settings: Mapping[str, Any],
    *,
    online: bool = False,
) -> TrainConfig:
    """Return `config`, or the settings of the next trainer. Raises ConfigError if both are given."""
    from ludic.training.inherited_settings import next_config

    if config is None:
        return next_config(root.url, settings, algorithm, online=online)
    if settings or algorithm:
        raise ConfigError("config gives all settings of the trainer; give single settings instead of it, or none")
    return config


# --- One worker ----------------------------------------------------------------------------------------------------


@operation(trains="ludic worker", worker=WorkerConfig, code=CodeSettings, engine=EngineConfig)
def worker(
    run: "Run",
    *,
    device: TrainerDevice = None,
    model: str | None = None,
    **settings: Unpack["WorkerSettings"],
) -> "Sampled":
    """Sample rollouts for a run.

    Ends this process if a call of an environment can't be interrupted. Raises SlotTakenError if another worker takes
    the slot.

    Args:
        device: Device to sample on; None uses CUDA if available.
        model: Location of the run's first model, which adapters need; None takes the location in run.json.
    """
    from ludic.launch.process import stop_on_signals
    from ludic.launch.work import work
    from ludic.operations.outcomes import Sampled

    parts = split(settings, worker=WorkerConfig, code=CodeSettings, engine=EngineConfig)
    config = convert(WorkerConfig, parts["worker"])
    _note_slot(config.slot, run.config.num_workers)
    num_groups = work(
        run.root.writable(),
        config,
        stop_on_signals(),
        engine=convert(EngineConfig, parts["engine"]),
        device=device,
        model=model,
        code=convert(CodeSettings, parts["code"]),
        guard=True,
    )
    return Sampled(root=run.url, num_groups=num_groups)


def _note_slot(slot: int | None, num_workers: int) -> None:
    """Say that a slot is beyond the run's schedule, which may be a mistake; Ray's workers use such slots."""
    if slot is not None and slot >= num_workers:
        logger.warning(
            "slot %d is beyond num_workers (%d): this worker samples groups of its own, beside those of the schedule; "
            "a worker of the schedule has --slot 0%s",
            *(slot, num_workers, "" if num_workers == 1 else f" to {num_workers - 1}"),
        )


@operation(trains="Run.work", worker=WorkerConfig, code=CodeSettings)
def work(
    run: "Run",
    num_groups: int | None = None,
    *,
    engine: "str | EngineConfig | Engine | MakeEngine" = ENGINE,
    device: TrainerDevice = None,
    model: str | None = None,
    stop: threading.Event | None = None,
    report: "Callable[[RolloutBatch], None] | None" = None,
    **settings: Unpack["WorkSettings"],
) -> "Sampled":
    """Sample groups in this process and append them to the run; returns what was sampled.

    With `num_groups`, samples so many groups with the newest weights, whatever the trainer asks for; if nothing is
    published yet, the run's model is published first. Without it, samples what the trainer asks for, as `ludic
    worker` does, until it is stopped. Ctrl-C ends the call after the sampled groups are stored, and raises
    KeyboardInterrupt. settings: fields of WorkerConfig, such as slot (None takes the first one that no living worker
    holds) and in_flight; trust_code and update_code.

    Args:
        num_groups: Number of groups to sample; None samples until it is stopped.
        engine: Name of an engine, path/to/file.py:ClassName, its settings, an engine, or a function that makes one
            from a folder of weights and their version.
        device: Device of an engine given by name; None takes CUDA if available.
        model: Location of the run's first model, if it is not where run.json says.
        stop: Ends the call when it is set, instead of Ctrl-C.
        report: Called with each batch, instead of the progress that is shown on stderr.
    """
    from ludic.launch.process import interruptible_unless
    from ludic.launch.work import free_slot, publish_first, work
    from ludic.operations.outcomes import Sampled

    parts = split(settings, worker=WorkerConfig, code=CodeSettings)
    own = {"num_groups": num_groups, "follow_budget": num_groups is None} | parts["worker"]
    config = convert(WorkerConfig, {"slot": free_slot(run.root)} | own)
    if num_groups is not None:
        publish_first(run.root, model)
    code = convert(CodeSettings, parts["code"])
    with interruptible_unless(stop) as stopped:
        done = work(run.root, config, stopped, engine=engine, device=device, model=model, code=code, report=report)
    return Sampled(root=run.url, num_groups=done)


# --- The trainer ---------------------------------------------------------------------------------------------------


@operation(trains="ludic train", train=TrainConfig, code=CodeSettings)
def trainer(
    run: "Run | str",
    *,
    algorithm: Algorithm = None,
    model: str | None = None,
    resume: Annotated[bool, Role(first_page=True)] = False,
    ranks: Annotated[Processes, Role(first_page=True)] = 1,
    stop_within_s: StopWithin | None = None,
    take_over: bool = False,
    replaces: CountOr0 | None = None,
    json: bool = False,
    **settings: Unpack["TrainerSettings"],
) -> "Trained | None":
    """Train on a run's rollouts, and publish weights.

    With several ranks, torchrun replaces this process; the first one returns the result.

    Args:
        run: Folder or URL of the run. Training continues from the last checkpoint, if there is one. With --sources or
            --replay-batches, the run is created if it does not exist.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        model: First weights of a run that is created here; None takes the model of its first source. For an existing
            run: the location of its first model, if it is not where run.json says.
        resume: Fail if there is no complete checkpoint to resume from. Without this flag, a run with a checkpoint is
            resumed, and a run without one starts from its first weights.
        ranks: Number of processes that train together, started here under torchrun.
        stop_within_s: Seconds that a rank may take to stop cleanly after SIGTERM, such as to finish a step and write a
            checkpoint; then it is killed. None takes the setting of the `ludic run` that started this process, else
            its default.
        take_over: Fence the trainer that owns the run, even if it is alive; without this flag, a live owner refuses
            the start.
        replaces: Attempt that is known to have ended, so that its lease is not watched; set by `ludic run`.
        json: Print the result as JSON.
    """
    import os

    from ludic.launch.process import stop_on_signals, stop_variables
    from ludic.launch.train import become_ranks, open_to_train, train_in_process
    from ludic.operations.outcomes import Trained
    from ludic.training.inherited_settings import next_config

    if stop_within_s is not None:
        os.environ.update(stop_variables(stop_within_s))
    url = run if isinstance(run, str) else run.url
    parts = split(settings, train=TrainConfig, code=CodeSettings)
    config, code = next_config(url, parts["train"], algorithm), convert(CodeSettings, parts["code"])
    root = open_to_train(url, config, model=model, resume=resume)
    options: dict[str, Any] = {"code": code, "model": model, "resume": resume, "take_over": take_over}
    if ranks > 1 and "WORLD_SIZE" not in os.environ:
        become_ranks(root, config, ranks, replaces=replaces, json=json, **options)
    step = train_in_process(root, config, stop_on_signals(), replaces=replaces, **options)
    if os.environ.get("RANK", "0") != "0":
        return None
    return Trained(root=root.url, step=step, num_steps=config.steps_to_reach)


@operation(trains="Run.train", train=TrainConfig, code=CodeSettings)
def train(
    run: "Run",
    config: "TrainConfig | None" = None,
    *,
    algorithm: Algorithm = None,
    model: str | None = None,
    resume: bool = False,
    take_over: bool = False,
    stop: threading.Event | None = None,
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
    **settings: Unpack["TrainSettings"],
) -> "Trained":
    """Train in this process, or in this rank if torchrun started it; returns how training ended.

    Continues from the last checkpoint, if there is one. Settings not given here are those of the run's last
    trainer, or of the run in `replay_batches`. Ctrl-C ends the call after a checkpoint, and raises KeyboardInterrupt.
    settings: fields of TrainConfig; trust_code and update_code. Raises ConfigError, OwnedError if another live trainer
    owns the run, StalledError if rollouts do not come.

    Args:
        config: All settings of the trainer, instead of single ones.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        model: Location of the run's first model, if it is not where run.json says.
        resume: Refuse to start without a complete checkpoint.
        take_over: Fence a live trainer.
        stop: Ends the call when it is set, instead of Ctrl-C.
        report: Called with each step and its metrics, instead of the progress that is shown on stderr.
    """
    from ludic.launch.process import interruptible_unless
    from ludic.launch.train import open_to_train, train_in_process
    from ludic.operations.outcomes import Trained

    parts = split(settings, train=TrainConfig, code=CodeSettings)
    config = train_config(run.root, config, algorithm, parts["train"])
    root, code = open_to_train(run.url, config, resume=resume), convert(CodeSettings, parts["code"])
    with interruptible_unless(stop) as stopped:
        step = train_in_process(
            root, config, stopped, code=code, model=model, resume=resume, take_over=take_over, report=report
        )
    return Trained(root=root.url, step=step, num_steps=config.steps_to_reach)
