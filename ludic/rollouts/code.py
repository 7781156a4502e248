"""Code that a worker scores with: find it, check consent, keep it in the root, and record it."""

from ludic.consent import CodeUse
from ludic.environments.registry import EnvironmentFactory
from ludic.environments.sources import installed_source
from ludic.interaction.limits import TimeLimit
from ludic.rollouts.sampler import make_environments
from ludic.store import Root, RunConfig
from ludic.store.code import CodeRecord, describe_file, environment_uses, keep_files, trusted_files
from ludic.user_files import Files, file_of


def open_environments(root: Root, limit: TimeLimit) -> tuple[dict[str, EnvironmentFactory], list[CodeRecord]]:
    """The run's environments, by name, and what they are. Raises ConsentError, ConfigError, TimeLimitError.

    limit: how long it may take to load one and to make its first instance.
    """
    files = trusted_files(root, environment_uses(root.run))
    environments = make_environments(root.run, files, limit)
    keep_files(root, files)  # what can't be made is not kept, so that a mended file is read again
    return environments, describe_environments(root.run, files)


def describe_environments(run: RunConfig, files: Files) -> list[CodeRecord]:
    """Return one record per environment. files: users' files by name."""
    return [_describe(use, files) for use in environment_uses(run)]


def _describe(use: CodeUse, files: Files) -> CodeRecord:
    name = file_of(use.setting)
    if name is not None:
        return describe_file(use, files, name)
    digest, package = installed_source(use.setting)
    return CodeRecord(role=use.role, name=use.setting, sha256=digest, package=package)
