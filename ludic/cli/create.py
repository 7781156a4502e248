"""`ludic create ROOT`: create a run's root and start no process; for workers and a trainer on other machines."""

from ludic.cli.flags.create import Settings
from ludic.launch.roots import create_run, is_there
from ludic.training.config import TrainConfig


def main(settings: Settings) -> None:
    found = "existed with the same settings" if is_there(settings.root) else "was created"
    url = create_run(settings.root, settings.run, TrainConfig(), settings.code).url
    print(f"{url} {found}; `ludic worker {url}` samples for it, `ludic train {url}` trains")
