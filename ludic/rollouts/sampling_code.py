"""Code that a worker samples and scores with: find it, check consent, keep it in the root, and record it."""

import threading
from dataclasses import replace

from ludic.agents.settings import check_agent
from ludic.consent import CodeUse
from ludic.environments.limits import NO_LIMIT, LimitedEnvironments, TimeLimit
from ludic.environments.sources import heldout_questions, installed_source
from ludic.installed import LUDIC, name_and_version
from ludic.rollouts.sampler import make_environments
from ludic.store import Root, RunConfig
from ludic.store.code_files import CodeRecord, describe_file, keep_files, sampling_uses, trusted_files
from ludic.user_files import NO_FILES, Files, file_of


def check_sampling_code(
    run: RunConfig, files: Files = NO_FILES, limit: TimeLimit = NO_LIMIT, stop: threading.Event | None = None
) -> dict[str, LimitedEnvironments]:
    """Load all code that a worker runs, and return the environments by name. Starts no servers of tools.

    files, limit, stop: as in `make_environments`. Raises ConfigError, TimeLimitError.
    """
    environments = make_environments(run, files, limit, stop)
    check_agent(run, files)
    return environments


def open_code(
    root: Root, limit: TimeLimit, run: RunConfig | None = None, *, stop: threading.Event | None = None
) -> tuple[dict[str, LimitedEnvironments], Files, list[CodeRecord]]:
    """Return the run's environments by name, the users' files of its settings, and a record of all code.

    limit, stop: as in `make_environments`. run: settings to use instead of the root's; the user named the code that the
    root's do not name. Raises ConsentError, ConfigError, TimeLimitError.
    """
    run = run or root.run
    uses = uses_of(root, run)
    files = trusted_files(root, uses)
    environments = check_sampling_code(run, files, limit, stop)
    keep_files(root, files)  # comes last: a file that can't be run is not kept, so that its fixed version is read
    return environments, files, [_describe(use, files) for use in uses]


def uses_of(root: Root, run: RunConfig) -> list[CodeUse]:
    """Return the code of settings; the user named what the root's settings do not name."""
    named = sampling_uses(root.run)
    return [use if use in named else replace(use, named_by_root=False) for use in sampling_uses(run)]


def _describe(use: CodeUse, files: Files) -> CodeRecord:
    name = file_of(use.setting)
    if name is not None:
        return describe_file(use, files, name)
    if use.role != "environment":
        return CodeRecord(role=use.role, name=use.setting, sha256=None, package=name_and_version(LUDIC))
    digest, package = installed_source(use.setting)
    return CodeRecord(
        role=use.role,
        name=use.setting,
        sha256=digest,
        package=package,
        imports=heldout_questions(use.setting, use.options),
    )
