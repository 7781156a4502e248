"""`ludic stats ROOT`: summarize a root, from run.json to the last gradient step."""

import ludic
from ludic.cli.flags.stats import Settings
from ludic.viewer.output import print_json, progress_bar, stdout_console


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    with progress_bar() as track:
        stats = run.stats(track=track)
    if settings.json:
        print_json(stats.facts)
    else:
        stats.print_to(stdout_console())
