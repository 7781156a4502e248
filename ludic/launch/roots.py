"""Create roots with everything that a run needs on other machines: run.json, code/, model/.

Raises ConfigError if the settings differ from those of an existing run, ModelError if the model is not found or differs
from the run's first model.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ludic.batches.source import batch_rules, names_in_root
from ludic.code.consent import CodeSettings, CodeUse, sampling_uses
from ludic.code.kept import create_root, prepare_code
from ludic.errors import ConfigError, MissingRootError, unknown_name
from ludic.models.first_model import identify_at, local_folder, remember_model
from ludic.rollouts.sampler import check_sampling_code
from ludic.sql.planner import BatchRules, Planner
from ludic.store import Root, RunConfig
from ludic.store.filesystem import Storage
from ludic.store.inputs import located
from ludic.store.root import check_scheme
from ludic.store.weights import copy_kept, keep_model
from ludic.training.config import TrainConfig
from ludic.user_files import NO_FILES, Files


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
    prepare_code(root, uses_of(root, train), code, check or partial(_check_code, located(root.run, root), train))


def uses_of(root: Root, train: TrainConfig) -> list[CodeUse]:
    """Return the code that workers and the trainer of a run use."""
    return [*sampling_uses(root.run), *rules_of(root.run, train).uses(names_in_root(root))]


def rules_of(run: RunConfig, train: TrainConfig) -> BatchRules:
    """Return the rules that a trainer plans batches by, without users' files. Raises ConfigError."""
    return batch_rules(train.batch, run.groups_per_batch, run.seed, loss_unit=train.loss.loss_unit)


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
    create_root(url, replace(run, model=root.run.model))  # refuses other settings
    remember_model(root, other_location(root, run.model))
    return root


def start_like(url: str, like: Root, model: str | None) -> Root:
    """Start a run with the settings and code of another run, and with its model if `model` is None."""
    if model is not None:
        return _start(url, replace(like.run, model=model, longrope=None), like)
    root = create_root(url, like.run, like=like)
    copy_kept(like, root)
    return root


def _start(url: str, run: RunConfig, like: Root | None = None) -> Root:
    """Start a run. The model is looked for first, so that a missing model leaves no root."""
    with local_folder(run.model) as folder:
        identity = identify_at(folder, run.model)
        root = create_root(url, _with_longrope(run, folder), like=like)
        keep_model(root, folder, identity)
    return root


def _with_longrope(run: RunConfig, folder: Path) -> RunConfig:
    """Return the settings with the factors of a longrope model, without importing torch for any other."""
    if run.longrope is None and b"short_factor" not in (folder / "config.json").read_bytes():
        return run
    from ludic.models.rope import with_longrope
    from ludic.models.weight_files import load_config

    return with_longrope(run, load_config(str(folder)))


def url_anywhere(root: Root) -> str:
    """Return the URL of a root; for a folder, its absolute path, which other working directories understand too."""
    return str(Path(root.path)) if root.is_local else root.url


def other_location(root: Root, model: str | None) -> str | None:
    """Return `model`, a location other than the one in run.json, or None if it is the same."""
    return None if model == root.run.model else model
