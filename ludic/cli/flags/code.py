"""Flags about a root's code, shared by `create`, `run`, `worker` and `train`: whether it may run, and which version."""

from dataclasses import dataclass


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
