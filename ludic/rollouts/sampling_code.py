"""Code that a worker samples and scores with: find it, check consent, keep it in the root, and record it."""

from ludic.consent import CodeUse
from ludic.environments.limits import TimeLimit
from ludic.environments.registry import EnvironmentFactory
from ludic.environments.sources import installed_source
from ludic.installed import LUDIC, name_and_version
from ludic.rollouts.sampler import make_environments
from ludic.store import Root
from ludic.store.code_files import CodeRecord, describe_file, keep_files, sampling_uses, trusted_files
from ludic.user_files import Files, file_of


def open_code(root: Root, limit: TimeLimit) -> tuple[dict[str, EnvironmentFactory], Files, list[CodeRecord]]:
    """Return the run's environments by name, the users' files of its settings, and a record of all code.

    limit: for loading an environment and making its first instance. Raises ConsentError, ConfigError, TimeLimitError.
    """
    uses = sampling_uses(root.run)
    files = trusted_files(root, uses)
    environments = make_environments(root.run, files, limit)
    keep_files(root, files)  # comes last: a file that can't be run is not kept, so that its fixed version is read
    return environments, files, [_describe(use, files) for use in uses]


def _describe(use: CodeUse, files: Files) -> CodeRecord:
    name = file_of(use.setting)
    if name is not None:
        return describe_file(use, files, name)
    if use.role != "environment":
        return CodeRecord(role=use.role, name=use.setting, sha256=None, package=name_and_version(LUDIC))
    digest, package = installed_source(use.setting)
    return CodeRecord(role=use.role, name=use.setting, sha256=digest, package=package)
