"""`ludic create ROOT`: create a run's root and start no process; for workers and a trainer on other machines."""

from ludic.cli.flags.create import Settings
from ludic.cli.run import open_run
from ludic.errors import MissingRootError
from ludic.store import Root
from ludic.training.config import TrainConfig


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
