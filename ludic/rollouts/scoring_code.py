"""Code that a worker scores with: find it, check consent, keep it in the root, and record it."""

from ludic.consent import CodeUse
from ludic.environments.limits import TimeLimit
from ludic.environments.registry import EnvironmentFactory
from ludic.environments.sources import installed_source
from ludic.rollouts.sampler import make_environments
from ludic.store import Root
from ludic.store.code_files import CodeRecord, describe_file, environment_uses, keep_files, trusted_files
from ludic.user_files import Files, file_of


def open_environments(root: Root, limit: TimeLimit) -> tuple[dict[str, EnvironmentFactory], list[CodeRecord]]:
    """Return the run's environments by name, and a record of their code.

    limit: for loading an environment and making its first instance. Raises ConsentError, ConfigError, TimeLimitError.
    """
    files = trusted_files(root, environment_uses(root.run))
    environments = make_environments(root.run, files, limit)
    keep_files(root, files)  # comes last: a file that can't be run is not kept, so that its fixed version is read
    return environments, [_describe(use, files) for use in environment_uses(root.run)]


def _describe(use: CodeUse, files: Files) -> CodeRecord:
    name = file_of(use.setting)
    if name is not None:
        return describe_file(use, files, name)
    digest, package = installed_source(use.setting)
    return CodeRecord(role=use.role, name=use.setting, sha256=digest, package=package)
