"""Flags of `ludic create`."""

from dataclasses import dataclass, field

import tyro

from ludic.cli.settings import RootUrl
from ludic.code.consent import CodeSettings
from ludic.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run to create."""
    run: tyro.conf.OmitArgPrefixes[RunConfig]
    code: tyro.conf.OmitArgPrefixes[CodeSettings] = field(default_factory=CodeSettings)
