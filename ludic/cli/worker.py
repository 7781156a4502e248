"""`ludic worker ROOT`: sample rollouts for a run until it is stopped."""

import sys

from ludic.cli.flags.worker import Settings
from ludic.errors import SlotTakenError
from ludic.launch.process import REPLACED, stop_on_signals
from ludic.launch.work import work
from ludic.store import Root


def main(settings: Settings) -> None:
    stop = stop_on_signals()
    root = Root.open(settings.root, writable=True)
    options = {name: getattr(settings, name) for name in ("engine", "device", "model", "code")}
    try:
        num_groups = work(root, settings.worker, stop, guard=True, **options)
    except SlotTakenError as error:
        print(f"ludic: {error}", file=sys.stderr)
        sys.exit(REPLACED)
    print(f"{num_groups} groups committed to {root.url}")
