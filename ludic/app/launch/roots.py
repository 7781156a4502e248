"""Create a root with all files that a run needs on other machines: run.json, code/, model/.

Raises ConfigError if the settings differ from those of an existing run, ModelError if the model is not found or differs
from the run's first model.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ludic.base import Longrope
from ludic.errors import ConfigError, MissingRootError, unknown_name
from ludic.rollouts import check_sampling_code
from ludic.root import Root, check_scheme
from ludic.root.sql import BatchRules, Planner
from ludic.root.storage import Storage
from ludic.root.weights import copy_snapshot, identify_at, keep_model, local_folder, remember_model
from ludic.run import RunConfig, create_root, located, prepare_code, run_of, sampling_uses
from ludic.settings import NO_FILES, CodeSettings, CodeUse, Files
from ludic.training import TrainConfig, tracker_uses
from ludic.training.batches import batch_rules, names_in_root


def create_run(
    url: str,
    run: RunConfig,
    train: TrainConfig,
    code: CodeSettings,
    check: Callable[[Files], object] | None = None,
) -> Root:
    """Start a run, or open the existing one with these settings, and check that its code works.

    A new run uses the code files of the user who starts it; code of an existing root runs only with consent. check:
    runs the code that was consented to, from these files instead of those on disk; None loads it.
    Raises ConfigError, QueryError, ModelError or ConsentError; then no root is made.
    """
    check_scheme(url)
    is_new = not is_there(url)
    if is_new:
        check_option_names(run)
        (check or partial(_check_code, located(run, Storage.connect(url)), train))(NO_FILES)
    root = open_or_start(url, run)
    prepare_run_code(root, train, code, None if is_new else check)
    return root


def is_there(url: str) -> bool:
    """Return whether a folder or URL holds a run."""
    try:
        Root.open(url)
    except MissingRootError:
        return False
    return True


def prepare_run_code(
    root: Root, train: TrainConfig, code: CodeSettings, check: Callable[[Files], object] | None = None
) -> None:
    """Check all code of a run and its trainer, and record the consent that `code` gives. check: as of create_run."""
    prepare_code(root, uses_of(root, train), code, check or partial(_check_code, located(run_of(root), root), train))


def uses_of(root: Root, train: TrainConfig) -> list[CodeUse]:
    """Return the code that workers and the trainer of a run use."""
    run = run_of(root)
    rules = rules_of(run, train)
    return [*sampling_uses(run), *rules.uses(names_in_root(root)), *tracker_uses(root, train.tracker.log_to)]


def rules_of(run: RunConfig, train: TrainConfig) -> BatchRules:
    """Return the rules that a trainer plans batches by, without users' files. Raises ConfigError."""
    return batch_rules(train.batch, run.groups_per_batch, run.seed, **train.loss.of_batches)


def check_option_names(config: RunConfig) -> None:
    """Raise ConfigError for options of an environment that the run does not name; they would have no effect."""
    for name in config.env_options:
        if name not in config.env:
            raise ConfigError(f"env_options: {unknown_name('environment', name, config.env)}")


def _check_code(config: RunConfig, train: TrainConfig, files: Files) -> None:
    """Load SQL, environments and the agent once, to find errors before every process fails.

    Runs users' code. files: contents that replace those on disk. Raises ConfigError, QueryError.
    """
    Planner(replace(rules_of(config, train), files=files), config.extra_columns)
    check_sampling_code(config, files)


def open_or_start(url: str, run: RunConfig) -> Root:
    """Open the run with these settings, or start it. The model of an existing run may be given at another location."""
    try:
        root = Root.open(url, writable=True)
    except MissingRootError:
        return _start(url, run)
    create_root(url, replace(run, model=root.record.model))  # refuses other settings
    remember_model(root, other_location(root, run.model))
    return root


def start_like(url: str, like: Root, model: str | None) -> Root:
    """Start a run with the settings and code of another run, and with its model if `model` is None."""
    if model is not None:
        return _start(url, replace(run_of(like), model=model, longrope=None), like)
    root = create_root(url, run_of(like), like=like)
    copy_snapshot(like, root)
    return root


def _start(url: str, run: RunConfig, like: Root | None = None) -> Root:
    """Start a run. The model is looked for first, so that a missing model leaves no root."""
    with local_folder(run.model) as folder:
        identity = identify_at(folder, run.model)
        root = create_root(url, with_longrope(run, folder), like=like)
        keep_model(root, folder, identity)
    return root


def with_longrope(run: RunConfig, folder: Path) -> RunConfig:
    """Return the settings of a new run with the factors of its model, which longrope of run.json records.

    folder: of the model's config.json. Long factors are for rows above original_max_position_embeddings, so they are
    used if max_sequence_tokens allows such rows. Raises ConfigError for settings that the model does not fit.
    """
    if run.longrope is None and b"short_factor" not in (folder / "config.json").read_bytes():
        return run
    # Imports torch, which other models do not need here.
    from ludic.models import load_config, max_positions, original_length

    config = load_config(str(folder))
    original = original_length(config)
    if original is None:
        if run.longrope is not None:
            raise ConfigError(f"longrope is {run.longrope}, and {run.model} is not a longrope model; leave it out")
        return run
    longest = run.max_sequence_tokens or 0
    longrope: Longrope = run.longrope or ("long" if longest > original else "short")
    most, advice = max_positions(config, longrope), ""
    if longrope == "short":
        advice = f", which is that of its short factors; for the long ones set max_sequence_tokens above {original}"
        advice += " and leave longrope out" if run.longrope else ""
    for name, value in {"max_sequence_tokens": longest, "max_tokens": run.max_tokens + 1}.items():
        if value > most:
            found = getattr(run, name)
            raise ConfigError(f"{name} is {found}, and rows of {run.model} have at most {most} tokens{advice}")
    return replace(run, longrope=longrope)


def url_anywhere(root: Root) -> str:
    """Return the URL of a root; for a folder, its absolute path, which other working directories understand too."""
    return str(Path(root.path)) if root.is_local else root.url


def other_location(root: Root, model: str | None) -> str | None:
    """Return `model`, a location other than the one in run.json, or None if it is the same."""
    return None if model == root.record.model else model
