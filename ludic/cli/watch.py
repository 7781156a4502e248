"""`ludic watch ROOT`: show the live state of a run, from any machine that can read its files.

Reads metrics, lease, LATEST and the names of checkpoints; writes nothing. While the filesystem fails, the last frame
stays, with the reason below it. Raises MissingRootError if there is no run, or it is deleted.
"""

import ludic
from ludic.cli.flags.watch import Settings
from ludic.viewer.output import stdout_console


def main(settings: Settings) -> None:
    run = ludic.open(settings.root)
    if settings.once:
        run.status().print_to(stdout_console())
    else:
        run.watch(settings.interval_s)
