"""Evaluate versions of a run in this process, with its own engine."""

import logging
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from functools import partial

from ludic.app.launch.guard import guarded
from ludic.app.launch.roots import create_run
from ludic.app.launch.sample import as_maker
from ludic.app.launch.train import last_step
from ludic.app.show.evaluations import interval_phrase
from ludic.app.show.watch import sampling_progress
from ludic.base import ENGINE, number
from ludic.engines import Engine, EngineConfig, EngineSetup, MakeEngine
from ludic.errors import ConfigError, LudicError, MissingRootError
from ludic.eval import (
    BatchCallback,
    Chosen,
    EvalConfig,
    EvaluationSamples,
    MeasureConfig,
    describe_versions,
    due_versions,
    environment_settings,
    evaluate,
    labelled,
    missed_versions,
    numbers,
    read_suite,
    settings_of_root,
)
from ludic.records import RolloutBatch
from ludic.rollouts import check_sampling_code
from ludic.root import Root
from ludic.root.weights import base_of_run, latest_policy, read_policy
from ludic.run import RunConfig, located, prepare_code, run_of, sampling_uses
from ludic.settings import CodeSettings
from ludic.training import TrainConfig

logger = logging.getLogger(__name__)


def evaluate_in_process(
    root: Root,
    configs: Mapping[str, EvalConfig],
    stop: threading.Event,
    *,
    engine: str | EngineConfig | Engine | MakeEngine = ENGINE,
    device: str | None = None,
    model: str | None = None,
    code: CodeSettings | None = None,
    guard: bool = False,
    report: BatchCallback | None = None,
) -> EvaluationSamples:
    """Sample the missing samples, until `stop` is set; return the ids of the evaluations.

    configs: as in ludic.eval.sampling.evaluate; the other arguments are those of ludic.app.launch.sample.work. Raises
    ConsentError, ConfigError or TimeLimitError.
    """
    for label, config in configs.items():
        with labelled(label):
            _prepare_code(root, config, code or CodeSettings())
    first = next(iter(configs.values()))
    with ExitStack() as stack:
        base = stack.enter_context(base_of_run(root, model))
        run = run_of(root)
        setup = partial(EngineSetup, device=device, base=base, float32_head=run.float32_head, longrope=run.longrope)
        make = as_maker(engine, setup)
        announce = stack.enter_context(guarded(first.env_timeout_s if guard else None))
        progress = sampling_progress(None) if report is None else nullcontext(report)
        show = stack.enter_context(progress)
        due: Iterator[int] | None = None
        sampled: set[int] = set()

        def note(batch: RolloutBatch) -> None:
            sampled.add(batch.groups[0].rollouts[0].policy_version)
            show(batch)

        if first.every is not None:
            due = due_versions(root, first.every, partial(_is_over, root, first.until_step), stop)
            due = _with_numbers(root, due, sampled)
        return evaluate(root, configs, make, stop, model=model, versions=due, report=note, announce=announce)


def _with_numbers(root: Root, versions: Iterable[int], sampled: Container[int]) -> Iterator[int]:
    """Yield versions to evaluate; log the mean reward of each that was sampled here before the next."""
    measure = MeasureConfig(measures=("mean_reward",))
    for version in versions:
        yield version
        if version not in sampled:
            continue
        with suppress(LudicError):  # training continues, and so does the evaluation
            for row in numbers(root, measure, Chosen(versions=[version])).rows:
                found = f"mean reward {number(row['estimate'], 3)} of {row['num_examples']} examples"
                found += f", {interval_phrase(row, 3)}"
                logger.info("version %d of %s: %s", version, row["env_name"], found)


def log_missed(root: Root, every: int) -> None:
    """Log the due versions without samples."""
    if missed := missed_versions(root, every):
        logger.warning(
            "%s were due but not evaluated: newer versions were published, or weights were deleted",
            describe_versions(missed),
        )


def _is_over(root: Root, until_step: int | None) -> bool:
    """Return whether training has reached a step and stored its checkpoint, after which no version is published."""
    if until_step is None:
        return False
    latest = latest_policy(root)  # first, since it costs less than a search for checkpoints
    policy = read_policy(root, latest.version) if latest else None
    return policy is not None and policy.step >= until_step and last_step(root) >= until_step


def _prepare_code(root: Root, config: EvalConfig, code: CodeSettings) -> None:
    """Record consent to users' code that the user names here, and to the code in `code`."""
    for run in environment_settings(root, config):
        uses = sampling_uses(run, run_of(root))
        if code.is_given or any(use.is_users and not use.named_by_root for use in uses):
            prepare_code(root, uses, code, partial(check_sampling_code, located(run, root)))


def open_to_evaluate(
    url: str, config: EvalConfig, model: str | None, code: CodeSettings, suite: str | None = None
) -> Root:
    """Open a root; if there is none, create one for evaluations of a model, which is its version 0.

    suite: file of a suite, whose environments the new root has. Raises MissingRootError if there is no root and no
    model is given, ConfigError without an environment.
    """
    try:
        return Root.open(url, writable=True)
    except MissingRootError:
        if model is None:
            raise MissingRootError(
                f"{url} holds no run; with --model FOLDER_OR_ID, one is made to evaluate it"
            ) from None
    if suite is not None:
        config = settings_of_root(read_suite(suite, config), config)
    if not config.env:
        raise ConfigError(f"{url} holds no run, so there are no environments to evaluate {model} in; give --env")
    given = {name: value for name, value in config.run.items() if name == "max_tokens" and value is not None}
    run = RunConfig(model=model, env=config.env, env_options=config.env_options, **given)
    return create_run(url, run, TrainConfig(), code)
