"""Flags of `ludic create`."""

from dataclasses import dataclass, field

from ludic.cli.settings import RootUrl
from ludic.code.consent import CodeSettings
from ludic.run_config import RunConfig

FIRST = (
    "model",
    "env",
    "env_options",
    "group_size",
    "groups_per_batch",
    "num_workers",
    "temperature",
    "max_tokens",
    "parser",
    "tools",
    "protocol",
    "seed",
)
"""Settings that the first page of --help shows."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run to create."""
    run: RunConfig
    code: CodeSettings = field(default_factory=CodeSettings)
