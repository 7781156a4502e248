"""Flags about a root's code, shared by `create`, `run`, `worker` and `train`: whether it may run, and which version."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludic.consent import CodeUse, has_consent
from ludic.store import Root
from ludic.store.code import consent_to, find_files, keep_files, trusted_files
from ludic.user_files import Files

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    trust_code: bool = False
    """Agree to run the files and modules that the root names, now and in the future. Without this flag, code that came
    with somebody else's root is refused; see docs/security.md."""
    update_code: bool = False
    """Use users' files as they are on this machine now, and store them in the root. Without this flag, the root's
    copies run."""

    @property
    def is_given(self) -> bool:
        return self.trust_code or self.update_code


def prepare_code(root: Root, uses: Sequence[CodeUse], settings: CodeSettings, check: Callable[[Files], object]) -> None:
    """Record the consent that the flags give, and store users' files in the root.

    check: loads the files; its errors are raised before a file is stored. Raises ConsentError, ConfigError.
    """
    if settings.is_given:
        _consent(root, uses, find_files(root, uses, update=settings.update_code).files)
    files = trusted_files(root, uses, update=settings.update_code)
    check(files)
    keep_files(root, files)


def _consent(root: Root, uses: Sequence[CodeUse], files: Files) -> None:
    new = [use for use in uses if use.is_users and not has_consent(use, files)]
    consent_to(root, new, files)
    for use in new:
        logger.info("%s may run %s %r from now on", root.url, use.role, use.setting)
