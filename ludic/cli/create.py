"""`ludic create ROOT`: create a run's root and start no process; for workers and a trainer on other machines."""

from dataclasses import dataclass, field

import tyro

from ludic.cli.code import CodeSettings
from ludic.cli.run import open_run
from ludic.cli.settings import RootUrl
from ludic.errors import MissingRootError
from ludic.store import Root, RunConfig
from ludic.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run to create."""
    run: tyro.conf.OmitArgPrefixes[RunConfig]
    code: tyro.conf.OmitArgPrefixes[CodeSettings] = field(default_factory=CodeSettings)


def main(settings: Settings) -> None:
    found = "was there already, with the same settings" if _is_there(settings.root) else "is made"
    url = open_run(settings.root, settings.run, TrainConfig(), settings.code).url
    print(f"{url} {found}; `ludic worker {url}` samples for it, `ludic train {url}` trains")


def _is_there(url: str) -> bool:
    try:
        Root.open(url)
    except MissingRootError:
        return False
    return True
