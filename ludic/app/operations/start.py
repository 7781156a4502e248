"""Start the processes of a run: workers that sample rollouts, the trainer, or all of them."""

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from ludic.app.launch.config import LaunchConfig, Start
from ludic.app.operations.create import create
from ludic.app.operations.operation import operation
from ludic.base import ENGINE, TRAIN, require, signal_when_parent_ends
from ludic.engines import EngineConfig
from ludic.errors import ConfigError, LudicError, MissingRootError, one_line
from ludic.rollouts import WorkerConfig
from ludic.run import RunConfig
from ludic.settings import (
    ALGORITHM,
    CodeSettings,
    CountOr0,
    Processes,
    Role,
    SettingsError,
    StopWithin,
    convert,
    given,
    split,
)
from ludic.training import TrainConfig

if TYPE_CHECKING:
    from ludic.app.launch.fork_server import StartServer
    from ludic.app.operations.outcomes import Checked, Sampled, Trained
    from ludic.app.operations.run import Run
    from ludic.app.operations.typed import CheckSettings, RunSettings, TrainSettings, WorkerSettings
    from ludic.engines import Engine, MakeEngine
    from ludic.records import RolloutBatch
    from ludic.root import Root

logger = logging.getLogger(__name__)

Algorithm = Annotated[str | None, ALGORITHM, Role(first_page=True)]
"""Type of a parameter for the name of a preset; settings that are given override the preset's."""
TrainerDevice = Literal["cpu", "cuda"] | None
GROUPS: Mapping[str, Any] = {
    "run": RunConfig,
    "train": TrainConfig,
    "code": CodeSettings,
    "engine": EngineConfig,
    "launch": LaunchConfig,
}
"""All settings of a run and its processes: the dataclasses by the names of their groups."""


@operation(
    group="First",
    place=3,
    on_sigterm="interrupt",
    **GROUPS,
)
def run(
    run: "Run | str",
    config: "TrainConfig | None" = None,
    *,
    algorithm: Algorithm = None,
    engine: "str | EngineConfig" = ENGINE,
    like: "str | PathLike[str] | Run | None" = None,
    create_only: bool = False,
    **settings: Unpack["RunSettings"],
) -> "Trained":
    """Start or resume a run: workers and trainer on this machine or a Ray cluster.

    Restarts processes that die. Settings that are not given are those that the root holds. In Python, Ctrl-C stops all
    processes and raises KeyboardInterrupt, and another call continues. settings: fields of RunConfig, TrainConfig,
    EngineConfig and LaunchConfig; trust_code and update_code. Raises ProcessDiedError if a process dies repeatedly,
    ConfigError, OwnedError or ConsentError.

    Args:
        run: Folder or URL of the run; created if it does not exist.
        config: All settings of the trainer, instead of single ones.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        engine: Engine of the workers, by name, path/to/file.py:ClassName, or its settings.
        like: Run whose settings and code a new run shares, and its model if no model is given.
        create_only: Make the root and start nothing; it holds the settings of the run, not those of the trainer, the
            engine and the processes. Needs no torch.
    """
    from functools import partial

    from ludic.app.launch.fork_server import start_server
    from ludic.app.launch.process import is_supervised

    groups = {"run": RunConfig, "train": TrainConfig, "code": CodeSettings, "launch": LaunchConfig}
    url, parts = _url(run), split(settings, **groups, engine=EngineConfig)
    if like is not None or create_only:
        made = create(url, like=like, **parts["run"], **parts["code"])
        if create_only:
            _note_unused({**parts["train"], **parts["engine"], **parts["launch"]})
            return _created(made.root)
    require("torch", TRAIN, "ludic run")
    if is_supervised():  # by `ludic grid`: a run must not outlive it, or the next call would find its root taken
        signal_when_parent_ends(signal.SIGTERM)
    start, code = start_of(url, config, algorithm, engine, parts)
    with start_server(start) as server:
        from ludic.app.launch.preflight import (  # slow to import, and meanwhile the server imports
            check_code,
            check_start,
        )
        from ludic.app.launch.roots import create_run

        check_start(start)
        root = create_run(start.url, start.run, start.train, code, partial(check_code, start))
        return _launch(root, start, code, server)


@operation(
    group="Start",
    place=2,
    **GROUPS,
)
def check(
    run: "Run | str",
    config: "TrainConfig | None" = None,
    *,
    algorithm: Algorithm = None,
    engine: "str | EngineConfig" = ENGINE,
    **settings: Unpack["CheckSettings"],
) -> "Checked":
    """Check what a run needs, before it starts: packages, model, servers, disk, environments, SQL.

    Starts nothing and makes no root. `ludic run` with the same settings makes the same checks first. Users' code runs
    only with consent, as there: an example of each environment is made, and for questions a made-up answer is scored.
    Raises ConfigError for settings that contradict each other.

    Args:
        run: Folder or URL of the run, which need not exist.
        config: All settings of the trainer, instead of single ones.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        engine: Engine of the workers, by name, path/to/file.py:ClassName, or its settings.
    """
    from ludic.app.launch.preflight import checks, code_checks, consented_files, try_all
    from ludic.app.operations.outcomes import Checked

    groups = {"run": RunConfig, "train": TrainConfig, "code": CodeSettings, "launch": LaunchConfig}
    start, code = start_of(_url(run), config, algorithm, engine, split(settings, **groups, engine=EngineConfig))
    with checks(start) as of_settings:
        rows = try_all(of_settings)
    try:
        rows = try_all(code_checks(start, consented_files(start, code)), rows)
    except LudicError as error:
        rows.append({"check": "code", "state": "wrong", "found": one_line(error)})
    return Checked(root=start.url, rows=rows)


def _url(run: "Run | str | PathLike[str]") -> str:
    from ludic.app.operations.run import Run

    return run.url if isinstance(run, Run) else str(run)


def start_of(
    url: str,
    config: TrainConfig | None,
    algorithm: str | None,
    engine: str | EngineConfig,
    parts: Mapping[str, Mapping[str, Any]],
) -> "tuple[Start, CodeSettings]":
    """Return what is to start; settings that are not given are those that the root holds. Raises ConfigError."""
    from ludic.root import Root, check_scheme
    from ludic.run import run_of

    check_scheme(url)
    root, earlier = None, {}
    with suppress(MissingRootError):
        root = Root.open(url)
        earlier = given(asdict(run_of(root)), f"earlier settings of {url}", "stored")
    start = Start(
        url=url,
        run=convert(RunConfig, {**earlier, **parts["run"]}),
        train=train_config(url, config, algorithm, parts["train"], online=True),
        processes=convert(LaunchConfig, parts["launch"]),
        engine=engine_config(engine, parts["engine"]),
        root=root,
    )
    return start, convert(CodeSettings, parts["code"])


def _note_unused(settings: Mapping[str, Any]) -> None:
    """Say which settings a root does not hold, so that nobody takes them for those of its trainer."""
    if settings:
        names = ", ".join(settings)
        logger.warning("the root does not hold %s: give them to `ludic run`, `ludic train` or `ludic worker`", names)


def _created(root: "Root") -> "Trained":
    from ludic.app.launch.train import last_step
    from ludic.app.operations.outcomes import Trained

    return Trained(root=root.url, step=last_step(root), num_steps=None, is_created_only=True)


def _launch(root: "Root", start: Start, code: CodeSettings, server: "StartServer | None") -> "Trained":
    from ludic.app.launch.local import launch
    from ludic.app.operations.outcomes import Trained

    model = start.run.model
    step = launch(root, start.train, start.processes, start.engine, model=model, code=code, server=server)
    evaluation = None
    if start.processes.eval_every is not None:
        from ludic.app.show.evaluations import measure_stored
        from ludic.eval import Chosen, MeasureConfig

        evaluation = measure_stored(root, MeasureConfig(measures=("mean_reward",)), Chosen())
    hint = f"; `ludic watch {root.url} --totals` shows a summary"
    return Trained(root=root.url, step=step, num_steps=start.train.num_steps, evaluation=evaluation, hint=hint)


def train_config(
    url: str,
    config: "TrainConfig | None",
    algorithm: str | None,
    settings: Mapping[str, Any],
    *,
    online: bool = False,
) -> TrainConfig:
    """Return `config`, or the settings of the next trainer. Raises ConfigError if both are given."""
    from ludic.training import next_config

    if config is None:
        return next_config(url, settings, algorithm, online=online)
    if settings or algorithm:
        raise ConfigError("config gives all settings of the trainer; give single settings instead of it, or none")
    return config


def engine_config(engine: "str | EngineConfig", settings: Mapping[str, Any]) -> EngineConfig:
    """Return the settings of an engine, given whole or one by one. Raises ConfigError if both are given."""
    if isinstance(engine, str):
        return convert(EngineConfig, {"engine": engine, **settings})
    if settings:
        raise ConfigError("engine gives all settings of the engine; give single settings instead of it, or none")
    return engine


# --- One worker ----------------------------------------------------------------------------------------------------


@operation(
    group="Start",
    place=3,
    on_sigterm="stop",
    trains=True,
    worker=WorkerConfig,
    code=CodeSettings,
    engine=EngineConfig,
)
def worker(
    run: "Run",
    num_groups: int | None = None,
    *,
    engine: "str | EngineConfig | Engine | MakeEngine" = ENGINE,
    device: TrainerDevice = None,
    model: str | None = None,
    stop: threading.Event | None = None,
    report: "Callable[[RolloutBatch], None] | None" = None,
    **settings: Unpack["WorkerSettings"],
) -> "Sampled":
    """Sample rollouts for a run.

    The command samples what the trainer asks for until it is stopped, and ends its process if a call of an environment
    can't be interrupted. A call in Python takes the first slot that no living worker holds, and with `num_groups`
    samples that many groups with the newest weights, whatever the trainer asks for; if nothing is published yet, the
    run's model is published first. Ctrl-C ends the call after the sampled groups are stored, and raises
    KeyboardInterrupt. settings: fields of WorkerConfig and EngineConfig; trust_code and update_code. Raises
    SlotTakenError if another worker takes the slot.

    Args:
        num_groups: Number of groups to sample; None samples until it is stopped.
        engine: Name of an engine, path/to/file.py:ClassName, its settings, an engine, or a function that makes one
            from a folder of weights and their version.
        device: Device to sample on; None uses CUDA if available.
        model: Location of the run's first model, which adapters need; None takes the location in run.json.
        stop: Ends the call when it is set, instead of Ctrl-C.
        report: Called with each batch, instead of the progress that is shown on stderr.
    """
    from ludic.app.launch.process import ProcessStop, interruptible_unless
    from ludic.app.launch.sample import free_slot, publish_first, work
    from ludic.app.operations.outcomes import Sampled

    is_command = isinstance(stop, ProcessStop)
    parts = split(settings, worker=WorkerConfig, code=CodeSettings, engine=EngineConfig)
    own = parts["worker"] if num_groups is None else {"num_groups": num_groups} | parts["worker"]
    if not is_command:
        own = {"slot": free_slot(run.root), "follow_budget": num_groups is None} | own
    config = convert(WorkerConfig, own)
    if is_command:
        _note_slot(config.slot, run.config.num_workers)
    elif num_groups is not None:
        publish_first(run.root, model)
    if parts["engine"] or isinstance(engine, str):
        if not isinstance(engine, str | EngineConfig):
            raise ConfigError(f"{next(iter(parts['engine']))} is for an engine by name, and engine is an object")
        engine = engine_config(engine, parts["engine"])
    code = convert(CodeSettings, parts["code"])
    options: dict[str, Any] = {"engine": engine, "device": device, "model": model, "code": code, "report": report}
    with interruptible_unless(stop) as stopped:
        done = work(run.root.writable(), config, stopped, guard=is_command, **options)
    return Sampled(root=run.url, num_groups=done)


def _note_slot(slot: int | None, num_workers: int) -> None:
    """Say that a slot is beyond the run's schedule, which may be a mistake; Ray's workers use such slots."""
    if slot is not None and slot >= num_workers:
        logger.warning(
            "slot %d is beyond num_workers (%d): this worker samples groups of its own, beside those of the schedule; "
            "a worker of the schedule has --slot 0%s",
            *(slot, num_workers, "" if num_workers == 1 else f" to {num_workers - 1}"),
        )


# --- The trainer ---------------------------------------------------------------------------------------------------


@operation(
    group="Start",
    place=4,
    on_sigterm="stop",
    trains=True,
    train=TrainConfig,
    code=CodeSettings,
)
def train(
    run: "Run | str",
    config: "TrainConfig | None" = None,
    *,
    algorithm: Algorithm = None,
    model: str | None = None,
    resume: Annotated[bool, Role(first_page=True)] = False,
    ranks: Annotated[Processes, Role(first_page=True)] = 1,
    stop_within_s: StopWithin | None = None,
    take_over: bool = False,
    replaces: CountOr0 | None = None,
    json: bool = False,
    stop: threading.Event | None = None,
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
    **settings: Unpack["TrainSettings"],
) -> "Trained":
    """Train on a run's rollouts, and publish weights.

    In Python, trains in this process, or in this rank if torchrun started it. Settings not given here are those of the
    run's last trainer, or of the run in `replay_batches`. Ctrl-C ends the call after a checkpoint, and raises
    KeyboardInterrupt. settings: fields of TrainConfig; trust_code and update_code. Raises ConfigError, OwnedError if
    another live trainer owns the run, StalledError if rollouts do not come.

    Args:
        run: Folder or URL of the run. Training continues from the last checkpoint, if there is one. With --sources or
            --replay-batches, the run is created if it does not exist.
        config: All settings of the trainer, instead of single ones.
        algorithm: Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them.
        model: First weights of a run that is created here; None takes the model of its first source. For an existing
            run: the location of its first model, if it is not where run.json says.
        resume: Fail if there is no complete checkpoint to resume from. Without this flag, a run with a checkpoint is
            resumed, and a run without one starts from its first weights.
        ranks: Number of processes that train together, started here under torchrun, which replaces this process. In
            Python, `Run.run` starts several.
        stop_within_s: Seconds that a rank may take to stop cleanly after SIGTERM, such as to finish a step and write a
            checkpoint; then it is killed. None takes the setting of the `ludic run` that started this process, else
            its default.
        take_over: Fence the trainer that owns the run, even if it is alive; without this flag, a live owner refuses
            the start.
        replaces: Attempt that is known to have ended, so that its lease is not watched; set by `ludic run`.
        json: Print the result as JSON.
        stop: Ends the call when it is set, instead of Ctrl-C.
        report: Called with each step and its metrics, instead of the progress that is shown on stderr.
    """
    import os

    from ludic.app.launch.process import ProcessStop, interruptible_unless, stop_variables
    from ludic.app.launch.train import become_ranks, open_to_train, train_in_process
    from ludic.app.operations.outcomes import Trained

    is_command = isinstance(stop, ProcessStop)
    if ranks > 1 and not is_command:
        raise SettingsError(f"ranks is {ranks}, wanted 1 in Python, where torchrun starts the ranks, or Run.run does")
    if stop_within_s is not None:
        os.environ.update(stop_variables(stop_within_s))
    parts = split(settings, train=TrainConfig, code=CodeSettings)
    config, code = train_config(_url(run), config, algorithm, parts["train"]), convert(CodeSettings, parts["code"])
    root = open_to_train(_url(run), config, model=model, resume=resume)
    options: dict[str, Any] = {"code": code, "model": model, "resume": resume, "take_over": take_over}
    if ranks > 1 and "WORLD_SIZE" not in os.environ:
        become_ranks(root, config, ranks, replaces=replaces, json=json, **options)
    with interruptible_unless(stop) as stopped:
        step = train_in_process(root, config, stopped, replaces=replaces, report=report, **options)
    is_other_rank = is_command and os.environ.get("RANK", "0") != "0"
    return Trained(root=root.url, step=step, num_steps=config.steps_to_reach, is_of_other_rank=is_other_rank)
