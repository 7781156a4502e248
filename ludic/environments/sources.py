"""Digest and package of the source of an environment that is no user's file, found without running it."""

import inspect
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ludic.consent import QUESTIONS
from ludic.environments.qa import heldout_sha256
from ludic.environments.qa_rows import Source
from ludic.environments.registry import BUILT_IN, find_family, prefix_of
from ludic.installed import LUDIC, module_file, name_and_version, package_of


def installed_source(name: str) -> tuple[str | None, str | None]:
    """Return the sha256 of an installed environment's file, or of the data of qa/SOURCE, and its package with version.

    The digest is None if there is no such file, and the package is None if the module belongs to no package.
    """
    if name in BUILT_IN:
        return _digest(inspect.getsourcefile(BUILT_IN[name])), name_and_version(LUDIC)
    if name.startswith(QUESTIONS):
        return Source(name=name.removeprefix(QUESTIONS)).sha256(), name_and_version(LUDIC)
    prefix = prefix_of(name)
    if prefix:
        path, package = find_family(prefix).source(name.removeprefix(prefix))
        return _digest(path), package
    module = name.rpartition(":")[0]
    return _digest(module_file(module)), package_of(module)


def heldout_questions(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return {"heldout": sha256} of the file with the held-out questions of qa/SOURCE; {} if there is none."""
    digest = heldout_sha256(name.removeprefix(QUESTIONS), options) if name.startswith(QUESTIONS) else None
    return {} if digest is None else {"heldout": digest}


def _digest(path: str | None) -> str | None:
    return sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
