"""Which code of a root may run, and which text of it: the flags that `run`, `worker` and `train` share."""

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
    """Agree to run the files and modules that the root names, now and from now on. Without it, code that came with
    somebody else's root is refused; docs/security.md."""
    update_code: bool = False
    """Take users' files as they are on this machine now, and keep them in the root. Without it its copies run."""

    @property
    def is_given(self) -> bool:
        return self.trust_code or self.update_code


def prepare_code(root: Root, uses: Sequence[CodeUse], settings: CodeSettings, check: Callable[[Files], object]) -> None:
    """Give the consent that the flags give, and keep files as they are now where that is asked for.

    check: loads the files; what it raises is raised before anything is kept. Raises ConsentError, ConfigError.
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
