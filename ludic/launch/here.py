"""Train and evaluate in this process; ludic.launch.work samples."""

import logging
import os
import shlex
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from ludic.batches.source import names_in_root
from ludic.children import become_python
from ludic.code.consent import CodeSettings
from ludic.code.kept import gives_consent, prepare_code
from ludic.code.uses import sampling_uses
from ludic.defaults import ENGINE
from ludic.engines.config import EngineConfig
from ludic.engines.engine import Engine
from ludic.engines.registry import EngineSetup, MakeEngine
from ludic.errors import ConfigError, LudicError, MissingRootError
from ludic.eval.config import EvalConfig, MeasureConfig
from ludic.eval.numbers import Chosen, numbers
from ludic.eval.plan import describe_versions, due_versions, environment_settings, missed_versions
from ludic.eval.sampling import Report, Sampled, evaluate
from ludic.eval.suite import labelled, read_suite, settings_of_root
from ludic.launch.guard import guarded
from ludic.launch.process import LAUNCHER, config_args, stop_variables, stop_within_s
from ludic.launch.roots import create_run, is_there, other_location, rules_of, start_like
from ludic.launch.work import as_maker
from ludic.models.first_model import base_of_run, identify_at
from ludic.models.folder_check import ADAPTER_CONFIG
from ludic.records import RolloutBatch
from ludic.results import number
from ludic.rollouts.sampler import check_sampling_code
from ludic.run_config import RunConfig
from ludic.run_json import create_root, located, run_of
from ludic.show.evaluations import interval_text
from ludic.show.watch import sampling_progress, training_progress
from ludic.sql.planner import Planner
from ludic.store import Root, latest_policy, newest_attempt_id
from ludic.store.attempts import NOTHING_TO_RESUME, begin_from_cut, checkpoint_id_to_resume, checkpoint_ids
from ludic.store.claims import newest_claim
from ludic.store.policies import copy_policy, has_weights, policy_folder, policy_versions, read_policy
from ludic.store.weights import keep_model
from ludic.training.config import TrainConfig

logger = logging.getLogger(__name__)

# --- Train -----------------------------------------------------------------------------------------------------------
# Train on a run's rollouts in this process, or as several ranks that torchrun starts.


def train_here(
    root: Root,
    config: TrainConfig,
    stop: threading.Event,
    *,
    code: CodeSettings | None = None,
    model: str | None = None,
    resume: bool = False,
    take_over: bool = False,
    replaces: int | None = None,
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
) -> int:
    """Train in this process, which may be a rank of torchrun; see ludic.training.trainer.train for the arguments.

    take_over: fence a live trainer. report: called with each step, instead of the progress that is shown on stderr.
    """
    from ludic.training.trainer import train

    prepare_trainer_code(root, config, code or CodeSettings())
    replaces = newest_claim(root) if take_over else replaces
    with training_progress(config.steps_to_reach) if report is None else nullcontext(report) as shown:
        model = other_location(root, model)
        return train(root, config, stop, shown, replaces=replaces, model=model, resume=resume)


def become_ranks(
    root: Root,
    config: TrainConfig,
    ranks: int,
    *,
    model: str | None,
    resume: bool,
    take_over: bool,
    replaces: int | None,
    code: CodeSettings,
    json: bool,
) -> NoReturn:
    """Replace this process by torchrun, which starts `ludic train` on each rank."""
    prepare_trainer_code(root, config, code)
    replaces = newest_claim(root) if take_over else replaces
    args = train_args(root.url, config, ranks, replaces, other_location(root, model), resume=resume, json=json)
    stops = stop_variables(stop_within_s())
    become_python(["-m", *args], environment={**os.environ, **stops, LAUNCHER: str(os.getpid())})


def train_args(
    root: str,
    config: TrainConfig,
    ranks: int,
    replaces: int | None = None,
    model: str | None = None,
    *,
    resume: bool = False,
    json: bool = False,
) -> list[str]:
    """Return the arguments after `python -m` to train on this machine, under torchrun if there are several ranks.

    Writes the settings to a file that lasts as long as this process, also if it becomes torchrun.
    """
    own = {"replaces": replaces, "ranks": ranks, "model": model, "resume": resume, "json": json}
    settings = {**config.flat(), **own}
    train = ["ludic", "train", root, *config_args("trainer", settings)]
    if ranks == 1:
        return train
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", *args_of_ranks(train)]


def args_of_ranks(args: Sequence[str]) -> list[str]:
    """Return the arguments of torchrun that its ranks get as `args`: it puts values for $ and a name, and $ for $$."""
    return [arg.replace("$", "$$") for arg in args]


def last_step(root: Root) -> int:
    """Return the step of the checkpoint that a trainer would resume from; 0 if there is none."""
    checkpoint_id = checkpoint_id_to_resume(root, newest_attempt_id(root), checkpoint_ids(root))
    return checkpoint_id[1] if checkpoint_id else 0


def prepare_trainer_code(root: Root, config: TrainConfig, code: CodeSettings) -> None:
    """Store users' files and record consent as `code` says, and to the user's own files that the root holds."""
    rules = rules_of(run_of(root), config)
    uses = rules.uses(names_in_root(root))
    if code.is_given or gives_consent(root, uses):
        prepare_code(root, uses, code, lambda files: Planner(replace(rules, files=files), root.extra_columns))


def open_to_train(url: str, config: TrainConfig, *, model: str | None = None, resume: bool = False) -> Root:
    """Open a run, or create it like the first run that it trains on.

    resume: refuse a run without a complete checkpoint. Raises MissingRootError or ConfigError.
    """
    like = config.batch.replay_batches or next(iter(config.batch.sources), None)
    try:
        root = Root.open(url, writable=True)
    except MissingRootError:
        if like is None or resume:
            raise
        root = start_like(url, Root.open(like), model)
    if config.batch.replay_batches is not None:
        begin_from_cut(root, Root.open(config.batch.replay_batches))
    if resume and not last_step(root):
        raise ConfigError(f"{root.url} {NOTHING_TO_RESUME}")
    return root


# --- Train a branch --------------------------------------------------------------------------------------------------
# Train a branch: a new run that begins with a stored policy and trains on the other run's batches by other rules.


def train_branch(root: Root, url: str, given: Mapping[str, Any], from_step: int, num_steps: int | None) -> list[str]:
    """Train a new run at `url` from the policy of a step; return commands that evaluate both in pairs."""
    from ludic.what_if.rerun import planned_steps  # imports torch, which `ludic run` does without

    planned = planned_steps(root)
    last = max(planned) if num_steps is None else from_step + num_steps
    for step in (from_step + 1, last):
        if step not in planned:
            raise ConfigError(
                f"{root.url} has no step {step} to train a branch on; its batches end with {max(planned)}"
            )
    version = version_of_step(root, planned, from_step)
    config = branch_config(root, planned[from_step + 1], given, from_step, last - from_step)
    branch = start_branch(url, root, version)
    train_here(branch, config, threading.Event(), code=CodeSettings())
    return compare_commands(root, planned, last, branch)


def version_of_step(root: Root, planned: Mapping[int, int], step: int) -> int:
    """Return the stored version of the weights after a step. Raises ConfigError if there is none, or it was pruned."""
    versions = [version for version in reversed(policy_versions(root)) if _is_of(root, version, planned, step)]
    for version in versions:
        if has_weights(root, version):
            return version
    pruned = f"{policy_folder(versions[0])} was pruned" if versions else "the step published none"
    raise ConfigError(f"{root.url}: no policy of step {step} is stored ({pruned}); choose another step")


def _is_of(root: Root, version: int, planned: Mapping[int, int], step: int) -> bool:
    policy = read_policy(root, version)
    return policy is not None and policy.step == step and (step == 0 or policy.attempt_id >= planned.get(step, 0))


def branch_config(root: Root, attempt_id: int, given: Mapping[str, Any], from_step: int, num_steps: int) -> TrainConfig:
    """Return the settings of the branch: those of the attempt, changed by the settings given."""
    from ludic.what_if.rerun import config_of, rules_of_step

    config = config_of(root, attempt_id, given)
    rules = rules_of_step(root, config, given)
    params = {name: value for name, value in rules.params.items() if name in config.batch.sql_params}
    own = {"offline": False, "sources": (), "epochs": None, "sql_params": params}
    return config.replace(**own, replay_batches=root.url, replan_from=from_step, num_steps=num_steps)


def start_branch(url: str, root: Root, version: int) -> Root:
    """Create a run whose first model is a version of another run's policy; the new root holds these weights."""
    if is_there(url):
        raise ConfigError(f"{url} holds a run already; give the branch a root of its own, or resume: ludic train {url}")
    source = f"{root.url}/{policy_folder(version)}"
    if root.exists(f"{policy_folder(version)}/{ADAPTER_CONFIG}"):
        raise ConfigError(f"{source} holds only an adapter; a branch needs whole weights (publish_lora merged)")
    branch = create_root(url, replace(run_of(root), model=source), like=root)
    with branch.scratch_folder() as folder:
        copy_policy(root, version, folder)
        keep_model(branch, folder, identify_at(folder, source), with_weights=True)
    return branch


def compare_commands(root: Root, planned: Mapping[int, int], last: int, branch: Root) -> list[str]:
    """Return the commands that evaluate the branch and the run after the same number of steps, and compare them."""
    try:
        version = str(version_of_step(root, planned, last))
    except ConfigError:
        version = "VERSION"  # of the nearest step whose policy is stored
    one, other = shlex.quote(root.url), shlex.quote(branch.url)
    return [
        f"ludic eval {one} --versions {version}",
        f"ludic eval {other} --versions latest",
        f"ludic eval compare {one}@{version} {other}@latest",
    ]


# --- Evaluate --------------------------------------------------------------------------------------------------------
# Evaluate versions of a run in this process, with an engine of its own.


def evaluate_here(
    root: Root,
    configs: Mapping[str, EvalConfig],
    stop: threading.Event,
    *,
    engine: str | EngineConfig | Engine | MakeEngine = ENGINE,
    device: str | None = None,
    model: str | None = None,
    code: CodeSettings | None = None,
    guard: bool = False,
    report: Report | None = None,
) -> Sampled:
    """Sample what is not stored yet, until `stop` is set; returns the ids of the evaluations.

    configs: as in ludic.eval.sampling.evaluate; the other arguments are those of ludic.launch.work.work. Raises
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
        with suppress(LudicError):  # training goes on, and so does this
            for row in numbers(root, measure, Chosen(versions=[version])).rows:
                found = f"mean reward {number(row['estimate'], 3)} of {row['num_examples']} examples"
                found += f", 95% interval {interval_text(row, 3)}"
                logger.info("version %d of %s: %s", version, row["env_name"], found)


def log_missed(root: Root, every: int) -> None:
    """Log which versions were due and have no samples."""
    if missed := missed_versions(root, every):
        logger.warning(
            "%s were due and not evaluated: newer ones came, or weights were deleted", describe_versions(missed)
        )


def _is_over(root: Root, until_step: int | None) -> bool:
    """Return whether training has reached a step and stored its checkpoint, after which no version is published."""
    if until_step is None:
        return False
    latest = latest_policy(root)  # first, since it costs less than to look for checkpoints
    policy = read_policy(root, latest.version) if latest else None
    return policy is not None and policy.step >= until_step and last_step(root) >= until_step


def _prepare_code(root: Root, config: EvalConfig, code: CodeSettings) -> None:
    """Record consent to users' code that the user names here, and to what `code` gives."""
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
